"""Files of trained heads as they are found: opened and bounded, nothing read of their values yet.

Whatever is wrong with a file is one InputError that names it. A `.pt` is opened without running what is pickled in
it, and mapped, so that it takes no more memory than it has bytes.
"""

import shutil
import uuid
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specnb.errors import InputError
from specnb.lm.bounded_json import Node, read_json

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES, MAX_CONFIG_VALUES = 1 << 20, 1 << 14
MAX_BYTES = 64 << 30
"""Of the weights: sixteen private lm_heads of the largest vocabularies there are take about that."""
MAX_TENSORS = 4096
MAX_PICKLE_BYTES = 16 << 20
"""Of what is pickled in a `.pt` besides the weights: names and shapes."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What weights may be stored in."""


@dataclass(frozen=True)
class Source:
    """A file of weights: `tensors` by the names it gives them, and the config.json beside it (empty where none is)."""

    file: Path
    config: Node
    tensors: Mapping[str, Tensor]


def open_source(path: Path, known: Collection[str]) -> Source:
    """The weights at `path`: a file, or a folder with one of the `known` names in it, or with a single `.pt`.

    Raises InputError where there is none, or it cannot be read.
    """
    file = path if path.is_file() else _weights_in(path, known)
    opener = OPENERS.get(file.suffix)
    if opener is None:
        raise InputError(f"{file} is no file of heads: they are in {' or '.join(OPENERS)} files")
    if file.stat().st_size > MAX_BYTES:
        raise InputError(f"{file} has {file.stat().st_size} bytes, more than heads can have ({MAX_BYTES})")
    beside = file.with_name(CONFIG_FILE)
    config = read_json(beside, MAX_CONFIG_BYTES, MAX_CONFIG_VALUES) if beside.is_file() else Node(beside, "", {})
    try:
        tensors = opener(file)
    except InputError:
        raise
    except Exception as error:  # a damaged file makes torch and safetensors raise what they like
        raise InputError(f"{file} cannot be read ({str(error)[:200]}): damaged, or no file of heads") from error
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise InputError(f"{file} holds {len(tensors)} tensors: heads have from 1 to {MAX_TENSORS}")
    if odd := next((f"{name[:80]!r} {why}" for name, one in tensors.items() if (why := _unreadable(one))), ""):
        raise InputError(f"{file}: {odd}: save plain, contiguous tensors")
    return Source(file, config, tensors)


def _weights_in(folder: Path, known: Collection[str]) -> Path:
    if not folder.is_dir():
        raise InputError(f"no heads at {folder}: give a folder with trained heads, or the file of their weights")
    if found := next((folder / name for name in known if (folder / name).is_file()), None):
        return found
    single = sorted(folder.glob("*.pt"))
    if len(single) != 1:
        raise InputError(
            f"{folder} holds no heads ({len(single)} .pt files, and none of {', '.join(known)}): name the file itself"
        )
    return single[0]


def _open_safetensors(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        names = list(opened.keys())
        if len(names) > MAX_TENSORS:
            raise InputError(f"{file} holds {len(names)} tensors: heads have at most {MAX_TENSORS}")
        return {name: opened.get_tensor(name) for name in names}


def _open_pt(file: Path) -> dict[str, Tensor]:
    _require_plain_zip(file)
    return _state(torch.load(file, map_location="cpu", weights_only=True, mmap=True), file)


def _require_plain_zip(file: Path) -> None:
    """torch writes its records uncompressed: then nothing in the file can grow when it is read."""
    if not zipfile.is_zipfile(file):
        raise InputError(f"{file} is not in torch's zip format: save it again with torch 1.6 or later")
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in records):
        raise InputError(f"{file} has compressed records, which torch never writes: it is not what it says")
    pickled = sum(one.file_size for one in records if one.filename.endswith(".pkl"))
    if pickled > MAX_PICKLE_BYTES:
        raise InputError(f"{file} has {pickled} bytes besides its weights, more than {MAX_PICKLE_BYTES}")


def _state(loaded: Any, file: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, of one inside a training checkpoint, or of a list of them, one a head."""
    if not isinstance(loaded, Mapping):
        raise InputError(f"{file} holds a {type(loaded).__name__}, not the state dict of heads")
    if any(isinstance(value, Tensor) for value in loaded.values()):
        return {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    states = {str(name): tensors for name, value in loaded.items() if (tensors := _heads_in(value))}
    if len(states) != 1:
        raise InputError(
            f"{file} holds {len(states)} state dicts with heads ({', '.join(list(states)[:5]) or 'none'}), not one: "
            "save the state dict of the heads alone"
        )
    return next(iter(states.values()))


def _heads_in(value: Any) -> dict[str, Tensor]:
    """Tensors of a state dict, or of a list of those of single heads; empty for anything else."""
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        value = {f"heads.{i}.{name}": tensor for i, one in enumerate(value) for name, tensor in one.items()}
    if not isinstance(value, Mapping):
        return {}
    tensors = {str(name): tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
    return tensors if len(tensors) == len(value) else {}


OPENERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {".safetensors": _open_safetensors, ".pt": _open_pt}


def _unreadable(tensor: Tensor) -> str:
    """Why `tensor` cannot be a weight or a map, "" where it can: a claimed shape must have its bytes in the file."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return f"is a {tensor.layout} tensor on {tensor.device}"
    return "" if tensor.is_contiguous() else f"has strides {tensor.stride()}: fewer values than its shape says"


@contextmanager
def replaced(folder: Path, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `folder` when all went well, and vanishes when not.

    What else lies in an older folder (a card, curves) is kept. Raises InputError when `folder` holds something and is
    not `ours`: a model's own folder may have the same names in it. A process that is killed between the two renames
    leaves the old folder beside, as `.NAME.….old`; neither is ever half.
    """
    target = folder.resolve()
    if target.exists() and not target.is_dir():
        raise InputError(f"{folder} is a file: give a folder for the heads")
    if target.is_dir() and any(target.iterdir()) and not ours(target):
        raise InputError(f"{folder} holds other things than such heads: give a new or an empty folder")
    mark = uuid.uuid4().hex
    new, old = (target.with_name(f".{target.name}.{mark}.{end}") for end in ("new", "old"))
    try:
        try:
            if target.is_dir():
                shutil.copytree(target, new)
            else:
                new.mkdir(parents=True)
            yield new
            _swap(new, target, old)
        except OSError as error:
            raise InputError(
                f"cannot write heads to {folder} ({error.strerror or error}): give another folder"
            ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _swap(new: Path, target: Path, old: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        with suppress(OSError):
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
