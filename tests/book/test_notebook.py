"""A notebook as a file: its parameters are read and never run, and what it is given is checked."""

import json
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from specnb.book import notebook
from specnb.book.notebook import declared, parse_parameters, read_notebook, resolve
from specnb.errors import InputError

CELL = """\
k: int = 4  # draft length, tokens
temperature: float = 0  # 0 is greedy
engine: str = "gguf"
ks: list[int] = [1, 2, 4]
rates: list[float] = []
live: bool = True
untyped = 7
mixed = [1, "a"]
"""


def notebook_at(path: Path, code: str | None = CELL, **kernelspec) -> Path:
    cells = [new_markdown_cell("# Question")]
    if code is not None:
        cells.append(new_code_cell(code, metadata={"tags": ["parameters"]}))
    nb = new_notebook(cells=[*cells, new_code_cell("k")])
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"} | kernelspec
    nbformat.write(nb, path)
    return path


@pytest.fixture
def source(tmp_path):
    return read_notebook(notebook_at(tmp_path / "01_test.ipynb"))


def test_the_parameters_cell_is_read_not_run():
    found = declared(CELL)
    assert {name: (p.type, p.default) for name, p in found.items()} == {
        "k": (int, 4),
        "temperature": (float, 0.0),
        "engine": (str, "gguf"),
        "ks": (list[int], [1, 2, 4]),
        "rates": (list[float], []),
        "live": (bool, True),
        "untyped": (int, 7),
        "mixed": (list, [1, "a"]),
    }
    assert type(found["temperature"].default) is float


def test_what_papermills_pattern_loses_is_found():
    found = declared(
        'a: int = 1  # b = 2\nc: "int | None" = None\nd: dict[str, float] = {"x": 1}\n(e): int = 3\nf: int\n'
    )
    assert list(found) == ["a", "c", "d", "e"]
    assert found["c"].type is Any
    assert found["d"].default == {"x": 1.0}


@pytest.mark.parametrize(
    "code, value",
    [
        ("k = 2 ** 3", r"2 \*\* 3"),
        ("k: int = 1.5", "1.5"),
        ("%matplotlib inline", "not Python"),
        ("k = " + "(" * 500 + ")" * 500, "not Python"),
    ],
)
def test_unusable_defaults_are_refused_with_file_and_value(tmp_path, code, value):
    with pytest.raises(InputError, match=r"01_bad\.ipynb: .*" + value):
        resolve(read_notebook(notebook_at(tmp_path / "01_bad.ipynb", code)), {})


def test_given_values_replace_defaults(source):
    given_, resolved = resolve(source, {"k": 8, "ks": [3]})
    assert given_ == {"k": 8, "ks": [3]}
    assert resolved["k"] == 8
    assert resolved["temperature"] == 0.0
    assert list(resolved) == list(declared(CELL))


def test_an_int_becomes_a_float_where_a_float_is_declared(source):
    given_, resolved = resolve(source, {"temperature": 1, "rates": [1, 0.5]})
    assert json.dumps(given_) == json.dumps({"temperature": 1.0, "rates": [1.0, 0.5]})
    assert type(resolved["temperature"]) is float


@pytest.mark.parametrize(
    "name, value",
    [
        ("k", "8"),
        ("k", True),
        ("k", None),
        ("k", np.int64(3)),
        ("temperature", "0.5"),
        ("temperature", False),
        ("engine", 3),
        ("engine", Path("x")),
        ("live", 1),
        ("ks", [1, "2"]),
        ("ks", (1, 2)),
        ("untyped", 0.5),
        ("mixed", 3),
    ],
)
def test_a_value_of_the_wrong_type_or_none_of_json_is_refused_with_value_and_type(source, name, value):
    with pytest.raises(InputError) as caught:
        resolve(source, {name: value})
    assert f"parameter {name} " in str(caught.value)
    assert repr(value) in str(caught.value)
    assert type(value).__name__ in str(caught.value)


def test_an_unknown_name_is_refused_with_close_ones(source, tmp_path):
    with pytest.raises(InputError, match=r"01_test\.ipynb has no parameter 'temprature': did you mean temperature"):
        resolve(source, {"temprature": 1.0})
    with pytest.raises(InputError, match=r"'Q': did you mean k or temperature or"):
        resolve(source, {"Q": 1})
    with pytest.raises(InputError, match="it has no parameters"):
        resolve(read_notebook(notebook_at(tmp_path / "02_none.ipynb", None)), {"k": 1})


def test_a_notebook_without_parameters_resolves_to_nothing(tmp_path):
    assert resolve(read_notebook(notebook_at(tmp_path / "02_none.ipynb", None)), {}) == ({}, {})


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"\xff", b"[" * 100_000),
        b'{"nbformat": 99, "nbformat_minor": 0, "cells": []}',
        b'{"nbformat":4,"nbformat_minor":5,"metadata":{},"cells":[3]}',
    ],
)
def test_what_is_not_a_notebook_gives_one_error_that_names_it(tmp_path, content):
    path = tmp_path / "bad.ipynb"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.ipynb"):
        read_notebook(path)
    with pytest.raises(InputError, match=r"none\.ipynb"):
        read_notebook(tmp_path / "none.ipynb")
    with pytest.raises(InputError, match="'julia'"):
        read_notebook(notebook_at(tmp_path / "j.ipynb", language="julia", name="julia-1.10"))


def test_numbered_notebooks_are_listed_in_order(tmp_path):
    for name in ("10_b.ipynb", "01_a.ipynb", "draft.ipynb", "02_x.txt", "1_c.ipynb"):
        (tmp_path / name).touch()
    (tmp_path / "03_folder.ipynb").mkdir()
    assert [path.name for path in notebook.notebooks(tmp_path)] == ["01_a.ipynb", "10_b.ipynb"]
    with pytest.raises(InputError, match="no folder"):
        notebook.notebooks(tmp_path / "missing")


def test_a_notebook_is_found_by_name_file_or_path(tmp_path, monkeypatch):
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = notebook_at(shelf / "01_a.ipynb")
    other = notebook_at(tmp_path / "mine.ipynb")
    monkeypatch.chdir(tmp_path)
    for name in ("01_a", "01_a.ipynb", path, "shelf/01_a.ipynb"):
        assert notebook.find_notebook(name, shelf) == path
    assert notebook.find_notebook("mine.ipynb", shelf) == other
    for name in ("02_b", "", "shelf", "nope/01_a.ipynb", "../shelf/01_a"):
        with pytest.raises(InputError, match="give a path, or one of 01_a"):
            notebook.find_notebook(name, shelf)


@pytest.mark.parametrize(
    "text, value",
    [
        ("4", 4),
        ("-4", -4),
        ("0.7", 0.7),
        ("1e-3", 0.001),
        ("[4, 8]", [4, 8]),
        ('{"a": 1}', {"a": 1}),
        ('"42"', "42"),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("none", None),
        ("null", None),
        ("4,8,12", "4,8,12"),
        ("gguf", "gguf"),
        ("a = b", "a = b"),
        ("", ""),
        ("007", "007"),
        ("smollm2-135m?backend=hf", "smollm2-135m?backend=hf"),
        ("9" * 5000, "9" * 5000),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_typed_text_becomes_the_json_type_it_looks_like(text, value):
    parsed = parse_parameters([("x", text)])["x"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_name_given_twice_is_refused():
    with pytest.raises(InputError, match="'k' is given twice"):
        parse_parameters([("k", "1"), ("k", "2")])


@given(st.text())
def test_any_text_is_parsed_to_a_json_value(text):
    value = parse_parameters([("x", text)])["x"]
    json.dumps(value)
