"""Checks of an opened model: cached state, exact rollback, and equal bits at all pass widths.

Each check runs a few tokens, compares logits, and leaves the state empty.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from specnb.errors import InputError, LoadError
from specnb.io import cache_dir, digest, read_json, write_atomic
from specnb.lm.base import LanguageModel, TreeModel
from specnb.lm.tree import Tree
from specnb.machine import cpuinfo

TOLERANCE = {True: 0.001, False: 0.1}
"""Largest relative error of a row by rounding, in float32 or not; a lost state causes more."""
STEP_TOLERANCE = {True: 5e-5, False: 0.1}
"""The same for single steps over COMPARED tokens: rounding causes 5e-6, another formula 1e-4."""
STEP_LIMIT = 0.1
"""Largest relative error of single steps that continue the state with another formula."""
COMPARED = 32
PROBED_WIDTHS = (2, 3, 4, 7, 8, 9, 14, 17, 33, 64)
"""Widths to compare with single steps: near all kernels' limits, and with partial vectors."""
PROBED_STEPS = 16
PROBED_PAST = 504
"""Tokens before the probe; from here on, bfloat16 bits in torch depend on the thread count."""
KERNEL_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
"""Environment variables that change the choice of kernels."""
REWIND_WIDTH = 4
PAST = 3
PROBE = Tree((-1, -1, -1, -1, -1, 4, 0, 5))
"""A tree in which the indices of nodes differ widely from their depths."""
DROPPED = PROBE.path(6)
WALKED = PROBE.path(7)
Steps = Literal["blocks", "later", "single"]


def kernel_facts() -> list[Any]:
    """Return what determines the kernels: the CPU, its instruction sets, and KERNEL_VARIABLES."""
    cpu, flags = cpuinfo()
    return [cpu, sorted(flags), {name: os.environ.get(name) for name in KERNEL_VARIABLES}]


def probe_ids(vocab_size: int, n: int) -> list[int]:
    """Return `n` token ids that are valid in every vocabulary."""
    return [(7 * i + 3) % vocab_size for i in range(n)]


def rows_distance(rows: np.ndarray, whole: np.ndarray) -> float:
    """Return the median over rows of |rows - whole| / |whole - mean of whole|; both `(n, vocab)`.

    The median ignores single rows in which an expert router changed its decision.
    """
    spread = np.linalg.norm(whole - whole.mean(axis=1, keepdims=True), axis=1)
    distance = np.linalg.norm(rows - whole, axis=1)
    return float(np.median(distance / np.maximum(spread, np.finfo(np.float32).tiny)))


