"""Tables against numbers worked out by hand from hand-made records."""

from datetime import UTC, datetime

import pandas as pd
import pytest

from specnb.book import tables
from specnb.errors import InputError
from specnb.measure.cost import CostCurve
from specnb.records import Generation, Round, RunRecord

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def generation(prompt, category, temperature, rounds, seconds, *, k=0, tokens=None, prefill_s=0.0):
    """`rounds` holds (drafted, accepted) pairs; a round of (0, 0) is a plain step. Tokens count up from 0.

    `seconds` of decoding are spread over the rounds: a fifth drafting, half verifying, a tenth rewinding, a tenth
    otherwise, and a tenth between rounds; 0.6 of them inside forwards.
    """
    made, at, each = [], 0, seconds / len(rounds)
    for index, (drafted, accepted) in enumerate(rounds):
        committed = tuple(range(at, at + accepted + 1))
        drafts = committed[:accepted] + (99,) * (drafted - accepted)
        times = (0.2 * each, 0.5 * each, 0.1 * each, 0.1 * each, 0.6 * each)
        made.append(Round(index, drafted, accepted, drafts, committed, (1.0,) * accepted, *times, drafted + 1))
        at += accepted + 1
    if tokens is not None:
        made[-1] = made[-1]._replace(committed_ids=tokens[at - accepted - 1 :])
    return Generation(
        prompt_id=prompt, category=category, temperature=temperature, k=k, prompt_ids=(5,),
        token_ids=tuple(t for r in made for t in r.committed_ids), rounds=tuple(made),
        wall_s=seconds + prefill_s, prefill_s=prefill_s, stop_reason="length",
    )  # fmt: skip


def record(*generations, forks=(), curve=None):
    return RunRecord(
        run_id="r1", experiment="01_k_sweep", params={}, provenance={}, started=NOW, ended=NOW, generations=generations,
        measurements={"forks": list(forks), "verify_curve": curve},
    )  # fmt: skip


# 12 tokens each. Plain: 12 s on both prompts. K = 2: 8 s and 16 s, 4 and 6 rounds.
PLAIN = [(0, 0)] * 12
SWEEP = record(
    generation("p2", "prose", 0.0, [(2, 1)] * 6, 16.0, k=2),
    generation("p2", "prose", 0.0, PLAIN, 12.0),
    generation("c1", "code", 0.0, PLAIN, 12.0, prefill_s=50.0),
    generation("c1", "code", 0.0, [(2, 2)] * 4, 8.0, k=2, prefill_s=1.0),
    generation("c1", "code", 0.7, [(4, 2)] * 4, 24.0, k=4),
    generation("c1", "code", 0.7, PLAIN, 12.0),
)

# Five prompts of 1 to 5 s; the last is not sped up
MANY = record(
    *(generation(f"p{s}", "code", 0.0, PLAIN, float(s)) for s in range(1, 6)),
    *(generation(f"p{s}", "code", 0.0, [(2, 2)] * 4, s / 2 if s < 5 else 5.0, k=2) for s in range(1, 6)),
)


def row(frame, category, temperature, k):
    found = frame[(frame["category"] == category) & (frame["temperature"] == temperature) & (frame["k"] == k)]
    assert len(found) == 1
    return found.iloc[0]


# --- k_sweep --------------------------------------------------------------------------------------------------------


def test_k_sweep_by_hand():
    frame = tables.k_sweep(SWEEP)
    code = row(frame, "code", 0.0, 2)
    assert (code["drafted"], code["accepted"], code["acceptance_rate"], code["tau"]) == (8, 8, 1.0, 3.0)
    # prefill and the token that it gives are left out on both sides
    assert code["tokens_per_s"] == 11 / 8 and code["speedup"] == pytest.approx(1.5)
    assert code["identical"] == 1 and code["n_prompts"] == 1
    prose = row(frame, "prose", 0.0, 2)
    assert (prose["drafted"], prose["accepted"], prose["acceptance_rate"], prose["tau"]) == (12, 6, 0.5, 2.0)
    assert prose["speedup"] == 0.75
    sampled = row(frame, "code", 0.7, 4)
    assert (sampled["acceptance_rate"], sampled["tau"], sampled["speedup"]) == (0.5, 3.0, 0.5)
    assert pd.isna(sampled["identical"])


def test_the_baseline_row_is_one_and_drafts_nothing():
    base = row(tables.k_sweep(MANY), "code", 0.0, 0)
    assert (base["speedup"], base["low"], base["high"], base["tau"]) == (1.0, 1.0, 1.0, 1.0)
    assert (base["drafted"], base["accepted"]) == (0, 0) and pd.isna(base["acceptance_rate"])


