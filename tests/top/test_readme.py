"""The numbers of the README and of the short table of measurements equal published records."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from specnb.batch.attach import judge_replies
from specnb.book.claims.report import fit_line, read_runs
from specnb.chapters import adaptive_k
from specnb.compat.check import check
from specnb.compat.read import describe
from specnb.io import project_dir
from specnb.measure.machines import machine_rows
from tests.book.store import record_of

ROOT = project_dir()
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "tests" / "benchmarks" / "README.md").read_text(encoding="utf-8")
MACHINES = (ROOT / "data" / "machines" / "README.md").read_text(encoding="utf-8")


def read(path: str) -> dict:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def measurements(figure: str) -> dict:
    """Return the measurements of a published figure's run."""
    return read(f"figures/{read(f'figures/{figure}.json')['record']}")["measurements"]


def interval(row: dict | pd.Series) -> str:
    return f"{row['speedup']:.2f} ({row['low']:.2f}-{row['high']:.2f})"


def against_transformers(file: str) -> str:
    rows = read(f"tests/benchmarks/{file}.json")["tables"]["all"]
    return interval(next(row for row in rows if row["method"] == "specnb plain"))


def both_types() -> str:
    return "; ".join(
        against_transformers(f"against_transformers{kind}") for kind in ("", "_bfloat16")
    )


def against_llamacpp() -> str:
    rows = read("tests/benchmarks/against_llamacpp.json")["rows"]
    return ", ".join(interval(row) for row in rows if row["kind"] == "plain")


def engines() -> str:
    rows = read("tests/benchmarks/engines.json")["rows"]
    of = next(row for row in rows if (row["engine"], row["capability"]) == ("torch int4", "AVX512"))
    return ", ".join(f"{of[f'T({n})']:.2f}" for n in (1, 4, 8))


CODER = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
PAYING = {
    "smollm2-135m": [("edit", "lookup:3"), ("all", "auto")],
    CODER: [("edit", "lookup:3"), ("json", "DRAFT:3"), ("code", "DRAFT:3")],
}


def live(target: str, content: str, method: str) -> str:
    """Return the live speed of a drafter over the fastest plain decoding, with its interval."""
    rows = read("tests/benchmarks/over_fastest.json")["rows"]
    row = next(
        row
        for row in rows
        if (row["target"], row["content"], row["method"]) == (target, content, method)
    )
    return (
        f"{row['over_fastest']:.2f} ({row['over_fastest_low']:.2f}-{row['over_fastest_high']:.2f})"
    )


def over_fastest() -> str:
    return "; ".join(
        ", ".join(live(target, *row) for row in rows) for target, rows in PAYING.items()
    )


def drafters() -> str:
    """Return live speeds of the published league."""
    table = pd.DataFrame(read("figures/07_drafters.json")["table"]["records"]).set_index("drafter")
    four = ", ".join(interval(table.loc[name]) for name in ("lookup", "hydra", "jump", "self"))
    return f"{four}; lookup over the fastest {table.over_fastest['lookup']:.2f}"


def faults() -> str:
    lab = read("data/divergence/score.json")["by_tool"][0]
    return (
        f"{lab['module'] * lab['n']:.0f} of {lab['n']}; "
        f"{lab['alarms']} of {lab['controls']} false alarms"
    )


@pytest.mark.parametrize(
    ("says", "computed"),
    [
        ("plain decoding against transformers", both_types),
        ("plain decoding against llama.cpp's own server", against_llamacpp),
        ("T(1), T(4), T(8) of torch int4", engines),
        ("drafters that pay", over_fastest),
        ("lookup, Hydra heads, jump drafter", drafters),
        ("planted faults named", faults),
    ],
)
def test_a_result_equals_that_of_its_record(says, computed):
    (line,) = (line for line in MEASURED.splitlines() if line.startswith(f"| {says}"))
    assert line.endswith(f"| {computed()} |")


# --- the table "What we found" of the README ------------------------------------------------------


def small() -> str:
    lookup = [live("smollm2-135m", content, "lookup:3") for content in ("edit", "json")]
    auto = [live("smollm2-135m", content, "auto") for content in ("prose", "chat")]
    return (
        "live, SmolLM2-135M, 15 prompts each, over the faster of llama.cpp and PyTorch: "
        f"prompt lookup with K = 3 on edits {lookup[0]}, on JSON {lookup[1]}; "
        "`auto`, which chooses a drafter, or none, in each round, "
        f"on prose {auto[0]}, on chat {auto[1]}"
    )


def large() -> str:
    edits, json_, code = (live(CODER, *row) for row in PAYING[CODER])
    return (
        "live, Qwen2.5-Coder-1.5B, 15 prompts each, same baseline, K = 3: prompt lookup on edits "
        f"{edits}; the 0.5B as draft model on JSON {json_}, on code {code}"
    )


