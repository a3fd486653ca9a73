"""Files, folders and JSON: reading, writing, digests and normalization.

Files that this package wrote are trusted. Other files are read by `read_bytes`, `read_text` or
`read_json`, which limit the size and raise one clear error.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from specnb.errors import FetchError, InputError, SpecnbError

JsonObject = dict[str, Any]
"""A JSON object, or values that become one."""
Model = TypeVar("Model", bound=BaseModel)

MAX_BYTES = 128 << 20
MAX_JSONL_BYTES = 16 << 20
"""Size limits of files that the package did not write."""
LOCK_WAIT_S = 3600.0


def cache_dir() -> Path:
    """Return the folder of downloaded and derived models, which may not exist yet.

    `$SPECNB_CACHE`, else `$XDG_CACHE_HOME/specnb`, else `~/.cache/specnb`.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return named_folder(os.environ.get("SPECNB_CACHE") or Path(caches, "specnb"))


def named_folder(name: str | Path) -> Path:
    """Return the absolute path of a folder. Raises InputError for `~` of an unknown user."""
    with reading(name):
        return Path(name).expanduser().absolute()


def project_dir() -> Path:
    """Return the folder that contains `data/`: the checkout, or a wheel's package."""
    package = Path(__file__).resolve().parent
    return package if (package / "data").is_dir() else package.parent


def plain(value: Any, where: str = "value", nan: Literal["error"] | None = "error") -> Any:
    """Convert numpy scalars, dates, tuples and pydantic models in `value` to JSON types.

    NaN, infinity, keys that are not str and other types raise InputError with their place. With
    `nan=None`, NaN, infinity and pandas' NA become None.

    >>> plain({"rates": (0.5, float("nan"))}, nan=None)
    {'rates': [0.5, None]}
    """
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif getattr(value, "ndim", None) == 0:
        value = value.item()
    match value:
        case str():
            return str.__str__(value)  # for a str enum, the value rather than the name
        case None | int():
            return value
        case float() if math.isfinite(value):
            return value
        case date():
            return value.isoformat()
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    got = f"{where} has the key {key!r} ({type(key).__name__})"
                    raise InputError(f"{got}, expected a string: convert it with str()")
            items = value.items()
            return {str.__str__(key): plain(item, f"{where}.{key}", nan) for key, item in items}
        case list() | tuple():
            return [plain(item, f"{where}[{index}]", nan) for index, item in enumerate(value)]
    kind = type(value).__name__
    if nan is None and (isinstance(value, float) or kind in ("NAType", "NaTType")):
        return None
    expected = "numbers, strings, lists, dicts or None"
    raise InputError(f"{where} is {value!r:.80} ({kind}), expected {expected}")


def comma_list(text: str) -> list[str]:
    """Split text at commas and strip each word."""
    return [word.strip() for word in text.split(",")]


