"""Laws of controllers: none changes the output, and a replay has the rounds of the live run."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from specnb.decode.content import ContentK
from specnb.decode.control import (
    ConfidenceStop,
    Controller,
    FixedK,
    RollingAcceptance,
    RoundOutcome,
    top_probability,
)
from specnb.decode.costaware import CostAware
from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.recording import Trace
from specnb.measure.replay import counts_of, fixed_k, oracle, walk_recording
from tests.laws.test_distribution import ONE, draft_model, off_by
from tests.measure.recorded import record

PROMPT = [0, 1, 2, 0, 1]
CURVE = CostCurve(
    model="m", context=1, widths=(1, 2, 9, 25), samples_s=((1.0,), (1.1,), (1.4,), (2.6,))
)
VERIFY = [CURVE.seconds(n) for n in range(26)]
EVEN = np.array([1.5, 0.5, 0.0, -0.5])
"""Logits of a drafter with constant confidence, most probable token first."""
CONTROLLERS = {
    "fixed": lambda: FixedK(5),
    "rolling": RollingAcceptance,
    "content": ContentK,
    "confidence": lambda: ConfidenceStop(8, 0.45),
    "cost-aware": lambda: CostAware(VERIFY, 0.2, patience=3),
    "cost-aware, expensive": lambda: CostAware(
        [0, *(1.0 * n for n in range(1, 26))], 0.9, patience=2
    ),
}


def drafter_named(name, seed):
    if name == "lookup":
        return LookupDrafter()
    if name == "far":  # uses the whole text: one wrong token in its state is detected
        return ModelDrafter(toy.markov(4, order=1000, seed=seed))
    model = (
        toy.markov(4, order=2, seed=seed)
        if "same" in name
        else toy.markov(4, order=1, seed=seed + 1)
    )
    if name == "short":
        model.caps = replace(model.caps, n_ctx=16)
    if "even" in name:  # equal confidence everywhere, also after a wrong draft token
        logits_of = model._logits_of
        model._logits_of = lambda prefix: EVEN[np.argsort(np.argsort(-logits_of(prefix)))]
    return ModelDrafter(model)


def recorded(target, drafter, n, **sampling):
    """Return plain output of `n` tokens, and the drafter's recording along it."""
    ((plain, (recording,)),) = record(target, [drafter], [PROMPT], max_new_tokens=n, **sampling)
    return plain, recording


@pytest.mark.parametrize("name", ["lookup", "other", "same", "far", "even"])
@pytest.mark.parametrize("seed", range(6))
def test_greedy_output_equals_plain_and_replayed_rounds_equal_live_ones(name, seed):
    """Rounds are equal in their numbers of drafted and accepted tokens.

    With a controller that reads confidence, this needs a draft model with constant confidence.
    """
    target = toy.markov(4, order=2, seed=seed, eog=frozenset({3}) if seed % 2 else frozenset())
    for n in (1, 2, 60):
        plain, recording = recorded(target, drafter_named(name, seed), n)
        for control, make in CONTROLLERS.items():
            controller = make()
            live = generate(
                target, PROMPT, drafter=drafter_named(name, seed), k=controller, max_new_tokens=n
            )
            assert live.token_ids == plain.token_ids and live.controller == controller.name
            if name in ("lookup", "even") or not controller.reads_drafts:
                steps = walk_recording(recording, make())
                assert [(s.drafted, s.n_accepted) for s in steps] == [
                    (r.k, r.n_accepted) for r in live.rounds
                ], control


READERS = ["confidence", "cost-aware", "rolling"]
WAYS = [("token", "model"), ("block", "model"), ("token", "lookup")]


@pytest.mark.parametrize(
    ("control", "rule", "name"),
    [
        pytest.param(control, *way, marks=[] if (i + j) % 3 == 0 else pytest.mark.slow)
        for i, control in enumerate(READERS)
        for j, way in enumerate(WAYS)
    ],
)
def test_sampled_output_has_the_targets_distribution(control, rule, name):
    drafter = LookupDrafter() if name == "lookup" else draft_model(7)
    assert (
        off_by(toy.markov(3, seed=4), drafter, ONE, 4, CONTROLLERS[control], rule, PROMPT[:2])
        < 1e-9
    )