def _same_rows(model: LanguageModel, rows: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether rows differ by rounding only; True if `expected` is not finite."""
    tolerance = TOLERANCE[model.caps.lossless_dtype]
    return not np.isfinite(expected).all() or rows_distance(rows, expected) < tolerance


def probe_steps(model: LanguageModel) -> Steps:
    """Return how tokens must be fed so that blocks and single steps agree.

    "blocks": in any widths. "later": one at a time after the first block, because blocks ignore the
    current state. "single": always one at a time, because single steps and blocks compute
    differently (Zamba2 and Nemotron-H clamp the time step in blocks only). Raises LoadError if
    single steps do not continue the state either (as in an encoder, which attends to future
    tokens).
    """
    half = min(COMPARED, model.caps.n_ctx) // 2
    ids = probe_ids(model.vocab.size, 2 * half)
    exact = model.caps.lossless_dtype
    try:
        whole = _last_rows(model, [ids], half)
        if not np.isfinite(whole).all():
            return "later"  # cannot compare; generation reports the module that returns NaN
        blocks = rows_distance(_last_rows(model, [ids[:half], ids[half:]], half), whole)
        single = rows_distance(_last_rows(model, [[token] for token in ids], half), whole)
    except Exception as error:
        raise LoadError(
            f"{model.name} cannot be run with transformers' cache: {error}; use a GGUF file of "
            "this model"
        ) from error
    agree = blocks < TOLERANCE[exact]
    if single < STEP_TOLERANCE[exact]:
        return "blocks" if agree else "later"
    if agree and single < STEP_LIMIT:
        return "single"
    raise LoadError(
        f"single steps of {model.name} differ from one pass by {single:.0%} of the spread: it is "
        "not a causal language model, or transformers does not cache its state. Use a GGUF file "
        "of this model"
    )


def certify(
    model: LanguageModel,
    widths: Iterable[int] = PROBED_WIDTHS,
    n_steps: int = PROBED_STEPS,
) -> int:
    """Return the largest of `widths` up to which passes are bit-identical to single steps, or 0.

    Compares `n_steps` rows with as many single steps after PROBED_PAST tokens. Wide passes cross a
    multiple of 64 positions. Leaves the state empty.
    """
    return _compare_widths(model, widths, n_steps, PROBED_PAST)[0]


def _compare_widths(
    model: LanguageModel, widths: Iterable[int], n_steps: int, past: int
) -> tuple[int, np.ndarray]:
    """Return the result of `certify`, and the logits of the single steps, `(n_steps, vocab)`."""
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
        fed = ids[past : past + max(width, n_steps)]  # several narrow passes: two rows are too few
        rows = [model.forward(fed[start : start + width]) for start in range(0, len(fed), width)]
        model.rewind(len(fed))
        if not np.array_equal(np.concatenate(rows)[:n_steps], steps):
            break
        widest = width
    model.reset()
    return widest, steps


class Certificate(NamedTuple):
    """The smallest width over all thread counts, and whether bits are equal for all of them."""

    width: int
    any_threads: bool


def certified(
    model: LanguageModel,
    counts: Sequence[int],
    set_threads: Callable[[int], None],
    *,
    past: int = PROBED_PAST,
    **facts: Any,
) -> Certificate:
    """Run `certify` with each of `counts` threads, or return the cached result.

    The cache key has the CPU, `counts` and `facts`: the engine's build, and the model's shapes,
    types and settings. Probing leaves the model with the last of `counts` threads.
    """
    facts |= {"cpu": kernel_facts(), "n_ctx": model.caps.n_ctx, "schema": 3, "past": past}

    def probe() -> dict[str, Any]:
        outcomes = set()
        for n in counts:
            set_threads(n)
            width, steps = _compare_widths(model, PROBED_WIDTHS, PROBED_STEPS, past)
            outcomes.add((width, steps.tobytes()))
        return {"width": min(width for width, _ in outcomes), "any_threads": len(outcomes) == 1}

    return Certificate(**probed_once("certificates", facts | {"counts": counts}, probe))


def probed_once(kind: str, key: Any, probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `probe`, a JSON object, cached on disk under `key`.

    `probe` is called again if the file is damaged, and every time if the cache is not writable.
    """
    file = cache_dir() / kind / digest(key)
    with contextlib.suppress(InputError):
        return read_json(file)
    result = probe()
    with contextlib.suppress(InputError):
        write_atomic(file, json.dumps(result).encode())
    return result


def probe_rewind(model: LanguageModel) -> bool:
    """Return whether `rewind` restores the earlier state, after a block and after single steps."""
    width = min(REWIND_WIDTH, (model.caps.n_ctx - 1) // 3)
    if width < 1:
        return True
    ids = probe_ids(model.vocab.size, 2 * width)
    rejected = [(5 * i + 1) % model.vocab.size for i in range(width)]
    expected = _last_rows(model, [ids[:width], ids[width:]], width)
    for in_block, n_true in product((True, False), {0, width - 1}):
        fed = [*ids[width : width + n_true], *rejected[n_true:]]
        model.forward(ids[:width])
        rows = np.concatenate(
            [*map(model.forward, [fed] if in_block else [[token] for token in fed])]
        )
        model.rewind(width - n_true)
        rows = np.concatenate([rows[:n_true], model.forward(ids[width + n_true :])])
        model.reset()
        if not _same_rows(model, rows, expected):
            return False
    return True


def probe_trees(model: TreeModel) -> str:
    """Return why `model` cannot run trees; "" if each node has the logits of its path."""
    if model.caps.n_ctx < PAST + len(PROBE):  # too short for the probe
        return ""
    ids = probe_ids(model.vocab.size, PAST + len(PROBE) + 1)
    past = ids[:PAST]
    nodes = ids[PAST:-1]
    after = ids[-1:]
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
    except Exception as error:  # the family may not accept a tree mask
        return f"a tree fails: {error}"
    finally:
        model.reset()
    if all(_same_rows(model, *rows) for rows in zip(in_tree, expected, strict=True)):
        return ""
    return "the nodes of a tree do not get the logits of their paths"


def _last_rows(model: LanguageModel, pieces: list[list[int]], width: int) -> np.ndarray:
    rows = [*map(model.forward, pieces)]
    model.reset()
    return np.concatenate(rows)[-width:]
