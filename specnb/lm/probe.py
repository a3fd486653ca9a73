"""Probes of an opened model: does it keep its state, does it go back exactly, how far do its widths agree bit by bit?

Each feeds a few tokens, compares logits, and leaves the state empty.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from specnb.errors import InputError, LoadError
from specnb.io import cache_dir, digest, read_text, write_atomic
from specnb.lm.base import LanguageModel, TreeModel
from specnb.lm.tree import Tree
from specnb.machine import cpuinfo

TOLERANCE = {True: 0.001, False: 0.1}
"""Share of a row's spread that rounding may move (float32 or not); a forgotten state moves most of it."""
STRICT = {True: 5e-5, False: 0.1}
"""The same for single steps over COMPARED tokens: rounding moves 5e-6, steps that compute otherwise from 1e-4 on."""
OTHERWISE = 0.1
COMPARED = 32
PROBED_WIDTHS = (2, 3, 4, 7, 8, 9, 14, 17, 33, 64)
"""Blocks that are compared with single steps: about every kernel's border, with remainders behind full vectors."""
PROBED_STEPS = 16
PROBED_PAST = 504
"""Tokens before the probe. A prompt this wide is where the number of threads decides the bits of torch's bfloat16."""
NARROWED_BY = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Environment variables that choose other kernels."""
REWIND_WIDTH = 4
PAST = 3
PROBE = Tree((-1, -1, -1, -1, -1, 4, 0, 5))
"""Wide before it is deep, so that a node's index is far from its depth."""
DROPPED, WALKED = PROBE.path(6), PROBE.path(7)
Steps = Literal["blocks", "later", "single"]


def kernel_facts() -> list[Any]:
    """Return what decides which kernels run: the CPU, its instruction sets, and the variables that narrow them."""
    cpu, flags = cpuinfo()
    return [cpu, sorted(flags), {name: os.environ.get(name) for name in NARROWED_BY}]


def probe_ids(vocab_size: int, n: int) -> list[int]:
    """Return `n` tokens that every vocabulary has, to try out a model with."""
    return [(7 * i + 3) % vocab_size for i in range(n)]


def rows_distance(rows: np.ndarray, whole: np.ndarray) -> float:
    """Return the median of |row - whole row| / |whole row - its mean|: a row that a router flipped does not count."""
    spread = np.linalg.norm(whole - whole.mean(axis=1, keepdims=True), axis=1)
    return float(np.median(np.linalg.norm(rows - whole, axis=1) / np.maximum(spread, np.finfo(np.float32).tiny)))


