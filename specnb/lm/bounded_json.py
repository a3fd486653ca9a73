"""JSON of unknown origin as nodes, whose getters say what is wrong and where."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specnb import io
from specnb.errors import InputError
from specnb.io import read_bytes, read_text

__all__ = ["Node", "read_bytes", "read_json", "read_text"]


@dataclass(frozen=True)
class Node:
    """A JSON object and where it stands, for errors that name file and key."""

    path: Path
    at: str
    values: Mapping[str, Any]

    def fault(self, key: str, value: object, why: str) -> InputError:
        shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
        where = f"{self.at}.{key}".strip(".")
        return InputError(f"{self.path}: {where} is {shown[:80]}: {why}; correct the file or fetch it again")

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
        if value is not None and not abs(value) <= sys.float_info.max:
            raise self.fault(key, value, "it must be finite")
        return None if value is None else float(value)

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


def read_json(path: Path, limit: int, _values: int = 0) -> Node:
    """The object in a JSON file of at most `limit` bytes, as `io.read_json` reads it."""
    return Node(path, "", io.read_json(path, limit))
