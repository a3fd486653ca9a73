"""Paths of modules: the same whichever wrappers of one model a run goes through."""

import re
from collections.abc import Iterable, Mapping

from specnb.errors import InputError

PREFIX = re.compile(r"^(?:(?:model|draft_model)\.)+")


def canonical(paths: Iterable[str], rename: Mapping[str, str] | None = None) -> dict[str, str]:
    """`canonical_name` of each module path of one model; one keeps its prefix beside a module of the shorter name.

    Raises InputError where two become one.
    """
    taken = {*(paths := list(paths))}
    short = {path: canonical_name(path) for path in paths}
    names = {path: _renamed(path if name in taken else name, rename) for path, name in short.items()}
    back: dict[str, str] = {}
    for path, name in names.items():
        if back.setdefault(name, path) != path:
            raise InputError(
                f"modules {back[name]!r} and {path!r} are both {name!r}: capture the inner models one by one, or give "
                "a `rename` that tells them"
            )
    return names


def canonical_name(path: str, rename: Mapping[str, str] | None = None) -> str:
    """A path without leading `model.` or `draft_model.`, then with each regular expression of `rename` replaced.

    Raises InputError for a wrong expression.
    """
    return _renamed(PREFIX.sub("", path), rename)


def _renamed(name: str, rename: Mapping[str, str] | None) -> str:
    for pattern, by in (rename or {}).items():
        try:
            name = re.sub(pattern, by, name)
        except (re.error, IndexError, TypeError) as error:
            raise InputError(f"rename {pattern!r} to {by!r} does not work ({error}): give re.sub's two") from error
    return name
