"""JSON of unknown origin: bounded in size, one value a key, and getters that say what is wrong."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specnb.errors import InputError

SHOWN = 80
BYTES_A_VALUE = 80
"""Most that a parsed value costs beyond its own text: an empty object and its place in a list or a dict."""


def read_bytes(path: Path, limit: int) -> bytes:
    """All of a file. Raises InputError if it cannot be read or has more than `limit` bytes."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise InputError(f"no such file: {path}")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size or limit  # what is asked for is allocated first, however short it is
            data = file.read(min(size, limit) + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > limit:
        raise InputError(f"{path} has more than {limit} bytes: this is not the file that its name says")
    return data


def read_text(path: Path, limit: int) -> str:
    """All of a UTF-8 file. Raises InputError as `read_bytes` does, and for what is no UTF-8."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}: fetch it again") from error


@dataclass(frozen=True)
class Node:
    """A JSON object and where it stands, for errors that name file and key."""

    path: Path
    at: str
    values: Mapping[str, Any]

    def fault(self, key: str, value: object, why: str) -> InputError:
        shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
        where = f"{self.at}.{key}".strip(".")
        return InputError(f"{self.path}: {where} is {shown[:SHOWN]}: {why}; correct the file or fetch it again")

    def get(self, key: str, kind: type, what: str) -> Any:
        """The value of `key`, None where it is missing or null; a bool is no int."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fault(key, value, f"it must be {what}")
        return value

    def text(self, key: str) -> str | None:
        return self.get(key, str, "a text")

    def flag(self, key: str) -> bool | None:
        return self.get(key, bool, "true or false")

    def count(self, key: str, limit: int) -> int | None:
        """An integer from 0 to `limit`."""
        value = self.get(key, int, "an integer")
        if value is not None and not 0 <= value <= limit:
            raise self.fault(key, value, f"it must be at least 0 and at most {limit}")
        return value

    def number(self, key: str) -> float | None:
        value = self.get(key, int | float, "a number")
        if value is None:
            return None
        try:
            finite = math.isfinite(float(value))
        except OverflowError:
            finite = False
        if not finite:
            raise self.fault(key, value, "it must be finite")
        return float(value)

    def node(self, key: str) -> "Node":
        """The object under `key`, empty where it is missing."""
        return Node(self.path, f"{self.at}.{key}".strip("."), self.get(key, dict, "an object") or {})

    def nodes(self, key: str) -> list["Node"]:
        """The objects of the list under `key`."""
        items = self.get(key, list, "a list") or []
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                raise self.fault(f"{key}[{i}]", item, "it must be an object")
        return [Node(self.path, f"{self.at}.{key}[{i}]".strip("."), item) for i, item in enumerate(items)]


def read_json(path: Path, limit: int, values: int) -> Node:
    """The object in a JSON file of at most `limit` bytes and about `values` values.

    A value may take 24 times its text once it is parsed (an empty list: two bytes, and 56), so values are counted
    before, by the marks between them: no more than BYTES_A_VALUE for each, and a few times the text, are ever taken.

    NaN and Infinity pass, as Python writes them into configs (Mamba's time_step_limit); `Node.number` refuses them.
    Raises InputError for what is no JSON object: a key with two values, nesting too deep, numbers of absurd length.
    """
    try:
        text = read_text(path, limit)
        if (found := sum(map(text.count, "[{,:"))) > values:
            raise InputError(f"{path} holds about {found} values, more than {values}: this is another file")
        value = json.loads(text, object_pairs_hook=_once)
    except InputError:
        raise
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a model's file: fetch it again") from error
    except ValueError as error:
        raise InputError(f"{path} is not sound JSON: {str(error)[:200]}; correct the file or fetch it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__} instead of an object: this is another file")
    return Node(path, "", value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next((key for key, value in pairs if values[key] != value), None)
        if twice is not None:
            raise ValueError(f"the key {twice[:SHOWN]!r} is there twice, with different values")
    return values
