"""`specnb/API.md`: public names; `python -m tests.top.test_api` generates it from docstrings."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import specnb
from specnb.io import project_dir

PAGE = project_dir() / "specnb" / "API.md"
HEAD = """# Public names

The names that `import specnb` provides, generated from docstrings by \
`python -m tests.top.test_api`. The glossary is in
[`__init__.py`](__init__.py).
"""


def declaration(node: ast.AST) -> ast.AST:
    """Return a function without its body, or a class with fields, `__init__` and public methods."""
    if isinstance(node, ast.FunctionDef):
        node.body = [ast.Expr(ast.Constant(...))]
        node.decorator_list = [
            name for name in node.decorator_list if ast.unparse(name) == "property"
        ]
    elif isinstance(node, ast.ClassDef):
        members = [
            n
            for n in node.body
            if not getattr(n, "name", "").startswith("_") or n.name == "__init__"
        ]
        node.body = [
            declaration(n) for n in members if isinstance(n, ast.FunctionDef | ast.AnnAssign)
        ]
        node.decorator_list = []
    return node


def formatted(doc: str) -> str:
    """Return a docstring as Markdown, with examples and diagrams as code blocks."""
    parts = doc.split("\n\n")
    return "\n\n".join(
        f"```python\n{part}\n```" if part.startswith((">>>", "    ")) else part for part in parts
    )


def entries() -> Iterator[str]:
    for name in specnb.__all__:
        value = getattr(specnb, name)
        if inspect.ismodule(value):
            functions = [
                f
                for n, f in inspect.getmembers(value, inspect.isfunction)
                if f.__module__ == value.__name__ and n[0] != "_"
            ]
            rows = [
                f"* `{f.__name__}`: {str(inspect.getdoc(f)).splitlines()[0]}" for f in functions
            ]
            yield f"## {name} (module)\n\n{inspect.getdoc(value)}\n\n" + "\n".join(rows) + "\n"
            continue
        code = ast.unparse(declaration(ast.parse(inspect.getsource(value)).body[0]))
        yield f"## {name}\n\n```python\n{code}\n```\n\n{formatted(str(inspect.getdoc(value)))}\n"


def page() -> str:
    ruff = [
        str(Path(sys.executable).with_name("ruff")),
        "format",
        "--stdin-filename",
        str(PAGE),
        "-",
    ]
    text = "\n".join([HEAD, *entries()])
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


def test_the_api_page_equals_the_docstrings():
    assert PAGE.read_text(encoding="utf-8") == page(), "regenerate it: python -m tests.top.test_api"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
