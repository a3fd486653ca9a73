"""Training text by the backbone itself: `python -m specnb.medusa.train --stage data` (self-distillation).

Heads are to foretell what the backbone says, so they learn from what it says (Cai et al. 2401.10774, section 2.3.2;
the same in EAGLE-3 and SpecForge). Rows (`stream`) are written batch by batch; a run that was stopped goes on behind
the last batch, and the batch of any number is the same for every run, since its random numbers come from
(seed, number).
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from specnb import corpus, store
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.bounded_json import read_json
from specnb.medusa.seeds import Seed, Turns, seeds
from specnb.medusa.stream import Stream, Writing, number_of

FACTS_FILE = "facts.json"
SPLITS = ("train", "held_out")
MAX_FILE, MAX_FACTS = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Rows:
    """Written rows: `tokens (rows, length)` int32 and `own (rows, length)` bool."""

    tokens: np.ndarray
    own: np.ndarray

    @property
    def n_own(self) -> int:
        return int(self.own.sum())

    def digest(self) -> str:
        """sha256 over both arrays."""
        return hashlib.sha256(self.tokens.tobytes() + np.packbits(self.own).tobytes()).hexdigest()


def write(
    model: LanguageModel,
    net: PreTrainedModel,
    folder: Path,
    *,
    batches: dict[str, int],
    made: Writing | None = None,
    backbone: str,
    packages: Iterable[str] = corpus.LICENCES,
    shard: tuple[int, int] = (0, 1),
    on_tokens: Callable[[int], None] = lambda n: None,
    on_states: Callable[[Path, Tensor], None] = lambda file, states: None,
) -> None:
    """Write the batches of each split (`train`, `held_out`) that are not in `folder` yet, as `made` says.

    `net` is the network behind `model`, and `backbone` its digest; seeds are of the `packages` that are installed.
    `shard` (i, n) writes every n-th batch from the i-th on, so that n processes share the work. Calls `on_tokens`
    with the tokens of each step, and `on_states` with each file and its hidden states `(rows, length, hidden)`.
    Raises InputError when the folder holds text made otherwise.
    """
    made = made or Writing()
    documents = dict(zip(SPLITS, corpus.split(corpus.documents(corpus.installed(packages))), strict=True))
    facts = {
        "writing": asdict(made),
        "backbone": backbone,
        "model": model.name,
        "corpus": {split: corpus.corpus_digest(found) for split, found in documents.items()},
    }
    require_same(folder, facts)
    turns = Turns.of(model) if model.vocab.chat_template else None
    for split, wanted in batches.items():
        for number in range(shard[0], wanted, shard[1]):
            file = folder / f"{split}-{number:05d}.npz"
            if file.is_file():
                continue
            key = [made.seed, SPLITS.index(split), number]
            chosen = _batch_of_seeds(model, documents[split], made, turns, key)
            written = Stream(net, model.vocab.eog, turns, made, key).run(chosen, on_tokens)
            save(file, Rows(written.tokens, written.own))
            on_states(file, written.states)


def read(folder: Path, split: str) -> Rows:
    """All rows of a split. Raises InputError where there are none, or one of the files is damaged."""
    parts = [open_file(file) for file in files(folder, split)]
    if len({part.tokens.shape[1] for part in parts}) > 1:
        raise InputError(f"the files of {split} in {folder} have rows of several lengths: remove the folder")
    return Rows(np.concatenate([p.tokens for p in parts]), np.concatenate([p.own for p in parts]))


def files(folder: Path, split: str = "*") -> list[Path]:
    """The files of a split, or of all, in order. Raises InputError where there are none."""
    found = sorted(folder.glob(f"{split}-*.npz"))
    if not found:
        raise InputError(f"no text in {folder}: write it first (--stage data)")
    return found


def facts(folder: Path) -> dict[str, Any]:
    """What the text was made with: settings, model, backbone and corpus digests. Raises InputError."""
    file = folder / FACTS_FILE
    if not file.is_file():
        raise InputError(f"no {FACTS_FILE} in {folder}: write the text first (--stage data)")
    return read_json(file, MAX_FACTS, MAX_FACTS).values


def require_backbone(folder: Path, backbone: str) -> None:
    """Refuse text that was written by, or cut for, another backbone: its states would be another's (InputError)."""
    made_with = facts(folder).get("backbone")
    if made_with != backbone:
        raise InputError(
            f"{folder} was made with backbone {str(made_with)[:12]}, not {backbone[:12]}: use another folder"
        )


def open_file(file: Path) -> Rows:
    """The rows of one file. Raises InputError where it is damaged."""
    try:
        with zipfile.ZipFile(file) as packed:
            size = sum(entry.file_size for entry in packed.infolist())
        if size > MAX_FILE:
            raise ValueError(f"it unpacks to {size} bytes")
        with np.load(file, allow_pickle=False) as arrays:
            rows = Rows(arrays["tokens"], arrays["own"])
    except Exception as error:  # a damaged zip raises what it likes
        raise InputError(f"{file} cannot be read ({error}): remove it to have it written again") from error
    good = rows.tokens.ndim == 2 and rows.tokens.dtype == np.int32 and rows.own.dtype == bool
    if not good or rows.own.shape != rows.tokens.shape or not rows.tokens.size or rows.tokens.min() < 0:
        raise InputError(f"{file} holds no rows of int32 tokens: remove it to have it written again")
    return rows


def save(file: Path, rows: Rows) -> None:
    """Write rows so that `open_file` reads them: whole or not at all."""
    packed = io.BytesIO()
    np.savez_compressed(packed, tokens=rows.tokens, own=rows.own)
    store.write_atomic(file, packed.getvalue())


def require_same(folder: Path, made: dict) -> None:
    """Note in a new folder what its text is made with. Raises InputError where it holds text made otherwise."""
    if not (folder / FACTS_FILE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        store.write_atomic(folder / FACTS_FILE, json.dumps(made, indent=1).encode())
    elif facts(folder) != json.loads(json.dumps(made)):
        raise InputError(f"{folder} holds text that was made otherwise ({FACTS_FILE}): give another folder")


def _batch_of_seeds(
    model: LanguageModel, documents: Sequence[corpus.Document], made: Writing, turns: Turns | None, key: list[int]
) -> list[Seed]:
    """The seeds of one batch, the shortest first: the common part is read in one forward."""
    endless: Iterator[Seed] = seeds(model, documents, longest=made.longest_seed, seed=number_of(key), turns=turns)
    return sorted((next(endless) for _ in range(made.batch_size)), key=lambda one: len(one.ids))
