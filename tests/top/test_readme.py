"""The numbers of the README and of the short table of measurements equal published records."""

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from jinja2 import Environment, StrictUndefined

from specnb.batch.attach import judge_replies
from specnb.book.claims.report import fit_line, read_runs
from specnb.chapters import adaptive_k
from specnb.compat.check import check
from specnb.compat.read import describe
from specnb.io import project_dir, read_json, read_toml
from specnb.measure.machines import machine_rows
from tests.book import store

ROOT = project_dir()
BENCHMARKS = ROOT / "tests" / "benchmarks"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {"found": README, "measured": (BENCHMARKS / "README.md").read_text(encoding="utf-8")}
MACHINES = (ROOT / "data" / "machines" / "README.md").read_text(encoding="utf-8")
TEMPLATES = read_toml(Path(__file__).with_name("readme.toml"))


def measured(figure: str) -> dict:
    """Return the measurements of a published figure's run."""
    figures = ROOT / "figures"
    return read_json(figures / read_json(figures / f"{figure}.json")["record"])["measurements"]


def bench(name: str) -> dict:
    return read_json(BENCHMARKS / f"{name}.json")


def ends(speeds: dict | pd.Series, name: str = "speedup") -> str:
    low, high = ("low", "high") if name == "speedup" else (f"{name}_low", f"{name}_high")
    return f"{speeds[name]:.2f} ({speeds[low]:.2f}-{speeds[high]:.2f})"


def live(target: str, content: str, method: str) -> str:
    """Return the live speed of a drafter over the fastest plain decoding, with its interval."""
    rows = pd.DataFrame(bench("over_fastest")["rows"])
    return ends(store.row(rows, target=target, content=content, method=method), "over_fastest")


@pytest.fixture(scope="module")
def environment() -> Environment:
    made = Environment(undefined=StrictUndefined)
    worst = adaptive_k.worst(SimpleNamespace(measurements=measured("02_worst")))
    made.globals |= {
        "small": "smollm2-135m",
        "coder": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "lab": read_json(ROOT / "data" / "divergence" / "score.json")["by_tool"][0],
        "line": fit_line(read_runs()),
        "over_fixed": adaptive_k.over_fixed_k(store.record_of("02_adaptive_k"))["prompt lookup"],
        "worst": worst.groupby("policy")["worst"].agg(["min", "max"]),
    }
    functions = (bench, live, measured, store.row, store.rows, store.table)
    made.globals |= {each.__name__: each for each in functions} | {"frame": pd.DataFrame}
    made.filters |= {"ends": ends, "fixed": lambda value, digits=2: f"{value:.{digits}f}"}
    return made


@pytest.mark.parametrize(
    ("table", "begins"), [(table, begins) for table in TEMPLATES for begins in TEMPLATES[table]]
)
def test_a_result_equals_that_of_its_record(environment, table, begins):
    (line,) = (line for line in PAGES[table].splitlines() if line.startswith(f"| {begins}"))
    assert f"| {environment.from_string(TEMPLATES[table][begins]).render()} |" in line


def test_the_output_of_commands_is_real():
    attached = judge_replies(read_json(ROOT / "data" / "servers" / "xllamacpp.json"))
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
