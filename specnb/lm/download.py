"""Download one file of known digest, resuming what an earlier try left; and the file helpers that it needs.

What lies under its final name is whole: bytes go to a temporary name, are checked, and are moved into place.
"""

import hashlib
import logging
import re
import shutil
import ssl
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from filelock import FileLock, Timeout
from tqdm import tqdm

from specnb.errors import FetchError, InputError
from specnb.provenance import file_digest

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 30  # no download is larger, unless the caller says so
PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # between tries that brought nothing new
READ_TIMEOUT_S = 30.0  # without a byte from the server
LOCK_TIMEOUT_S = 3600.0
CHUNK_BYTES = 1 << 20

_CONTENT_RANGE = re.compile(r"bytes (?:(?P<start>\d+)-\d+|\*)/(?P<total>\d+|\*)")


class Unreachable(FetchError):
    """Not a byte came, or the server wants credentials: pip, with its own settings, may still get through."""


class _Dropped(Exception):
    """One request did not bring the rest of the file; the next one may."""


def download(url: str, dest: Path, *, sha256: str, max_bytes: int = MAX_BYTES, progress: bool = True) -> Path:
    """Download `url` (http, https, file) to `dest` and check its digest.

    The bytes stream into `dest` + ".part", which survives an interruption; the next call asks only for the rest.
    A dropped connection is taken up again a few times. Raises FetchError when it cannot be had (the part is kept),
    when it is longer than `max_bytes` or has another digest (the part is deleted); InputError for another scheme.
    """
    if urlsplit(url).scheme not in ("http", "https", "file"):
        raise InputError(f"cannot download {url!r}: use an http, https or file address")
    part = dest.with_name(dest.name + ".part")
    with disk_errors(dest.parent), tqdm(desc=dest.name, unit="B", unit_scale=True, disable=not progress) as bar:
        dest.parent.mkdir(parents=True, exist_ok=True)
        best, failures = size_of(part), 0
        while True:
            try:
                _receive(url, part, max_bytes, bar)
                break
            except _Dropped as error:
                # only new bytes earn new tries: a server that always starts again must not keep us for ever
                failures, best = (0 if size_of(part) >= best + CHUNK_BYTES else failures + 1), max(best, size_of(part))
                if failures > len(PAUSES_S):
                    kind = FetchError if best else Unreachable
                    kept = f"{size_of(part)} bytes are kept in {part}" if best else "nothing was received"
                    raise kind(f"cannot download {url}: {error}; {kept}") from error
                log.info("download of %s: %s; trying again", url, error)
                time.sleep(PAUSES_S[max(failures - 1, 0)])
        check_digest(part, sha256, f"the download of {url}", delete=True)
        part.replace(dest)
    return dest


def _receive(url: str, part: Path, max_bytes: int, bar: tqdm) -> None:
    """One request for what `part` lacks, appended to it (or from the start, if the server answers so)."""
    have = size_of(part)
    headers = {"User-Agent": "specnb"} | ({"Range": f"bytes={have}-"} if have else {})
    with _open(url, headers, part, have) as response:
        if response.status == 206:
            offset = have
            given = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if given is None or given["start"] is None or int(given["start"]) != have:
                part.unlink(missing_ok=True)
                raise _Dropped(f"the server sent another range than bytes {have}-")
        elif response.status == 416:
            return  # nothing is missing; the digest decides
        else:
            offset = 0
        length = response.headers.get("Content-Length", "")
        expected = offset + int(length) if length.isdecimal() else None
        bar.reset(expected)
        bar.n = bar.initial = offset
        bar.refresh()
        got = offset
        with part.open("ab" if offset else "wb") as out:
            while got <= max_bytes and (expected or 0) <= max_bytes and (chunk := _read(response)):
                out.write(chunk)
                got += len(chunk)
                bar.update(len(chunk))
    if max(got, expected or 0) > max_bytes:
        part.unlink()
        raise FetchError(f"{url} is longer than the {max_bytes} bytes expected; nothing was kept")
    if expected is not None and got < expected:
        raise _Dropped(f"the connection closed after {got} of {expected} bytes")


def _open(url: str, headers: dict[str, str], part: Path, have: int) -> HTTPResponse | HTTPError:
    """The response, or 416 where the part is whole; _Dropped where another try can help, else FetchError."""
    try:
        return urlopen(Request(url, headers=headers), timeout=READ_TIMEOUT_S)
    except HTTPError as error:
        if error.code == 416:
            whole = _CONTENT_RANGE.fullmatch(error.headers.get("Content-Range", ""))
            if whole and whole["total"] == str(have):
                return error
            part.unlink(missing_ok=True)
            raise _Dropped("the server has no such range; starting again") from error
        if error.code in (408, 425, 429) or error.code >= 500:
            raise _Dropped(f"HTTP {error.code} {error.reason}") from error
        kind = Unreachable if error.code in (401, 403, 407) else FetchError
        raise kind(f"cannot download {url}: HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if urlsplit(url).scheme == "file":
            raise FetchError(f"cannot read {url}: {reason}") from error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise Unreachable(f"cannot download {url}: {reason}") from error
        raise _Dropped(str(reason) or repr(reason)) from error


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK_BYTES)
    except (OSError, HTTPException) as error:
        raise _Dropped(str(error) or repr(error)) from error


def files_digest(paths: Iterable[str | Path]) -> str:
    """sha256 (hex) of the digests of several files, in their order. Raises as `provenance.file_digest`."""
    return hashlib.sha256("".join(map(file_digest, paths)).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(path: Path, sha256: str, what: str, *, delete: bool = False) -> None:
    """FetchError with both digests unless the file has this one; `delete` removes a wrong file."""
    found = sha256_of(path)
    if found != sha256:
        if delete:
            path.unlink()
        raise FetchError(f"{what} has sha256 {found}, pinned is {sha256}" + ("; it was deleted" if delete else ""))


def need_space(folder: Path, n_bytes: int) -> None:
    """FetchError unless the disk of `folder` (which exists) has `n_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise FetchError(
            f"{folder} needs {n_bytes / 1e6:.0f} MB, the disk has {free / 1e6:.0f} MB free: "
            "free some, or set SPECNB_CACHE to a folder on another disk"
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of the disk into a FetchError that names the folder and the remedy."""
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"cannot work in {folder}: {error}; make it writable or free some space, or set SPECNB_CACHE elsewhere"
        ) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path` (a file beside it) among threads and processes; the folder is made.

    An OSError in the body becomes a FetchError too (see `disk_errors`).
    """
    lock = FileLock(path.with_name(path.name + ".lock"), timeout=LOCK_TIMEOUT_S)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with lock:
                yield
        except Timeout as error:
            raise FetchError(f"another process has held {lock.lock_file} for {LOCK_TIMEOUT_S:.0f} s: end it") from error


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0
