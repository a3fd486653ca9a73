"""Checks of an opened model before it is trusted: does it keep its state, in blocks too, and does it go back exactly?

They feed a few tokens and compare logits; all leave the state empty.
"""

from typing import Literal

import numpy as np

from specnb.errors import LoadError
from specnb.lm.base import LanguageModel

WIDTH = 4
PROBED = (1, 2, 9)
TOLERANCE = {True: 0.001, False: 0.1}
"""Share of a row's spread that rounding may move (float32 or not); a forgotten state moves most of it."""
STRICT = {True: 5e-5, False: 0.1}
"""The same for single steps over COMPARED tokens: rounding moves 5e-6, steps that compute otherwise from 1e-4 on."""
OTHERWISE = 0.1
COMPARED = 32
Steps = Literal["blocks", "later", "single"]


def probe_ids(vocab_size: int, n: int) -> list[int]:
    """`n` tokens that every vocabulary has, to try out a model with."""
    return [(7 * i + 3) % vocab_size for i in range(n)]


def steps_needed(model: LanguageModel) -> Steps:
    """How this model must be fed for all ways of feeding to agree, found by comparing blocks and single tokens.

    "blocks": as one likes. "later": behind a first block token by token, for its blocks ignore the state they find.
    "single": token by token from the start, for its single steps compute otherwise than its blocks (Zamba2 and
    Nemotron-H bound the time step in blocks only). Leaves the state empty. Raises LoadError if single steps do not
    continue the state either (an encoder, which sees the tokens to come, shows the same way).
    """
    half = min(COMPARED, model.caps.n_ctx) // 2
    ids = probe_ids(model.vocab.size, 2 * half)
    exact = model.caps.lossless_dtype
    try:
        whole = _last_rows(model, [ids] if ids else [], half)
        if not np.isfinite(whole).all():
            return "later"  # nothing to compare; the run itself will say where NaN comes from
        blocks = apart(_last_rows(model, [ids[:half], ids[half:]], half), whole)
        single = apart(_last_rows(model, [[token] for token in ids], half), whole)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"{model.name} cannot be run with transformers' cache: {error}") from error
    agree = blocks < TOLERANCE[exact]
    if single < STRICT[exact]:
        return "blocks" if agree else "later"
    if agree and single < OTHERWISE:
        return "single"
    raise LoadError(
        f"{model.name} cannot be run step by step by transformers: its logits differ from those of one whole "
        f"forward by {single:.0%} of their spread. It is no causal language model, or its state is not kept; "
        "a .gguf file of it may open in llama.cpp"
    )


def same_bits(model: LanguageModel) -> bool:
    """Whether widths 1, 2 and 9 give the same logits bit for bit, on this CPU's kernels. Leaves the state empty."""
    if model.caps.n_ctx < 2 * PROBED[-1]:
        return False
    ids = probe_ids(model.vocab.size, 2 * PROBED[-1])
    by_width = [
        _last_rows(model, [ids[i : i + width] for i in range(0, len(ids), width)], len(ids)) for width in PROBED
    ]
    return all(np.array_equal(rows, by_width[0]) for rows in by_width)


def goes_back(model: LanguageModel) -> bool:
    """Whether a rewind leaves the state as if the tokens had never been fed, after blocks and after single steps."""
    width = min(WIDTH, (model.caps.n_ctx - 1) // 3)
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


def _last_rows(model: LanguageModel, pieces: list[list[int]], width: int) -> np.ndarray:
    rows = [model.forward(piece) for piece in pieces]
    model.reset()
    return np.concatenate([np.empty((0, model.vocab.size), np.float32), *rows])[-width:]


def apart(rows: np.ndarray, whole: np.ndarray) -> float:
    """Median over rows of |row - whole row| / |whole row - its mean|; a row that a router flipped does not count."""
    if not len(whole):
        return 0.0
    spread = np.linalg.norm(whole - whole.mean(axis=1, keepdims=True), axis=1)
    return float(np.median(np.linalg.norm(rows - whole, axis=1) / np.maximum(spread, np.finfo(np.float32).tiny)))
