"""The controller study on toy models: replays, live runs, and tables."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from specnb.chapters import adaptive_k
from specnb.chapters.adaptive_k import STREAM, SWITCHING
from specnb.decode.router import EPS, GRACE
from specnb.draft.load import LoadedDrafter
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure import experiment
from specnb.measure.cost import NAMED, THIS_MACHINE, CostCurve
from specnb.params import AdaptiveKParams

SMALL = AdaptiveKParams(
    categories=["code", "prose"],
    prompts_per_category=2,
    live_prompts=1,
    max_new_tokens=24,
    conversations=1,
)
SPOKEN = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Reading(toy.ToyLM):
    """Encodes any text: a token per byte, modulo the vocabulary size."""

    def encode(self, text, *, special=True):
        return [b % self.vocab.size for b in text.encode()][-40:]


def reading(order=2, name="toy"):
    """Return a model that encodes any text, with a mock `close`."""
    model = toy.markov(7, order=order, seed=1)
    model.__class__ = Reading
    model.name = name
    model.close = Mock()
    return model


@pytest.fixture(scope="module")
def study():
    target = reading()
    draft = toy.markov(7, order=1, seed=2)
    target.vocab = replace(target.vocab, chat_template=SPOKEN)
    made = {"lookup": LookupDrafter(), SMALL.drafters[1]: ModelDrafter(draft)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "load", lambda name: target)
        patch.setattr(experiment, "load_drafter", lambda name, *_, **__: LoadedDrafter(made[name]))
        return adaptive_k.run_adaptive(SMALL)


def test_every_drafter_is_recorded_for_every_prompt_and_live_rounds_equal_replayed_ones(study):
    plain = [g for g in study.record.generations if not g.k]
    turns = [f"turns.switching-01-{n}" for n in (1, 2, 3, 4)]
    texts = ["code-01", "code-02", "prose-01", "prose-02", *turns]
    # the last two next to live runs
    assert [g.prompt_id for g in plain] == [
        *texts,
        "code-01",
        "prose-01",
    ]
    assert len(study.trace.recordings) == 8 * 2
    check = adaptive_k.live_check(study)
    # lookup has no confidence
    assert len(check) == 2 * (4 + 5) and set(check["content"]) == {
        "code",
        "prose",
    }
    lookup = check[check["drafter"].str.startswith("lookup")]
    assert lookup["same"].all() and check["same_text"].all() and check["near_tie"].isna().all()


def test_every_controller_and_the_router_also_run_live(study):
    speeds = adaptive_k.controller_speeds(study.record, adaptive_k.live_check(study))
    assert len(speeds) == 1 + 4 + 5 + 1 and speeds["speedup"].is_monotonic_decreasing
    assert (speeds["n_prompts"] == 2).all() and (speeds["identical"] == 2).all()
    assert speeds.set_index("controller")["speedup"]["plain decoding"] == 1
    assert set(speeds.loc[speeds["predicted"].isna(), "controller"]) == {"plain decoding", "router"}
    assert speeds["controller"].str.fullmatch(r"one fixed K \(\d+\)").sum() == 2
    over_fixed = adaptive_k.over_fixed_k(study.record)
    assert len(over_fixed) == 2 and all(speed.value > 0 for speed in over_fixed.values())
    assert adaptive_k.draw_live(speeds).data


def test_speeds_are_relative_to_the_best_fixed_k_and_oracles_are_no_slower(study):
    share = adaptive_k.against_best(study.record)
    assert len(share) == (1 + len(NAMED)) * ((2 + 4 + 1) + (2 + 5 + 1))
    assert set(share.index.levels[0]) == {THIS_MACHINE, *(f"{name} (simulated)" for name in NAMED)}
    assert adaptive_k.draw_worst(adaptive_k.worst(study.record)).data
    oracle = share.xs("oracle", level="policy")[["code", "prose", SWITCHING]]
    assert (oracle >= 1 - 1e-9).all(axis=None)  # it adapts K to each position


def test_the_router_processes_all_texts_as_one_stream_within_its_loss_budget(study):
    record = study.record
    rows = record.measurements["routed"]
    contents = ["code", "prose", SWITCHING, STREAM]
    assert [row["content"] for row in rows] == contents * (1 + len(NAMED))
    assert all(sum(row["best_s"]) <= sum(row["plain_s"]) for row in rows)
    texts = {recording.prompt_id: recording.n_tokens for recording in study.trace.recordings}
    tokens = sum(n - 1 for n in texts.values())
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    for row in (row for row in rows if row["content"] == STREAM):
        plain_s = sum(row["plain_s"])
        # A toy's passes take microseconds: under load, a round may take several steps longer.
        overrun = max(map(curve.ratio, curve.widths)) if row["machine"] == THIS_MACHINE else 0
        assert sum(row["seconds"]) <= (1 + EPS) * plain_s + (GRACE + overrun) * plain_s / tokens
    assert adaptive_k.routed(record).shape == (len(rows), 2)


def test_one_controller_processes_all_answers_of_a_conversation(study):
    drafter = study.trace.recordings[0].drafter
    frame = adaptive_k.trajectory(study, drafter, ["rolling acceptance", "cost-aware"])
    assert frame.groupby("policy")["token"].is_monotonic_increasing.all()
    assert frame["token"].max() > 3 * 24 and adaptive_k.k_over_time(frame, drafter).data
    without = study._replace(trace=study.trace.select(prompt_id="code-01"))
    with pytest.raises(InputError, match="conversations of 1 or more"):
        adaptive_k.trajectory(without, drafter, ["cost-aware"])
