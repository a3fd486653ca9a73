"""Files under the cache folder: made once under a lock, noted with their digests, and made again when damaged."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specnb.errors import FetchError, InputError
from specnb.io import digest, file_digest

LOCK_TIMEOUT_S = 3600.0
NOTE = ".made.json"
"""Ending of the note beside a derived file or folder: `{"made_from": …, "files": {name: sha256}}`."""


def made_once(dest: Path, make: Callable[[Path], object], *, n_bytes: int, made_from: str = "") -> Path:
    """The file or folder `dest` as `make(path)` writes it; made where it is not there, damaged or of another source.

    `n_bytes` must be free on the disk. `made_from` names the source where the name of `dest` does not. Raises
    FetchError for a disk that is full or not writable, and what `make` raises.
    """
    if intact(dest, made_from):
        return dest
    with locked(dest):
        if intact(dest, made_from):
            return dest
        need_space(dest.parent, n_bytes)
        partial, note = dest.with_name(f"making-{dest.name}"), note_of(dest)
        try:
            _remove(partial)
            make(partial)
            files = sorted(path for path in partial.rglob("*") if path.is_file()) or [partial]
            if not sum(size_of(file) for file in files):
                raise FetchError(f"{dest.name} was made, but is empty: look into the log of llama.cpp")
            digests = {str(file.relative_to(partial)): digest(file) for file in files}
            note.unlink(missing_ok=True)  # an old note must never stand beside a new file
            _remove(dest)
            partial.replace(dest)
            note.write_text(json.dumps({"made_from": made_from, "files": digests}), encoding="utf-8")
        finally:
            _remove(partial)
    return dest


def intact(dest: Path, made_from: str | None = None, digest_of: Callable[[Path], str] = file_digest) -> bool:
    """Whether `dest` is as it was made; `digest_of` may be `io.digest`, which trusts no time stamp."""
    try:
        note = json.loads(note_of(dest).read_text(encoding="utf-8"))
        if made_from not in (None, note["made_from"]):
            return False
        return all(digest_of(dest / name) == sha256 for name, sha256 in note["files"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, InputError):
        return False


def note_of(dest: Path) -> Path:
    """Where the note of a derived file or folder lies."""
    return dest.with_name(dest.name + NOTE)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def files_digest(paths: Iterable[str | Path]) -> str:
    """sha256 (hex) of the digests of several files, in their order. Raises as `io.file_digest`."""
    return hashlib.sha256("".join(map(file_digest, paths)).encode()).hexdigest()


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def expanded(path: str | Path) -> Path:
    """`path` with the home folder for ~; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for it


def need_space(folder: Path, n_bytes: int) -> None:
    """FetchError unless the disk of `folder` (which exists) has `n_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise FetchError(
            f"{folder} needs {n_bytes / 1e6:.0f} MB, the disk has {free / 1e6:.0f} MB free: "
            "free some, or set SPECNB_CACHE to a folder on another disk"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path` (a file beside it) among threads and processes; the folder is made.

    An OSError in the body becomes a FetchError that names the folder and the remedy.
    """
    lock = FileLock(path.with_name(path.name + ".lock"), timeout=LOCK_TIMEOUT_S)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock:
            yield
    except Timeout as error:
        raise FetchError(f"another process has held {lock.lock_file} for {LOCK_TIMEOUT_S:.0f} s: end it") from error
    except OSError as error:
        raise FetchError(
            f"cannot work in {path.parent}: {error}; make it writable or free some space, or set SPECNB_CACHE elsewhere"
        ) from error
