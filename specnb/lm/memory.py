"""Will it fit? Asked before a model is loaded: weights + state + margin against the free memory of the device.

Running out while loading kills the process (or the machine swaps for minutes); a refusal beforehand is an error that
the caller can act on: generate with the target alone, take a smaller context or a smaller quantisation.
"""

import contextlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from specnb.errors import InputError, MemoryShortError

MIN_MARGIN_BYTES = 256 << 20
MARGIN_SHARE = 0.05
PROC_CGROUP, CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CUDA = re.compile(r"cuda(?::(\d+))?")


@dataclass(frozen=True)
class Need:
    """Bytes a model takes: weights, state (KV cache, recurrent state) and a margin for work buffers.

    `margin_bytes` is `max(256 MiB, 5 % of the weights)` if not given.
    """

    weights_bytes: int
    state_bytes: int = 0
    margin_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.margin_bytes is None:
            margin = max(MIN_MARGIN_BYTES, math.ceil(MARGIN_SHARE * self.weights_bytes))
            object.__setattr__(self, "margin_bytes", margin)

    @property
    def total(self) -> int:
        """Weights, state and margin together, bytes."""
        return self.weights_bytes + self.state_bytes + self.margin_bytes


def kv_bytes(n_layers: int, n_kv_heads: int, head_dim: int, n_ctx: int, bytes_per_value: float) -> int:
    """Bytes of the key and value cache of an attention model for `n_ctx` positions.

    `bytes_per_value` is 4 for float32, 2 for float16 and bfloat16, 34/32 for q8_0.
    """
    return math.ceil(2 * n_layers * n_kv_heads * head_dim * n_ctx * bytes_per_value)


def require(need: Need, *, name: str, device: str = "cpu", free: int | None = None) -> int:
    """The free bytes of `device` if `need` fits there; `name` is that of the model in the error.

    `free` replaces the measured number (bytes). Raises MemoryShortError with every number and the remedy, and
    InputError for a device that is not there.
    """
    free = free_bytes(device) if free is None else free
    if need.total <= free:
        return free
    parts = (need.weights_bytes, need.state_bytes, need.margin_bytes)
    weights, state, margin = (human_bytes(part) for part in parts)
    raise MemoryShortError(
        f"{name} does not fit on {device}: it needs {human_bytes(need.total)} (weights {weights} + state {state} + "
        f"margin {margin}), {human_bytes(free)} is free, {human_bytes(need.total - free)} short; use a smaller context "
        "(n_ctx), a smaller quantisation, or the target alone without a draft model"
    )


def free_bytes(device: str = "cpu") -> int:
    """Bytes that can still be taken on `cpu`, `cuda` or `cuda:N` without swapping or being killed.

    For the CPU: what the system calls available, bounded by every memory limit of the control group. For CUDA: what
    the driver reports free and what torch holds in its cache without using it. Raises InputError for another device
    and for one that is not there.
    """
    device = str(device)
    if device == "cpu":
        return _free_ram_bytes()
    if match := CUDA.fullmatch(device):
        return _free_vram_bytes(device, int(match[1]) if match[1] else None)
    raise InputError(f"unknown device {device!r}: use cpu, cuda or cuda:N")


def gguf_parts(path: Path) -> list[Path]:
    """All files of a model that is stored in several, as llama.cpp names them."""
    split = re.fullmatch(r"(.*)-[0-9]{5}-of-([0-9]{5})\.gguf", path.name)
    if not split:
        return [path]
    return [path.with_name(f"{split[1]}-{i:05d}-of-{split[2]}.gguf") for i in range(1, int(split[2]) + 1)]


def human_bytes(n_bytes: float) -> str:
    """`n_bytes` for people, in powers of 1024: "812 B", "256.0 MiB", "1.42 GiB"."""
    size, sign = abs(n_bytes), "-" if n_bytes < 0 else ""
    if size < 1024:
        return f"{sign}{size:.0f} B"
    unit = min(int(math.log2(size) // 10), 4)
    digits = 2 if unit >= 3 else 1
    return f"{sign}{size / 1024**unit:.{digits}f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"


def _free_ram_bytes() -> int:
    import psutil

    rooms = (_cgroup_room_bytes(folder) for folder in cgroup_folders("memory"))
    return min([psutil.virtual_memory().available, *(room for room in rooms if room is not None)])


def _cgroup_room_bytes(folder: Path) -> int | None:
    """Limit minus use of one control group (version 2), never below 0; None where it sets no limit."""
    texts = {name: _kernel_text(folder / f"memory.{name}").strip() for name in ("max", "high", "current")}
    limits = [int(texts[name]) for name in ("max", "high") if texts[name].isdigit()]
    if not limits:
        return None
    # The use counts file pages that the kernel drops on demand, among them the model file just written or read.
    lines = (line.split() for line in _kernel_text(folder / "memory.stat").splitlines())
    reclaimable = next((int(line[1]) for line in lines if line[0] == "inactive_file"), 0)
    return max(0, min(limits) - max(0, int(texts["current"] or 0) - reclaimable))


def _free_vram_bytes(device: str, index: int | None) -> int:
    import torch

    if not torch.cuda.is_available() or (index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise InputError(
            f"device {device!r} is not there (torch {torch.__version__} sees {seen} CUDA devices); use cpu"
        )
    index = torch.cuda.current_device() if index is None else index
    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


def cgroup_folders(controller: str, proc: Path = PROC_CGROUP, mount: Path = CGROUP_MOUNT) -> list[Path]:
    """Folders that may limit this process, innermost first; version 2 and version 1 of Linux control groups.

    Every ancestor limits too. Inside a container the path in `/proc` can name folders of the host: those that do
    not exist here are left out, and the top of the mount, where the container sees its own limits, is always tried.
    """
    folders: list[Path] = []
    for line in _kernel_text(proc).splitlines():
        _, names, inside = line.split(":", 2)
        if not names or controller in names.split(","):
            top = mount / controller if names else mount
            parts = [] if ".." in inside.split("/") else inside.strip("/").split("/")
            folders += [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def quota_cores() -> float | None:
    """Cores the control group grants, the smallest along the path; None where there is no limit."""
    quotas = []
    for folder in cgroup_folders("cpu"):
        old = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = (_kernel_text(folder / "cpu.max") or " ".join(_kernel_text(folder / name) for name in old)).split()
        # no limit is "max" in version 2 and -1 in version 1
        if len(words) == 2 and all(word.isdigit() and int(word) > 0 for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return round(min(quotas), 3) if quotas else None


def _kernel_text(file: Path) -> str:
    """A small file of the kernel; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""
