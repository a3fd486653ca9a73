"""A trace on disk: what was written is what is read."""

import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

from specnb.divergence.trace import ARRAYS, EVENTS, FORMAT, PARAM_COLUMNS, TENSOR_COLUMNS, Trace, canonical, table
from specnb.errors import InputError

DEFAULTS = {"int64": 0, "str": "x", "float64": 0.1, "bool": True, "ints": (2, 3)}


def row(columns, **values):
    return {name: DEFAULTS[kind] for name, kind in columns.items()} | values


def example():
    tensors = [
        row(TENSOR_COLUMNS, row=0, role="in", module="layers.0", token_axis=0, max=float("inf"), storage=1 << 62),
        row(TENSOR_COLUMNS, row=1, role="out", module="läyers\u2028.0", mean=float("nan"), shape=(), contiguous=False),
    ]
    arrays = {"0.tokens": np.ones((2, 16), np.float32), "0.token_l2": np.ones(2, np.float32)}
    arrays["0.full"] = np.arange(6).reshape(2, 3).T
    params = [row(PARAM_COLUMNS, owner="target", object_id=1 << 47)]
    return Trace({"tag": "draft", "steps": [1]}, table(tensors, TENSOR_COLUMNS), table(params, PARAM_COLUMNS), arrays)


def assert_same(read, trace):
    pd.testing.assert_frame_equal(read.tensors, trace.tensors)
    pd.testing.assert_frame_equal(read.params, trace.params)
    assert read.facts == trace.facts and read.arrays.keys() == trace.arrays.keys()
    assert all(np.array_equal(read.arrays[key], value) for key, value in trace.arrays.items())


def empty(arrays):
    return Trace({}, table([], TENSOR_COLUMNS), table([], PARAM_COLUMNS), arrays)


@pytest.mark.parametrize("trace", [example(), empty({})], ids=["rows", "empty"])
def test_what_is_saved_is_what_is_loaded(tmp_path, trace):
    folder = trace.save(tmp_path / "deep" / "trace")
    assert_same(Trace.load(folder), trace)
    assert {path.name for path in folder.iterdir()} == {EVENTS, ARRAYS}


@pytest.mark.parametrize("full", [np.array(2.5), np.array([1 + 2j], np.complex64), np.zeros((2, 0)), np.array([True])])
def test_a_tensor_of_any_shape_and_type_can_be_kept_in_full(tmp_path, full):
    read = Trace.load(empty({"4.full": full}).save(tmp_path)).array(4, "full")
    assert (read.shape, read.dtype, read.tolist()) == (full.shape, full.dtype, full.tolist())


def test_rows_are_found_by_their_values():
    trace = example()
    assert trace.rows(module="layers.0", role="in")["row"].tolist() == [0]
    assert trace.rows(module="elsewhere").empty
    assert trace.array(0, "full").shape == (3, 2) and trace.array(1, "tokens") is None


def test_reading_a_trace_needs_no_torch(tmp_path):
    example().save(tmp_path)
    code = "import sys; from pathlib import Path; from specnb.divergence.trace import Trace\n"
    code += f"Trace.load(Path({str(tmp_path)!r})); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [EVENTS, ARRAYS])
def test_a_missing_or_damaged_file_is_named(tmp_path, name):
    path = example().save(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match=name):
        Trace.load(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match=name):
        Trace.load(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("format", FORMAT - 1), ("digest", "blake2b")])
def test_another_format_and_digests_of_another_kind_are_refused(tmp_path, key, value):
    path = example().save(tmp_path) / EVENTS
    header, *rows = path.read_text().split("\n")
    path.write_text("\n".join([json.dumps(json.loads(header) | {key: value}), *rows]))
    with pytest.raises(InputError, match=str(value)):
        Trace.load(tmp_path)


NAMES = {"": "", "model": "model", "model.layers.0": "layers.0", "draft_model.model.norm": "norm", "lm_head": "lm_head"}


@pytest.mark.parametrize(
    "names", [NAMES, *({p: p for p in twins} for twins in (["model.norm", "norm"], ["model.norm", "model.model.norm"]))]
)
def test_names_of_modules_lose_their_prefix_but_never_their_difference(names):
    assert canonical(list(names)) == names


def long_generation(n_rows):
    """Rows of one token each, each with the arrays that every row has."""
    tokens, norms = np.ones((1, 16), np.float32), np.ones(1, np.float32)
    arrays = {f"{row}.tokens": tokens for row in range(n_rows)} | {f"{row}.token_l2": norms for row in range(n_rows)}
    tensors = table([row(TENSOR_COLUMNS, row=number) for number in range(n_rows)], TENSOR_COLUMNS)
    return Trace({}, tensors, table([], PARAM_COLUMNS), arrays)


@pytest.mark.parametrize("n_rows", [1000, pytest.param(700_000, marks=pytest.mark.slow)])
def test_a_long_generation_can_be_stored(tmp_path, n_rows):
    """The header of a safetensors file holds no more than some 600,000 arrays of their own."""
    trace = long_generation(n_rows)
    read = Trace.load(trace.save(tmp_path))
    assert len(load_file(tmp_path / ARRAYS)) < 20
    assert read.arrays.keys() == trace.arrays.keys() and np.array_equal(read.tensors["row"], trace.tensors["row"])
    assert read.arrays["2.tokens"].base is read.arrays["7.tokens"].base  # views: nothing is there twice