def probe_steps(model: LanguageModel) -> Steps:
    """Return how this model must be fed for all ways of feeding to agree: blocks are compared with single tokens.

    "blocks": in any way. "later": token by token after a first block, for its blocks ignore the state they find.
    "single": token by token from the start, for its single steps and its blocks compute differently (Zamba2 and
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
        blocks = rows_distance(_last_rows(model, [ids[:half], ids[half:]], half), whole)
        single = rows_distance(_last_rows(model, [[token] for token in ids], half), whole)
    except Exception as error:
        raise LoadError(f"{model.name} cannot be run with transformers' cache: {error}") from error
    agree = blocks < TOLERANCE[exact]
    if single < STRICT[exact]:
        return "blocks" if agree else "later"
    if agree and single < OTHERWISE:
        return "single"
    off = f"{model.name} differs step by step from one forward by {single:.0%} of the logits' spread"
    raise LoadError(f"{off}: it is no causal language model, or transformers keeps no state of it. Try a .gguf of it")


def certify(
    model: LanguageModel, widths: Iterable[int] = PROBED_WIDTHS, n_steps: int = PROBED_STEPS, past: int = PROBED_PAST
) -> int:
    """Return the widest block, of `widths`, up to which tokens have the bits of single steps; 0 for none.

    Compares `n_steps` rows of blocks with as many single steps from the same state, of `past` tokens. Wide
    blocks cross a multiple of 64 positions. Leaves the state empty.
    """
    return _compare_widths(model, widths, n_steps, past)[0]


def _compare_widths(model: LanguageModel, widths: Iterable[int], n_steps: int, past: int) -> tuple[int, np.ndarray]:
    """Return what `certify` does, and the logits of the single steps, `(n_steps, vocab)`."""
    widths = [width for width in widths if width <= model.caps.n_ctx]
    most = max(widths, default=0)
    past = max(0, min(past, model.caps.n_ctx - most))
    ids = probe_ids(model.vocab.size, past + most)
    model.reset()
    if past:
        model.forward(ids[:past], 0)
    steps = np.concatenate([model.forward([token]) for token in ids[past : past + n_steps]])
    model.rewind(len(steps))
    widest = 0
    for width in widths:
        fed = ids[past : past + max(width, n_steps)]  # narrow blocks one behind the other: two rows tell little
        rows = [model.forward(fed[start : start + width]) for start in range(0, len(fed), width)]
        model.rewind(len(fed))
        if not np.array_equal(np.concatenate(rows)[:n_steps], steps):
            break
        widest = width
    model.reset()
    return widest, steps


class Certificate(NamedTuple):
    """The smallest width that `certify` finds with any number of threads, and whether all numbers give equal bits."""

    width: int
    any_threads: bool


def certified(
    model: LanguageModel, counts: Sequence[int], set_threads: Callable[[int], None], *, past: int = PROBED_PAST,
    **facts: Any,
) -> Certificate:  # fmt: skip
    """Run `certify` with each of `counts` threads, once for a CPU, an engine's build and `facts` of the model.

    `facts` are its shapes, types and rules. The answer stays in the cache folder. Ends with the last of `counts`.
    """
    facts |= {"cpu": kernel_facts(), "n_ctx": model.caps.n_ctx, "schema": 3, "past": past}
    file = cache_dir() / "certificates" / digest(facts | {"counts": counts})
    with contextlib.suppress(InputError, ValueError):
        width, any_threads = map(int, read_text(file).split())
        return Certificate(width, bool(any_threads))
    results = []
    for n in counts:
        set_threads(n)
        results.append(_compare_widths(model, PROBED_WIDTHS, PROBED_STEPS, past))
    outcomes = {(width, steps.tobytes()) for width, steps in results}
    certificate = Certificate(min(width for width, _ in outcomes), len(outcomes) == 1)
    with contextlib.suppress(InputError):  # a cache that cannot be written costs seconds at each opening
        write_atomic(file, f"{certificate.width} {certificate.any_threads:d}".encode())
    return certificate


def probe_rewind(model: LanguageModel) -> bool:
    """Return whether a rewind of a block, and of single steps, leaves the state as if the tokens were never fed."""
    width = min(REWIND_WIDTH, (model.caps.n_ctx - 1) // 3)
    if width < 1:
        return True
    ids, tolerance = probe_ids(model.vocab.size, 2 * width), TOLERANCE[model.caps.lossless_dtype]
    strangers = [(5 * i + 1) % model.vocab.size for i in range(width)]
    expected = _last_rows(model, [ids[:width], ids[width:]], width)
    for in_block, n_true in product((True, False), {0, width - 1}):
        fed = [*ids[width : width + n_true], *strangers[n_true:]]
        model.forward(ids[:width])
        rows = np.concatenate([*map(model.forward, [fed] if in_block else [[token] for token in fed])])
        model.rewind(width - n_true)
        rows = np.concatenate([rows[:n_true], model.forward(ids[width + n_true :])])
        model.reset()
        if np.isfinite(expected).all() and not rows_distance(rows, expected) < tolerance:
            return False
    return True


def probe_trees(model: TreeModel) -> str:
    """Say what is wrong with the trees of `model`; "" where nodes, and what follows, get the logits of their paths."""
    if model.caps.n_ctx < PAST + len(PROBE):  # too short to look
        return ""
    ids = probe_ids(model.vocab.size, PAST + len(PROBE) + 1)
    past, nodes, after = ids[:PAST], ids[PAST:-1], ids[-1:]
    try:
        model.forward(past, 0)
        rows = model.forward_tree(nodes, PROBE)
        model.keep_path(WALKED)
        in_tree = [rows[DROPPED], rows[WALKED], model.forward(after)]
        model.reset()
        model.forward(past, 0)
        dropped = model.forward([nodes[i] for i in DROPPED])
        model.rewind(len(DROPPED))
        expected = [dropped, model.forward([nodes[i] for i in WALKED]), model.forward(after)]
    except Exception as error:  # of a family that takes no such mask
        return f"a tree fails: {error}"
    finally:
        model.reset()
    tolerance = TOLERANCE[model.caps.lossless_dtype]
    pairs = ((rows, chain) for rows, chain in zip(in_tree, expected, strict=True) if np.isfinite(chain).all())
    agree = all(rows_distance(rows, chain) < tolerance for rows, chain in pairs)
    return "" if agree else "the nodes of a tree do not get the logits that their paths get"


def _last_rows(model: LanguageModel, pieces: list[list[int]], width: int) -> np.ndarray:
    rows = [*map(model.forward, pieces)]
    model.reset()
    return np.concatenate(rows)[-width:]
