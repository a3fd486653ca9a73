"""A trace on disk: what was written is what is read, and nothing else is."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save as save_arrays

from specnb.divergence.trace import PARAM_COLUMNS, TENSOR_COLUMNS, Trace, table
from specnb.errors import InputError

DEFAULTS = {"int64": 0, "str": "x", "float64": 0.5, "bool": True, "ints": (2, 3)}


def row(columns, **values):
    return {name: DEFAULTS[kind] for name, kind in columns.items()} | values


def example():
    tensors = [
        row(TENSOR_COLUMNS, row=0, role="in", module="layers.0", token_axis=0),
        row(TENSOR_COLUMNS, row=1, role="out", module="layers.0", token_axis=-1, mean=float("nan"), shape=()),
    ]
    arrays = {"0.sketch": np.ones(64, np.float32), "1.sketch": np.zeros(64, np.float32)}
    arrays |= {"0.tokens": np.ones((2, 16), np.float32), "0.token_l2": np.ones(2, np.float32)}
    arrays["0.full"] = np.arange(6).reshape(2, 3)
    params = [row(PARAM_COLUMNS, owner="target", object_id=1 << 47)]
    return Trace({"tag": "draft", "steps": [1]}, table(tensors, TENSOR_COLUMNS), table(params, PARAM_COLUMNS), arrays)


def reseal(folder, name, data):
    """Put another file in place with the digest that fits it: a forger can do that, damage cannot."""
    (folder / name).write_bytes(data)
    document = json.loads((folder / "facts.json").read_text())
    document["trace"]["sha256"][name] = hashlib.sha256(data).hexdigest()
    (folder / "facts.json").write_text(json.dumps(document))


def test_what_is_saved_is_what_is_loaded(tmp_path):
    trace = example()
    read = Trace.load(trace.save(tmp_path / "deep" / "trace"))
    pd.testing.assert_frame_equal(read.tensors, trace.tensors)
    pd.testing.assert_frame_equal(read.params, trace.params)
    assert read.facts == trace.facts
    assert read.arrays.keys() == trace.arrays.keys()
    assert all(np.array_equal(read.arrays[key], trace.arrays[key]) for key in trace.arrays)
    assert read.tensors["shape"].tolist() == [(2, 3), ()]
    assert not [path for path in (tmp_path / "deep" / "trace").iterdir() if path.name.startswith(".")]


def test_an_empty_trace_can_be_stored(tmp_path):
    empty = Trace({}, table([], TENSOR_COLUMNS), table([], PARAM_COLUMNS), {})
    read = Trace.load(empty.save(tmp_path))
    pd.testing.assert_frame_equal(read.tensors, empty.tensors)


def test_rows_are_found_by_their_values():
    trace = example()
    assert trace.rows(module="layers.0", role="out")["row"].tolist() == [1]
    assert trace.rows(module="elsewhere").empty
    assert trace.array(0, "full").shape == (2, 3) and trace.array(1, "tokens") is None
    with pytest.raises(InputError, match="no column 'modul'"):
        trace.rows(modul="layers.0")


def test_reading_a_trace_needs_no_torch(tmp_path):
    example().save(tmp_path)
    code = "import sys; from pathlib import Path; from specnb.divergence.trace import Trace\n"
    code += f"Trace.load(Path({str(tmp_path)!r})); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["tensors.parquet", "params.parquet", "arrays.safetensors", "facts.json"])
def test_a_missing_or_damaged_file_is_named(tmp_path, name):
    folder = example().save(tmp_path)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match=name):
        Trace.load(folder)
    path.unlink()
    with pytest.raises(InputError, match=name):
        Trace.load(folder)


def test_files_of_two_traces_do_not_mix(tmp_path):
    one, other = example().save(tmp_path / "a"), example()
    other.arrays["0.sketch"][3] = 2
    other.save(tmp_path / "b")
    (one / "arrays.safetensors").write_bytes((tmp_path / "b" / "arrays.safetensors").read_bytes())
    with pytest.raises(InputError, match="not the file that facts"):
        Trace.load(one)


def test_another_version_is_refused(tmp_path):
    folder = example().save(tmp_path)
    document = json.loads((folder / "facts.json").read_text())
    document["trace"]["version"] = 2
    (folder / "facts.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="version 2"):
        Trace.load(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("0.sketch", np.zeros(63, np.float32)),
        ("0.sketch", np.zeros(64, np.float64)),
        ("0.sketch", np.full(64, np.nan, np.float32)),
        ("0.tokens", np.zeros((3, 16), np.float32)),
        ("0.full", np.zeros((3, 3), np.float32)),
        ("1.tokens", np.zeros((2, 16), np.float32)),
        ("7.sketch", np.zeros(64, np.float32)),
        ("00.sketch", np.zeros(64, np.float32)),
        ("../0.sketch", np.zeros(64, np.float32)),
    ],
)
def test_arrays_that_fit_no_row_are_refused(tmp_path, key, value):
    trace = example()
    folder = trace.save(tmp_path)
    reseal(folder, "arrays.safetensors", save_arrays(trace.arrays | {key: value}))
    with pytest.raises(InputError, match=r"arrays\.safetensors"):
        Trace.load(folder)


@pytest.mark.parametrize(
    ("column", "value"),
    [("row", 1), ("row", -1), ("role", "inside"), ("token_axis", 2), ("token_axis", -2), ("shape", (2, -3))],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path, column, value):
    trace = example()
    trace.tensors.at[0, column] = value
    with pytest.raises(InputError, match=r"tensors\.parquet"):
        Trace.load(trace.save(tmp_path))


@pytest.mark.parametrize("column", ["module", "row", "mean"])
def test_a_table_without_a_column_or_of_another_type_is_refused(tmp_path, column):
    trace = example()
    folder = trace.save(tmp_path)
    for frame in (trace.tensors.drop(columns=column), trace.tensors.assign(**{column: [[b"x"], [b"y"]]})):
        frame.to_parquet(folder / "other.parquet")
        reseal(folder, "tensors.parquet", (folder / "other.parquet").read_bytes())
        with pytest.raises(InputError, match=f"no column '{column}'"):
            Trace.load(folder)
    with pytest.raises(InputError, match=f"no column '{column}'"):
        Trace({}, trace.tensors.drop(columns=column), trace.params, {}).save(folder)


def test_an_empty_place_in_a_table_is_refused(tmp_path):
    trace = example()
    folder = trace.save(tmp_path)
    trace.tensors.at[0, "module"] = None
    trace.tensors.to_parquet(folder / "other.parquet")
    reseal(folder, "tensors.parquet", (folder / "other.parquet").read_bytes())
    with pytest.raises(InputError, match="empty place"):
        Trace.load(folder)


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": object()}])
def test_facts_that_json_cannot_hold_are_refused_and_nothing_is_written(tmp_path, facts):
    trace = example()
    with pytest.raises(InputError, match="JSON"):
        Trace(facts, trace.tensors, trace.params, trace.arrays).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
