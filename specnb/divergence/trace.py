"""A trace: what one run of a set-up left, as two tables and arrays. Reading it needs no torch.

A folder holds `tensors.parquet`, `params.parquet`, `arrays.safetensors` and, written last, the facts in `trace.json`.
Modules have the same path whichever wrappers of one model a run goes through (`canonical`); whoever reads a trace
applies `rename_all` alone.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from safetensors import numpy as safetensors

from specnb.errors import InputError
from specnb.io import read_json, reading, write_atomic

FORMAT = 7
FACTS = "trace.json"
READERS = {"tensors.parquet": pd.read_parquet, "params.parquet": pd.read_parquet,
           "arrays.safetensors": safetensors.load_file}  # fmt: skip

TENSOR_COLUMNS = ("step", "module", "kind", "call", "order", "role", "name", "shape", "dtype", "digest",
                  "holder", "holder_call")  # fmt: skip
"""One row for each tensor seen. `order` counts events of the run: a module's inputs come before its outputs, inner
modules between them. `holder` is the module inside which it ran, and `holder_call` that one's call; -1: in none."""

PARAM_COLUMNS = ("step", "module", "call", "owner", "owner_path", "digest", "dtype")
"""One row for each parameter that an operation read while a module ran."""
OWN, NEIGHBOUR, UNKNOWN = "draft", "neighbour", "?"
"""Owners of parameters: the two models of a set-up, and whoever else has one."""


class Key(NamedTuple):
    """One tensor of a module's call."""

    module: str
    call: int
    role: str
    name: str


def rotary_outputs(module: str) -> list[Key]:
    """What a rotary module gives: cosines and sines, or both in one tensor."""
    return [Key(module, 0, "out", name) for name in ("out", "out.1")]


@dataclass(frozen=True)
class ModuleTrace:
    """`facts` (JSON), the tables of TENSOR_COLUMNS and PARAM_COLUMNS, and arrays by digest.

    An array is the tensor as it was (bfloat16 as float32, exactly), and is there once, however many modules handed it
    on.
    """

    facts: dict[str, Any]
    tensors: pd.DataFrame
    params: pd.DataFrame
    arrays: dict[str, np.ndarray]

    def rows(self, **where: object) -> pd.DataFrame:
        """The rows of `tensors` with these values, e.g. `rows(module="layers.0.mlp", role="out")`."""
        return self.tensors[np.logical_and.reduce([self.tensors[name] == value for name, value in where.items()])]

    def save(self, folder: Path) -> Path:
        """Write the trace into `folder`, and return that."""
        contents = self.tensors.to_parquet(), self.params.to_parquet(), safetensors.save(self.arrays)
        for name, content in zip(READERS, contents, strict=True):
            write_atomic(Path(folder) / name, content)
        write_atomic(Path(folder) / FACTS, json.dumps({"format": FORMAT, "facts": self.facts}).encode())
        return Path(folder)

    @classmethod
    def load(cls, folder: Path) -> "ModuleTrace":
        """The trace that `save` wrote. InputError names the file that is missing, damaged, or of another format."""
        facts, contents = read_facts(folder), []
        for name, read in READERS.items():
            with reading(Path(folder) / name):
                contents.append(read(Path(folder) / name))
        tensors, params, arrays = contents
        return cls(facts, tensors.assign(shape=tensors["shape"].map(tuple)), params, arrays)


def read_facts(folder: Path) -> dict[str, Any]:
    """The `facts` of a trace in a folder. Raises InputError."""
    content = read_json(path := Path(folder) / FACTS)
    if content.get("format") != FORMAT:
        raise InputError(f"{path} is of format {content.get('format')}, expected {FORMAT}: capture it again")
    return content["facts"]


PREFIX = re.compile(r"^(?:(?:model|draft_model)\.)+")


def canonical(paths: Iterable[str]) -> dict[str, str]:
    """`canonical_name` of all modules of one model; those that would have one name in common keep theirs."""
    short = {path: canonical_name(path) for path in paths}
    shared = Counter(short.values())
    return {path: path if shared[name] > 1 else name for path, name in short.items()}


def canonical_name(path: str) -> str:
    """A path without leading `model.` or `draft_model.`."""
    return PREFIX.sub("", path)


def rename_all(names: Iterable[str], rename: Mapping[str, str] | None) -> dict[str, str]:
    """Each name with the expressions of `rename` replaced. InputError for a wrong one, and where two become one."""
    after = {name: name for name in names}
    for pattern, by in (rename or {}).items():
        try:
            after = {name: re.sub(pattern, by, new) for name, new in after.items()}
        except (re.error, IndexError) as error:
            raise InputError(f"rename {pattern!r} to {by!r} does not work ({error}): give re.sub's two") from error
    twins = [name for name, n in Counter(after.values()).items() if n > 1]
    if twins:
        before = [name for name, new in after.items() if new == twins[0]]
        raise InputError(f"`rename` makes {twins[0]!r} of {' and of '.join(before)}: keep them apart")
    return after
