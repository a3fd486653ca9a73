"""Training text that is given instead of written by the backbone: a .jsonl file with `{"text": …}` on each line.

Every token counts as a label, so heads learn to foretell these texts, not what the backbone would say; where the two
differ they are accepted less often. (Warming heads up on such text before their own gained nothing: LOG.md.)
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.bounded_json import read_text
from specnb.medusa import data
from specnb.prompts import json_lines
from specnb.provenance import file_digest

MAX_BYTES, MAX_TOKENS = 1 << 30, 1 << 28
HELD_OUT_EVERY = 20
"""Every so many rows one is held out."""
ROWS = 256
"""Rows of one file."""


def write(
    model: LanguageModel, texts: Iterable[str], folder: Path, *, facts: dict[str, Any], backbone: str, length: int
) -> int:
    """Write rows of `length` tokens made of the texts, one behind the other; returns how many tokens.

    `facts` say what the texts are, `backbone` is the digest of the model. Raises InputError when the folder holds
    others, or there are too few.
    """
    data.require_same(folder, facts | {"length": length, "backbone": backbone, "model": model.name})
    if (folder / "train-00000.npz").is_file():
        return sum(data.open_file(file).tokens.size for file in data.files(folder))
    ids = np.fromiter(islice(_stream(model, texts), MAX_TOKENS), dtype=np.int32)
    rows = ids[: len(ids) // length * length].reshape(-1, length)
    if len(rows) < HELD_OUT_EVERY:
        raise InputError(f"the texts have {len(ids)} tokens, at least {HELD_OUT_EVERY * length} are needed")
    held_out = np.arange(len(rows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    for split, chosen in (("held_out", rows[held_out]), ("train", rows[~held_out])):
        for number in reversed(range(-(-len(chosen) // ROWS))):  # the first file last: then all are there
            part = chosen[number * ROWS : (number + 1) * ROWS]
            data.save(folder / f"{split}-{number:05d}.npz", data.Rows(part, np.ones(part.shape, dtype=bool)))
    return rows.size


def of_file(file: Path) -> tuple[list[str], dict[str, Any]]:
    """The texts of a .jsonl file. Raises InputError where a line is anything but `{"text": …}`."""
    read_text(file, MAX_BYTES)  # size and encoding: one clear error
    texts = []
    for number, line in json_lines(file):
        if not isinstance(line, dict) or set(line) != {"text"} or not isinstance(line["text"], str):
            raise InputError(f'{file}, line {number}: each line is {{"text": "…"}} and nothing else')
        texts.append(line["text"])
    return texts, {"texts": file_digest(file)}


def _stream(model: LanguageModel, texts: Iterable[str]) -> Iterator[int]:
    end = sorted(model.vocab.eog)[:1]
    for text in texts:
        yield from model.encode(text, special=False)
        yield from end
