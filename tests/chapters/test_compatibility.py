"""A draft model with other vocabularies: the trial's counts, equal texts, and closed models."""

import pandas as pd
import pytest

from specnb.chapters import compatibility
from specnb.compat.description import Description
from specnb.lm.vocab import Vocabulary
from specnb.params import CompatibilityParams
from tests.chapters.test_adaptive_k import reading

SMALL = CompatibilityParams(
    target="t",
    draft="turned",
    draft_model="d",
    families=["half"],
    prompts_per_category=1,
    max_new_tokens=20,
)


def family(name, *pieces):
    vocab = Vocabulary(pieces=tuple(p.encode() for p in pieces), kind="toy")
    return Description(
        name=name, source="test", vocab=vocab, n_tokens=len(pieces), vocab_size=len(pieces)
    )


FAMILIES = {"turned": family("turned", *"gfedcba"), "half": family("half", *"abcdxyzuv")}


@pytest.fixture
def models(monkeypatch):
    opened = {
        "t": reading(name="t"),
        "d": reading(name="d"),
        "e": reading(order=1, name="e"),
    }
    monkeypatch.setattr(compatibility, "load", opened.__getitem__)
    monkeypatch.setattr(compatibility, "describe", FAMILIES.__getitem__)
    monkeypatch.setattr(compatibility, "opens", opened.__contains__)
    return opened


def test_every_prompt_runs_with_each_vocabulary_and_is_counted(models):
    seen = []
    record = compatibility.run_trial(SMALL, progress=lambda *step: seen.append(step))
    rows = record.measurements["trial"]
    own, turned, half = rows
    assert [r["vocabulary"] for r in rows] == [compatibility.OWN_VOCABULARY, "turned", "half"]
    assert [step[:2] for step in seen] == [(done, 8) for done in range(8)]
    assert [m.close.call_count for m in models.values()] == [1, 1, 0]
    assert all(r["same_text"] and 0 <= r["accepted"] <= r["drafted"] for r in rows)
    assert all(r["speedup"] > 0 and r["low"] is None and r["verdict"] == "undecided" for r in rows)
    assert own["translated"] == "not needed" and own["pieces_shared"] == 1
    # only the ids are others
    assert turned["translated"] == "tokens" and turned["accepted"] == own["accepted"]
    assert half["pieces_shared"] == pytest.approx(4 / 7)
    assert half["acceptance_rate"] < own["acceptance_rate"]
    by_drafter = {g.drafter: g for g in record.generations}
    assert by_drafter["d as half"].translation.startswith(half["translated"])
    runs = [g for g in record.generations if g.drafter == "d"]
    tokens, rounds = (sum(g.tau * len(g.rounds) for g in runs), sum(len(g.rounds) for g in runs))
    assert own["tau"] == pytest.approx(tokens / rounds)
    assert all(r["tau"] <= r["tau_bound"] + 1e-9 for r in rows)
    # the same run, as one number
    assert own["predicted_rate"] == pytest.approx(own["acceptance_rate"], abs=0.1)
    # toys cannot encode the ordinary text, so its reach is unknown and nothing is predicted
    assert turned["text_shared"] is turned["predicted_rate"] is half["predicted_tau"] is None
    assert turned["in_reach"] == 1.0 > half["in_reach"] > 0
    assert half["tau_bound"] < turned["tau_bound"] == 1 + SMALL.k
    table = pd.DataFrame(rows).assign(text_shared=[1.0, 1.0, 0.5])
    assert compatibility.overlap_against_acceptance(table).data


def test_a_draft_with_weights_runs_as_a_model_without_a_prediction(models):
    record = compatibility.run_trial(SMALL.model_copy(update={"draft": "e", "families": []}))
    own, other = record.measurements["trial"]
    assert (other["vocabulary"], other["translated"]) == ("e", "not needed")
    assert other["predicted_rate"] is None is not own["predicted_rate"]
    assert {g.drafter for g in record.generations} == {"", "d", "e"}
    assert [m.close.call_count for m in models.values()] == [1, 1, 1]
    assert "e" in [model["id"] for model in record.provenance["models"]]
