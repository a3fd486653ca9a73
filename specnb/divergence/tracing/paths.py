"""Paths of modules: the same whichever wrappers of one model a run goes through.

A capture gives its modules these names, and a trace holds them as they are: whoever reads one applies `renamed` alone.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from specnb.errors import InputError

PREFIX = re.compile(r"^(?:(?:model|draft_model)\.)+")


def canonical(paths: Iterable[str]) -> dict[str, str]:
    """`canonical_name` of each path, of all modules of one model; those that would have one name in common keep theirs.

    Of a part of the paths it may make other names: what is told apart depends on all.
    """
    short = {path: canonical_name(path) for path in paths}
    shared = Counter(short.values())
    return {path: path if shared[name] > 1 else name for path, name in short.items()}


def canonical_name(path: str, rename: Mapping[str, str] | None = None) -> str:
    """A path without leading `model.` or `draft_model.`, then with each regular expression of `rename` replaced.

    Raises InputError for a wrong expression.
    """
    return _renamed(PREFIX.sub("", path), rename)


def renamed(names: Iterable[str], rename: Mapping[str, str] | None) -> dict[str, str]:
    """Each name of a trace with the regular expressions of `rename` replaced.

    Raises InputError for a wrong expression, and where two names become one.
    """
    found = {name: _renamed(name, rename) for name in names}
    back: dict[str, str] = {}
    for name, new in found.items():
        if back.setdefault(new, name) != name:
            raise InputError(
                f"`rename` makes {new!r} of {back[new]!r} and of {name!r}: give expressions that keep them apart"
            )
    return found


def _renamed(name: str, rename: Mapping[str, str] | None) -> str:
    for pattern, by in (rename or {}).items():
        try:
            name = re.sub(pattern, by, name)
        except (re.error, IndexError, TypeError) as error:
            raise InputError(f"rename {pattern!r} to {by!r} does not work ({error}): give re.sub's two") from error
    return name