def test_pooled_rows_are_totals_over_all_categories():
    """24 tokens in 24 s against 24 s; acceptance 14 of 20."""
    pooled = row(tables.k_sweep(SWEEP), "all", 0.0, 2)
    assert (pooled["drafted"], pooled["accepted"], pooled["acceptance_rate"]) == (20, 14, 0.7)
    assert pooled["tau"] == 2.4 and pooled["speedup"] == 1.0 and pooled["n_prompts"] == 2
    assert pd.isna(pooled["low"]) and pd.isna(pooled["high"])  # two prompts are too few for an interval


def test_rows_are_in_order_of_category_as_run_then_temperature_then_k():
    frame = tables.k_sweep(SWEEP)
    assert list(frame[["category", "temperature", "k"]].itertuples(index=False, name=None)) == [
        ("prose", 0.0, 0), ("prose", 0.0, 2),
        ("code", 0.0, 0), ("code", 0.0, 2), ("code", 0.7, 0), ("code", 0.7, 4),
        ("all", 0.0, 0), ("all", 0.0, 2), ("all", 0.7, 0), ("all", 0.7, 4),
    ]  # fmt: skip


def test_each_run_is_paired_with_the_baseline_of_its_own_prompt_and_temperature():
    made = record(
        generation("a", "code", 0.0, PLAIN, 10.0), generation("a", "code", 0.0, [(2, 2)] * 4, 5.0, k=2),
        generation("b", "code", 0.0, PLAIN, 40.0), generation("b", "code", 0.0, [(2, 2)] * 4, 20.0, k=2),
        generation("a", "code", 0.5, PLAIN, 80.0), generation("a", "code", 0.5, [(2, 2)] * 4, 20.0, k=2),
    )  # fmt: skip
    frame = tables.k_sweep(made)
    assert [row(frame, "code", t, 2)["speedup"] for t in (0.0, 0.5)] == [2.0, 4.0]


def test_differing_tokens_are_not_identical():
    other = generation("c1", "code", 0.0, [(2, 2)] * 4, 8.0, k=2, tokens=(*range(11), 77))
    frame = tables.k_sweep(record(generation("c1", "code", 0.0, PLAIN, 12.0), other))
    assert row(frame, "code", 0.0, 2)["identical"] == 0


def test_the_interval_is_over_prompts_each_paired_with_its_own_baseline():
    """Four prompts twice as fast and one as fast, though the slowest is five times slower than the fastest."""
    made = row(tables.k_sweep(MANY), "code", 0.0, 2)
    assert made["speedup"] == pytest.approx(15 / (5 + 0.5 * 10)) and made["n_prompts"] == 5
    assert 1.0 <= made["low"] < made["speedup"] < made["high"] == 2.0
    narrow, wide = (row(tables.k_sweep(MANY, level=level), "code", 0.0, 2) for level in (0.1, 0.99))
    assert narrow["high"] - narrow["low"] < wide["high"] - wide["low"]


def test_the_wall_speedup_counts_prefill_too():
    """8 s and 1 s of prefill against 12 s and 50 s."""
    assert row(tables.k_sweep(SWEEP), "code", 0.0, 2)["wall_speedup"] == pytest.approx(62 / 9)


def test_one_lossy_run_makes_its_row_lossy():
    lossy = SWEEP.generations[4].model_copy(update={"lossless": False})
    frame = tables.k_sweep(record(*SWEEP.generations[:4], lossy, SWEEP.generations[5]))
    assert not row(frame, "code", 0.7, 4)["lossless"] and not row(frame, "all", 0.7, 4)["lossless"]
    assert row(frame, "code", 0.0, 2)["lossless"] and row(frame, "code", 0.7, 0)["lossless"]


def test_a_record_without_a_baseline_is_refused():
    with pytest.raises(InputError, match=r"no baseline for prompt 'c1' at temperature 0.0"):
        tables.k_sweep(record(generation("c1", "code", 0.0, [(2, 2)], 8.0, k=2)))


# --- best_k ---------------------------------------------------------------------------------------------------------


def sweep_frame(*rows):
    frame = pd.DataFrame(rows, columns=["category", "temperature", "k", "speedup", "low", "high"])
    return frame.assign(tau=2.0)


