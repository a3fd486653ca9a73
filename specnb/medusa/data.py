"""What heads learn from: rows of text and their hidden states in a folder, and the examples that are cut from them.

Heads are to foretell what the backbone says, so they learn from what it says (Cai et al. 2401.10774, section 2.3.2).
Rows are written batch by batch (`text`); the random numbers of a batch come from (seed, number), so a run that was
stopped goes on behind the last one. Or texts are given, of which every token counts as a label. The backbone is frozen:
its states are kept, in front of the final norm and in bfloat16.

An example is one position of one row. At position t the heads get the hidden state of token t. Head i is to say token
t + 2 + i; Hydra's head i is shown the tokens t + 1 … t + 1 + i. An example exists where token t + 2 is the backbone's
own choice, and head i has a label as far as all tokens from there on are: what a user or a template writes is not the
backbone's to foretell.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.errors import InputError, MemoryShortError
from specnb.io import file_digest, json_lines, write_atomic
from specnb.lm.base import LanguageModel
from specnb.lm.hf.hidden import pre_norm_states
from specnb.medusa import corpus
from specnb.medusa.nets import Heads, digest, draft_ids
from specnb.medusa.text import OnTokens, Turns, Writer, Writing, seeds

FACTS_FILE, SPLITS = "facts.json", ("train", "held_out")
MAX_TOKENS, HELD_OUT_EVERY = 1 << 28, 20
"""Of given texts: most tokens that are read, and of how many rows one is held out."""
FORWARD_ROWS = 4
"""Rows of one forward: wide enough for matrix products, small enough for a cache."""
NO_LABEL = -100


@dataclass(frozen=True)
class TextRows:
    """Written rows: `tokens (rows, length)` int32 and `own (rows, length)` bool, the backbone's greedy choices."""

    tokens: np.ndarray
    own: np.ndarray

    @property
    def n_own(self) -> int:
        return int(self.own.sum())

    def digest(self) -> str:
        """sha256 over both arrays."""
        return hashlib.sha256(self.tokens.tobytes() + np.packbits(self.own).tobytes()).hexdigest()

    def save(self, file: Path) -> None:
        """Write them whole or not at all."""
        packed = io.BytesIO()
        np.savez_compressed(packed, tokens=self.tokens, own=self.own)
        write_atomic(file, packed.getvalue())

    @classmethod
    def load(cls, file: Path) -> Self:
        with np.load(file, allow_pickle=False) as arrays:
            return cls(arrays["tokens"], arrays["own"])


def write(
    model: LanguageModel,
    folder: Path,
    *,
    batches: dict[str, int],
    writing: Writing,
    packages: Iterable[str] = corpus.LICENCES,
    on_tokens: OnTokens = lambda n: None,
) -> None:
    """Have `model` write the batches of each split that are not in `folder` yet, and compute their hidden states.

    Seeds are of the `packages` that are installed. Raises InputError when the folder holds text of other settings.
    """
    documents = dict(zip(SPLITS, corpus.split(corpus.documents(corpus.installed(packages))), strict=True))
    digests = {split: corpus.corpus_digest(texts) for split, texts in documents.items()}
    _require_same(folder, model, {"writing": asdict(writing), "corpus": digests})
    turns = Turns.of(model) if model.vocab.chat_template else None
    for split, n in batches.items():
        for number in range(n):
            file = folder / f"{split}-{number:05d}.npz"
            if file.is_file():
                continue
            key = [writing.seed, SPLITS.index(split), number]
            endless = seeds(model, documents[split], longest=writing.longest_seed, key=key, turns=turns)
            # the shortest first: the common part is read in one forward
            batch = sorted(islice(endless, writing.batch_size), key=lambda seed: len(seed.ids))
            TextRows(*Writer(model, turns, writing, key).run(batch, on_tokens)).save(file)
    _compute_states(model.network, folder)


