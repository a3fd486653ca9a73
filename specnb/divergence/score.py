"""The published score of the lab: how often it, and what people use instead, names the module that is wrong.

`python -m tests.benchmarks.divergence_score` measures it on planted faults and harmless changes, and writes the tables
that are read here, and all rows behind them.
"""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from specnb.errors import InputError
from specnb.io import read_json
from specnb.paths import project_dir

LAB = "lab"
"""The lab's own name among the tools."""
FILE_BYTES = 1 << 24


class Score(NamedTuple):
    """`by_tool`: shares of right modules, tokens and causes, and false alarms (NaN for what a tool does not tell);
    `smallest`: by dtype the smallest scale that is always found; `misses`: faults that the lab got wrong;
    `false_alarms`: controls in which it named a module; `facts`: what was run, and the provenance."""

    by_tool: pd.DataFrame
    by_fault: pd.DataFrame
    smallest: pd.DataFrame
    misses: pd.DataFrame
    false_alarms: pd.DataFrame
    facts: dict[str, Any]

    @classmethod
    def of(cls, document: dict[str, Any]) -> "Score":
        """From the JSON document of a score."""
        tables = (pd.DataFrame(document[name]) for name in cls._fields[:-1])
        return cls(*tables, document["facts"])


def published() -> Path:
    """Where the score of the whole grid lies in the checkout."""
    return project_dir() / "data" / "divergence" / "score.json"


def document() -> dict[str, Any]:
    """The published score as a JSON document. Raises InputError outside of a checkout."""
    return read_json(published(), FILE_BYTES)


def published_alarms() -> tuple[int, int] | None:
    """Of the published score: false alarms of the lab, and controls; None where there is none."""
    with contextlib.suppress(InputError):  # no checkout, or no score in it: a verdict stands without
        lab = Score.of(document()).by_tool.set_index("tool").loc[LAB]
        return int(lab["alarms"]), int(lab["controls"])
    return None
