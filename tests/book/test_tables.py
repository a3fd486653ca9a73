"""Tables against numbers worked out by hand from hand-made records."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pandas as pd
import pytest

from specnb.book import tables
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
        measurements={"forks": list(forks), "verify_curve": curve, "c": 0.0},
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


def row(frame, category, temperature, k):
    found = frame[(frame["category"] == category) & (frame["temperature"] == temperature) & (frame["k"] == k)]
    assert len(found) == 1
    return found.iloc[0]


NONE = float("nan")


def test_k_sweep_by_hand():
    frame = tables.k_sweep(SWEEP)
    assert list(frame[["category", "temperature", "k"]].itertuples(index=False, name=None))[:5] == [
        ("prose", 0.0, 0), ("prose", 0.0, 2), ("code", 0.0, 0), ("code", 0.0, 2), ("code", 0.7, 0),
    ]  # fmt: skip
    code = row(frame, "code", 0.0, 2)
    assert (code["drafted"], code["accepted"], code["acceptance_rate"], code["tau"]) == (8, 8, 1.0, 3.0)
    # prefill and the token that it gives are left out on both sides
    assert code["tokens_per_s"] == 11 / 8 and code["speedup"] == pytest.approx(1.5)
    assert code["wall_speedup"] == pytest.approx(62 / 9)  # with prefill
    assert code["identical"] == 1 and code["n_prompts"] == 1
    prose = row(frame, "prose", 0.0, 2)
    assert (prose["drafted"], prose["accepted"], prose["acceptance_rate"], prose["tau"]) == (12, 6, 0.5, 2.0)
    assert prose["speedup"] == 0.75
    sampled = row(frame, "code", 0.7, 4)
    assert (sampled["acceptance_rate"], sampled["tau"], sampled["speedup"]) == (0.5, 3.0, 0.5)
    assert pd.isna(sampled["identical"]) and sampled["lossless"]
    pooled = row(frame, "all", 0.0, 2)  # 24 tokens in 24 s against 24 s; acceptance 14 of 20
    assert (pooled["drafted"], pooled["accepted"], pooled["acceptance_rate"]) == (20, 14, 0.7)
    assert pooled["tau"] == 2.4 and pooled["speedup"] == 1.0 and pooled["n_prompts"] == 2
    assert pd.isna(pooled["low"]) and pd.isna(pooled["high"])  # two prompts are too few for an interval


def test_speedups_are_over_the_fastest_plain_decoding_and_those_over_the_same_engine_stand_beside():
    rates = {"baseline_engine": "llama.cpp q4_1", "baseline_tokens_per_s": 80.0, "plain_tokens_per_s": 20.0}
    over = SWEEP.model_copy(update={"measurements": SWEEP.measurements | {"baseline": rates}})
    both = row(tables.k_sweep(SWEEP), "code", 0.0, 2), row(tables.k_sweep(over), "code", 0.0, 2)
    assert [r["speedup_same_engine"] for r in both] == pytest.approx([1.5, 1.5])
    assert [r["speedup"] for r in both] == pytest.approx([1.5, 1.5 / 4]) and both[0]["tokens_per_s"] == 11 / 8
    assert "llama.cpp q4_1: 80.0" in str(tables.baseline(over))


def test_best_k_is_the_fastest_draft_length_and_says_whether_it_pays():
    rows = [
        ("prose", 0, 1.0, 1.0, 1.0), ("prose", 2, 0.8, 0.7, 0.9), ("prose", 4, 0.5, 0.4, 0.6),
        ("code", 0, 1.0, 1.0, 1.0), ("code", 2, 1.2, 1.1, 1.3), ("code", 4, 1.5, 1.2, 1.9),
        ("a", 2, 1.2, 1.0, 1.4), ("b", 2, 0.9, 0.8, 1.0), ("c", 2, 3.0, NONE, NONE),
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["category", "k", "speedup", "low", "high"])
    best = tables.best_k(frame.assign(tau=2.0, temperature=0.0, n_prompts=30, busy=False))
    assert best[["category", "k", "verdict"]].values.tolist() == [
        ["prose", 2, "does not pay"], ["code", 4, "pays"],
        *([name, 2, "undecided"] for name in "abc"),  # intervals that touch one, and none
    ]  # fmt: skip


@pytest.mark.parametrize(("run", "curve", "marked"), [(None, None, None), (True, False, True), (None, True, True)])
def test_what_a_busy_machine_measured_is_marked_and_gets_no_verdict(run, curve, marked):
    timed = CostCurve(model="m", context=4, widths=(1, 3), samples_s=((0.1,), (0.4,)), busy=curve)
    seen = record(*SWEEP.generations, curve=timed.model_dump(mode="json"))
    seen = seen.model_copy(update={"provenance": {"extra": {} if run is None else {"contention": {"busy": run}}}})
    best = tables.best_k(tables.k_sweep(seen))
    assert set(tables.k_sweep(seen)["busy"]) == {marked} and set(tables.verify_cost(seen)["busy"]) == {curve}
    assert (set(best["verdict"]) == {tables.BUSY}) is bool(marked)


def test_a_table_to_be_read_has_the_interval_in_its_cell_and_a_dash_for_nothing():
    rows = [("b", 2, 1.284, 1.05, 1.706, None), ("b", 3, 1.0, 1.0, 1.0, 0.5), ("a", 4, 0.5, NONE, NONE, 0.5)]
    frame = pd.DataFrame(rows, columns=["category", "k", "speedup", "low", "high", "acceptance_rate"])
    shown = tables.compact(frame)
    assert shown["speedup"].tolist() == ["1.28 [1.05, 1.71]", "1.00 [1.00, 1.00]", "0.50"]
    assert shown["acceptance_rate"].tolist() == ["–", 0.5, 0.5] and not {"low", "high"} & set(shown)
    assert tables.glance(frame.assign(temperature=0.0)).loc[(0, "b")].to_dict() == {2: "1.28 [1.05, 1.71]", 4: "–"}


# --- checks ---------------------------------------------------------------------------------------------------------

BASE, SAME = generation("c1", "code", 0.0, PLAIN, 12.0), generation("c1", "code", 0.0, [(2, 2)] * 4, 8.0, k=2)
DIFFERS = generation("c1", "code", 0.0, [(2, 2)] * 4, 8.0, k=2, tokens=(*range(11), 77))
FAST = BASE.model_copy(update={"rounds": SAME.rounds})
# more accepted than drafted; more committed than accepted and the extra token
WRONG = [SAME.model_copy(update={"rounds": (SAME.rounds[0]._replace(n_accepted=n), *SAME.rounds[1:])}) for n in (3, 1)]


def fork(near_tie):
    return {"prompt_id": "c1", "k": 2, "near_tie": near_tie}


@pytest.mark.parametrize(
    ("generations", "forks", "ok"),
    [
        (SWEEP.generations, [], [True, True, True]),
        ([BASE, DIFFERS], [fork(True)], [True, True, True]),
        ([BASE, SAME, DIFFERS], [], [False, True, True]),
        ([BASE, SAME, DIFFERS], [fork(False)], [False, True, True]),
        *(([BASE, wrong], [], [True, False, True]) for wrong in WRONG),
        ([FAST, SAME], [], [True, True, False]),
    ],
)
def test_checks_hold_for_a_sound_record_and_catch_what_is_planted(generations, forks, ok):
    assert tables.checks(record(*generations, forks=forks))["ok"].tolist() == ok


def test_the_best_k_is_the_range_that_cannot_be_told_apart_and_plain_decoding_is_among_the_choices():
    """Five prompts; "copy" has 4 drafts at most, "slow" never pays, "mixed" pays for two prompts of five."""

    def row(drafter, at, k, seconds):
        scale = [0.9, 0.95, 1.0, 1.05, 1.1][at]
        return {
            "drafter": drafter, "category": "code", "temperature": 0.0, "prompt_id": str(at), "k": k, "n_decoded": 10,
            "rounds": 5.0, "tau": 2.2, "drafted": 10, "accepted": 5, "seconds": scale * seconds, "plain_s": scale,
            "live_plain_s": scale,
        }  # fmt: skip

    times = {"copy": [0.8, 0.7, 0.5, 0.49, 0.49], "slow": [1.1, 1.2, 1.3, 1.4, 1.5]}
    rows = [row(name, i, k, each) for name in times for i in range(5) for k, each in enumerate(times[name], start=1)]
    rows += [row("mixed", i, k, 0.7 if i < 2 else 1.1) for i in range(5) for k in (1, 2)]
    record = SimpleNamespace(measurements={"replay": {"rows": rows}}, params={}, provenance={}, generations=())
    best = tables.best_range(record).query("category == 'code'").set_index("drafter")
    assert best[["k", "range", "longest", "verdict"]].T.to_dict("list") == {
        "copy": [4, "4", 4, "pays"], "slow": [0, "0", 5, "does not pay"], "mixed": [1, "0-1", 1, "undecided"],
    }  # fmt: skip
    assert best.loc["copy", ["speedup", "tau"]].tolist() == pytest.approx([1 / 0.49, 2.2])