def write_given(model: LanguageModel, texts: Path, folder: Path, *, length: int) -> None:
    """Write rows of `length` tokens of a .jsonl file with `{"text": …}` on each line, and their hidden states.

    One text stands behind the other. Raises InputError when the folder holds other text, there is too little, or a
    line is anything else.
    """
    _require_same(folder, model, {"texts": file_digest(texts), "length": length})
    if not (folder / "train-00000.npz").is_file():
        ids = np.fromiter(islice(_given_ids(model, texts), MAX_TOKENS), dtype=np.int32)
        rows = ids[: len(ids) // length * length].reshape(-1, length)
        if len(rows) < HELD_OUT_EVERY:
            raise InputError(f"the texts have {len(ids)} tokens, at least {HELD_OUT_EVERY * length} are needed")
        held_out = np.arange(len(rows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        for split, chosen in (("held_out", rows[held_out]), ("train", rows[~held_out])):
            TextRows(chosen, np.ones(chosen.shape, dtype=bool)).save(folder / f"{split}-00000.npz")
    _compute_states(model.network, folder)


def _given_ids(model: LanguageModel, texts: Path) -> Iterator[int]:
    for number, line in json_lines(texts):
        if not isinstance(line, dict) or set(line) != {"text"} or not isinstance(line["text"], str):
            raise InputError(f'{texts}, line {number}: each line is {{"text": "…"}} and nothing else')
        yield from model.encode(line["text"], special=False)
        yield from sorted(model.vocab.eog)[:1]


@torch.inference_mode()
def _compute_states(net: PreTrainedModel, folder: Path) -> None:
    """Write the states of every file of text in `folder` that has none yet."""
    for file in files(folder):
        if _states_of(file).is_file():
            continue
        parts = []
        for tokens in torch.from_numpy(TextRows.load(file).tokens).long().split(FORWARD_ROWS):
            with pre_norm_states(net) as caught:
                net(input_ids=tokens.to(net.device), use_cache=False, logits_to_keep=1)
            parts.append(caught[0].to(torch.bfloat16).cpu())
        states = torch.cat(parts)
        if not bool(torch.isfinite(states).all()):
            raise InputError("the backbone's hidden states are not finite: try another dtype")
        packed = io.BytesIO()
        np.save(packed, states.view(torch.int16).numpy())
        write_atomic(_states_of(file), packed.getvalue())


def _states_of(file: Path) -> Path:
    return file.with_suffix(".hidden.npy")


def read(folder: Path, split: str) -> TextRows:
    """All rows of a split."""
    parts = [TextRows.load(file) for file in files(folder, split)]
    return TextRows(np.concatenate([p.tokens for p in parts]), np.concatenate([p.own for p in parts]))


def read_states(folder: Path, split: str) -> Tensor:
    """States of a split, `(rows, length, hidden)` bfloat16, in the order of `read`.

    Raises MemoryShortError where they do not fit the memory.
    """
    parts = [np.load(_states_of(file), mmap_mode="r", allow_pickle=False) for file in files(folder, split)]
    n_bytes, free = sum(part.nbytes for part in parts), psutil.virtual_memory().available
    if n_bytes > free:
        size = f"{n_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free"
        raise MemoryShortError(f"the hidden states of {split} take {size}: train on fewer batches")
    return torch.from_numpy(np.concatenate(parts)).view(torch.bfloat16)


def files(folder: Path, split: str = "*") -> list[Path]:
    """The files of a split, or of all, in order."""
    return sorted(folder.glob(f"{split}-*.npz"))


def facts(folder: Path) -> dict[str, Any]:
    """What the text was written with: settings, model, digests of backbone and corpus."""
    return json.loads((folder / FACTS_FILE).read_text())


def _require_same(folder: Path, model: LanguageModel, settings: dict[str, Any]) -> None:
    """Note in a new folder what its text is written with. Raises InputError where it holds text of other settings."""
    settings |= {"backbone": digest(model.network), "model": model.name}
    if not (folder / FACTS_FILE).is_file():
        write_atomic(folder / FACTS_FILE, json.dumps(settings, indent=1).encode())
    elif facts(folder) != json.loads(json.dumps(settings)):
        raise InputError(f"{folder} holds text of other settings or another model ({FACTS_FILE}): use another folder")


class Batch(NamedTuple):
    """`hidden (batch, hidden)`, `ids (batch, n_heads)` the tokens since, `labels (batch, n_heads)` draft ids,
    and, where asked for, `later (batch, n_heads, hidden)`, the states in which the backbone chose the labels."""

    hidden: Tensor
    ids: Tensor
    labels: Tensor
    later: Tensor | None


class Examples:
    """All examples of a split, drawn by step: the batch of step n is a function of (seed, n) alone."""

    def __init__(
        self, rows: TextRows, states: Tensor, *, n_heads: int, token_map: Tensor | None, vocab_size: int
    ) -> None:
        """`states (rows, length, hidden)` as of `read_states`."""
        n_rows, length = rows.tokens.shape
        self._hidden = states.flatten(0, 1)
        self._tokens = torch.from_numpy(rows.tokens.astype(np.int64)).flatten()
        self._n_heads = n_heads
        last = length - 1 - n_heads  # positions whose every label lies in the row
        is_own = np.stack([rows.own[:, 2 + i : 2 + i + last] for i in range(n_heads)], axis=-1)
        known = torch.from_numpy(np.logical_and.accumulate(is_own, axis=-1)).flatten(0, 1)
        places = torch.from_numpy(np.arange(n_rows)[:, None] * length + np.arange(last)).flatten()
        usable = known[:, 0]
        self._known, self._places = known[usable], places[usable]
        self._draft_id = draft_ids(token_map, vocab_size)
        self._order: tuple[tuple[int, int], np.ndarray] = ((-1, -1), np.empty(0))

    @classmethod
    def of(cls, folder: Path, split: str, heads: Heads) -> Self:
        """The examples of a split of the text in `folder`, for these heads."""
        token_map = None if heads.token_map is None else heads.token_map.cpu()
        sizes = {"n_heads": heads.config.n_heads, "vocab_size": heads.config.vocab_size}
        return cls(read(folder, split), read_states(folder, split), token_map=token_map, **sizes)

    def __len__(self) -> int:
        return len(self._places)

    def at_step(self, step: int, *, batch_size: int, seed: int, later: bool = True) -> Batch:
        """The batch of a step: each epoch visits every example at most once, in another order."""
        if batch_size > len(self):
            raise InputError(f"a batch of {batch_size} of {len(self)} examples: write more text")
        epoch, place = divmod(step, len(self) // batch_size)
        if self._order[0] != (seed, epoch):  # made once an epoch: it takes longer than a small step
            self._order = ((seed, epoch), np.random.default_rng([seed, epoch]).permutation(len(self)))
        return self.batch(torch.from_numpy(self._order[1][place * batch_size : (place + 1) * batch_size]), later=later)

    def spread(self, n: int, *, later: bool = True) -> Batch:
        """About `n` examples spread evenly over all."""
        return self.batch(torch.arange(0, len(self), max(1, len(self) // n)), later=later)

    def batch(self, chosen: Tensor, *, later: bool = True) -> Batch:
        """The examples with these numbers; `later` are most of the bytes, and only soft targets need them."""
        at = self._places[chosen]
        since = at[:, None] + 1 + torch.arange(self._n_heads)
        labels = self._draft_id[self._tokens[since + 1]]
        labels = torch.where(self._known[chosen], labels, NO_LABEL)
        return Batch(self._hidden[at], self._tokens[since], labels, self._hidden[since] if later else None)


def most_frequent(rows: TextRows, n: int) -> Tensor:
    """The `n` tokens that the backbone wrote most often, ascending, int64: a draft vocabulary.

    Where it wrote fewer different ones, the most frequent of what else stands in the text follow: they are likely in
    other texts. Raises InputError where all of the text has fewer.
    """
    size = int(rows.tokens.max()) + 1
    counts, every = (np.bincount(tokens, minlength=size) for tokens in (rows.tokens[rows.own], rows.tokens.ravel()))
    if np.count_nonzero(every) < n:
        raise InputError(f"a draft vocabulary of {n}, but the text holds {np.count_nonzero(every)} different tokens")
    return torch.from_numpy(np.sort(np.lexsort((-every, -counts))[:n]))


def coverage(rows: TextRows, token_map: Tensor | None) -> float:
    """Share of the backbone's own tokens that the draft vocabulary holds."""
    return 1.0 if token_map is None else float(np.isin(rows.tokens[rows.own], token_map.numpy()).mean())
