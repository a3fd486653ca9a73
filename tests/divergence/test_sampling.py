"""The sampling audit: sums and exact checks detect faults; sound samplers raise no alarm."""

import numpy as np
import pytest

from specnb.chapters.lossless import PLANTED, related
from specnb.decode import accept
from specnb.decode.generate import generate
from specnb.divergence.lossless import generate_logged
from specnb.divergence.sampling import CAUSES, LIMIT, MEANING, Position, SamplingTally
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from tests.laws.trees import Trees

V = 32
NOTHING, TOP_K, GREEDY, FROM_P = PLANTED


def logged(seed, n_tokens=150, fault=NOTHING, *, drafter=None, target=None, **options):
    """Return the positions of one generation, and the generation."""
    models = related(seed)
    drafter = drafter or ModelDrafter(models[1])
    heard = []
    settings = {"temperature": 1.0, "k": 4, "max_new_tokens": n_tokens, "seed": seed} | options
    with PLANTED[fault](drafter):
        generation = generate_logged(
            target or models[0], [seed % V], drafter=drafter, on_position=heard.append, **settings
        )
    return heard, generation


def audit(positions, **options):
    tally = SamplingTally()
    for position in positions:
        tally.add(position)
    return tally.audit(**options)


def blind(positions):
    """Return the same log without random numbers, as from an engine that does not log them."""
    return [position._replace(accept_u=None, resample_u=None) for position in positions]


def zs(audited):
    return {statistic.name: statistic.z for statistic in audited.panel}


def pooled(fault, seeds=range(6), **options):
    return [position for seed in seeds for position in logged(seed, fault=fault, **options)[0]]


ROW_P = np.array([0.5, 0.3, 0.2, 0.0])
ROW_Q = np.array([0.25, 0.25, 0.25, 0.25])
SOUND = Position(ROW_P, ROW_Q, 0, True, 0)
REJECTED = {"draft_id": 2, "accepted": False, "accept_u": 0.9, "resample_u": 0.7}


# --- sound decoding -------------------------------------------------------------------------------


def test_sound_sampling_is_inconclusive_until_there_are_enough_positions():
    heard = pooled(NOTHING, range(10))
    late = audit(heard)
    early = audit(heard[:200])
    assert (late.verdict, late.exit_code, late.causes, late.flaws) == ("sound", 0, (), {})
    assert late.replayed == late.n == len(heard) and audit(blind(heard)).verdict == "sound"
    assert early.verdict == "inconclusive" and early.exit_code == 125
    assert audit(heard[: 200 + early.more]).verdict == "sound"
    assert audit(heard[:200], effect=0.5).verdict == "sound"
    assert audit(heard, effect=0.01).more > 20 * len(heard)


@pytest.mark.parametrize(
    "drafter", [LookupDrafter, lambda: ModelDrafter(related(3)[0])], ids=["lookup", "itself"]
)
def test_deterministic_and_perfect_drafters_raise_no_alarm(drafter):
    """If the target drafts for itself, nothing is rejected, and only rounding varies."""
    heard = []
    for seed in range(8):
        options = {"target": related(3)[0], "drafter": drafter(), "temperature": 0.7}
        heard += logged(seed, **options)[0]
    audited = audit(heard)
    assert audited.causes == () and audited.flaws == {} and audited.replayed == audited.n > 100


def logged_trees(temperature, seeds=range(8)):
    """Return the positions of texts drafted in trees of six tokens."""
    return [
        position
        for seed in seeds
        for position in logged(seed, drafter=Trees(6, V, seed), k=6, temperature=temperature)[0]
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_audited_position_by_position(temperature):
    heard = logged_trees(temperature)
    audited = audit(heard)
    assert audited.causes == () and audited.flaws == {} and audited.n > 500
    assert temperature == 0 or any(zs(audited).values())


def test_a_tree_that_is_sampled_twice_is_found_by_its_random_numbers(monkeypatch):
    """If no draft token is accepted, the walk starts again, so draft tokens are too frequent.

    Statistics alone do not detect this, because the log of a tree has no q.
    """
    sound = accept.walk_drafts

    def eager(logits, proposal, chooser):
        first = sound(logits, proposal, chooser)
        return first if first.path else sound(logits, proposal, chooser)

    monkeypatch.setattr(accept, "walk_drafts", eager)
    heard = logged_trees(1.0, range(2))
    assert audit(heard).causes == (CAUSES["bonus"],) and not audit(blind(heard)).causes


def test_greedy_positions_are_checked_exactly_and_few_suffice():
    heard, _ = logged(0, 30, temperature=0.0)
    audited = audit(heard)
    assert audited.exact == audited.n and audited.replayed == 0 and audited.verdict == "sound"
    assert all(z is None for z in zs(audited).values())
    at, kept = next((i, position) for i, position in enumerate(heard) if position.accepted)
    heard[at] = kept._replace(accepted=False, committed_id=(kept.committed_id + 1) % V)
    audited = audit(heard)
    assert audited.verdict == "wrong" and "committed" in audited.flaws
    assert audited.flaws["accept"].position == at


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.8}], ids=str)
def test_logging_does_not_change_the_rounds(options):
    target, draft = related(0)
    settings = {"temperature": 1.0, "k": 4, "max_new_tokens": 150, "seed": 0} | options
    plain = generate(target, [0], drafter=ModelDrafter(draft), **settings)
    generation = logged(0, **options)[1]
    assert [r[:6] for r in generation.rounds] == [r[:6] for r in plain.rounds]  # without times


