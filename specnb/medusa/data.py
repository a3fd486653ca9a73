"""Training text by the backbone itself: `python -m specnb.medusa.train --stage data` (self-distillation).

Heads are to foretell what the backbone says, so they learn from what it says (Cai et al. 2401.10774, section 2.3.2;
the same in EAGLE-3 and SpecForge). A row is one stream of `length` tokens: a seed, the backbone's greedy answer, and,
where the answer ends early, a request that the backbone writes itself with some chance and answers again; so every
row of a batch is busy to the end and nothing is padded. `own[i]` says that token i is the backbone's greedy choice.

Rows are written batch by batch; a run that was stopped goes on behind the last batch, and the batch of any number is
the same for every run, since its random numbers come from (seed, number).
"""

import hashlib
import inspect
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb import corpus, store
from specnb.errors import InputError
from specnb.lm import hf_state
from specnb.lm.base import LanguageModel
from specnb.lm.bounded_json import read_json
from specnb.lm.hf_cache import new_cache
from specnb.medusa.seeds import ASKED, Seed, Turns, seeds

FACTS_FILE = "facts.json"
SPLITS = ("train", "held_out")
MAX_FILE, MAX_FACTS = 1 << 30, 1 << 20
ASKING_TEMPERATURE = 0.8
"""Of the requests that the backbone writes; its answers are greedy."""


@dataclass(frozen=True)
class Writing:
    """How the text is made: rows of `length` tokens in batches of `batch_size`, after seeds of at most `longest_seed`.

    An answer is at most `longest_answer` tokens, a request that the backbone writes `longest_request`.
    """

    length: int = 320
    batch_size: int = 64
    longest_seed: int = 120
    longest_answer: int = 160
    longest_request: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.length - self.longest_seed, self.batch_size, self.longest_answer, self.longest_request) < 1:
            raise InputError(f"rows must be longer than their seeds and every length at least 1, got {self}")


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
    made: Writing = Writing(),
    backbone: str,
    packages: Iterable[str] = corpus.LICENCES,
    shard: tuple[int, int] = (0, 1),
    on_tokens: Callable[[int], None] = lambda n: None,
) -> None:
    """Write the batches of each split (`train`, `held_out`) that are not in `folder` yet.

    `net` is the network behind `model`, and `backbone` its digest; seeds are of the `packages` that are installed.
    `shard` (i, n) writes every n-th batch from the i-th on, so that n processes share the work. Calls `on_tokens`
    with the tokens of each step. Raises InputError when the folder holds text made otherwise.
    """
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
            rows = _Stream(net, model.vocab.eog, turns, made, key).run(chosen, on_tokens)
            save(file, rows)


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
    endless: Iterator[Seed] = seeds(model, documents, longest=made.longest_seed, seed=_number(key), turns=turns)
    return sorted((next(endless) for _ in range(made.batch_size)), key=lambda one: len(one.ids))


def _number(key: list[int]) -> int:
    """A seed that is as good as random and the same for the same key."""
    return int(np.random.default_rng(key).bit_generator.seed_seq.generate_state(1)[0])


class _Row:
    """Where one row stands: what it must write next, or whose turn it is and for how many tokens more."""

    def __init__(self, seed: Seed, made: Writing) -> None:
        self.forced = list(seed.ids)
        self.answering = seed.kind != ASKED
        self.left = made.longest_answer if self.answering else made.longest_request


class _Stream:
    """One batch of rows, written token by token."""

    def __init__(
        self, net: PreTrainedModel, ends: frozenset[int], turns: Turns | None, made: Writing, key: list[int]
    ) -> None:
        self._net, self._ends, self._turns, self._made = net, sorted(ends), turns, made
        known = inspect.signature(net.forward).parameters
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._generator = torch.Generator().manual_seed(_number([*key, 1]))

    @torch.inference_mode()
    def run(self, chosen: list[Seed], on_tokens: Callable[[int], None]) -> Rows:
        length = self._made.length
        rows = [_Row(seed, self._made) for seed in chosen]
        tokens = np.zeros((len(rows), length), dtype=np.int32)
        own = np.zeros((len(rows), length), dtype=bool)
        known = min(len(row.forced) for row in rows)
        for row, line in zip(rows, tokens, strict=True):
            line[:known] = row.forced[:known]
            row.forced = row.forced[known:]
        state, logits = {hf_state.argument(self._net): new_cache(self._net)}, None
        for at in range(known, length):
            fed = slice(0, known) if logits is None else slice(at - 1, at)
            logits = self._net(
                input_ids=torch.from_numpy(tokens[:, fed]).long().to(self._net.device),
                position_ids=torch.arange(fed.start, fed.stop, device=self._net.device)[None].expand(len(rows), -1),
                use_cache=True,
                **state,
                **self._keep,
            ).logits[:, -1]
            self._write(rows, at, logits, tokens, own)
            on_tokens(len(rows))
        return Rows(tokens, own)

    def _write(self, rows: list[_Row], at: int, logits: torch.Tensor, tokens: np.ndarray, own: np.ndarray) -> None:
        """The token of every row at position `at`: forced, the best, or drawn."""
        best = logits.argmax(-1).tolist()
        asking = [i for i, row in enumerate(rows) if not row.forced and not row.answering]
        drawn = dict(zip(asking, self._draw(logits[asking]), strict=True)) if asking else {}
        for i, row in enumerate(rows):
            if row.forced:
                tokens[i, at] = row.forced.pop(0)
                continue
            own[i, at] = row.answering
            tokens[i, at] = best[i] if row.answering else drawn[i]
            self._turn(row, tokens[i, at] in self._ends)

    def _draw(self, logits: torch.Tensor) -> list[int]:
        chances = (logits.float() / ASKING_TEMPERATURE).softmax(-1).cpu()
        return torch.multinomial(chances, 1, generator=self._generator)[:, 0].tolist()

    def _turn(self, row: _Row, ended: bool) -> None:
        """Count a token; hand over where the answer or the request has ended."""
        row.left -= 1
        if (not ended and row.left > 0) or self._turns is None:
            return
        after = self._turns.to_request if row.answering else self._turns.to_answer
        # the end token that was just written is the first of what the template puts behind a message
        row.forced = list(after[1:] if ended and after and after[0] in self._ends else after)
        row.answering = not row.answering
        row.left = self._made.longest_answer if row.answering else self._made.longest_request
