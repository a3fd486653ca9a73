"""The cost-aware controller where speculation always, never or sometimes pays."""

from functools import cache

import pytest

from specnb.decode.control import RoundOutcome
from specnb.decode.costaware import TRY, CostAware
from specnb.decode.generate import generate
from specnb.lm import toy
from specnb.measure.cost import Cost
from specnb.measure.follow import follow
from specnb.measure.replay import counts_of, every_k, walk_recording
from tests.laws.test_controllers import drafter_named

K_MAX = 16
FLAT = Cost.straight("flat", 1.02, 0.02)
DEAR = Cost.straight("dear", 8.0, 0.9)


def cost_aware(cost, **options):
    return CostAware(cost.ratios(K_MAX), cost.c, **options)


@cache
def recorded(drafter, seed=0, n=120):
    target = toy.markov(4, order=2, seed=seed)
    plain = generate(target, [0, 1, 2], max_new_tokens=n)
    followed = [drafter_named(drafter, seed)]
    return follow(target, followed, plain, k_max=K_MAX, max_new_tokens=n)[0]


def even(kept, top, n=200):
    """Return a recording in which all draft tokens are accepted, or none, at confidence `top`."""
    base = recorded("other", n=n)
    keep = tuple((kept,) * min(drafts, base.n_tokens - i) for i, drafts in enumerate(base.offered))
    return base._replace(keep=keep, beliefs=(top,) * base.n_tokens)


def test_expensive_wrong_drafts_are_only_tried_rarely():
    recording = even(0.0, 0.3, 2000)
    control = cost_aware(DEAR)
    steps = walk_recording(recording, control)
    plain = (recording.n_tokens - 1) * DEAR.curve.seconds(1)
    assert counts_of(recording, steps).seconds(DEAR) < 1.02 * plain
    late = [s.at for s in steps if s.steps and s.at > 100]
    assert TRY <= len(late) <= 0.02 * recording.n_tokens


def test_drafting_resumes_when_draft_tokens_become_correct():
    control = cost_aware(FLAT, patience=8)
    perfect = even(1.0, 0.99)
    walk_recording(even(0.0, 0.3), control)
    steps = walk_recording(perfect, control)
    assert steps[-3].drafted > 0 and len(steps) < 0.3 * perfect.n_tokens


@pytest.mark.parametrize("drafter", ["lookup", "other", "same"])
@pytest.mark.parametrize(
    "cost", [FLAT, DEAR, Cost.straight("middle", 1.8, 0.2)], ids=["flat", "dear", "middle"]
)
def test_the_speed_is_close_to_the_best_fixed_k_in_hindsight(drafter, cost):
    """On closed-form models. Notebook 02 has the bound for real texts."""
    cost = cost if drafter != "lookup" else cost._replace(c=0.0)
    group = [recorded(drafter, seed) for seed in range(4)]
    by_k = zip(*(every_k(recording, range(K_MAX + 1)) for recording in group), strict=True)
    best = min(sum(counts.seconds(cost) for counts in of_k) for of_k in by_k)
    control = cost_aware(cost)
    assert best / sum(counts_of(r, walk_recording(r, control)).seconds(cost) for r in group) > 0.93


def test_k_is_learned_by_position_if_the_drafter_reports_no_confidence():
    control = cost_aware(Cost.straight("middle", 2.5))
    for _ in range(60):
        k = control.draft_length()
        control.update(RoundOutcome(k, min(k, 2), b""))
    assert control.draft_length() == 2


def test_a_round_without_a_request_for_drafts_teaches_nothing_about_drafting():
    control = cost_aware(FLAT)
    assert control.draft_length() > 0 and control.goes_on(0, 0.9)
    control.update(RoundOutcome(1, 1, b""))
    learned = [control.recent_rate, *control._calibration._tested]
    control.update(RoundOutcome(0, 0, b""))  # as from a router without budget for this drafter
    assert [control.recent_rate, *control._calibration._tested] == learned