def width() -> str:
    costs = read("tests/benchmarks/over_fastest.json")["costs"]
    ratios = next(cost["T(n)/T(1)"] for cost in costs if cost["target"] == CODER)
    times = (
        f"a pass over four tokens takes {ratios['4']:.2f} times as long as over one, "
        f"over five {ratios['5']:.2f}"
    )
    line = fit_line(read_runs())
    report = (
        "a round with draft length K takes "
        f"{1000 * line.base_s:.0f} + {1000 * line.per_draft_s:.1f} K ms"
    )
    return f"Coder-1.5B: {times}. In the report, {report}"


def rolling() -> str:
    least = adaptive_k.worst(SimpleNamespace(measurements=measurements("02_worst"))).groupby(
        "policy"
    )["worst"]
    ends = {
        name: f"{least.min()[name]:.2f} to {least.max()[name]:.2f}"
        for name in ("rolling acceptance", "cost-aware")
    }
    live = adaptive_k.over_fixed_k(record_of("02_adaptive_k"))["prompt lookup"]
    return (
        f"live, target in float16, prompt lookup, {live.n} prompts: cost-aware "
        f"{live.value:.2f} ({live.low:.2f}-{live.high:.2f}) times as fast as one fixed K. "
        "Replayed on this and three simulated machines, relative to the best fixed K, "
        "on the worst of five contents: rolling acceptance rate "
        f"{ends['rolling acceptance']}, cost-aware {ends['cost-aware']}"
    )


def vocabularies() -> str:
    rows = measurements("03_overlap_acceptance")["trial"]
    shares = [
        f"{row['vocabulary']} {row['accepted'] / row['drafted']:.0%}".replace("%", " %")
        for row in rows
    ]
    settings = (
        "6 prompts, target in float32, one draft model, restricted to the tokens of each vocabulary"
    )
    return f"share of draft tokens accepted, {settings}: {', '.join(shares)}"


def hybrid() -> str:
    rows = [
        row for row in measurements("04_rollback_strategies")["ways"] if row["engine"] == "torch"
    ]
    best = max((row for row in rows if row["method"] == "replay"), key=lambda row: row["speedup"])
    return (
        "live speed of the fastest strategy, named replay, over plain decoding in PyTorch, "
        "an 8M-parameter hybrid (recurrent and attention layers) in float32, one thread, "
        "an oracle drafter that costs nothing and is right 80 % of the time, "
        f"{best['n_prompts']} passages: {interval(best)}"
    )


def heads() -> str:
    rows = {
        row["kind"]: row for row in measurements("05_speed")["speeds"] if row["category"] == "all"
    }
    hydra = rows["hydra"]
    medusa = rows["medusa"]
    over = [
        f"{row['over_fastest']:.2f} ({row['over_fastest_low']:.2f}-{row['over_fastest_high']:.2f})"
        for row in (hydra, medusa)
    ]
    return (
        f"live, {hydra['n_prompts']} prompts, over the fastest plain decoding (llama.cpp): "
        f"Hydra {over[0]}, Medusa {over[1]}; "
        f"over plain decoding in PyTorch {interval(hydra)} and {interval(medusa)}"
    )


def lab() -> str:
    named, alarms = faults().split("; ")
    n, _, changes, _, _ = alarms.split()  # "0 of 63 false alarms"
    alarms = f"{n} false alarms in {changes} harmless changes"
    return (
        "small models with random weights, planted faults whose module is named first: "
        f"{named}; {alarms}"
    )


def lossless() -> str:
    found = measurements("08_planted_faults")["greedy"]
    equal = f"{sum(row['identical'] for row in found)} of {len(found)}"
    return f"greedy texts equal to plain decoding, target in float32: {equal}"


@pytest.mark.parametrize(
    ("question", "computed"),
    [
        ("Does it beat", small),
        ("And of a 1.5B", large),
        ("Which K?", width),
        ("Should K follow", rolling),
        ("Must draft and target", vocabularies),
        ("Can a recurrent state", hybrid),
        ("Do trained heads", heads),
        ("Nothing is accepted", lab),
        ("Is the output lossless", lossless),
    ],
)
def test_a_finding_equals_that_of_its_record(question, computed):
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {question}"))
    assert line.split(" | ")[2] == computed()


def test_the_output_of_commands_is_real():
    attached = judge_replies(read("data/servers/xllamacpp.json"))
    lines = README.splitlines()
    assert lines.index(attached["line"]) + 1 == lines.index(attached["option"])
    assert check(describe("smollm2-135m"), describe("gpt-2")).summary() in lines


@pytest.mark.parametrize("name", machine_rows())
def test_a_row_of_a_machine_equals_its_file(name):
    row = machine_rows()[name]
    speed = f"{row.tokens_per_s:.3g} ({row.baseline_engine} {row.baseline_tokens_per_s:.3g})"
    over = f"{row.over_fastest:.2f} ({row.over_fastest_low:.2f}-{row.over_fastest_high:.2f})"
    numbers = f"{speed} | {row.at8:.2f} | {row.best_k} | {over} | {row.verdict}"
    assert f"| [{name}]({name}.json) | {numbers} |" in MACHINES
