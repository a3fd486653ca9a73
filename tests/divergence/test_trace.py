"""Traces on disk, and canonical module names."""

import json

import numpy as np
import pandas as pd
import pytest

from specnb.divergence.trace import (
    ARRAYS,
    FACTS,
    FORMAT,
    PARAM_COLUMNS,
    TENSOR_COLUMNS,
    TENSORS,
    ModuleTrace,
    canonical,
)
from specnb.errors import InputError


def example():
    row = dict.fromkeys(TENSOR_COLUMNS, 0)
    tensors = [
        row | {"module": "layers.0", "shape": (2, 3)},
        row | {"module": "l\u00e4yers\u2028.0", "shape": ()},
    ]
    arrays = {
        "a": np.ones((3, 2), np.float32),
        "b": np.array([1 + 2j], np.complex64),
        "c": np.zeros((2, 0)),
    }
    params = pd.DataFrame([dict.fromkeys(PARAM_COLUMNS, "x")])
    return ModuleTrace({"model": "draft", "steps": [1]}, pd.DataFrame(tensors), params, arrays)


def test_a_saved_trace_loads_unchanged(tmp_path):
    trace = example()
    read = ModuleTrace.load(trace.save(tmp_path / "deep" / "rows"))
    pd.testing.assert_frame_equal(read.tensors, trace.tensors, check_dtype=False)
    pd.testing.assert_frame_equal(read.params, trace.params, check_dtype=False)
    assert read.facts == trace.facts
    for key, value in trace.arrays.items():
        np.testing.assert_array_equal(read.arrays[key], value, strict=True)
    empty = ModuleTrace({}, trace.tensors[:0], trace.params[:0], {})
    assert ModuleTrace.load(empty.save(tmp_path / "empty")).tensors.empty


@pytest.mark.parametrize(
    ("name", "change", "value"),
    [
        (TENSORS, lambda data: data[:-3], "trace"),
        (ARRAYS, None, "trace"),
        (FACTS, lambda _: json.dumps({"format": FORMAT - 1}).encode(), str(FORMAT - 1)),
    ],
)
def test_missing_and_damaged_files_and_other_formats_are_refused(tmp_path, name, change, value):
    path = example().save(tmp_path / "trace") / name
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(InputError, match=value):
        ModuleTrace.load(tmp_path / "trace")


@pytest.mark.parametrize(
    "names",
    [
        {
            "": "",
            "model": "model",
            "model.layers.0": "layers.0",
            "draft_model.model.norm": "norm",
            "lm_head": "lm_head",
        },
        {"model.norm": "model.norm", "norm": "norm"},
    ],
)
def test_module_names_lose_their_prefix_unless_they_would_collide(names):
    assert canonical(names) == names
