"""The house stays small and plain: ceilings, folders, importers, users of every symbol, names."""

import ast
import importlib
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from specnb.io import project_dir

ROOT = project_dir()
CEILINGS = {"specnb": (217_000, 153), "tests": (176_800, 144)}
"""Tokens of code, without comments, docstrings and blank lines, and files."""
ONE_IMPORTER, TWICE, BANNED_USES = 24, 5, 2
"""Modules with one importer beside backends and commands, class names that occur twice, modules times banned names."""
BANNED = {"made", "said", "told", "found", "one", "ours", "theirs", "what", "own"}

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
          tokenize.ENDMARKER}  # fmt: skip

SOURCES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "specnb").rglob("*.py"))}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def notebook(path: Path) -> ast.Module:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ast.parse("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))


MODULES = {module(path): tree for path, tree in SOURCES.items()}
NOTEBOOKS = {path.stem: notebook(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def tokens(path: Path) -> int:
    """Tokens of Python's tokenizer that are code."""
    text = path.read_text(encoding="utf-8")
    prose = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    each = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in prose for token in each)


@pytest.mark.parametrize("folder", CEILINGS)
def test_the_package_and_its_tests_stay_below_their_ceilings(folder):
    most_tokens, most_files = CEILINGS[folder]
    files = list((ROOT / folder).rglob("*.py"))
    assert 0.97 * most_tokens <= sum(map(tokens, files)) <= most_tokens and len(files) <= most_files


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def shared_prefixes(folder: Path) -> set[str]:
    """Prefixes `head` of modules and folders such as `head` and `head_gates`, or `head_a` and `head_b`."""
    names = [p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    return {p for p, n in Counter(name.split("_")[0] for name in names if name != "__init__").items() if n > 1}


def test_a_folder_has_few_files_and_no_two_with_the_same_prefix():
    folders = {str(path.parent.relative_to(ROOT)): path.parent for path in SOURCES}
    crowded = {name for name, f in folders.items() if len(list(f.glob("[!_]*.py"))) > 15}
    assert crowded == set()
    prefixes = {name: shared_prefixes(folder) for name, folder in folders.items()}
    assert {name: shared for name, shared in prefixes.items() if shared} == {}


def imports(tree: ast.Module) -> set[str]:
    """Modules of the package that a module imports, inside functions too, and those it names as "module:object"."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=str(source), names=aliases):
                names |= {source, *(f"{source}.{alias.name}" for alias in aliases)}
            case ast.Constant(value=str(text)) if re.fullmatch(r"specnb[\w.]*(:\w+)?", text):
                names.add(text.split(":")[0])
    return names & set(MODULES)


def test_a_module_with_one_importer_is_part_of_that_importer():
    importers = defaultdict(set)
    for name, tree in MODULES.items():
        for other in imports(tree) - {name}:
            importers[other].add(name)
    others = {module(path) for path in SOURCES if path.name == "__init__.py"}
    others |= set().union(*(imports(tree) for tree in NOTEBOOKS.values()))
    single = {name for name in set(MODULES) - others if len(importers[name] - others) == 1}
    assert len(single) <= ONE_IMPORTER, sorted(single)


def definitions(tree: ast.Module) -> set[str]:
    """Names of functions, classes and constants at the top of a module."""
    assigned = {n.id for node in tree.body for n in ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign)
                and isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)} | assigned


def uses(tree: ast.AST) -> set[str]:
    """Names that code reads, imports, or spells in a string such as "module:object"."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.Constant(value=str(text)) if " " not in text:
                names |= set(re.findall(r"\w+", text))
    return names


SCRIPTS = [*(ROOT / "data").rglob("*.py"), *(ROOT / "tests/benchmarks").rglob("*.py")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_from_the_package_is_there(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("specnb"):
            there = set(dir(importlib.import_module(node.module)))
            there |= {name.removeprefix(f"{node.module}.") for name in MODULES}
            assert {alias.name for alias in node.names} <= there


def test_every_symbol_has_a_user_other_than_tests():
    used = set().union(*(uses(tree) for tree in SOURCES.values()))
    for path in SCRIPTS:
        used |= uses(ast.parse(path.read_text(encoding="utf-8")))
    used |= set().union(*(uses(tree) for tree in NOTEBOOKS.values()))
    used |= set(re.findall(r"\w+", (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    used |= {"__getattr__", "__dir__", "__version__", "__all__"}
    functions = [n for tree in SOURCES.values() for n in tree.body if isinstance(n, ast.FunctionDef)]
    used |= {n.name for n in functions if n.decorator_list}  # commands
    idle = {(name, symbol) for name, tree in MODULES.items() for symbol in definitions(tree) - used}
    assert idle == set()


def test_class_names_are_unique():
    names = Counter(node.name for tree in SOURCES.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert len({name for name, n in names.items() if n > 1}) <= TWICE


def identifiers(tree: ast.AST) -> set[str]:
    """Names that code binds: variables, parameters, functions, classes, fields."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return names


def test_names_say_what_they_hold():
    bad = {name: identifiers(tree) & BANNED for name, tree in MODULES.items()}
    assert sum(map(len, bad.values())) <= BANNED_USES, {name: names for name, names in bad.items() if names}
