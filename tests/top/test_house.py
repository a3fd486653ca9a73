"""Size and style of the package: ceilings, folders, importers, unused symbols, names.

`house.toml` has the current numbers, which may only decrease: tokens of Python by room; words and
signs of other files by room; modules that bind a vague (banned) name; modules that share a public
name. `python -m tests.top.test_house` updates them.
"""

import ast
import json
import re
import tokenize
import tomllib
from collections import Counter, defaultdict
from importlib import import_module
from pathlib import Path

import pytest

from specnb.io import project_dir

ROOT = project_dir()
HOUSE = Path(__file__).with_name("house.toml")
NUMBERS = tomllib.loads(HOUSE.read_text(encoding="utf-8"))
ONE_IMPORTER = 28
"""Modules with one importer, except for those in the registry."""
LAYOUT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

SOURCES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "specnb").rglob("*.py"))
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def notebook(path: Path) -> ast.Module:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ast.parse(
        "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    )


MODULES = {module(path): tree for path, tree in SOURCES.items()}
NOTEBOOKS = {path.stem: notebook(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def tokens(path: Path) -> int:
    """Return the number of tokens of Python's tokenizer without comments and docstrings."""
    n = 0
    before = tokenize.NEWLINE
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.NL):
                continue
            is_docstring = token.type == tokenize.STRING and before in LAYOUT
            if token.type not in LAYOUT and not is_docstring:
                n += 1
            before = token.type
    return n


def rooms() -> dict[str, int]:
    """Return the tokens of each room, of modules outside of rooms (`specnb`), and of the tests."""
    sizes = Counter()
    for path in SOURCES:
        folders = path.relative_to(ROOT / "specnb").parts[:-1]
        sizes[folders[0] if folders else "specnb"] += tokens(path)
    return dict(sizes) | {"tests": sum(map(tokens, (ROOT / "tests").rglob("*.py")))}


def texts() -> dict[str, int]:
    """Return the words and signs of the TOML, HTML, JavaScript and CSS of each room."""
    sizes = Counter()
    for path in sorted((ROOT / "specnb").rglob("*")):
        if path.suffix in (".toml", ".html", ".js", ".css"):
            folders = path.relative_to(ROOT / "specnb").parts[:-1]
            text = path.read_text(encoding="utf-8")
            sizes[folders[0] if folders else "specnb"] += len(re.findall(r"\w+|[^\w\s]", text))
    return dict(sizes)


@pytest.mark.parametrize(("name", "count"), [("tokens", rooms), ("texts", texts)])
def test_each_room_has_at_most_as_many_tokens_as_its_ceiling_and_not_many_fewer(name, count):
    ceilings = NUMBERS[name]
    sizes = count()
    assert sizes.keys() == ceilings.keys()
    off = {
        room: (n, ceilings[room])
        for room, n in sizes.items()
        if not 0.97 * ceilings[room] <= n <= ceilings[room]
    }
    assert off == {}, (
        "tokens and ceiling; cut, or lower the ceiling with: python -m tests.top.test_house"
    )


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def shared_prefixes(folder: Path) -> set[str]:
    """Return prefixes shared by modules and folders, such as `head` of `head_a` and `head_b`."""
    names = [p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    return {
        p
        for p, n in Counter(name.split("_")[0] for name in names if name != "__init__").items()
        if n > 1
    }


def test_a_folder_has_few_files_and_no_two_with_the_same_prefix():
    folders = {str(path.parent.relative_to(ROOT)): path.parent for path in SOURCES}
    crowded = {name for name, f in folders.items() if len(list(f.glob("[!_]*.py"))) > 15}
    assert crowded == set()
    prefixes = {name: shared_prefixes(folder) for name, folder in folders.items()}
    assert {name: shared for name, shared in prefixes.items() if shared} == {}


def imports(tree: ast.Module) -> set[str]:
    """Return the modules of the package that a module imports, or names as "module:object"."""
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


def test_few_modules_have_a_single_importer():
    importers = defaultdict(set)
    for name, tree in MODULES.items():
        for other in imports(tree) - {name}:
            importers[other].add(name)
    others = {module(path) for path in SOURCES if path.name == "__init__.py"}
    others |= set().union(*(imports(tree) for tree in NOTEBOOKS.values()))
    others |= imports(MODULES["specnb.registry"])
    single = {name for name in set(MODULES) - others if len(importers[name] - others) == 1}
    assert len(single) <= ONE_IMPORTER, sorted(single)


def definitions(tree: ast.Module) -> set[str]:
    """Return the names of functions, classes and constants at the top level of a module."""
    assigned = {
        n.id
        for node in tree.body
        for n in ast.walk(node)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(n, ast.Name)
        and isinstance(n.ctx, ast.Store)
    }
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)} | assigned


def uses(tree: ast.AST) -> set[str]:
    """Return names that code reads, imports, or has in a string such as "module:object"."""
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


def test_names_that_scripts_import_from_the_package_exist():
    nodes = [
        node for path in SCRIPTS for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    froms = [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("specnb")
    ]
    wanted = {(str(node.module), alias.name) for node in froms for alias in node.names}
    missing = {(module, name) for module, name in wanted if f"{module}.{name}" not in MODULES}
    assert {
        (module, name) for module, name in missing if not hasattr(import_module(module), name)
    } == set()


def test_every_symbol_has_a_user_other_than_tests():
    used = set().union(*(uses(tree) for tree in SOURCES.values()))
    for path in SCRIPTS:
        used |= uses(ast.parse(path.read_text(encoding="utf-8")))
    used |= set().union(*(uses(tree) for tree in NOTEBOOKS.values()))
    used |= set(re.findall(r"\w+", (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    used |= {"__getattr__", "__dir__", "__version__", "__all__"}
    functions = [
        n for tree in SOURCES.values() for n in tree.body if isinstance(n, ast.FunctionDef)
    ]
    used |= {n.name for n in functions if n.decorator_list}  # commands
    idle = {(name, symbol) for name, tree in MODULES.items() for symbol in definitions(tree) - used}
    assert idle == set()


def identifiers(tree: ast.AST) -> set[str]:
    """Return the names that code binds: variables, parameters, functions, classes, fields."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return names


def banned() -> Counter[str]:
    """Return the number of modules that bind each banned name."""
    return Counter(
        name for tree in MODULES.values() for name in identifiers(tree) & NUMBERS["banned"].keys()
    )


def repeated() -> Counter[str]:
    """Return public functions and classes, except commands, with one name in several modules."""
    public = (
        node.name
        for name, tree in MODULES.items()
        if "specnb.cli" not in name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
    )
    return Counter({name: n for name, n in Counter(public).items() if n > 1})


@pytest.mark.parametrize("count", [banned, repeated])
def test_vague_and_repeated_names_do_not_increase(count):
    assert count() - Counter(NUMBERS[count.__name__]) == Counter()


if __name__ == "__main__":
    tables = {
        "tokens": rooms(),
        "texts": texts(),
        "banned": dict.fromkeys(NUMBERS["banned"], 0) | banned(),
        "repeated": repeated(),
    }
    tables = {
        name: "".join(f"{key} = {n}\n" for key, n in sorted(table.items()))
        for name, table in tables.items()
    }
    HOUSE.write_text(
        "\n".join(f"[{name}]\n{rows}" for name, rows in tables.items()), encoding="utf-8"
    )