def test_best_k_is_the_fastest_draft_length_and_says_whether_it_pays():
    rows = [
        ("prose", 0.0, 0, 1.0, 1.0, 1.0), ("prose", 0.0, 2, 0.8, 0.7, 0.9), ("prose", 0.0, 4, 0.5, 0.4, 0.6),
        ("code", 0.0, 0, 1.0, 1.0, 1.0), ("code", 0.0, 2, 1.2, 1.1, 1.3), ("code", 0.0, 4, 1.5, 1.2, 1.9),
        ("code", 0.7, 0, 1.0, 1.0, 1.0), ("code", 0.7, 2, 1.1, 0.9, 1.3), ("code", 0.7, 4, 0.7, 0.6, 0.8),
    ]  # fmt: skip
    best = tables.best_k(sweep_frame(*rows))
    assert best[["category", "temperature", "k", "verdict"]].values.tolist() == [
        ["prose", 0.0, 2, "does not pay"], ["code", 0.0, 4, "pays"], ["code", 0.7, 2, "undecided"],
    ]  # fmt: skip


def test_an_interval_that_touches_one_is_undecided():
    frame = sweep_frame(("a", 0.0, 2, 1.2, 1.0, 1.4), ("b", 0.0, 2, 0.9, 0.8, 1.0))
    assert tables.best_k(frame)["verdict"].tolist() == ["undecided"] * 2


def test_without_an_interval_nothing_is_decided():
    none = float("nan")
    assert tables.best_k(sweep_frame(("a", 0.0, 2, 3.0, none, none)))["verdict"].tolist() == ["undecided"]


# --- verify_cost, time_split ----------------------------------------------------------------------------------------


def test_verify_cost_is_the_curve():
    curve = CostCurve(model="m", context=4, widths=(1, 3), samples_s=((0.1, 0.3, 0.2), (0.4, 0.4, 0.9)))
    frame = tables.verify_cost(record(curve=curve.model_dump(mode="json")))
    assert frame["width"].tolist() == [1, 3] and frame["median_s"].tolist() == [0.2, 0.4]
    assert frame["ratio"].tolist() == [1.0, 2.0]


def test_time_split_is_shares_of_decoding_time_that_sum_to_one():
    frame = tables.time_split(SWEEP).set_index("k")
    assert frame.index.tolist() == [0, 2, 4]
    for k in (0, 2, 4):
        assert frame.loc[k, ["draft", "verify", "rewind"]].tolist() == pytest.approx([0.2, 0.5, 0.1])
        assert frame.loc[k, "other"] == pytest.approx(0.2)  # in rounds and between them
        assert frame.loc[k, "overhead"] == pytest.approx(0.4)
    assert frame[["draft", "verify", "rewind", "other"]].sum(axis=1).tolist() == pytest.approx([1.0] * 3)


# --- checks ---------------------------------------------------------------------------------------------------------

BASE, SAME = generation("c1", "code", 0.0, PLAIN, 12.0), generation("c1", "code", 0.0, [(2, 2)] * 4, 8.0, k=2)
DIFFERS = generation("c1", "code", 0.0, [(2, 2)] * 4, 8.0, k=2, tokens=(*range(11), 77))
SHORT = generation("c1", "code", 0.0, [(2, 2)] * 3, 8.0, k=2)


def fork(near_tie):
    return {"prompt_id": "c1", "k": 2, "near_tie": near_tie}


def verdicts(*generations, forks=()):
    return tables.checks(record(*generations, forks=forks))["ok"].tolist()


def test_checks_hold_for_a_sound_record():
    assert tables.checks(SWEEP)["ok"].all() and tables.checks(SWEEP)["of"].tolist() == [2, 6, 3]
    assert verdicts(BASE, DIFFERS, forks=[fork(True)]) == [True] * 3


@pytest.mark.parametrize("planted", [(DIFFERS, []), (DIFFERS, [fork(False)]), (SHORT, [])], ids=str)
def test_checks_catch_a_greedy_run_that_differs_without_a_near_tie(planted):
    """Also one that is a beginning of the baseline, which has no fork."""
    run, forks = planted
    assert verdicts(BASE, SAME, run, forks=forks) == [False, True, True]


def test_sampled_runs_may_differ():
    sampled = [g.model_copy(update={"temperature": 0.7}) for g in (BASE, DIFFERS)]
    assert verdicts(BASE, SAME, *sampled) == [True] * 3


@pytest.mark.parametrize("change", [{"n_accepted": 3}, {"n_accepted": 1}])
def test_checks_catch_rounds_whose_counts_do_not_add_up(change):
    """More accepted than drafted; more committed than accepted and the extra token."""
    rounds = (SAME.rounds[0]._replace(**change), *SAME.rounds[1:])
    assert verdicts(BASE, SAME.model_copy(update={"rounds": rounds})) == [True, False, True]


def test_checks_catch_a_baseline_that_was_not_plain():
    fast = BASE.model_copy(update={"rounds": SAME.rounds})
    assert verdicts(fast, SAME) == [True, True, False]
