"""Checks before a model is trusted: does it fit into memory, does it keep its state, and does it go back exactly?

Memory is counted before a model is loaded: running out of it kills the process, or the machine swaps for minutes,
where an error lets the caller take a smaller context, or the target alone. The other checks feed a few tokens to an
opened model and compare logits; all leave the state empty.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.io import cache_dir, digest, read_json, write_atomic
from specnb.lm.base import LanguageModel, TreeModel
from specnb.lm.tree import Tree

DEFAULT_N_CTX = 4096
"""Tokens of context at most, unless more are asked for."""
MIN_MARGIN_BYTES = 256 << 20
MARGIN_SHARE = 0.05

TOLERANCE = {True: 0.001, False: 0.1}
"""Share of a row's spread that rounding may move (float32 or not); a forgotten state moves most of it."""
STRICT = {True: 5e-5, False: 0.1}
"""The same for single steps over COMPARED tokens: rounding moves 5e-6, steps that compute otherwise from 1e-4 on."""
OTHERWISE = 0.1
COMPARED = 32
PROBED_WIDTHS = (2, 3, 4, 7, 8, 9, 14, 17, 33, 64)
"""Blocks that are compared with single steps: about every kernel's border, with remainders behind full vectors."""
PROBED_STEPS, PROBED_PAST = 16, 56
NARROWED_BY = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Environment variables that choose other kernels."""
REWIND_WIDTH = 4
PAST = 3
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instruction sets that multiply it: x86 names, then ARM's."""
PROBE = Tree((-1, -1, -1, -1, -1, 4, 0, 5))
"""Wide before it is deep, so that a node's index is far from its depth."""
DROPPED, KEPT = PROBE.path(6), PROBE.path(7)
Steps = Literal["blocks", "later", "single"]


def kv_bytes(n_layers: int, n_kv_heads: int, head_dim: int, n_ctx: int, bytes_per_value: int) -> int:
    """Bytes of the key and value cache of an attention model for `n_ctx` positions."""
    return 2 * n_layers * n_kv_heads * head_dim * n_ctx * bytes_per_value


def need_bytes(weights: int, state: int = 0) -> int:
    """Bytes a model takes: weights, state (KV cache, recurrent state) and a margin for work buffers."""
    return weights + state + max(MIN_MARGIN_BYTES, math.ceil(MARGIN_SHARE * weights))


def require(weights: int, state: int = 0, *, name: str, device: str = "cpu") -> None:
    """Refuse what the free memory of `device` does not hold, in bytes; `name` is that of the model in the error.

    Raises MemoryShortError with every number and the remedy, and InputError for a device that is not there.
    """
    free, need = free_bytes(device), need_bytes(weights, state)
    if need > free:
        parts = f"weights {human_bytes(weights)}, state {human_bytes(state)}, the rest for work"
        needs = f"{name} does not fit on {device}: it needs {human_bytes(need)} ({parts}), {human_bytes(free)} is free"
        raise MemoryShortError(f"{needs}; use a smaller n_ctx or quantisation, or no draft model")


def free_bytes(device: str = "cpu") -> int:
    """Bytes that can still be taken on `cpu`, `cuda` or `cuda:N` without swapping or being killed.

    CPU: what the system calls available, bounded by every memory limit of the control group (version 2). CUDA: what
    the driver reports free and what torch holds unused. Raises InputError for a device that is not there.
    """
    if device == "cpu":
        import psutil

        rooms = (_cgroup_room_bytes(folder) for folder in cgroup_folders())
        return min([psutil.virtual_memory().available, *(room for room in rooms if room is not None)])
    if not (match := re.fullmatch(r"cuda(?::(\d+))?", str(device))):
        raise InputError(f"unknown device {device!r}: use cpu, cuda or cuda:N")
    import torch

    index, n_devices = int(match[1] or 0), torch.cuda.device_count()
    if index >= n_devices:
        raise InputError(f"device {device!r} is not there: torch sees {n_devices} CUDA devices; use device=cpu")
    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


def _cgroup_room_bytes(folder: Path) -> int | None:
    """Limit minus use of one control group, never below 0; None where it sets no limit."""
    limits = [int(text) for name in ("max", "high") if (text := kernel_text(folder / f"memory.{name}")).isdigit()]
    if not limits:
        return None
    # The use counts file pages that the kernel drops on demand, among them the model file just written or read.
    lines = (line.split() for line in kernel_text(folder / "memory.stat").splitlines())
    reclaimable = next((int(line[1]) for line in lines if line[0] == "inactive_file"), 0)
    return max(0, min(limits) - max(0, int(kernel_text(folder / "memory.current") or 0) - reclaimable))