def test_replayed_confidence_stop_has_the_live_rounds_and_accepted_tokens():
    target = toy.markov(4, order=2, seed=1)
    _, recording = recorded(target, drafter_named("other", 1), 60)
    control = CONTROLLERS["confidence"]
    live = generate(
        target, PROMPT, drafter=drafter_named("other", 1), k=control(), max_new_tokens=60
    )
    counts = counts_of(recording, walk_recording(recording, control()))
    assert (counts.rounds, counts.accepted) == (
        len(live.rounds),
        live.accepted_tokens,
    ) and counts.drafted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4, 24])
def test_walks_with_a_fixed_k_agree_with_the_exact_counts(k, temperature):
    target = toy.markov(4, order=2, seed=3)
    _, recording = recorded(target, drafter_named("other", 3), 40, temperature=temperature)
    rng = np.random.default_rng(0)
    walks = [
        counts_of(recording, walk_recording(recording, FixedK(k), rng))
        for _ in range(400 if temperature else 1)
    ]
    exact = fixed_k(recording, k)

    def facts(counts):
        return (
            counts.rounds,
            counts.drafted,
            counts.accepted,
            counts.steps,
            counts.seconds(Cost(CURVE, 0.2)),
        )

    values = np.array([facts(walk) for walk in walks], dtype=float)
    assert (
        abs(values.mean(0) - facts(exact)) <= 3.3 * values.std(0) / np.sqrt(len(values)) + 1e-9
    ).all()


class OracleK(Controller):
    """Follows a plan computed in hindsight, one K per generated token: a bound, not a method."""

    name = "oracle"

    def __init__(self, plan: Sequence[int]) -> None:
        self._plan = tuple(plan)
        self._at = 0
        self.k_max = max(plan, default=0)

    def draft_length(self) -> int:
        return self._plan[self._at] if self._at < len(self._plan) else 0

    def update(self, outcome: RoundOutcome) -> None:
        self._at += outcome.n_accepted + 1


@pytest.mark.parametrize("c", [0.0, 0.3])
@pytest.mark.parametrize("name", ["lookup", "other"])
def test_the_oracle_plan_takes_the_oracles_time_and_no_fixed_k_is_faster(name, c):
    target = toy.markov(4, order=2, seed=2)
    cost = Cost(CURVE, c)
    _, recording = recorded(target, drafter_named(name, 2), 50)
    plan, seconds = oracle(recording, cost, 24)
    assert counts_of(recording, walk_recording(recording, OracleK(plan))).seconds(
        cost
    ) == pytest.approx(seconds)
    assert all(fixed_k(recording, k).seconds(cost) >= seconds - 1e-9 for k in range(25))
    live = generate(
        target, PROMPT, drafter=drafter_named(name, 2), k=OracleK(plan), max_new_tokens=50
    )
    assert len(live.rounds) == len(walk_recording(recording, OracleK(plan)))


def test_recordings_load_from_current_and_older_files(tmp_path):
    target = toy.markov(4, order=2, seed=1)
    file = tmp_path / "t.parquet"
    made = []
    for temperature in (0.0, 0.7):
        drafters = [drafter_named("lookup", 1), drafter_named("other", 1)]
        for _, recordings in record(
            target, drafters, [PROMPT, [2]], temperature=temperature, max_new_tokens=9
        ):
            made += recordings
    trace = Trace(tuple(made))
    trace.save(file)
    assert Trace.load(file) == trace and len(trace.select(temperature=0.7).recordings) == 4
    table = pq.read_table(file)
    pq.write_table(table.drop_columns("drafts"), file)
    assert Trace.load(file).recordings == tuple(r._replace(drafts=()) for r in made)
    # older files: entropies next to confidences, and rows after wrong draft tokens
    beliefs = [[[top, 1.0] for top in r.beliefs] for r in made]
    table = table.set_column(table.column_names.index("beliefs"), "beliefs", [beliefs])
    pq.write_table(table.append_column("astray", [[[]] * len(made)]), file)
    assert Trace.load(file) == trace


def test_confidence_is_the_largest_probability_of_the_softmax():
    assert top_probability(np.log(np.array([0.5, 0.25, 0.25, 1e-300])) + 17) == pytest.approx(0.5)
    assert top_probability(np.array([3.0, -np.inf])) == 1.0


def test_rolling_acceptance_follows_the_field_report_exactly():
    control = RollingAcceptance()
    assert control.draft_length() == 12
    lengths = []
    for n_accepted in [10] * 4 + [0] * 12:
        control.update(RoundOutcome(10, n_accepted, b""))
        lengths.append(control.draft_length())
    assert lengths == [16, 20, 24, 24, 24, 24, 20, 16, 12, 8, 4, 4, 4, 4, 4, 4]
