"""The package as a whole: quick to import, every door closed that should be, nothing printed, style kept."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import specnb
from specnb.paths import project_dir

ROOT = project_dir()
HEAVY = {"torch", "transformers", "llama_cpp", "pandas", "plotly", "pyarrow", "duckdb", "papermill", "ipywidgets"}
SOURCES = sorted((ROOT / "specnb").rglob("*.py"))


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tool(name, *words):
    """A command that is installed beside this Python."""
    command = [str(Path(sys.executable).with_name(name)), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def loaded_after(statement):
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    return set(json.loads(python(code)))


# --- imports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import specnb", set()),
        ("import specnb.cli", set()),
        ("import specnb.records, specnb.params, specnb.store, specnb.provenance, specnb.doctor", set()),
        ("import specnb.decode.generate, specnb.measure.cost, specnb.measure.pair, specnb.lm.toy", set()),
        ("import specnb.book.figures, specnb.book.style", {"pandas", "plotly", "pyarrow"}),
    ],
)
def test_imports_that_stay_light(statement, allowed):
    assert not (loaded_after(statement) & HEAVY) - allowed


def test_the_check_above_sees_a_heavy_import():
    assert "pandas" in loaded_after("import specnb; specnb.tables")


def test_import_writes_nothing_and_leaves_global_state_alone(tmp_path):
    """No folder made, no log handler, no random state, no environment variable."""
    code = f"""
import logging, os, random
os.environ["SPECNB_CACHE"] = {str(tmp_path / "cache")!r}
import numpy
before = dict(os.environ), random.getstate(), str(numpy.random.get_state())
before_handlers = list(logging.getLogger().handlers)
import specnb, specnb.decode.generate, specnb.measure.bench, specnb.lm.load
assert before[0] == dict(os.environ) and before[1] == random.getstate()
assert before[2] == str(numpy.random.get_state())
assert before_handlers == logging.getLogger().handlers
"""
    assert python(code) == "" and not (tmp_path / "cache").exists()


# --- the public names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", specnb.__all__)
def test_every_public_name_resolves(name):
    found = getattr(specnb, name)
    assert found.__doc__
    assert callable(found) or found.__name__.startswith("specnb.")


def test_the_names_a_reader_needs_are_there():
    assert {"load", "generate", "prompts", "tables", "figures"} <= set(specnb.__all__)
    assert set(dir(specnb)) == {*specnb.__all__, "__version__"} and specnb.__all__ == sorted(specnb.__all__)


def test_the_version_is_that_of_the_installed_package():
    from importlib.metadata import version

    assert specnb.__version__ == version("specnb")


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(AttributeError, match=r"'specnb' has no attribute 'laod'; it offers .*load"):
        specnb.laod  # noqa: B018
    assert not hasattr(specnb, "nothing")


def test_prompts_is_the_function_whatever_was_imported_before():
    code = """
import specnb
first = specnb.prompts("code")
import specnb.prompts
assert specnb.prompts("code") == first and len(first) >= 12
from specnb.prompts import Prompt
from specnb import prompts
assert prompts("code", limit=1) == first[:1] and specnb.Prompt is Prompt
import specnb.lm.load, specnb.decode.generate, specnb.book.figures
assert callable(specnb.load) and callable(specnb.generate) and specnb.figures.speedup_over_k
"""
    python(code)


def test_no_other_module_hides_behind_a_public_name():
    """Importing `specnb.x` puts the module in the place of the name x."""
    modules = {p.stem for p in SOURCES if p.parent == ROOT / "specnb"} | {p.parent.name for p in SOURCES}
    assert modules & set(specnb.__all__) == {"prompts"}


# --- doors, style, silence ------------------------------------------------------------------------------------------


def test_the_doors_between_rooms_are_kept():
    tool("lint-imports", "--no-cache")


def test_ruff_is_content():
    tool("ruff", "check", "--no-cache", "specnb", "tests")
    tool("ruff", "format", "--check", "--no-cache", "specnb", "tests")


def loud(code):
    """Lines that print, or show a figure."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    names = ((call.lineno, getattr(call.func, "id", getattr(call.func, "attr", ""))) for call in calls)
    return [line for line, name in names if name in ("print", "pprint", "show", "display")]


def test_only_the_command_line_prints():
    found = {str(p.relative_to(ROOT)): loud(p.read_text(encoding="utf-8")) for p in SOURCES}
    # the second is copied beside a captured module, and runs there without the package
    assert {name for name, lines in found.items() if lines} == {
        "specnb/cli.py",
        "specnb/divergence/reproduction/standalone.py",
    }


def test_the_scan_for_prints_sees_them():
    assert loud("def f():\n    print(1)\n    go.Figure().show()\n    x.showing(print)") == [2, 3]


def random_calls(code):
    """Lines that use a global random state: `random.x()`, `np.random.x()` other than making a generator.

    Models draw their first weights from torch's global state: under `fork_rng` that is put back.
    """
    found = []
    tree = ast.parse(code)
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
            case ast.Attribute(value=ast.Name(id="random")):
                found.append(node.lineno)
            case ast.Attribute(attr="manual_seed"):
                found.append(node.lineno)
    return found


def test_random_numbers_come_from_an_argument_and_never_from_a_global_state():
    assert {p.name: lines for p in SOURCES if (lines := random_calls(p.read_text(encoding="utf-8")))} == {}
    assert random_calls("np.random.seed(0)\nrng = np.random.default_rng(0)\nrandom.random()\ntorch.manual_seed(1)") == [
        1, 3, 4,
    ]  # fmt: skip


def test_no_module_is_longer_than_a_room():
    assert {p.name: n for p in SOURCES if (n := len(p.read_text(encoding="utf-8").splitlines())) > 300} == {}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name != "__init__.py"], ids=lambda p: p.stem)
def test_every_module_and_public_name_in_it_says_what_it_is_for(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no module docstring"
    public = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]
    assert [n.name for n in public if not ast.get_docstring(n)] == []