def cgroup_folders(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Folders that may limit this process, innermost first: its control group (version 2), and every ancestor.

    In a container `/proc` can name folders of the host; the top of the mount, where its own limits are, is always one.
    """
    inside = next((line[3:] for line in kernel_text(proc).splitlines() if line.startswith("0::")), "")
    parts = [] if ".." in inside else inside.strip("/").split("/")
    folders = (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def allowed_cores() -> list[int]:
    """Numbers of the logical cores that this process may run on."""
    import psutil

    process = psutil.Process()  # macOS has no affinity
    return process.cpu_affinity() if hasattr(process, "cpu_affinity") else list(range(psutil.cpu_count() or 1))


def listed(text: str) -> set[int]:
    """The numbers in a list of the kernel such as "0-3,8"."""
    bounds = (part.partition("-") for part in text.split(",") if part)
    return {n for first, _, last in bounds for n in range(int(first), int(last or first) + 1)}


def core_siblings(system: Path = Path("/sys")) -> set[str]:
    """For each physical core behind `allowed_cores` the list of its hyperthreads; empty where Linux does not tell."""
    folders = (system / f"devices/system/cpu/cpu{n}/topology" for n in allowed_cores())
    return {kernel_text(folder / "thread_siblings_list") for folder in folders} - {""}


def quota_cores() -> float | None:
    """Cores the control group grants, the smallest along the path; None where there is no limit."""
    matches = (re.fullmatch(r"(\d+) (\d+)", kernel_text(folder / "cpu.max")) for folder in cgroup_folders())
    return min((round(int(match[1]) / int(match[2]), 3) for match in matches if match), default=None)


def cpuinfo(path: Path = Path("/proc/cpuinfo")) -> tuple[str | None, frozenset[str]]:
    """Name and flags of the first core; the rest of the file repeats them once a core."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    facts = {key.strip().lower(): value.strip() for key, _, value in lines}
    return facts.get("model name"), frozenset(facts.get("flags", facts.get("features", "")).split())


def auto_dtype(device: str = "cpu") -> str:
    """The type that `dtype=auto` stands for: bfloat16 where `device` has it in hardware, else float32."""
    if device == "cpu":
        return "bfloat16" if BFLOAT16 & cpuinfo()[1] else "float32"
    import torch

    has_it = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_it else "float32"


def kernel_text(file: Path) -> str:
    """A small file of the kernel; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def human_bytes(n_bytes: float) -> str:
    """`n_bytes` for people, in powers of 1024: "256.0 MiB", "1.42 GiB"."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


# ---- of an opened model


def probe_ids(vocab_size: int, n: int) -> list[int]:
    """`n` tokens that every vocabulary has, to try out a model with."""
    return [(7 * i + 3) % vocab_size for i in range(n)]


def apart(rows: np.ndarray, whole: np.ndarray) -> float:
    """Median over rows of |row - whole row| / |whole row - its mean|; a row that a router flipped does not count."""
    spread = np.linalg.norm(whole - whole.mean(axis=1, keepdims=True), axis=1)
    return float(np.median(np.linalg.norm(rows - whole, axis=1) / np.maximum(spread, np.finfo(np.float32).tiny)))


def steps_needed(model: LanguageModel) -> Steps:
    """How this model must be fed for all ways of feeding to agree, found by comparing blocks and single tokens.

    "blocks": as one likes. "later": behind a first block token by token, for its blocks ignore the state they find.
    "single": token by token from the start, for its single steps compute otherwise than its blocks (Zamba2 and
    Nemotron-H bound the time step in blocks only). Raises LoadError if single steps do not continue the state either
    (an encoder, which sees the tokens to come, shows the same way).
    """
    half = min(COMPARED, model.caps.n_ctx) // 2
    ids = probe_ids(model.vocab.size, 2 * half)
    exact = model.caps.lossless_dtype
    try:
        whole = _last_rows(model, [ids], half)
        if not np.isfinite(whole).all():
            return "later"  # nothing to compare; the run itself will say where NaN comes from
        blocks = apart(_last_rows(model, [ids[:half], ids[half:]], half), whole)
        single = apart(_last_rows(model, [[token] for token in ids], half), whole)
    except Exception as error:
        raise LoadError(f"{model.name} cannot be run with transformers' cache: {error}") from error
    agree = blocks < TOLERANCE[exact]
    if single < STRICT[exact]:
        return "blocks" if agree else "later"
    if agree and single < OTHERWISE:
        return "single"
    off = f"step by step its logits differ from those of one forward by {single:.0%} of their spread"
    causes = "it is no causal language model, or transformers keeps no state of it"
    raise LoadError(f"{model.name} cannot be run: {off}, so {causes}. A .gguf of it may open in llama.cpp")


def certify(
    model: LanguageModel, widths: Iterable[int] = PROBED_WIDTHS, n_steps: int = PROBED_STEPS, past: int = PROBED_PAST
) -> int:
    """Return the widest block, of `widths`, up to which tokens have the bits of single steps; 0 for none.

    Compares the first `n_steps` rows of a block with as many single steps from the same state, of `past` tokens. Wide
    blocks cross a multiple of 64 positions. Leaves the state empty.
    """
    widths = [width for width in widths if width <= model.caps.n_ctx]
    past = max(0, min(past, model.caps.n_ctx - max(widths, default=0)))
    ids = probe_ids(model.vocab.size, past + max(widths, default=0))
    model.reset()
    if past:
        model.forward(ids[:past], 0)
    steps = [model.forward([token]) for token in ids[past : past + n_steps]]
    model.rewind(len(steps))
    widest = 0
    for width in widths:
        rows = model.forward(ids[past : past + width])[:n_steps]
        model.rewind(width)
        if not np.array_equal(rows, np.concatenate(steps[:width])):
            break
        widest = width
    model.reset()
    return widest


def certified_width(model: LanguageModel, *, past: int = PROBED_PAST, **facts: Any) -> int:
    """`certify`, once for a CPU, an engine's build and `facts` of the model: its shapes, types, threads and rules.

    The answer is kept in the cache folder.
    """
    cpu = [*cpuinfo(), {name: os.environ.get(name) for name in NARROWED_BY}]
    key = digest(
        {"cpu": [cpu[0], sorted(cpu[1]), cpu[2]], "n_ctx": model.caps.n_ctx, "schema": 1} | facts | {"past": past}
    )
    file = cache_dir() / "certificates" / f"{key}.json"
    with contextlib.suppress(InputError, KeyError):
        return int(read_json(file)["same_bits_up_to"])
    widest = certify(model, past=past)
    with contextlib.suppress(InputError):  # a cache that cannot be written costs a second at each opening
        write_atomic(file, json.dumps({"same_bits_up_to": widest}).encode())
    return widest


def goes_back(model: LanguageModel) -> bool:
    """Whether a rewind leaves the state as if the tokens had never been fed, after blocks and after single steps."""
    width = min(REWIND_WIDTH, (model.caps.n_ctx - 1) // 3)
    if width < 1:
        return True
    ids = probe_ids(model.vocab.size, 2 * width)
    wrong = [(5 * i + 1) % model.vocab.size for i in range(width)]
    tolerance = TOLERANCE[model.caps.lossless_dtype]
    expected = _last_rows(model, [ids[:width], ids[width:]], width)
    for in_block in (True, False):
        for kept in {0, width - 1}:
            rows = _after_going_back(model, ids, wrong, kept, in_block)
            if np.isfinite(expected).all() and not apart(rows, expected) < tolerance:
                return False
    return True


def _after_going_back(model: LanguageModel, ids: list[int], wrong: list[int], kept: int, in_block: bool) -> np.ndarray:
    """Logits of the second half of `ids`, of which first only `kept` came, then `wrong` ones, which were undone."""
    half = len(ids) // 2
    fed = [*ids[half : half + kept], *wrong[kept:]]
    model.forward(ids[:half])
    rows = np.concatenate([model.forward(piece) for piece in ([fed] if in_block else [[token] for token in fed])])
    model.rewind(len(fed) - kept)
    rows = np.concatenate([rows[:kept], model.forward(ids[half + kept :])])
    model.reset()
    return rows


def probe_trees(model: TreeModel) -> str:
    """What is wrong with the trees of `model`; "" where nodes, and what follows, get the logits of their paths."""
    if model.caps.n_ctx < PAST + len(PROBE):  # too short to look
        return ""
    ids = probe_ids(model.vocab.size, PAST + len(PROBE) + 1)
    past, nodes, after = ids[:PAST], ids[PAST:-1], ids[-1:]
    try:
        model.forward(past, 0)
        rows = model.forward_tree(nodes, PROBE)
        model.keep_path(KEPT)
        in_tree = [rows[DROPPED], rows[KEPT], model.forward(after)]
        model.reset()
        model.forward(past, 0)
        dropped = model.forward([nodes[i] for i in DROPPED])
        model.rewind(len(DROPPED))
        expected = [dropped, model.forward([nodes[i] for i in KEPT]), model.forward(after)]
    except Exception as error:  # of a family that takes no such mask
        return f"a tree fails: {error}"
    finally:
        model.reset()
    tolerance = TOLERANCE[model.caps.lossless_dtype]
    pairs = [(rows, chain) for rows, chain in zip(in_tree, expected, strict=True) if np.isfinite(chain).all()]
    if all(apart(rows, chain) < tolerance for rows, chain in pairs):
        return ""
    return "the nodes of a tree do not get the logits that their paths get"


def _last_rows(model: LanguageModel, pieces: list[list[int]], width: int) -> np.ndarray:
    rows = [model.forward(piece) for piece in pieces]
    model.reset()
    return np.concatenate(rows)[-width:]
