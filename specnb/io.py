"""Files, folders and JSON: the one place that reads, writes, digests and normalises.

Files that this package wrote are trusted. Files from elsewhere come through `read_bytes`, `read_text` or `read_json`:
bounded, with one clear error.
"""

import contextlib
import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from specnb.errors import InputError, SpecnbError

Model = TypeVar("Model", bound=BaseModel)

MAX_JSONL_BYTES = 16 << 20
SETTLED_S = 2.0
"""A file changed less long ago may change again within the grain of its time stamp: its digest is not remembered."""


def cache_dir() -> Path:
    """Folder of fetched and derived models: `$SPECNB_CACHE`, else `$XDG_CACHE_HOME/specnb`, else `~/.cache/specnb`.

    The folder is not created here.
    """
    if folder := os.environ.get("SPECNB_CACHE"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specnb"


def project_dir() -> Path:
    """The checkout that holds `data/`, `notebooks/` and `figures/`; the package is installed from it (`-e .`)."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "data").is_dir():
        raise InputError(f"no data/ folder beside the package ({root}): install it in its checkout, `pip install -e .`")
    return root


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
        case None | bool():
            return value
        case str():
            return str.__str__(value)  # the value of a text enumeration, not its name
        case int():
            return int(value)
        case float() if math.isfinite(value):
            return value
        case Mapping():
            if bad := [key for key in value if not isinstance(key, str)]:
                raise InputError(f"{where} has the key {bad[0]!r} ({type(bad[0]).__name__}): use str(), as JSON does")
            return {str.__str__(key): plain(item, f"{where}.{key}", nan) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, f"{where}[{index}]", nan) for index, item in enumerate(value)]
    if nan is None and (isinstance(value, float) or type(value).__name__ in ("NAType", "NaTType")):
        return None
    if isinstance(value, date):
        return value.isoformat()
    raise InputError(f"{where} is {value!r:.80} ({type(value).__name__}), expected numbers, text, lists, dicts or None")


def comma_list(text: str) -> list[str]:
    """Return the words that commas separate."""
    return [word.strip() for word in text.split(",")]


def canonical_json(value: Any) -> str:
    """Return one ASCII text for equal values: keys sorted, no spaces. Raises InputError as `plain` does."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """Return the sha256 (hex) of bytes, of the file that a Path names, or of an object's `canonical_json`."""
    if isinstance(value, Path):
        with value.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(value if isinstance(value, bytes) else canonical_json(value).encode()).hexdigest()


def file_digest(path: str | Path) -> str:
    """Return `digest(Path(path))`, remembered in `cache_dir()/digests.json` by path, size and time stamp.

    A lost or unwritable memory costs the time to hash again. Raises InputError unless `path` is a file.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise InputError(f"{path} is no file: only files have a digest; check the path")
    memory, stat, entries = cache_dir() / "digests.json", file.stat(), {}
    with contextlib.suppress(InputError):
        entries = read_json(memory, 4 << 20)
    size, mtime_ns, known = entries.get(str(file), (0, 0, ""))
    if (size, mtime_ns) != (stat.st_size, stat.st_mtime_ns):
        known = digest(file)
        if time.time() - stat.st_mtime_ns / 1e9 >= SETTLED_S:
            entries[str(file)] = [stat.st_size, stat.st_mtime_ns, known]
            with contextlib.suppress(InputError):
                write_atomic(memory, json.dumps(entries, indent=0).encode())
    return known


def read_bytes(path: str | Path, limit: int) -> bytes:
    """Return all of a file. Raises InputError if it cannot be read or has more than `limit` bytes."""
    try:
        if Path(path).stat().st_size <= limit:
            return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): check the path") from error
    raise InputError(f"{path} has more than {limit} bytes: it is another file than expected; check it")


def read_text(path: str | Path, limit: int) -> str:
    """Return all of a UTF-8 file. Raises InputError as `read_bytes` does, and for bytes that are not UTF-8."""
    data = read_bytes(path, limit)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}): save it as UTF-8, or fetch it again") from error


def read_json(path: str | Path, limit: int) -> dict[str, Any]:
    """Return the object in a JSON file. Raises InputError as `read_text` does, and for anything but a JSON object."""
    text = read_text(path, limit)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({str(error)[:200]}): damaged; fetch or make it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, not an object: this is another file")
    return value


def json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each line that is not blank; a byte order mark and CRLF are allowed.

    Raises InputError with file and line for one that is not JSON in UTF-8, and as `read_bytes` does.
    """
    # Only \n ends a line: str.splitlines would also cut at U+2028 and others, which JSON allows inside a string.
    for number, line in enumerate(read_bytes(path, MAX_JSONL_BYTES).removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            try:
                value = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{number}: not JSON in UTF-8: {error}; write one object a line") from error
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
