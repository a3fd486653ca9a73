"""Whole package: fast imports, no output, examples. `make check` has style and import contracts."""

import ast
import doctest
import json
import subprocess
import sys
from importlib import import_module, metadata

import pytest

import specnb
from specnb.errors import MissingExtraError, importing
from tests.top.test_house import ROOT, SOURCES

TREES = {str(path.relative_to(ROOT)): tree for path, tree in SOURCES.items()}
LONGEST = 640


def run(*command, cwd=ROOT):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IMPORTS = """
import logging, os, random, sys, numpy
HEAVY = {"torch", "transformers", "llama_cpp", "pandas", "plotly", "pyarrow", "duckdb"}
HEAVY |= {"papermill", "ipywidgets", "nbclient", "nbformat"}
def state():
    handlers = list(logging.getLogger().handlers)
    return dict(os.environ), random.getstate(), str(numpy.random.get_state()), handlers
def light(*allowed):
    loaded = HEAVY & set(sys.modules) - set(allowed)
    assert not loaded and state() == before, loaded
before = state()
import specnb
light()
first = specnb.prompts("code")
import specnb.prompts  # does not replace the function
from specnb import prompts
assert specnb.prompts("code") == prompts("code") == first and len(first) >= 12
import specnb.records, specnb.params, specnb.store, specnb.provenance, specnb.doctor
specnb.provenance.provenance()
light()
import specnb.cli
before = state()  # rich draws a number
import specnb.decode.generate, specnb.measure.cost, specnb.measure.pair
import specnb.lm.load, specnb.lm.toy
light()
import specnb.book.figures, specnb.book.style
light("pandas", "plotly", "pyarrow")
assert callable(specnb.load) and callable(specnb.generate) and specnb.figures.speedup_over_k
assert "pandas" in sys.modules
"""


def test_imports_are_light_and_do_not_change_files_or_global_state(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    assert run(sys.executable, "-c", IMPORTS) == "" and not (tmp_path / "cache").exists()


def test_the_public_names_resolve_and_have_docstrings():
    for name in specnb.__all__:
        assert getattr(specnb, name).__doc__, name
    names = [*specnb.__all__, "__version__"]
    assert set(dir(specnb)) == {*names} and specnb.__all__ == sorted(specnb.__all__)
    assert specnb.__version__ == metadata.version("specnb")
    with pytest.raises(AttributeError, match=r"'laod'.*load"):
        specnb.laod  # noqa: B018
    folder = ROOT / "specnb"
    modules = {path.stem for path in folder.iterdir()}
    assert modules & set(specnb.__all__) == {"prompts"}  # `import specnb.x` replaces a name x


def test_a_missing_extra_raises_an_error_with_the_pip_command(monkeypatch):
    monkeypatch.setattr(
        metadata, "requires", lambda name: ["plotly<8,>=6; extra == 'book'", "numpy>=2"]
    )
    with pytest.raises(MissingExtraError, match=r"plotly is not .*'specnb\[book\]'"), importing():
        raise ModuleNotFoundError(name="plotly.express")
    with pytest.raises(ModuleNotFoundError), importing():
        raise ModuleNotFoundError(name="numpy")


@pytest.mark.slow
def test_a_wheel_works_outside_the_checkout(tmp_path, monkeypatch):
    pip = (sys.executable, "-m", "pip")
    site = str(tmp_path / "site")
    run(*pip, "wheel", "--no-deps", "-w", str(tmp_path), ".")
    run(*pip, "install", "--no-deps", "--target", site, *map(str, tmp_path.glob("*.whl")))
    monkeypatch.setenv("PYTHONPATH", site)
    main = (
        "import sys, specnb, specnb.cli; assert specnb.__file__.startswith(sys.argv.pop(1)); "
        "specnb.cli.main()"
    )
    report = run(
        sys.executable, "-c", main, site, "compat", "qwen2.5", "qwen2.5", "--json", cwd=tmp_path
    )
    assert json.loads(report)["verdict"] == "drop-in"


def test_torchs_global_random_state_is_restored_after_seeding():
    """Models draw initial weights from it. Ruff finds other global states, and prints."""
    for name, tree in TREES.items():
        forks = [
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.With) and "fork_rng" in ast.unparse(n.items[0])
        ]
        within = "".join(map(ast.unparse, forks)).count("torch.manual_seed(")
        assert ast.unparse(tree).count("torch.manual_seed(") == within, name


def test_modules_have_limited_length_and_a_docstring():
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: n for path, n in lengths.items() if n > LONGEST} == {}
    modules = {name: tree for name, tree in TREES.items() if not name.endswith("__init__.py")}
    assert [name for name, tree in modules.items() if not ast.get_docstring(tree)] == []


EXAMPLES = [name for name in TREES if ">>> " in (ROOT / name).read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings_pass(name):
    result = doctest.testmod(import_module(name.removesuffix(".py").replace("/", ".")))
    assert result.attempted and not result.failed
