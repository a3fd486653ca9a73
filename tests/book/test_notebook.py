"""A notebook as a file: its parameters are read and never run, and what it is given is checked."""

import json
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from specnb.book import notebook
from specnb.book.notebook import declared, find_notebook, parse_parameters, read_notebook, resolve
from specnb.errors import InputError

CELL = """\
k: int = 4  # draft length, tokens
temperature: float = 0  # 0 = greedy
engine: str = "gguf"
ks: list[int] = [1, 2, 4]
live: bool = True
untyped = 7
anything = None
f: int
print(k)
"""
DEFAULTS = {
    "k": 4, "temperature": 0.0, "engine": "gguf", "ks": [1, 2, 4], "live": True, "untyped": 7, "anything": None,
}  # fmt: skip


def notebook_at(path: Path, *cells: str, language: str = "python", **metadata) -> Path:
    nb = new_notebook(cells=[new_code_cell(code, metadata={"tags": ["parameters"]}) for code in cells])
    nb.metadata = nb.metadata | {"kernelspec": {"name": "x", "display_name": "X", "language": language}, **metadata}
    nbformat.write(nb, path)
    return path


@pytest.fixture
def source(tmp_path):
    return read_notebook(notebook_at(tmp_path / "01_test.ipynb", CELL))


def test_the_parameters_cell_is_read_not_run(source, tmp_path):
    assert json.dumps(declared(CELL)) == json.dumps(DEFAULTS)
    assert resolve(source, {}) == ({}, DEFAULTS)
    assert resolve(read_notebook(notebook_at(tmp_path / "02_none.ipynb")), {}) == ({}, {})


@pytest.mark.parametrize(
    "code, value", [("k = 2 ** 3", "2 ** 3"), ("x: float = 'a'", "'a'"), ("%matplotlib", "not Python")]
)
def test_unusable_defaults_are_refused_with_file_and_value(tmp_path, code, value):
    with pytest.raises(InputError) as caught:
        resolve(read_notebook(notebook_at(tmp_path / "01_bad.ipynb", code)), {})
    assert "01_bad.ipynb" in str(caught.value) and value in str(caught.value)


def test_given_values_replace_defaults_and_an_int_becomes_a_float(source):
    given, resolved = resolve(source, {"k": 8, "ks": [3], "temperature": 1, "anything": "x"})
    assert json.dumps(given) == json.dumps({"k": 8, "ks": [3], "temperature": 1.0, "anything": "x"})
    assert resolved == DEFAULTS | given and list(resolved) == list(DEFAULTS)


@pytest.mark.parametrize(
    "name, value",
    [
        *(("k", value) for value in ("8", True, None, np.int64(3))),
        *(("temperature", value) for value in ("0.5", False)),
        *(("engine", value) for value in (3, Path("x"))),
        *(("live", 1), ("ks", (1, 2)), ("untyped", 0.5), ("temprature", 1.0), ("Q", 1)),
    ],
)
def test_an_unknown_name_and_a_value_of_the_wrong_type_are_refused(source, name, value):
    with pytest.raises(InputError) as caught:
        resolve(source, {name: value})
    said = str(caught.value)
    assert (name in DEFAULTS and repr(value) in said) or ("temperature" in said and repr(name) in said)


def test_the_class_of_the_parameters_checks_them_too(tmp_path):
    cell = "\n".join(f"{name} = {value!r}" for name, value in notebook.params.ExplorerParams().model_dump().items())
    source = read_notebook(notebook_at(tmp_path / "09_x.ipynb", cell, specnb={"params": "ExplorerParams"}))
    assert resolve(source, {"k_max": 8})[1]["k_max"] == 8
    assert resolve(source, {"temperatures": [1]})[0] == {"temperatures": [1.0]}
    for name, value in {"k_max": 0, "contents": ["code", "code"], "temperatures": [-1.0]}.items():
        with pytest.raises(InputError, match=name):
            resolve(source, {name: value})


CONTENTS = [b"", b"[]", b"\xff", b'{"nbformat": 99, "nbformat_minor": 0, "cells": []}']


@pytest.mark.parametrize("content", [*CONTENTS, b'{"nbformat":4,"nbformat_minor":5,"metadata":{},"cells":[3]}', None])
def test_what_is_not_a_notebook_gives_one_error_that_names_it(tmp_path, content):
    path = tmp_path / "bad.ipynb"
    if content is None:
        notebook_at(path, language="julia")
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.ipynb"):
        read_notebook(path)


def test_a_notebook_is_found_by_name_file_or_path(tmp_path, monkeypatch):
    shelf = tmp_path / "notebooks"
    shelf.mkdir()
    other, path = notebook_at(tmp_path / "mine.ipynb"), notebook_at(shelf / "01_a.ipynb")
    for name in ("10_b.ipynb", "draft.ipynb", "02_x.txt", "1_c.ipynb"):
        (shelf / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebook, "project_dir", lambda: tmp_path)
    assert [file.name for file in notebook.notebooks()] == ["01_a.ipynb", "10_b.ipynb"]
    for name in ("01_a", "01_a.ipynb", path, "notebooks/01_a.ipynb"):
        assert find_notebook(name) == path
    assert find_notebook("mine.ipynb") == other
    for name in ("02_b", "", "notebooks", "nope/01_a.ipynb", "../notebooks/01_a"):
        with pytest.raises(InputError, match="01_a"):
            find_notebook(name)


TYPED = {
    "4": 4, "-4": -4, "0.7": 0.7, "1e-3": 0.001, "[4, 8]": [4, 8], '{"a": 1}': {"a": 1}, '"42"': "42", "true": True,
    "FALSE": False, "none": None, "null": None, "4,8,12": "4,8,12", "a = b": "a = b", "": "", "007": "007",
    "smollm2-135m?backend=hf": "smollm2-135m?backend=hf", "9" * 5000: "9" * 5000, "[" * 100_000: "[" * 100_000,
}  # fmt: skip


def test_typed_text_becomes_the_json_type_it_looks_like():
    for text, value in TYPED.items():
        parsed = parse_parameters([f"x={text}"])["x"]
        assert parsed == value and type(parsed) is type(value)
    for words in (["k=1", "k=2"], ["k"]):
        with pytest.raises(InputError, match="'k'"):
            parse_parameters(words)
