"""I/O: conversion to JSON, digests, reading with limits, atomic writing."""

import enum
import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydantic import create_model

from specnb.errors import InputError
from specnb.io import cache_dir, digest, file_digest, plain, read_bytes, read_json, read_text
from specnb.store import results_dir


# libraries still use this form, whose str() is not its value
class Color(str, enum.Enum):  # noqa: UP042
    RED = "red"


def test_other_values_are_converted_or_refused_with_their_place():
    for value, expected in (
        (np.int64(3), 3),
        ((1, (2,)), [1, [2]]),
        ({Color.RED: Color.RED}, {"red": "red"}),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        (create_model("P", k=(int, 4))(), {"k": 4}),
    ):
        assert (plain(value), type(plain(value))) == (expected, type(expected))
    for value, place in (
        ({"a": [1, float("nan")]}, r"value\.a\[1\].*nan"),
        (np.zeros(2), "ndarray"),
        ({"curve": {1: 2}}, r"value\.curve.* 1 "),
    ):
        with pytest.raises(InputError, match=place):
            plain(value)
    rows = [{"rate": np.nan, "n": pd.NA}]
    assert plain(rows, nan=None) == [{"rate": None, "n": None}]


def test_a_file_is_hashed_again_only_if_its_size_or_time_changes(tmp_path, monkeypatch):
    file = tmp_path / "w"
    for data, mtime in ((b"[1]", 1), (b"one", 2), (b"three", 2), (b"seven", 3)):
        file.write_bytes(data)
        os.utime(file, (mtime, mtime))
        assert file_digest(file) == digest(file) == digest(data) == hashlib.sha256(data).hexdigest()
    assert digest([1]) == digest(b"[1]")
    monkeypatch.setattr(hashlib, "file_digest", None)  # hashing again would fail
    (tmp_path / "link").symlink_to(file)
    assert file_digest(str(file)) == file_digest(tmp_path / "link") == digest(b"seven")


def test_invalid_files_and_json_are_refused_with_their_name_and_files_up_to_the_limit_are_read(
    tmp_path,
):
    file = tmp_path / "some.json"
    os.mkfifo(tmp_path / "pipe")  # reading a pipe or a device may never end
    for bad in (file, tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        for reader in (file_digest, lambda path: read_bytes(path, 1 << 20)):
            with pytest.raises(InputError, match=bad.name):
                reader(bad)
    for content in (b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"some\.json"):
            read_json(file, 1 << 20)
    file.write_bytes(b'{"a": 1}')
    assert read_json(file, 8) == {"a": 1} and read_text(file, 8) == '{"a": 1}'
    with pytest.raises(InputError, match=r"some\.json.* 7 "):
        read_json(file, 7)


@pytest.mark.parametrize(
    ("variable", "folder"),
    [("SPECNB_CACHE", cache_dir), ("XDG_CACHE_HOME", cache_dir), ("SPECNB_RESULTS", results_dir)],
)
def test_a_folder_of_an_unknown_user_is_refused_with_its_name(variable, folder, monkeypatch):
    monkeypatch.delenv("SPECNB_CACHE", raising=False)
    monkeypatch.setenv(variable, "~no-such-user/x")
    with pytest.raises(InputError, match="~no-such-user/x"):
        folder()
