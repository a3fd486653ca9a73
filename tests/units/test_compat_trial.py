"""A draft model behind other vocabularies: what the trial counts, and that nothing is lost or left open."""

import pytest

from specnb.book import compat as figures
from specnb.compat import shelf, trial
from specnb.compat.description import Description
from specnb.compat.foreign import Family, speaking
from specnb.decode.generate import generate
from specnb.draft.load import fitted
from specnb.errors import InputError, VocabularyMismatch
from specnb.lm import toy
from specnb.lm.vocab import Vocabulary
from specnb.params import CompatibilityParams

SMALL = CompatibilityParams(
    target="t", draft_model="d", families=["turned", "half"], prompts_per_category=1, max_new_tokens=20
)


def family(name, *pieces):
    vocab = Vocabulary(pieces=tuple(p.encode() for p in pieces), kind="toy")
    return Description(name=name, source="test", vocab=vocab, n_tokens=len(pieces), vocab_size=len(pieces))


FAMILIES = {"turned": family("turned", *"gfedcba"), "half": family("half", *"abcdxyzuv")}


class Reading(toy.ToyLM):
    """Reads any text: each byte is a token, modulo its few."""

    closed = 0

    def encode(self, text, *, special=True):
        return [b % self.vocab.size for b in text.encode()][-40:]

    def close(self):
        self.closed += 1
        super().close()


def reading(order=2, sharpness=1.5, name="toy"):
    model = toy.markov(7, order=order, seed=1, sharpness=sharpness)
    model.__class__, model.name = Reading, name
    return model


@pytest.fixture
def models(monkeypatch):
    opened = {"t": reading(name="t"), "d": reading(sharpness=1.0, name="d")}
    monkeypatch.setattr(trial, "load", opened.__getitem__)
    monkeypatch.setattr(trial, "describe", FAMILIES.__getitem__)
    return opened


def test_each_vocabulary_runs_every_prompt_and_is_counted(models):
    seen = []
    record = trial.run(SMALL, progress=lambda *step: seen.append(step))
    rows = record.measurements["trial"]
    assert [r["vocabulary"] for r in rows] == [trial.OWN, "turned", "half"]
    assert [done for done, _, _ in seen] == list(range(8)) and {total for _, total, _ in seen} == {8}
    assert len(record.generations) == 2 * 4 and all(m.closed == 1 for m in models.values())
    assert all(r["same_text"] and 0 <= r["accepted"] <= r["drafted"] for r in rows)
    own, turned, half = rows
    assert own["translated"] == "not needed" and own["pieces_shared"] == 1
    assert turned["translated"] == "tokens" and turned["accepted"] == own["accepted"], "only the ids are others"
    assert half["pieces_shared"] == pytest.approx(4 / 7) and half["acceptance_rate"] < own["acceptance_rate"]
    assert record.generations[-1].translation.startswith(half["translated"])
    assert record.generations[-1].drafter == "d as half"
    assert own["tau"] == pytest.approx(
        sum(g.tau * len(g.rounds) for g in record.generations[2:4])
        / sum(len(g.rounds) for g in record.generations[2:4])
    )


def test_what_was_made_before_an_error_is_saved(models, monkeypatch):
    saved = []
    monkeypatch.setattr("specnb.measure.experiment.save", saved.append)
    monkeypatch.setattr(trial, "_row", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trial.run(SMALL)
    assert saved[0].status == "failed" and len(saved[0].generations) == 4
    assert all(m.closed == 1 for m in models.values())


def test_a_family_without_pieces_or_with_nothing_in_common_is_refused():
    with pytest.raises(InputError, match="facts-only"):
        Family(Description(name="facts-only", source="facts"))
    with pytest.raises(VocabularyMismatch, match="share not one token"):
        speaking(reading(), Family(family("cyrillic", "д", "ж")))


def test_a_model_behind_its_own_vocabulary_in_another_order_drafts_as_before():
    target = reading()
    drafter = fitted(speaking(reading(sharpness=1.0), Family(FAMILIES["turned"])), target, "tokens")
    assert drafter.translation.how == "tokens" and drafter.vocab is target.vocab


def test_the_figure_shows_each_vocabulary(models):
    import pandas as pd

    table = pd.DataFrame(trial.run(SMALL).measurements["trial"]).assign(text_shared=[1.0, 1.0, 0.5])
    figure = figures.overlap_against_acceptance(table)
    assert [t.name.split(" (")[0] for t in figure.data] == table["vocabulary"].tolist()
    with pytest.raises(InputError, match="overlap"):
        figures.overlap_against_acceptance(table.assign(text_shared=None))
    with pytest.raises(InputError, match="no pair"):
        figures.verdicts(pd.DataFrame())


@pytest.mark.model
@pytest.mark.parametrize("target_name", ["smollm2-135m:f32?threads=1", "smollm2-135m?backend=hf"])
@pytest.mark.parametrize("name", ["gpt-2", "qwen2.5"])
def test_a_real_draft_in_another_familys_vocabulary(opened, target_name, name):
    """In both engines: the text of plain decoding, drafts kept, the overlap in the record."""
    target = opened(target_name)
    drafter = fitted(speaking(opened("smollm2-135m:q4_0?threads=1"), Family(shelf.describe(name))), target)
    prompt = "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n"
    plain, made = (generate(target, prompt, max_new_tokens=16, **d) for d in ({}, {"drafter": drafter, "k": 4}))
    assert made.token_ids == plain.token_ids and made.accepted_tokens > 0
    assert "pieces shared" in made.translation and made.drafter.endswith(f"as {name}")
