"""The numbers of the README equal those of published records."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from specnb.book.claims.report import fit_line, read_runs, read_small
from specnb.book.tables import baseline
from specnb.chapters import adaptive_k
from specnb.chapters.league import rank_drafters
from specnb.io import project_dir
from specnb.measure.machines import machine_rows

ROOT = project_dir()
README = (ROOT / "README.md").read_text(encoding="utf-8")


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
    return "; ".join(against_transformers(f"against_transformers{kind}") for kind in ("", "_bfloat16"))


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


def over_fastest() -> str:
    stored = read("tests/benchmarks/over_fastest.json")["rows"]
    rows = {(row["target"], row["content"], row["method"]): row for row in reversed(stored)}
    speedups = []
    for target, methods in PAYING.items():
        cells = []
        for row in (rows[target, *method] for method in methods):
            ends = f"{row['over_fastest_low']:.2f}-{row['over_fastest_high']:.2f}"
            cells.append(f"{row['over_fastest']:.2f} ({ends})")
        speedups.append(", ".join(cells))
    return "; ".join(speedups)


def sweep() -> str:
    replay = measurements("01_speedup_over_k")["replay"]
    return f"{replay['live_s'] / replay['replay_s']:,.0f} times less time"


def league() -> tuple[pd.DataFrame, float]:
    """Return the greedy ranks of the published league, and its baseline's share."""
    kept = SimpleNamespace(measurements=measurements("07_drafters"), generations=())
    return rank_drafters(kept, 0.0).rename(columns={"predicted": "speedup"}), baseline(kept).share


def drafters() -> str:
    table, share = league()
    four = ", ".join(interval(table.loc[name]) for name in ("lookup", "hydra", "jump", "self"))
    return f"{four}; the copy over the fastest {share * table.speedup['self']:.2f}"


def faults() -> str:
    lab = read("data/divergence/score.json")["by_tool"][0]
    return f"{lab['module'] * lab['n']:.0f} of {lab['n']}; {lab['alarms']} of {lab['controls']} false alarms"


@pytest.mark.parametrize(("says", "computed"), [
    ("plain decoding against transformers", both_types),
    ("plain decoding against llama.cpp's own server", against_llamacpp),
    ("T(1), T(4), T(8) of torch int4", engines),
    ("drafters that pay", over_fastest),
    ("a K sweep by replay", sweep), ("lookup, Hydra heads, jump drafter", drafters),
    ("planted faults named", faults),
])  # fmt: skip
def test_a_result_equals_that_of_its_record(says, computed):
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {says}"))
    assert line.endswith(f"| {computed()} |")


def report() -> str:
    values, line = read("data/claims.json"), fit_line(read_runs())
    _, low, high, _ = values["best_k_code"]
    _, *prose, _ = values["best_k_prose"]
    small = read_small()
    best = small.loc[small.groupby("setting")["speedup"].idxmax()].set_index("setting")
    drafted = small[(small["setting"] == "4 bits") & (small["k"] > 0)]
    won = {setting: f"{best.speedup[setting]:.2f} at K = {best.k[setting]}" for setting in best.index}
    return (
        f"its runs lie on one line, {1000 * line.base_s:.0f} + {1000 * line.per_draft_s:.1f} K ms a round: code is "
        f"fastest at K = {low} to {high}, prose at {prose[0]} or {prose[1]}, over a plain step that reads memory at "
        f"{values['read_gb_per_s']:.0f} GB/s. In small, here: {won['16 bits']} in 16 bits, {won['across engines']} "
        f"over torch, at most {drafted['speedup'].max():.2f} in 4 bits, whose plain decoding is the fastest of all"
    )


def rolling() -> str:
    least = adaptive_k.worst(SimpleNamespace(measurements=measurements("02_worst"))).groupby("policy")["worst"]
    ends = {
        name: f"{least.min()[name]:.2f} to {least.max()[name]:.2f}" for name in ("rolling acceptance", "cost-aware")
    }
    return (
        f"on its worst content, {ends['rolling acceptance']} of the best fixed K's speed, by machine and drafter; a "
        f"controller that weighs what each draft costs: {ends['cost-aware']}"
    )


def vocabularies() -> str:
    rows = measurements("03_overlap_acceptance")["trial"]
    counts = ", ".join(f"{row['vocabulary']} {row['accepted']} of {row['drafted']}" for row in rows)
    return f"no: with each one the text is identical to plain decoding; draft tokens accepted: {counts}"


def hybrid() -> str:
    rows = [row for row in measurements("04_ways_back_torch")["ways"] if row["engine"] == "torch"]
    best = max((row for row in rows if row["method"] == "replay"), key=lambda row: row["speedup"])
    fastest = f"the fastest, replay: {interval(best)} times plain decoding"
    return f"it can, by five strategies, each with the tokens of plain decoding; {fastest}"


def heads() -> str:
    table = league()[0]
    return (
        f"jump drafter {interval(table.loc['jump'])}, Hydra {interval(table.loc['hydra'])} over plain decoding in torch"
    )


def copy() -> str:
    row = read("tests/benchmarks/quant_gap.json")["rows"][1]
    ratio = f"{row['speedup_same_engine']:.2f} of plain decoding at K = 2"
    return f"in one engine {ratio}: a step of q4_0 takes {row['c']:.2f} of a step of q8_0"


def lossless() -> str:
    found = measurements("08_planted_faults")
    note, same = found["note"], sum(row["identical"] for row in found["greedy"])
    cured = note[2]["seen"].partition(";")[0]
    drafted = [row for row in found["foreign"]["sources"] if row["new"] is not None]
    foreign = f"drafting in other engines, {len(drafted)} ways, adds {sum(row['new'] for row in drafted)} forks"
    same = f"{same} of {len(found['greedy'])} texts equal plain decoding; {foreign}"
    return f"{same}; *HelloHello* reproduced; with the proposed cure {cured}"


@pytest.mark.parametrize(("says", "computed"), [
    ("K = 24 for code", report), ("raise K while", rolling), ("the vocabularies must", vocabularies),
    ("a recurrent state", hybrid), ("0 % accepted", lambda: f"the module is named first: {faults()}"),
    ("trained heads", heads), ("a quantized copy", copy), ("input unchanged", lossless),
])  # fmt: skip
def test_a_measured_claim_equals_that_of_its_record(says, computed):
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {says}"))
    assert line.split(" | ")[1] == computed()


@pytest.mark.parametrize("name", [name for name, row in machine_rows().items() if row.baseline_engine])
def test_a_row_of_a_machine_equals_its_file(name):
    row = machine_rows()[name]
    speed = f"{row.tokens_per_s:.3g} ({row.baseline_engine} {row.baseline_tokens_per_s:.3g})"
    numbers = f"{speed} | {row.at8:.2f} | {row.best_k} | {interval(row.model_dump())} | {row.verdict}"
    assert f"| [{name}](data/machines/{name}.json) | {numbers} |" in README
