"""Tables equal numbers computed by hand from small records."""

from datetime import UTC, datetime

import pandas as pd
import pytest

from specnb.book import tables
from specnb.measure.cost import CostCurve
from specnb.records import Generation, Round, RunRecord

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NONE = float("nan")
RATES = {
    "baseline_engine": "llama.cpp q4_1",
    "baseline_tokens_per_s": 80.0,
    "plain_tokens_per_s": 20.0,
}


def generation(prompt, category, temperature, rounds, seconds, *, k=0, prefill_s=0.0):
    """Return a generation of tokens 0, 1, …; `rounds`: (drafted, accepted), plain steps (0, 0)."""
    made, n = [], 0
    for index, (drafted, accepted) in enumerate(rounds):
        committed = tuple(range(n, n + accepted + 1))
        drafts = committed[:accepted] + (99,) * (drafted - accepted)
        chances = (1.0,) * accepted
        made.append(
            Round(index, drafted, accepted, drafts, committed, chances, *[0.0] * 5, drafted + 1)
        )
        n += accepted + 1
    return Generation(
        prompt_id=prompt,
        category=category,
        temperature=temperature,
        k=k,
        prompt_ids=(5,),
        token_ids=tuple(range(n)),
        rounds=tuple(made),
        wall_s=seconds + prefill_s,
        prefill_s=prefill_s,
        stop_reason="length",
    )


def record(*generations, **measured):
    measured = {"forks": [], "verify_curve": None, "baseline": RATES} | measured
    return RunRecord(
        run_id="r1",
        experiment="01_k_sweep",
        params={},
        provenance={},
        started=NOW,
        ended=NOW,
        generations=generations,
        measurements=measured,
    )


# 12 tokens each. Plain: 12 s on both prompts. K = 2: 8 s and 16 s, 4 and 6 rounds.
PLAIN = [(0, 0)] * 12
BASE = generation("c1", "code", 0.0, PLAIN, 12.0, prefill_s=50.0)
SAME = generation("c1", "code", 0.0, [(2, 2)] * 4, 8.0, k=2, prefill_s=1.0)
SWEEP = record(
    generation("p2", "prose", 0.0, [(2, 1)] * 6, 16.0, k=2),
    generation("p2", "prose", 0.0, PLAIN, 99.0),  # of repeated plain runs, the last one counts
    generation("p2", "prose", 0.0, PLAIN, 12.0),
    BASE,
    SAME,
    generation("c1", "code", 0.7, [(4, 2)] * 4, 24.0, k=4),
    generation("c1", "code", 0.7, PLAIN, 12.0),
)


def test_the_k_sweep_equals_one_computed_by_hand():
    frame = tables.k_sweep(SWEEP)
    assert frame["category"].tolist() == ["prose"] * 2 + ["code"] * 4 + ["all"] * 4
    assert frame["k"].tolist() == [0, 2, 0, 2, 0, 4, 0, 2, 0, 4]
    columns = ["drafted", "accepted", "acceptance_rate", "tau", "speedup", "n_prompts"]
    rows = frame.query("k > 0").set_index(["category", "temperature"])[columns]
    # both sides exclude prefill and the token that it yields
    expected = {
        ("prose", 0.0): [12, 6, 0.5, 2.0, 0.75, 1],
        ("code", 0.0): [8, 8, 1.0, 3.0, 1.5, 1],
        ("code", 0.7): [16, 8, 0.5, 3.0, 0.5, 1],
        ("all", 0.0): [20, 14, 0.7, 2.4, 1.0, 2],
        ("all", 0.7): [16, 8, 0.5, 3.0, 0.5, 1],
    }
    assert rows.T.to_dict("list") == {
        key: pytest.approx(values) for key, values in expected.items()
    }
    code = frame.iloc[3]
    # with prefill
    assert code["tokens_per_s"] == 11 / 8 and code["wall_speedup"] == pytest.approx(62 / 9)
    assert code["over_fastest"] == pytest.approx(1.5 / 4)
    assert (
        code["identical"] == 1 and pd.isna(frame["identical"].iloc[5]) and frame["lossless"].all()
    )
    assert frame[["low", "high"]].isna().all(axis=None)  # two prompts are too few for an interval


