"""The I/O kernel: one JSON form a value, digests, bounded reading, writing that never leaves half a file."""

import enum
import hashlib
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import create_model

from specnb import io
from specnb.errors import InputError
from specnb.io import canonical_json, digest, file_digest, plain, read_bytes, read_json, read_text, write_atomic

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.randoms())
def test_json_comes_back_as_the_same_value_and_the_order_of_keys_does_not_count(value, random):
    assert json.loads(canonical_json(value)) == value
    if isinstance(value, dict):
        items = list(value.items())
        random.shuffle(items)
        assert digest(dict(items)) == digest(value)


class Colour(str, enum.Enum):  # noqa: UP042 - libraries still use this form, whose str() is not its value
    RED = "red"


def test_values_have_one_plain_form_and_those_that_json_lacks_are_refused_with_their_place():
    for value, expected in (
        (np.int64(3), 3), ((1, (2,)), [1, [2]]), ({Colour.RED: Colour.RED}, {"red": "red"}),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"), (create_model("P", k=(int, 4))(), {"k": 4}),
    ):  # fmt: skip
        assert (plain(value), type(plain(value))) == (expected, type(expected))
    for value, place in (
        ({"a": [1, float("nan")]}, r"value\.a\[1\].*nan"), (np.float32("-inf"), "-inf"), (np.zeros(2), "ndarray"),
        ({"p": Path("x")}, r"value\.p.*PosixPath"), ({"curve": {1: 2}}, r"value\.curve.* 1 "),
    ):  # fmt: skip
        with pytest.raises(InputError, match=place):
            plain(value)
    rows = pd.DataFrame({"rate": [0.5, np.nan], "n": pd.array([1, None], "Int64")}).to_dict(orient="records")
    assert plain(rows, nan=None) == [{"rate": 0.5, "n": 1}, {"rate": None, "n": None}]


def settled(file: Path, data: bytes, mtime: int = 1_600_000_000) -> Path:
    """A file that was written long ago: its digest may be remembered."""
    file.write_bytes(data)
    os.utime(file, (mtime, mtime))
    return file


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_settled_file_is_hashed_once_and_another_size_or_time_is_another_file(tmp_path, own_cache, monkeypatch):
    file = settled(tmp_path / "w", b"[1]")
    assert digest(file) == digest(b"[1]") == digest([1]) == hashlib.sha256(b"[1]").hexdigest()
    for data, mtime in ((b"one", 1_600_000_000), (b"three", 1_600_000_000), (b"seven", 1_600_000_001)):
        assert file_digest(settled(file, data, mtime)) == digest(data)
    file_digest(settled(tmp_path / "v", b"v"))
    assert set(json.loads((own_cache / "digests.json").read_bytes())) == {str(file), str(tmp_path / "v")}
    monkeypatch.setattr(hashlib, "file_digest", None)  # hashing again would fail
    (tmp_path / "link").symlink_to(file)
    assert file_digest(str(file)) == file_digest(tmp_path / "link") == digest(b"seven")


def test_a_file_just_written_is_not_remembered(tmp_path, own_cache):
    """Two writes within the grain of the time stamp look alike; only hashing tells them apart."""
    now = int(time.time())
    for data in (b"one", b"two"):
        assert file_digest(settled(tmp_path / "w", data, now)) == digest(data)


def test_a_damaged_memory_of_digests_is_replaced_and_an_unwritable_one_costs_only_time(tmp_path, own_cache):
    file = settled(tmp_path / "w", b"one")
    own_cache.write_text("a file where the folder should be")
    assert file_digest(file) == digest(b"one")
    own_cache.unlink()
    own_cache.mkdir()
    (own_cache / "digests.json").write_bytes(b"{")
    assert file_digest(file) == digest(b"one")
    assert json.loads((own_cache / "digests.json").read_bytes())[str(file)][2] == digest(b"one")


def test_what_is_no_file_or_no_json_object_is_refused_by_name_and_a_file_is_read_up_to_its_limit(tmp_path):
    file = tmp_path / "some.json"
    for bad in (file, tmp_path):
        for reader in (file_digest, lambda path: read_bytes(path, 9)):
            with pytest.raises(InputError, match=bad.name):
                reader(bad)
    for content in (b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"some\.json"):
            read_json(file, 1 << 20)
    file.write_bytes(b'{"a": 1}')
    assert (read_json(file, 8), read_text(file, 8), read_bytes(file, 8)) == ({"a": 1}, '{"a": 1}', b'{"a": 1}')
    with pytest.raises(InputError, match=r"some\.json.* 7 "):
        read_json(file, 7)


def test_a_failed_write_keeps_the_old_file_and_is_an_input_error(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.json"
    write_atomic(path, b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io.os, "fsync", full)
    with pytest.raises(InputError, match=r"a\.json"):
        write_atomic(path, b"new")
    assert [(file.name, file.read_bytes()) for file in path.parent.iterdir()] == [("a.json", b"old")]
    with pytest.raises(InputError, match=r"a\.json"):
        write_atomic(path / "below", b"a file is no folder")
