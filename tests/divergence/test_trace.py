"""A trace on disk: what was written is what is read."""

import json

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

from specnb.divergence.trace import (
    ARRAYS,
    EVENTS,
    FORMAT,
    PARAM_COLUMNS,
    TENSOR_COLUMNS,
    ModuleTrace,
    canonical,
    make_table,
)
from specnb.errors import InputError

DEFAULTS = {"int64": 0, "str": "x", "ints": (2, 3)}


def row(columns, **values):
    return {name: DEFAULTS[kind] for name, kind in columns.items()} | values


def example():
    tensors = [row(TENSOR_COLUMNS, role="in", module="layers.0", token_axis=0),
               row(TENSOR_COLUMNS, row=1, role="out", module="läyers\u2028.0", shape=())]  # fmt: skip
    fulls = [np.arange(6).reshape(2, 3).T, np.array(2.5), np.array([1 + 2j], np.complex64), np.zeros((2, 0))]
    arrays = {"0.tokens": np.ones((2, 16), np.float32), "0.token_l2": np.ones(2, np.float32)}
    arrays |= {f"{number}.full": full for number, full in enumerate(fulls)}
    params = [row(PARAM_COLUMNS, owner="target", object_id=1 << 47)]
    return ModuleTrace(
        {"tag": "draft", "steps": [1]}, make_table(tensors, TENSOR_COLUMNS), make_table(params, PARAM_COLUMNS), arrays
    )


def test_what_is_saved_is_what_is_loaded(tmp_path):
    for name, trace in {
        "rows": example(), "empty": ModuleTrace({}, make_table([], TENSOR_COLUMNS), make_table([], PARAM_COLUMNS), {}),
    }.items():  # fmt: skip
        read = ModuleTrace.load(trace.save(tmp_path / "deep" / name))
        pd.testing.assert_frame_equal(read.tensors, trace.tensors)
        pd.testing.assert_frame_equal(read.params, trace.params)
        assert read.facts == trace.facts and read.arrays.keys() == trace.arrays.keys()
        for key, value in trace.arrays.items():
            assert (read.arrays[key].dtype, read.arrays[key].tolist()) == (value.dtype, value.tolist())
    assert trace.rows(module="elsewhere").empty and trace.array(1, "tokens") is None
    assert example().rows(module="layers.0", role="in")["row"].tolist() == [0]


def headed(**change):
    return lambda data: json.dumps(json.loads(data.partition(b"\n")[0]) | change).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "change", "value"),
    [
        (EVENTS, lambda data: data[:-3], EVENTS),
        (ARRAYS, lambda data: data[:-3], ARRAYS),
        (ARRAYS, None, ARRAYS),
        (EVENTS, headed(format=FORMAT - 1), str(FORMAT - 1)),
        (EVENTS, headed(digest="blake2b"), "blake2b"),
    ],
)
def test_a_missing_or_damaged_file_or_one_of_another_format_is_named(tmp_path, name, change, value):
    path = example().save(tmp_path) / name
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(InputError, match=value):
        ModuleTrace.load(tmp_path)


NAMES = {"": "", "model": "model", "model.layers.0": "layers.0", "draft_model.model.norm": "norm", "lm_head": "lm_head"}


@pytest.mark.parametrize(
    "names", [NAMES, *({p: p for p in twins} for twins in (["model.norm", "norm"], ["model.norm", "model.model.norm"]))]
)
def test_names_of_modules_lose_their_prefix_but_never_their_difference(names):
    assert canonical(list(names)) == names


@pytest.mark.parametrize("n_rows", [1000, pytest.param(700_000, marks=pytest.mark.slow)])
def test_a_long_generation_can_be_stored(tmp_path, n_rows):
    """The header of a safetensors file holds no more than some 600,000 arrays of their own."""
    tokens, norms = np.ones((1, 16), np.float32), np.ones(1, np.float32)
    arrays = {f"{row}.tokens": tokens for row in range(n_rows)} | {f"{row}.token_l2": norms for row in range(n_rows)}
    tensors = make_table([row(TENSOR_COLUMNS, row=number) for number in range(n_rows)], TENSOR_COLUMNS)
    trace = ModuleTrace({}, tensors, make_table([], PARAM_COLUMNS), arrays)
    read = ModuleTrace.load(trace.save(tmp_path))
    assert len(load_file(tmp_path / ARRAYS)) < 20
    assert read.arrays.keys() == trace.arrays.keys() and np.array_equal(read.tensors["row"], trace.tensors["row"])
    assert read.arrays["2.tokens"].base is read.arrays["7.tokens"].base  # views: nothing is there twice
