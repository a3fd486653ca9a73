"""Files, folders and JSON: the one place that reads, writes, digests and normalises.

Files that this package wrote are trusted. Files from elsewhere come through `read_bytes`, `read_text` or `read_json`:
bounded, with one clear error.
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

Model = TypeVar("Model", bound=BaseModel)

MAX_BYTES, MAX_JSONL_BYTES = 128 << 20, 16 << 20
"""What is read of a file from elsewhere at most."""
LOCK_WAIT_S = 3600.0


def cache_dir() -> Path:
    """Folder of fetched and derived models: `$SPECNB_CACHE`, else `$XDG_CACHE_HOME/specnb`, else `~/.cache/specnb`.

    The folder is not created here.
    """
    folder = os.environ.get("SPECNB_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "specnb")
    return named_folder(folder)


def named_folder(name: str | Path) -> Path:
    """Return the absolute path of a folder; InputError for `~` of an unknown user."""
    with reading(name):
        return Path(name).expanduser().absolute()


def project_dir() -> Path:
    """Return the folder that holds `data/`: the checkout, with `notebooks/` and `figures/`, or a wheel's package."""
    package = Path(__file__).resolve().parent
    return package if (package / "data").is_dir() else package.parent


def plain(value: Any, where: str = "value", nan: Literal["error"] | None = "error") -> Any:
    """Return `value` in the types of JSON; numpy scalars, dates, tuples and pydantic models are converted.

    NaN, infinity, a key that is not text and a type that JSON lacks raise InputError with the place. With `nan=None`
    numbers that are none, pandas' NA among them, become None.

    >>> plain({"rates": (0.5, float("nan"))}, nan=None)
    {'rates': [0.5, None]}
    """
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif getattr(value, "ndim", None) == 0:
        value = value.item()
    match value:
        case str():
            return str.__str__(value)  # the value of a text enumeration, not its name
        case None | int():
            return value
        case float() if math.isfinite(value):
            return value
        case date():
            return value.isoformat()
        case Mapping():
            if bad := [key for key in value if not isinstance(key, str)]:
                raise InputError(f"{where} has the key {bad[0]!r} ({type(bad[0]).__name__}): use str(), as JSON does")
            return {str.__str__(key): plain(item, f"{where}.{key}", nan) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, f"{where}[{index}]", nan) for index, item in enumerate(value)]
    if nan is None and (isinstance(value, float) or type(value).__name__ in ("NAType", "NaTType")):
        return None
    raise InputError(f"{where} is {value!r:.80} ({type(value).__name__}), expected numbers, text, lists, dicts or None")


def comma_list(text: str) -> list[str]:
    """Return the words that commas separate."""
    return [word.strip() for word in text.split(",")]