def test_best_k_is_the_fastest_k_with_a_verdict_on_whether_it_pays():
    rows = [
        ("prose", 0, 1.0, 1.0, 1.0),
        ("prose", 2, 0.8, 0.7, 0.9),
        ("code", 2, 1.2, 1.1, 1.3),
        ("code", 4, 1.5, 1.2, 1.9),
        ("a", 2, 1.2, 1.0, 1.4),
        ("b", 2, 3.0, NONE, NONE),
    ]
    frame = pd.DataFrame(rows, columns=["category", "k", "speedup", "low", "high"])
    best = tables.best_k(frame.assign(tau=2.0, temperature=0.0, n_prompts=30, busy=False))
    assert best[["category", "k", "verdict"]].values.tolist() == [
        ["prose", 2, "does not pay"],
        ["code", 4, "pays"],
        *([name, 2, "undecided"] for name in "ab"),  # an interval that touches 1, and no interval
    ]


@pytest.mark.parametrize(
    ("run", "curve", "marked"), [(None, None, None), (True, False, True), (None, True, True)]
)
def test_measurements_on_a_busy_machine_are_marked_and_get_no_verdict(run, curve, marked):
    timed = CostCurve(model="m", context=4, widths=(1, 3), samples_s=((0.1,), (0.4,)), busy=curve)
    measured = record(*SWEEP.generations, verify_curve=timed.model_dump(mode="json"))
    measured.provenance["extra"] = {"contention": {"busy": run}}
    sweep = tables.k_sweep(measured)
    assert set(sweep["busy"]) == {marked} and set(tables.verify_cost(measured)["busy"]) == {curve}
    assert (set(tables.best_k(sweep)["verdict"]) == {tables.BUSY}) is bool(marked)


# --- checks


def changed(made, index=-1, **fields):
    """Return the generation with one round changed."""
    rounds = list(made.rounds)
    rounds[index] = rounds[index]._replace(**fields)
    token_ids = tuple(token for r in rounds for token in r.committed_ids)
    return made.model_copy(update={"rounds": tuple(rounds), "token_ids": token_ids})


DIFFERS = changed(SAME, committed_ids=(9, 10, 77))
FAST = BASE.model_copy(update={"rounds": SAME.rounds})


@pytest.mark.parametrize(
    ("generations", "near_ties", "ok"),
    [
        (SWEEP.generations, [], [True, True, True]),
        ([BASE, DIFFERS], [True], [True, True, True]),
        ([BASE, SAME, DIFFERS], [False], [False, True, True]),
        # more accepted than drafted
        (
            [BASE, changed(SAME, 0, n_accepted=3)],
            [],
            [True, False, True],
        ),
        # more committed than accepted plus one
        (
            [BASE, changed(SAME, 0, n_accepted=1)],
            [],
            [True, False, True],
        ),
        ([FAST, SAME], [], [True, True, False]),
    ],
)
def test_checks_hold_for_a_sound_record_and_detect_planted_faults(generations, near_ties, ok):
    forks = [{"prompt_id": "c1", "k": 2, "near_tie": near_tie} for near_tie in near_ties]
    assert tables.checks(record(*generations, forks=forks))["ok"].tolist() == ok


def test_best_k_is_a_range_of_equally_fast_k():
    """Five prompts: "copy" drafts at most 4 tokens, "slow" never pays, "mixed" pays on two."""
    times = {"copy": [[0.8, 0.7, 0.5, 0.49, 0.49]] * 5, "slow": [[1.1, 1.2, 1.3, 1.4, 1.5]] * 5}
    times["mixed"] = [[0.7, 0.7]] * 2 + [[1.1, 1.1]] * 3
    same = {"category": "code", "temperature": 0.0, "n_decoded": 10, "rounds": 5, "tau": 2.2}
    same |= {"drafted": 10, "accepted": 5}
    rows = [
        same
        | {"drafter": name, "prompt_id": str(at), "k": k, "seconds": s * scale, "plain_s": scale}
        for name, of_prompts in times.items()
        for at, scale in enumerate([0.9, 0.95, 1.0, 1.05, 1.1])
        for k, s in enumerate(of_prompts[at], start=1)
    ]
    measured = record(replay={"rows": rows}, baseline={})
    best = tables.best_range(measured).query("category == 'code'").set_index("drafter")
    assert best[["k", "range", "longest", "verdict"]].T.to_dict("list") == {
        "copy": [4, "4", 4, "pays"],
        "slow": [1, "1", 5, "does not pay"],
        "mixed": [1, "1", 1, "undecided"],
    }
    numbers = best.loc["copy", ["speedup", "tau", "without_loops"]].tolist()
    assert numbers == pytest.approx([1 / 0.49, 2.2, 1 / 0.49])