# --- planted faults -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "cause"),
    [(TOP_K, MEANING["z_surp"][0]), (GREEDY, MEANING["z_surp"][0]), (FROM_P, CAUSES["residual"])],
)
def test_a_planted_fault_is_detected_by_each_kind_of_check_and_removed(fault, cause):
    """With random numbers, without them, and by the two sums alone."""
    heard = pooled(fault, range(16))
    audited = audit(heard)
    assert audited.verdict == "wrong" and audited.exit_code == 1 and cause in audited.causes
    assert audit(blind(heard)).verdict == "wrong"
    assert any(abs(z) > LIMIT for z in zs(audited).values())
    assert logged(5)[1].token_ids != logged(5, fault=fault)[1].token_ids
    assert not audit(logged(5)[0]).causes


# --- exact checks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"accepted": False, "committed_id": 1}, "accept"),  # p > q is always accepted
        ({"draft_id": 3, "committed_id": 3}, "accept"),  # p = 0 never is
        ({"committed_id": 1}, "committed"),
        ({"draft_id": None, "q_draft": None, "accepted": False, "committed_id": 3}, "committed"),
        ({"draft_id": 2, "accepted": False, "committed_id": 2}, "residual"),
        ({"q_draft": np.array([0, 0.5, 0.5, 0])}, "draft"),
        ({"q_draft": ROW_P, "accepted": False, "committed_id": 1}, "accept"),
        ({"accept_u": 0.99, "accepted": False, "committed_id": 1}, "accept"),
        # u = 0.7 draws token 0 from the residual, and token 1 from p
        (REJECTED | {"committed_id": 1}, "residual"),
        ({"q_draft": None, "accepted": False, "committed_id": 0}, "residual"),
    ],
)
def test_an_impossible_outcome_is_found_in_one_position(change, kind):
    assert not audit([SOUND, SOUND._replace(**REJECTED, committed_id=0)]).flaws
    assert kind in audit([SOUND._replace(**change)]).flaws


def test_an_empty_log_is_inconclusive_and_invalid_effects_are_refused():
    audited = audit([])
    assert audited.verdict == "inconclusive" and audited.n == 0 and audited.more > 0
    for wrong in ({"effect": 0.0}, {"effect": 10}, {"effect": float("nan")}):
        with pytest.raises(InputError):
            audit([SOUND], **wrong)


# --- false alarms ---------------------------------------------------------------------------------


def test_one_rejection_of_nearly_certain_draft_tokens_is_no_alarm():
    """One rejection where 0.001 are expected is 32 standard deviations, but may be chance."""
    p = np.array([1 - 1e-6, 1e-6])
    q = np.array([1.0, 0.0])
    heard = [Position(p, q, 0, True, 0)] * 999 + [Position(p, q, 0, False, 1)]
    assert audit(heard).verdict == "sound" and abs(zs(audit(heard))["z_acc"]) < 2
    assert audit([*heard[:900], *[heard[-1]] * 100]).verdict == "wrong"


def test_sums_over_sound_positions_are_within_freedmans_bound():
    """The bound on P(|z| > 2) is 2 exp(-2) = 0.27; for a normal sum it is 4.6 %."""
    rng = np.random.default_rng(1)
    row = np.array([0.8, 0.2])
    exceeded = 0
    for _ in range(300):
        tally = SamplingTally()
        for token in rng.choice(2, 60, p=row):
            tally.add(Position(row, None, None, False, int(token)))
        exceeded += abs(zs(tally.audit())["z_surp"]) > 2
    assert 0 < exceeded < 0.1 * 300
