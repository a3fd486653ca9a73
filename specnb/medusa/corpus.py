"""Training text from what is installed anyway: the standard library and permissively licensed packages.

A document is one file: Python source, the longer docstrings of a source file, a chapter of the language reference, or
a package's description. Which side of the split it is on follows from its name alone. Nothing depends on the order of
the file system, and no path of the machine gets in.
"""

import ast
import hashlib
import importlib.metadata
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

STDLIB = "cpython"
LICENCES = {
    STDLIB: "PSF-2.0",
    "annotated-types": "MIT", "anyio": "MIT", "asttokens": "Apache-2.0", "attrs": "MIT", "click": "BSD-3-Clause",
    "comm": "BSD-3-Clause", "executing": "MIT", "fastjsonschema": "BSD-3-Clause", "filelock": "MIT",
    "fsspec": "BSD-3-Clause", "gguf": "MIT", "h11": "MIT", "huggingface-hub": "Apache-2.0", "ipykernel": "BSD-3-Clause",
    "ipython": "BSD-3-Clause", "ipywidgets": "BSD-3-Clause", "jinja2": "BSD-3-Clause", "jsonschema": "MIT",
    "jupyter-client": "BSD-3-Clause", "jupyter-core": "BSD-3-Clause", "markdown-it-py": "MIT", "mpmath": "BSD-3-Clause",
    "nbclient": "BSD-3-Clause", "nbformat": "BSD-3-Clause", "networkx": "BSD-3-Clause", "numpy": "BSD-3-Clause",
    "packaging": "Apache-2.0 OR BSD-2-Clause", "pandas": "BSD-3-Clause", "papermill": "BSD-3-Clause", "parso": "MIT",
    "platformdirs": "MIT", "prompt-toolkit": "BSD-3-Clause", "psutil": "BSD-3-Clause", "pyarrow": "Apache-2.0",
    "pydantic": "MIT", "pyzmq": "BSD-3-Clause", "requests": "Apache-2.0", "rich": "MIT", "sympy": "BSD-3-Clause",
    "tenacity": "Apache-2.0", "torch": "BSD-3-Clause", "tornado": "Apache-2.0", "traitlets": "BSD-3-Clause",
    "transformers": "Apache-2.0", "typer": "MIT", "urllib3": "MIT",
}  # fmt: skip
"""What is read, with the licence of the files read; copyleft packages and bundled foreign code are left out."""
DOCSTRINGS_ONLY = frozenset({"sympy", "torch", "transformers"})
"""Packages larger than the rest together: only their prose is taken."""

HELD_OUT_SHARE = 0.04
MIN_CHARS, MAX_CHARS = 400, 120_000
MIN_DOCSTRING = 300
MAX_LINE = 400
SKIPPED_PARTS = frozenset(
    {
        "test", "tests", "testing", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__",
        "_vendor", "vendor", "vendored", "extern", "externals", "bundled", "node_modules", "static", "templates",
        "encodings", "lexers", "styles", "models", "quantization_config", "_typing",
    }
)  # fmt: skip
"""Folders of tests, of other people's code, and of tables that look like code."""
GENERATED = re.compile(r"auto-?(matically)?[ -]?generated|generated (by|from|with|file)|do not (edit|modify)", re.I)
LEGAL = re.compile(r"copyright|licen[cs]e|all rights reserved|spdx", re.I)

Kind = Literal["code", "prose"]


@dataclass(frozen=True)
class Document:
    """One text: `name` is `package/relative/path`, with `#docstrings` or `#topic` behind it for a part of a file."""

    name: str
    kind: Kind
    text: str


@dataclass(frozen=True)
class Source:
    """One package to read: its version, its licence, its Python files by relative name, and its description."""

    package: str
    version: str
    licence: str
    files: tuple[tuple[str, Path], ...]
    description: str = ""