def digest(value: Any) -> str:
    """Return the SHA-256 (hex) of bytes, of a file (Path), or of an object's JSON.

    The JSON has sorted keys and no spaces. Raises InputError as `plain` does.
    """
    if isinstance(value, Path):
        with value.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if not isinstance(value, bytes):
        value = json.dumps(plain(value), sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(value).hexdigest()


def file_digest(path: str | Path) -> str:
    """Return `digest(Path(path))`, cached by path, size and modification time.

    Raises InputError if there is no such file.
    """
    with reading(path):
        file = Path(path).expanduser().resolve()
        stat = regular_stat(file)
        cached = cache_dir() / "digests" / digest([str(file), stat.st_size, stat.st_mtime_ns])
        if not cached.exists():
            write_atomic(cached, digest(file).encode())
        return cached.read_text()


@contextlib.contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Convert errors of the OS and of decoders to an InputError that names `place`."""
    try:
        yield
    except SpecnbError:
        raise
    except Exception as error:  # decoders raise errors of any class for damaged files
        reason = (str(error) or type(error).__name__)[:200]
        remedy = "check it, or download or create it again"
        raise InputError(f"{place} cannot be read ({reason}): {remedy}") from error


def regular_stat(path: Path) -> os.stat_result:
    """Return the `stat` of a regular file. Raises OSError for others, such as a pipe."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    return path.stat()


def read_bytes(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """Read a whole file. Raises InputError if it cannot be read or has more than `limit` bytes."""
    with reading(path):
        if regular_stat(Path(path)).st_size > limit:
            raise ValueError(f"it has more than {limit} bytes")
        return Path(path).read_bytes()


def read_text(path: str | Path, limit: int = MAX_BYTES) -> str:
    """Read a whole UTF-8 file. Raises InputError as `read_bytes` does, and for other encodings."""
    with reading(path):
        return read_bytes(path, limit).decode("utf-8")


def read_json(path: str | Path, limit: int = MAX_BYTES) -> JsonObject:
    """Read a JSON object from a file. Raises InputError as `read_text`, or if it is not one."""
    with reading(f"{path}: the JSON"):
        value = json.loads(read_text(path, limit))
        if not isinstance(value, dict):
            raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
    return value


def read_toml(path: Path) -> JsonObject:
    """Read a TOML file of this package or checkout."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) for each nonblank line; a byte order mark and CRLF are allowed.

    Raises InputError with file and line if a line is not JSON in UTF-8, and as `read_bytes` does.
    """
    # Only \n ends a line: str.splitlines also splits at U+2028 and others, valid in JSON strings.
    lines = read_bytes(path, MAX_JSONL_BYTES).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            with reading(f"{path}:{number}: the JSON"):
                value = json.loads(line.decode())
            yield number, value


def validated(model: type[Model], value: Any, where: str) -> Model:
    """Validate `value` as a `model`. Raises InputError with `where`, the reasons and the values."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        reasons = []
        for detail in error.errors(include_url=False, include_context=False)[:5]:
            field = ".".join(map(str, detail["loc"])) or "all"
            reasons.append(f"{field} = {detail['input']!r:.150}: {detail['msg']}")
        raise InputError(f"{where}: {'; '.join(reasons)}") from error


@contextlib.contextmanager
def writing(path: str | Path, kind: type[SpecnbError] = InputError) -> Iterator[None]:
    """Convert an OSError (disk full, no permission) to a `kind` that names `path`."""
    try:
        yield
    except OSError as error:
        remedy = "free disk space, or choose another folder (SPECNB_CACHE)"
        raise kind(f"cannot write {path} ({error}): {remedy}") from error


@contextlib.contextmanager
def locked(
    file: Path, reason: str, *, wait_s: float = 0, kind: type[SpecnbError] = InputError
) -> Iterator[None]:
    """Hold the lock `file`, creating its folder. The system releases it if the process is killed.

    Raises `kind` with `reason` if another process or thread still holds it after `wait_s` seconds.
    """
    from filelock import FileLock, Timeout

    with writing(file.parent, kind):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(file).acquire(timeout=wait_s)
        except Timeout as error:
            raise kind(f"{file} is locked: {reason}") from error
    with lock:
        yield


def write_atomic(path: str | Path, data: bytes) -> None:
    """Write `data` to `path` atomically, creating its folders: readers see the old or the new file.

    Raises InputError if it cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any, indent: int | None = 1) -> None:
    """Write `value` as JSON with a final line break. Raises InputError as `write_atomic` does."""
    write_atomic(path, f"{json.dumps(value, indent=indent)}\n".encode())


# ---- files that are created once


def make_once(dest: Path, make: Callable[[Path], object], *, n_bytes: int) -> Path:
    """Return the file or folder `dest`, calling `make(path)` to write it unless it exists.

    One thread or process creates it while others wait. Its name must identify its source. Raises
    FetchError if the disk is not writable or has less than `n_bytes` free, or if the lock is held
    for LOCK_WAIT_S; errors of `make` propagate.
    """
    if dest.exists():
        return dest
    partial = dest.with_name(f"making-{dest.name}")
    lock = dest.with_name(f"{dest.name}.lock")
    with (
        locked(lock, "wait, or delete it", wait_s=LOCK_WAIT_S, kind=FetchError),
        writing(dest.parent, FetchError),
    ):
        if not dest.exists():
            need_space(dest.parent, n_bytes)
            try:
                _remove(partial)  # left by a killed process
                make(partial)
                partial.replace(dest)
            finally:
                _remove(partial)
    return dest


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def need_space(folder: Path, n_bytes: int) -> None:
    """Raise FetchError unless the disk of `folder` (which exists) has `n_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        remedy = "free disk space, or set SPECNB_CACHE to another disk"
        raise FetchError(f"{folder} has {free} bytes free, {n_bytes} are needed: {remedy}")


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    return path.stat().st_size if path.is_file() else 0
