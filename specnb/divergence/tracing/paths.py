"""Paths of modules: the same whichever wrappers of one model a run goes through."""

import re
from collections.abc import Iterable, Mapping

from specnb.errors import InputError

PREFIX = re.compile(r"(?:(?:model|draft_model)\.)+")


def canonical(paths: Iterable[str]) -> dict[str, str]:
    """Module paths -> the same without leading `model.` or `draft_model.`, but for those that stand beside a module of
    the shorter name. InputError where two become one."""
    paths = list(paths)
    taken = {*paths}
    short = {path: canonical_name(path) for path in paths}
    short = {path: path if name in taken else name for path, name in short.items()}
    back: dict[str, str] = {}
    for path, name in short.items():
        if name in back:
            raise InputError(
                f"modules {back[name]!r} and {path!r} of one model are both {name!r} without their prefix: "
                "capture the two inner models one by one"
            )
        back[name] = path
    return short


def canonical_name(path: str, rename: Mapping[str, str] | None = None) -> str:
    """A path without leading `model.` or `draft_model.`, then with each regular expression of `rename` replaced.

    Raises InputError for a wrong expression.
    """
    name = PREFIX.sub("", path, count=1) if PREFIX.match(path) else path
    for pattern, by in (rename or {}).items():
        try:
            name = re.sub(pattern, by, name)
        except (re.error, IndexError, TypeError) as error:
            raise InputError(f"rename {pattern!r} to {by!r} does not work ({error}): give re.sub's two") from error
    return name


def canonical_names(paths: Iterable[str], rename: Mapping[str, str] | None = None) -> dict[str, str]:
    """`canonical_name` of each path. Raises InputError where two modules of one trace get one name."""
    names = {path: canonical_name(path, rename) for path in paths}
    back: dict[str, str] = {}
    for path, name in names.items():
        if back.setdefault(name, path) != path:
            raise InputError(f"modules {back[name]!r} and {path!r} are both {name!r}: give a `rename` that tells them")
    return names
