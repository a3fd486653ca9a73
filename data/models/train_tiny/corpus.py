"""Training text from what is installed: the standard library and permissively licensed packages.

A document is one file: Python source, or the longer docstrings of a file. Which side of the split
it is on follows from its name alone. Nothing depends on the order of the file system, and no path
of the machine gets in.
"""

import ast
import hashlib
import importlib.metadata
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

STDLIB = "cpython"
LICENCES = {
    STDLIB: "PSF-2.0",
    "annotated-types": "MIT",
    "anyio": "MIT",
    "asttokens": "Apache-2.0",
    "attrs": "MIT",
    "click": "BSD-3-Clause",
    "comm": "BSD-3-Clause",
    "executing": "MIT",
    "fastjsonschema": "BSD-3-Clause",
    "filelock": "MIT",
    "fsspec": "BSD-3-Clause",
    "gguf": "MIT",
    "h11": "MIT",
    "huggingface-hub": "Apache-2.0",
    "ipykernel": "BSD-3-Clause",
    "ipython": "BSD-3-Clause",
    "ipywidgets": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "jsonschema": "MIT",
    "jupyter-client": "BSD-3-Clause",
    "jupyter-core": "BSD-3-Clause",
    "markdown-it-py": "MIT",
    "mpmath": "BSD-3-Clause",
    "nbclient": "BSD-3-Clause",
    "nbformat": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "packaging": "Apache-2.0 OR BSD-2-Clause",
    "pandas": "BSD-3-Clause",
    "papermill": "BSD-3-Clause",
    "parso": "MIT",
    "platformdirs": "MIT",
    "prompt-toolkit": "BSD-3-Clause",
    "psutil": "BSD-3-Clause",
    "pyarrow": "Apache-2.0",
    "pydantic": "MIT",
    "pyzmq": "BSD-3-Clause",
    "requests": "Apache-2.0",
    "rich": "MIT",
    "sympy": "BSD-3-Clause",
    "tenacity": "Apache-2.0",
    "torch": "BSD-3-Clause",
    "tornado": "Apache-2.0",
    "traitlets": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "typer": "MIT",
    "urllib3": "MIT",
}
"""What is read, with the licence of its files; copyleft and bundled foreign code are left out."""
DOCSTRINGS_ONLY = frozenset({"sympy", "torch", "transformers"})
"""Packages larger than the rest together: only their prose is taken."""


HELD_OUT_SHARE = 0.04
MIN_CHARS, MAX_CHARS, MIN_DOCSTRING, MAX_LINE = 400, 120_000, 300, 400
SKIPPED_PARTS = frozenset(
    {
        "..",
        "test",
        "tests",
        "testing",
        "idle_test",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_vendor",
        "vendor",
        "vendored",
        "extern",
        "externals",
        "bundled",
        "node_modules",
        "static",
        "templates",
        "encodings",
        "lexers",
        "styles",
        "models",
        "quantization_config",
        "_typing",
    }
)
"""Folders of tests, of other people's code, and of tables that look like code."""
GENERATED = re.compile(
    r"auto-?(matically)?[ -]?generated|generated (by|from|with|file)|do not (edit|modify)", re.I
)


class Document(NamedTuple):
    """One text, code or prose.

    `name` is `package/relative/path`, with `#docstrings` behind it for a part of a file.
    """

    name: str
    kind: str
    text: str


class Package(NamedTuple):
    """One package to read, with its Python files by relative name."""

    package: str
    version: str
    licence: str
    files: Sequence[tuple[str, Path]]


def is_held_out(name: str) -> bool:
    """Whether a file is held out: about HELD_OUT_SHARE of them, by hash of the name up to `#`."""
    digest = hashlib.sha256(name.split("#")[0].encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def installed(packages: Iterable[str] = LICENCES) -> list[Package]:
    """The installed ones among `packages`, which LICENCES knows, sorted by name."""
    sources = []
    for package in sorted(packages):
        if package == STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            version = platform.python_version()
            files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
        else:
            try:
                distribution = importlib.metadata.distribution(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            version = distribution.version
            files = {
                file.as_posix(): Path(file.locate())
                for file in distribution.files or ()
                if file.suffix == ".py"
            }
        kept = sorted(item for item in files.items() if not SKIPPED_PARTS & set(item[0].split("/")))
        sources.append(Package(package, version, LICENCES[package], kept))
    return sources


def documents(sources: Iterable[Package]) -> list[Document]:
    """All documents of the sources in order."""
    texts = []
    for source in sources:
        for name, path in source.files:
            text = path.read_text(encoding="utf-8", errors="replace")
            if GENERATED.search(text[:2000]):
                continue
            document = Document(f"{source.package}/{name}", "code", text)
            if source.package in DOCSTRINGS_ONLY:
                document = Document(f"{document.name}#docstrings", "prose", _docstrings(text))
            if _is_plain(document.text):
                texts.append(document)
    return texts


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out): by the file's name, so that all parts of one file are on one side."""
    return [d for d in documents if not is_held_out(d.name)], [
        d for d in documents if is_held_out(d.name)
    ]


def corpus_digest(documents: Iterable[Document]) -> str:
    """sha256 over names and texts in order: equal for equal training data."""
    digest = hashlib.sha256()
    for document in documents:
        for field in (document.name, document.text):
            digest.update(len(field.encode()).to_bytes(8, "big") + field.encode())
    return digest.hexdigest()


def _is_plain(text: str) -> bool:
    """Neither tiny nor huge, no minified lines, no paths of the machine it was installed on."""
    private = {sys.prefix, sys.base_prefix, str(Path.home())} - {"/", "/usr"}
    sized = MIN_CHARS <= len(text) <= MAX_CHARS and max(map(len, text.split("\n"))) <= MAX_LINE
    return sized and not any(place in text for place in private)


def _docstrings(source: str) -> str:
    """The docstrings of at least MIN_DOCSTRING characters, in order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(source)
    except SyntaxError:
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in docstrings if text and len(text) >= MIN_DOCSTRING) + "\n"
