"""Notebook files: parameters are read without execution, and given values are checked."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from specnb import params
from specnb.book import notebook
from specnb.book.notebook import (
    declared,
    find_notebook,
    parse_parameters,
    read_notebook,
    resolve_params,
)
from specnb.errors import InputError

CELL = """\
k: int = 4  # draft length, tokens
engine: str = "gguf"
ks: list[int] = [
    1, 2]
untyped = 7
anything = None
f: int
print(k)
"""
DEFAULTS = {"k": 4, "engine": "gguf", "ks": [1, 2], "untyped": 7, "anything": None}


def notebook_at(path: Path, *cells: str, **metadata) -> Path:
    """Write a notebook of code cells, the first (if any) with the parameters; return its path."""
    tags = [{"tags": ["parameters"]}] + [{}] * len(cells)
    nb = new_notebook(
        cells=[new_code_cell(code, metadata=tag) for code, tag in zip(cells, tags, strict=False)]
    )
    nb.metadata = nb.metadata | {
        "kernelspec": {"name": "x", "display_name": "X", "language": "python"},
        **metadata,
    }
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nb, path)
    return path


def test_parameters_are_read_not_executed_and_given_values_replace_defaults(tmp_path):
    source = read_notebook(notebook_at(tmp_path / "01_test.ipynb", CELL))
    assert declared(CELL) == DEFAULTS and resolve_params(source, {}) == ({}, DEFAULTS)
    given, resolved = resolve_params(source, {"ks": [3], "k": 8})
    assert (
        given == {"ks": [3], "k": 8}
        and resolved == DEFAULTS | given
        and list(resolved) == list(DEFAULTS)
    )
    with pytest.raises(InputError, match=r"'engin'.*engine"):
        resolve_params(source, {"engin": "hf"})
    none = read_notebook(notebook_at(tmp_path / "02_none.ipynb"))
    assert resolve_params(none, {}) == ({}, {})
    with pytest.raises(InputError, match="'k'"):
        resolve_params(none, {"k": 1})


def of_class(path: Path, kind: type, **cell) -> notebook.Source:
    """Return a notebook with the quick parameters of a `specnb.params` class, updated by `cell`."""
    values = kind(budget="quick").model_dump() | cell
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    return read_notebook(notebook_at(path, lines, specnb={"params": kind.__name__}))


def test_given_values_are_checked_by_the_class_of_the_parameters(tmp_path, monkeypatch):
    monkeypatch.delenv(params.BUDGET, raising=False)
    source = of_class(tmp_path / "09_x.ipynb", params.ExplorerParams)
    assert resolve_params(source, {"temperatures": [1]})[0] == {"temperatures": [1.0]}
    with pytest.raises(InputError, match="k_max"):
        resolve_params(source, {"k_max": 0})


@pytest.mark.parametrize(
    ("given", "command", "environment", "prompts"),
    [
        ({}, None, "", 3),
        ({}, None, "full", 24),
        ({"prompts": None}, "quick", "full", 3),
        ({"budget": "full"}, "quick", "", 24),
        ({"prompts": 5}, "full", "", 5),
    ],
)
def test_a_given_budget_precedes_the_commands_the_environments_and_the_cells(
    given, command, environment, prompts, tmp_path, monkeypatch
):
    monkeypatch.setenv(params.BUDGET, environment)
    source = of_class(tmp_path / "08_x.ipynb", params.LosslessParams, prompts=None)
    changed, resolved = resolve_params(source, given, command)
    assert resolved["prompts"] == prompts and changed == {name: resolved[name] for name in given}
    with pytest.raises(InputError, match="'huge'"):
        resolve_params(source, {}, "huge")


@pytest.mark.parametrize("metadata", [7, "x", {"params": 7}], ids=str)
def test_metadata_without_a_class_of_parameters_are_refused(tmp_path, metadata):
    source = read_notebook(notebook_at(tmp_path / "odd.ipynb", CELL, specnb=metadata))
    with pytest.raises(InputError, match=r"odd\.ipynb|metadata"):
        resolve_params(source, {})
    with pytest.raises(InputError):
        notebook.defaults(source)


NOTEBOOK = (
    b'{"nbformat": 4, "nbformat_minor": 5, '
    b'"metadata": {"specnb": {"params": "Nothing"}}, "cells": []}'
)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"", ""),
        (b"[]", ""),
        (NOTEBOOK, "'Nothing'"),
        (b"\xff", ""),
        (b'{"nbformat":4,"nbformat_minor":5,"metadata":{},"cells":[3]}', ""),
        ("k = 2 ** 3", "2 ** 3"),
        ("%matplotlib", "`parameters`"),
    ],
)
def test_an_invalid_notebook_or_default_is_named_in_the_error(tmp_path, content, value):
    path = tmp_path / "bad.ipynb"
    path.write_bytes(content) if isinstance(content, bytes) else notebook_at(path, content)
    with pytest.raises(InputError, match=r"bad\.ipynb") as caught:
        resolve_params(read_notebook(path), {})
    assert value in str(caught.value)


def test_a_notebook_is_found_by_name_file_or_path(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebook, "project_dir", lambda: tmp_path)
    other = notebook_at(tmp_path / "mine.ipynb")
    path = notebook_at(tmp_path / "notebooks" / "01_a.ipynb")
    for name in ("10_b.ipynb", "12_01.ipynb", "draft.ipynb", "02_x.txt"):
        (tmp_path / "notebooks" / name).touch()
    assert [file.name[:2] for file in notebook.notebooks()] == ["01", "10", "12"]
    for name in ("01_a", "01_a.ipynb", path, "notebooks/01_a.ipynb", "01"):
        assert find_notebook(name) == path
    assert find_notebook("mine.ipynb") == other
    for name in ("1", "b", "", "notebooks", "../notebooks/01_a"):
        with pytest.raises(InputError, match="01_a"):
            find_notebook(name)


def test_typed_text_becomes_the_json_type_it_looks_like():
    typed = {"4": 4, "0.7": 0.7, "[4, 8]": [4, 8], '"42"': "42", "FALSE": False, "none": None}
    typed |= {text: text for text in ("", "4,8,12", "a = b", "007")}
    for text, value in typed.items():
        parsed = parse_parameters([f"x={text}"])["x"]
        assert (parsed, type(parsed)) == (value, type(value))
    for words in (["k=1", "k=2"], ["k"]):
        with pytest.raises(InputError, match="'k'"):
            parse_parameters(words)
