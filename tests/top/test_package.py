"""The package as a whole: quick to import, every door closed that should be, nothing printed, style kept."""

import ast
import doctest
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import specnb
from specnb.paths import project_dir

ROOT = project_dir()
SOURCES = sorted((ROOT / "specnb").rglob("*.py"))
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
LONGEST = 520


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IMPORTS = """
import logging, os, random, sys, numpy
HEAVY = {"torch", "transformers", "llama_cpp", "pandas", "plotly", "pyarrow", "duckdb", "papermill", "ipywidgets"}
HEAVY |= {"nbclient", "nbformat"}
def state():
    return dict(os.environ), random.getstate(), str(numpy.random.get_state()), list(logging.getLogger().handlers)
def light(*allowed):
    loaded = HEAVY & set(sys.modules) - set(allowed)
    assert not loaded and state() == before, loaded
before = state()
import specnb
light()
first = specnb.prompts("code")
import specnb.prompts  # the function stays, whatever is imported
from specnb import prompts
assert specnb.prompts("code") == prompts("code") == first and len(first) >= 12
import specnb.records, specnb.params, specnb.store, specnb.provenance, specnb.doctor, specnb.book.engine
light()
import specnb.cli
before = state()  # rich draws a number
import specnb.decode.generate, specnb.measure.cost, specnb.measure.pair, specnb.lm.load, specnb.lm.toy
light()
import specnb.book.figures, specnb.book.style
light("pandas", "plotly", "pyarrow")
assert callable(specnb.load) and callable(specnb.generate) and specnb.figures.speedup_over_k
assert "pandas" in sys.modules
"""


def test_imports_are_light_and_leave_files_and_global_state_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    assert run(sys.executable, "-c", IMPORTS) == "" and not (tmp_path / "cache").exists()


def test_the_public_names_resolve_and_are_those_of_a_reader():
    for name in specnb.__all__:
        assert getattr(specnb, name).__doc__, name
    assert {"load", "generate", "prompts", "save", "publish", "tables", "figures"} <= set(specnb.__all__)
    assert set(dir(specnb)) == {*specnb.__all__, "__version__"} and specnb.__all__ == sorted(specnb.__all__)
    assert specnb.__version__ == version("specnb")
    with pytest.raises(AttributeError, match=r"'laod'.*load"):
        specnb.laod  # noqa: B018


def test_no_other_module_hides_behind_a_public_name():
    """Importing `specnb.x` puts the module in the place of the name x."""
    modules = {p.stem for p in SOURCES if p.parent == ROOT / "specnb"} | {p.parent.name for p in SOURCES}
    assert modules & set(specnb.__all__) == {"prompts"}


def test_the_doors_between_rooms_are_kept_and_ruff_is_content():
    tools = Path(sys.executable).parent
    run(str(tools / "lint-imports"), "--no-cache")
    run(str(tools / "ruff"), "check", "--no-cache", "specnb", "tests")
    run(str(tools / "ruff"), "format", "--check", "--no-cache", "specnb", "tests")


def printing(tree):
    """Lines that print, or show a figure."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = ((call.lineno, getattr(call.func, "id", getattr(call.func, "attr", ""))) for call in calls)
    return [line for line, name in names if name in ("print", "pprint", "show", "display")]


def test_only_the_command_line_prints():
    found = {name for name, tree in TREES.items() if printing(tree) and not name.startswith("specnb/cli/")}
    # copied beside a captured module, and runs there without the package
    assert found <= {"specnb/divergence/repro/standalone.py"}
    assert printing(ast.parse("def f():\n    print(1)\n    go.Figure().show()\n    x.showing(print)")) == [2, 3]


def random_calls(tree):
    """Lines that use a global random state: `random.x()`, `np.random.x()` other than making a generator.

    Models draw their first weights from torch's global state: under `fork_rng` that is put back.
    """
    found = []
    forks = [n for n in ast.walk(tree) if isinstance(n, ast.With) and "fork_rng" in ast.unparse(n.items[0])]
    forked = {line for fork in forks for line in range(fork.lineno, fork.end_lineno + 1)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="fork_rng"):
                continue
            case ast.Attribute(value=ast.Call(func=ast.Attribute(attr="Generator")), attr="manual_seed"):
                continue
            case ast.Attribute(attr="manual_seed") if node.lineno in forked:
                continue
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="np"), attr="random"), attr=name):
                found += [] if name in ("default_rng", "Generator") else [node.lineno]
            case ast.Attribute(value=ast.Name(id="random")) | ast.Attribute(attr="manual_seed"):
                found.append(node.lineno)
    return found


def test_random_numbers_come_from_an_argument_and_never_from_a_global_state():
    assert {name: lines for name, tree in TREES.items() if (lines := random_calls(tree))} == {}
    bad = "np.random.seed(0)\nrng = np.random.default_rng(0)\nrandom.random()\ntorch.manual_seed(1)"
    assert random_calls(ast.parse(bad)) == [1, 3, 4]


def test_a_module_is_an_idea_of_bounded_length_and_says_what_it_is_for():
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: n for path, n in lengths.items() if n > LONGEST} == {}
    modules = {name: tree for name, tree in TREES.items() if not name.endswith("__init__.py")}
    assert [name for name, tree in modules.items() if not ast.get_docstring(tree)] == []


EXAMPLES = [name for name in TREES if ">>> " in (ROOT / name).read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings_hold(name):
    result = doctest.testmod(import_module(name.removesuffix(".py").replace("/", ".")))
    assert result.attempted and not result.failed