def is_held_out(name: str) -> bool:
    """Whether this file is kept from training: by hash of its name up to `#`, about HELD_OUT_SHARE of the files."""
    digest = hashlib.sha256(name.split("#")[0].encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def installed(packages: Iterable[str] = LICENCES) -> list[Source]:
    """The installed ones among `packages`, which LICENCES knows, sorted by name."""
    sources = []
    for package in sorted(packages):
        if package == STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            files = ((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))
            version, description = sys.version.split()[0], ""
        else:
            try:
                distribution = importlib.metadata.distribution(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            files = (
                (file.as_posix(), Path(file.locate())) for file in distribution.files or () if file.suffix == ".py"
            )
            version, description = distribution.version, distribution.metadata.get_payload() or ""
        sources.append(Source(package, version, LICENCES[package], readable(files), description))
    return sources


def readable(files: Iterable[tuple[str, Path]]) -> tuple[tuple[str, Path], ...]:
    """Sorted; outside the package, linked, in a skipped folder or private build settings: left out."""
    kept = [
        (name, path)
        for name, path in files
        if not {"..", *SKIPPED_PARTS} & set(name.split("/"))
        and not path.name.startswith("_sysconfigdata")
        and not path.is_symlink()
    ]
    return tuple(sorted(kept))


def documents(sources: Iterable[Source]) -> list[Document]:
    """All documents of the sources in order, each text once: a file most of whose lines were seen is left out."""
    seen: set[bytes] = set()
    return [document for document in _all(sources) if _is_new(document.text, seen)]


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out): by the file's name, so that all parts of one file are on one side."""
    return [d for d in documents if not is_held_out(d.name)], [d for d in documents if is_held_out(d.name)]


def corpus_digest(documents: Iterable[Document]) -> str:
    """sha256 over names and texts in order: equal for equal training data."""
    digest = hashlib.sha256()
    for document in documents:
        for field in (document.name, document.text):
            digest.update(len(field.encode()).to_bytes(8, "big") + field.encode())
    return digest.hexdigest()


def _all(sources: Iterable[Source]) -> Iterator[Document]:
    for source in sources:
        yield from _checked(source.package, "DESCRIPTION", "prose", source.description)
        for name, path in source.files:
            text = _read(path)
            if name == "pydoc_data/topics.py":
                yield from _topics(source.package, name, text)
            elif not text or GENERATED.search(text[:2000]):
                continue
            elif source.package in DOCSTRINGS_ONLY:
                yield from _checked(source.package, f"{name}#docstrings", "prose", _docstrings(text))
            else:
                yield from _checked(source.package, name, "code", _without_legal_head(text))


def _checked(package: str, name: str, kind: Kind, text: str) -> Iterator[Document]:
    text = text.replace("\r\n", "\n").expandtabs(4).strip("\n")
    if _is_plain(text):
        yield Document(f"{package}/{name}", kind, text + "\n")


def _read(path: Path) -> str:
    """The text, or "" for what is too large, is not UTF-8 or cannot be read: training does without it."""
    try:
        if path.stat().st_size > 8 * MAX_CHARS:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _is_plain(text: str) -> bool:
    """Neither tiny nor huge, no minified lines, no tables of data, no paths of the machine it was installed on."""
    if not MIN_CHARS <= len(text) <= MAX_CHARS or max(map(len, text.split("\n"))) > MAX_LINE:
        return False
    letters = sum(map(str.isalpha, text)) + text.count(" ")
    n_ascii = len(text.encode("ascii", "ignore"))
    private = any(place in text for place in {sys.prefix, sys.base_prefix, str(Path.home())} - {"/", "/usr"})
    return letters > 0.6 * len(text) and n_ascii > 0.97 * len(text) and "\0" not in text and not private


def _docstrings(source: str) -> str:
    """The docstrings of at least MIN_DOCSTRING characters, dedented, in order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(textwrap.dedent(text).strip() for text in docstrings if text and len(text) >= MIN_DOCSTRING)


def _topics(package: str, name: str, source: str) -> Iterator[Document]:
    """The language reference as it ships for `help()`: one document a topic."""
    for node in ast.walk(ast.parse(source)) if source else ():
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    yield from _checked(package, f"{name}#{key.value}", "prose", str(value.value))


def _without_legal_head(text: str) -> str:
    """Without the comment block on top if it is about rights: the same lines in every file teach nothing."""
    head = re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)+", text)
    return text[head.end() :] if head and LEGAL.search(head.group()) else text


def _is_new(text: str, seen: set[bytes]) -> bool:
    lines = (line.strip().encode() for line in text.split("\n") if len(line.strip()) > 20)
    ids = {hashlib.blake2b(line, digest_size=8).digest() for line in lines}
    fresh = ids - seen
    seen |= ids
    return len(fresh) * 2 > len(ids)