def digest(value: Any) -> str:
    """Return the sha256 (hex) of bytes, of the file that a Path names, or of an object's JSON, keys sorted, no spaces.

    Raises InputError as `plain` does.
    """
    if isinstance(value, Path):
        with value.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if not isinstance(value, bytes):
        value = json.dumps(plain(value), sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(value).hexdigest()


def file_digest(path: str | Path) -> str:
    """Return `digest(Path(path))`, remembered in the cache by path, size and time stamp. InputError for no file."""
    with reading(path):
        file = Path(path).expanduser().resolve()
        stat = regular_stat(file)
        memory = cache_dir() / "digests" / digest([str(file), stat.st_size, stat.st_mtime_ns])
        if not memory.exists():
            write_atomic(memory, digest(file).encode())
        return memory.read_text()


@contextlib.contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Turn what the system and the decoders raise inside into an InputError that names the place."""
    try:
        yield
    except SpecnbError:
        raise
    except Exception as error:  # the decoders of others raise whatever a broken file makes them stumble over
        reason = (str(error) or type(error).__name__)[:200]
        raise InputError(f"{place} cannot be read ({reason}): check it, or fetch or make it again") from error


def regular_stat(path: Path) -> os.stat_result:
    """Return the `stat` of a regular file. Raises OSError for all else: a pipe may never end."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    return path.stat()


def read_bytes(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """Return all of a file. Raises InputError if it cannot be read or has more than `limit` bytes."""
    with reading(path):
        if regular_stat(Path(path)).st_size > limit:
            raise ValueError(f"it has more than {limit} bytes")
        return Path(path).read_bytes()


def read_text(path: str | Path, limit: int = MAX_BYTES) -> str:
    """Return all of a UTF-8 file. Raises InputError as `read_bytes` does, and for bytes that are not UTF-8."""
    with reading(path):
        return read_bytes(path, limit).decode("utf-8")


def read_json(path: str | Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file. Raises InputError as `read_text` does, and for anything but a JSON object."""
    with reading(f"{path}: the JSON"):
        value = json.loads(read_text(path, limit))
        if not isinstance(value, dict):
            raise ValueError(f"it holds a JSON {type(value).__name__}, not an object")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file of this package or checkout."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each line that is not blank; a byte order mark and CRLF are allowed.

    Raises InputError with file and line for one that is not JSON in UTF-8, and as `read_bytes` does.
    """
    # Only \n ends a line: str.splitlines would also cut at U+2028 and others, which JSON allows inside a string.
    for number, line in enumerate(read_bytes(path, MAX_JSONL_BYTES).removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            with reading(f"{path}:{number}: the JSON"):
                value = json.loads(line.decode())
            yield number, value


def validated(model: type[Model], value: Any, where: str) -> Model:
    """Return `value` as a `model`; InputError with the place and the first reasons, each with the value given."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)[:5]
        reasons = [f"{'.'.join(map(str, d['loc'])) or 'all'} = {d['input']!r:.150}: {d['msg']}" for d in details]
        raise InputError(f"{where}: {'; '.join(reasons)}") from error


@contextlib.contextmanager
def writing(path: str | Path, kind: type[SpecnbError] = InputError) -> Iterator[None]:
    """Turn an OSError inside (no room, no permission) into an error of this `kind` that names `path`."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot write {path} ({error}): make room, or name another folder (SPECNB_CACHE)") from error


@contextlib.contextmanager
def locked(file: Path, reason: str, *, wait_s: float = 0, kind: type[SpecnbError] = InputError) -> Iterator[None]:
    """Hold the lock `file`, whose folder is made; the system releases it when the process is killed.

    Raises `kind` with `reason` while another process or thread holds it, and `wait_s` have passed.
    """
    from filelock import FileLock, Timeout

    with writing(file.parent, kind):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(file).acquire(timeout=wait_s)
        except Timeout as error:
            raise kind(f"{file} is held: {reason}") from error
    with lock:
        yield


def write_atomic(path: str | Path, data: bytes) -> None:
    """Write `data` to `path`, folders included, so that a reader sees the old file or the new one, never a part.

    Raises InputError where it cannot be written.
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


# ---- files that are made once


def once(dest: Path, make: Callable[[], None], is_there: Callable[[], bool], *, n_bytes: int) -> Path:
    """Return `dest`, which `make` makes where `is_there` says no: one thread or process does, the others wait.

    Raises FetchError for a disk without `n_bytes` free or that cannot be written, and what `make` raises.
    """
    if not is_there():
        lock = dest.with_name(f"{dest.name}.lock")
        with locked(lock, "wait, or remove it", wait_s=LOCK_WAIT_S, kind=FetchError), writing(dest.parent, FetchError):
            if not is_there():
                need_space(dest.parent, n_bytes)
                make()
    return dest


def make_once(dest: Path, make: Callable[[Path], object], *, n_bytes: int) -> Path:
    """Return the file or folder `dest` as `make(path)` writes it where it is not there: its name tells its source.

    Raises as `once`.
    """
    partial = dest.with_name(f"making-{dest.name}")

    def make_whole() -> None:
        try:
            _remove(partial)
            make(partial)
            partial.replace(dest)
        finally:
            _remove(partial)

    return once(dest, make_whole, dest.exists, n_bytes=n_bytes)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def need_space(folder: Path, n_bytes: int) -> None:
    """FetchError unless the disk of `folder` (which exists) has `n_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise FetchError(f"{folder} has {free} of {n_bytes} bytes: free some, or set SPECNB_CACHE to another disk")


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0
