"""Training text of heads: rows that the backbone writes, and their hidden states, in a folder.

Heads predict the backbone's own tokens, so they are trained on them (Cai et al. 2401.10774, section 2.3.2).
A row is a seed, an answer that the backbone draws, and, where the answer ends early or repeats itself, a request that
the backbone draws too and answers again: nothing is padded. What is written a second time in a row counts as a
repeat, and nothing is learned from it.

Seeds are of the kinds that people send: code and prose to go on with, and chat requests to explain, edit, summarise
or extract, from the texts that come with Python; and next to nothing, an opening of a few words or an empty request,
from which the backbone draws the rest itself. Nothing of `data/prompts` is among them.

Rows are written batch by batch, and the random numbers of a batch come from (seed, number): a run that was stopped goes
on behind the last one. States are the outputs of `tapped_layers` and the input of the final norm, in bfloat16.
"""

import io
import json
import platform
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specnb.decode.generate import encode_open
from specnb.errors import InputError, MemoryShortError
from specnb.io import digest, project_dir, read_json, write_atomic
from specnb.lm import chat
from specnb.lm.base import LanguageModel
from specnb.lm.hf.engine import cache_argument, new_cache
from specnb.lm.hf.hidden import pre_norm_states
from specnb.lm.hf.product import pack
from specnb.machine import free_bytes
from specnb.measure.experiment import Progress, silent
from specnb.medusa.nets import backbone_of

# --- seeds: what the backbone writes from ---

ASKED = "asked"
"""The kind of seed that holds no request: the backbone writes one itself (Magpie, Xu et al. 2406.08464)."""
KINDS = {"code": 0.35, "prose": 0.1, "opening": 0.1, "request": 0.25, ASKED: 0.2}
"""The share of each kind."""
EXCERPT_LINES = (2, 14)
"""Lines of the excerpt, from and up to."""
MARK = "\u0001"
"""Stands for a message's text in a rendered chat; no template writes it itself."""


class Writing(NamedTuple):
    """Settings of the text: rows of `length` tokens in batches of `batch_size`, seeds of at most `longest_seed`.

    An answer is at most `longest_answer` tokens, a request that the backbone writes `longest_request`.
    """

    length: int = 256
    batch_size: int = 64
    longest_seed: int = 96
    longest_answer: int = 144
    longest_request: int = 40
    seed: int = 0


class Turns(NamedTuple):
    """The tokens a chat template puts before the first request, and behind each request and each answer."""

    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_request: tuple[int, ...]

    @classmethod
    def of(cls, model: LanguageModel) -> Self:
        """Raises InputError when the template changes what it is given, or there is none."""
        messages = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
        parts = chat.render_chat(model.vocab, messages).split(MARK)
        if len(parts) != 4:
            raise InputError(f"the chat template of {model.name} does not write each message once: give plain texts")
        opening, *others = (tuple(encode_open(model, part)) for part in parts[:3])
        if model.vocab.add_bos:  # encode puts it in front of each part; it belongs in front of the chat alone, once
            opening = opening[opening[:2] == (model.vocab.bos,) * 2 :]
            others = [part[1:] for part in others]
        return cls(opening, *others)


class Seed(NamedTuple):
    """Token ids to begin with. The backbone goes on with a request where the kind is `asked`, else with an answer."""

    kind: str
    ids: tuple[int, ...]


def read_library(split: str) -> dict[str, list[str]]:
    """The texts of a split by kind: Python's own modules are code, its language reference is prose."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[!_]*.py"))
    texts = {"code": [module.read_text(encoding="utf-8", errors="replace") for module in modules]}
    texts["prose"] = [topics[name] for name in sorted(topics)]
    chosen = split == "held_out"
    return {kind: [text for i, text in enumerate(of, 1) if (i % HELD_OUT_EVERY == 0) is chosen]
            for kind, of in texts.items()}  # fmt: skip


def draw_seeds(
    model: LanguageModel, texts: Mapping[str, Sequence[str]], writing: Writing, key: list[int], turns: Turns | None
) -> list[Seed]:
    """Draw the seeds of a batch with `key` from `texts` by kind, the shortest first; no chat without `turns`."""
    # beginnings of texts of all kinds, and requests about a text
    openings, requests = read_json(project_dir() / "data/heads/seeds.json").values()
    rng = np.random.default_rng(key)
    kinds = {kind: share for kind, share in KINDS.items() if turns or kind not in ("request", ASKED)}
    shares, batch = np.array(list(kinds.values())), []
    while len(batch) < writing.batch_size:
        kind = rng.choice(list(kinds), p=shares / shares.sum())
        about = kind if kind in texts else rng.choice(list(texts))
        # a few lines of a text, beginning where a paragraph does
        lines = texts[about][rng.integers(len(texts[about]))].split("\n")
        begins = [i for i, line in enumerate(lines) if line.strip() and (i == 0 or not lines[i - 1].strip())]
        start = begins[rng.integers(len(begins))]
        excerpt = "\n".join(lines[start : start + rng.integers(*EXCERPT_LINES)]) + "\n"
        if kind == ASKED:
            ids = turns.opening
        elif kind == "request":
            request = rng.choice(requests[about]).format(text=excerpt.strip("\n"))
            ids = (*turns.opening, *model.encode(request, special=False), *turns.to_answer)
            if len(ids) > writing.longest_seed:  # cut in the middle it would have no question
                continue
        else:
            ids = model.encode(str(rng.choice(openings)) if kind == "opening" else excerpt, special=False)
        batch.append(Seed(kind, tuple(ids[: writing.longest_seed])))
    return sorted(batch, key=lambda seed: len(seed.ids))  # the common part is read in one forward


# --- rows: a seed, and what the backbone writes behind it ---

DRAWING_TEMPERATURE = 0.8
REPEAT, LONGEST_REPEAT = 8, 24
"""Tokens that stood in this row before are a repeat; a message ends where so many tokens end one."""


class GrowingRow:
    """A row that is being written: `forced` tokens, then a message of the backbone's, and so on."""

    def __init__(self, seed: Seed, writing: Writing) -> None:
        self.forced, self.answering = [*seed.ids], seed.kind != ASKED
        self._writing, self._in_message, self._repeated = writing, 0, 0
        self._tokens, self._past = [], set()

    def append(self, token: int, turns: Turns | None, ends: Collection[int]) -> bool:
        """Take the token that came; return whether it is the backbone's own, and no repeat.

        Behind the last token of a message it is the other side's turn.
        """
        self._tokens.append(token)
        newest = tuple(self._tokens[-REPEAT:])
        repeats, own = newest in self._past, not self.forced
        self._past.add(newest)
        if not own:
            del self.forced[0]
            return False
        self._in_message, self._repeated = self._in_message + 1, self._repeated + 1 if repeats else 0
        longest = self._writing.longest_answer if self.answering else self._writing.longest_request
        over = token in ends or self._in_message >= longest or self._repeated >= LONGEST_REPEAT
        if over and turns:  # without a chat template there is nobody else
            after = turns.to_request if self.answering else turns.to_answer
            # the end token that was just written is the first of what the template puts behind a message
            self.forced = [*(after[1:] if token in ends and after and after[0] in ends else after)]
            self.answering, self._in_message, self._repeated = not self.answering, 0, 0
        return not repeats


class TextRows(NamedTuple):
    """Written rows: `tokens (rows, length)` int32 and `own (rows, length)` bool, what the backbone drew anew."""

    tokens: np.ndarray
    own: np.ndarray

    @property
    def n_own(self) -> int:
        return int(self.own.sum())

    def digest(self) -> str:
        """sha256 over both arrays."""
        return digest(self.tokens.tobytes() + np.packbits(self.own).tobytes())


def tapped_layers(n_layers: int) -> list[int]:
    """Layers whose outputs are kept, from 0: a low one, the middle, one at two thirds, a high one.

    EAGLE-3 reads the first, the second and the last of them.

    >>> tapped_layers(30)
    [2, 15, 20, 27]
    """
    return [max(0, layer) for layer in (min(2, n_layers - 3), n_layers // 2, 2 * n_layers // 3, n_layers - 3)]


@contextmanager
def attending_in_groups(net: PreTrainedModel) -> Iterator[None]:
    """Have one new token a row attend by two products: torch's own attention takes ten times as long on a CPU.

    It does where heads share keys and there is no mask.
    """

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, **options: Any):
        if q.shape[2] > 1 or mask is not None:
            return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **options)
        q = q.view(*k.shape[:2], -1, k.shape[-1]) * scaling  # (B, G, H / G, d)
        attended = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return attended.flatten(1, 2)[:, None], None

    AttentionInterface.register("groups", attend)
    AttentionMaskInterface.register("groups", sdpa_mask)
    before = net.config._attn_implementation
    net.set_attn_implementation("groups" if before == "sdpa" else before)
    try:
        yield
    finally:
        net.set_attn_implementation(before)


@torch.inference_mode()
def write_rows(
    model: LanguageModel, seeds: Sequence[Seed], turns: Turns | None, writing: Writing, key: list[int]
) -> tuple[TextRows, Tensor]:
    """Have the backbone go on behind `seeds`; also return its states `(rows, length, layers, hidden)`.

    `key` is that of the draws.
    """
    net, states = model.network, []
    pack(net)
    options = {cache_argument(net): new_cache(net), "use_cache": True}
    generator = torch.Generator().manual_seed(int(np.random.default_rng([*key, 2]).integers(1 << 62)))
    rows = [GrowingRow(seed, writing) for seed in seeds]
    tokens = np.zeros((len(rows), writing.length), np.int32)
    own = np.zeros(tokens.shape, bool)
    n_fed, known = 0, min(len(seed.ids) for seed in seeds)

    def feed_to(end: int) -> Tensor:
        """Logits `(rows, vocab)` behind the first `end` tokens."""
        ids = tokens[:, n_fed:end]
        positions = torch.arange(n_fed, end, device=net.device)[None].expand(len(rows), -1)
        logits, state = forward_tapped(net, ids, position_ids=positions, **options)
        states.append(state)
        return logits

    with attending_in_groups(net):
        for at in range(writing.length):
            if at >= known:
                below = (feed_to(at).float() / DRAWING_TEMPERATURE).softmax(-1).cumsum(-1).cpu()
                places = torch.rand(len(rows), 1, generator=generator) * below[:, -1:]
                drawn, n_fed = torch.searchsorted(below, places)[:, 0].tolist(), at
            for i, row in enumerate(rows):
                tokens[i, at] = row.forced[0] if row.forced else drawn[i]
                own[i, at] = row.append(int(tokens[i, at]), turns, model.vocab.eog)
        feed_to(writing.length)
    return TextRows(tokens, own), torch.cat(states, 1)


@torch.inference_mode()
def forward_tapped(net: PreTrainedModel, tokens: np.ndarray, **options: Any) -> tuple[Tensor, Tensor]:
    """Last logits `(rows, vocab)` of `tokens (rows, n)`, and bfloat16 states `(rows, n, layers, hidden)`.

    The states are those behind `tapped_layers`, and last those in front of the final norm.
    """
    ids = torch.from_numpy(tokens).long().to(net.device)
    with pre_norm_states(net) as final:
        out = net(input_ids=ids, output_hidden_states=True, logits_to_keep=1, **options)
    tapped = [out.hidden_states[1 + layer] for layer in tapped_layers(len(out.hidden_states) - 1)]
    return out.logits[:, -1], torch.stack([*tapped, final[0]], 2).to(torch.bfloat16).cpu()


# --- a folder of rows and their states ---

FACTS_FILE, SPLITS = "facts.json", ("train", "held_out")
"""The file has what a text was written with: settings, model, digest of the backbone."""
HELD_OUT_EVERY = 20
"""Number of texts to begin with for each that is held out."""


def write_splits(
    model: LanguageModel, folder: Path, *, batches: dict[str, int], writing: Writing, progress: Progress = silent
) -> None:
    """Have `model` write the batches of each split that are not in `folder` yet, and compute their hidden states.

    Raises InputError when the folder holds text of other settings.
    """
    settings = {"writing": writing._asdict(), "python": platform.python_version()}
    settings |= {"backbone": backbone_of(model).digest, "model": model.name}
    if not (folder / FACTS_FILE).is_file():
        write_atomic(folder / FACTS_FILE, json.dumps(settings, indent=1).encode())
    elif read_json(folder / FACTS_FILE) != settings:
        raise InputError(f"{folder} holds text of other settings or another model ({FACTS_FILE}): use another folder")
    turns = Turns.of(model) if model.vocab.chat_template else None
    texts = {split: read_library(split) for split in batches}
    parts = [(split, number) for split, n in batches.items() for number in range(n)]
    for done, (split, number) in enumerate(parts):
        file = folder / f"{split}-{number:05d}.npz"
        if file.is_file():
            continue
        progress(done, len(parts), "text by the backbone, and its states")
        key = [writing.seed, SPLITS.index(split), number]
        seeds = draw_seeds(model, texts[split], writing, key, turns)
        save_rows(file, *write_rows(model, seeds, turns, writing, key))


def save_rows(file: Path, rows: TextRows, states: Tensor) -> None:
    """Write rows and their hidden states, whole or not at all. Raises InputError for states that are not finite."""
    if not states.isfinite().all():
        raise InputError("the backbone's hidden states are not finite: try another dtype")
    packed = io.BytesIO()
    np.savez(packed, **rows._asdict(), states=states.to(torch.bfloat16).view(torch.int16).numpy())
    write_atomic(file, packed.getvalue())


def read(folder: Path, split: str) -> TextRows:
    """All rows of a split."""
    return TextRows(*(np.concatenate([*_parts(folder, split, array)]) for array in TextRows._fields))


def read_states(folder: Path, split: str, layers: Any) -> Tensor:
    """States of a split, `(rows, length, layers, hidden)` bfloat16, in the order of `read`.

    `layers` are places among those that are kept. Raises MemoryShortError where they do not fit the memory.
    """
    n_files, free = len([*folder.glob(f"{split}-*.npz")]), free_bytes() / 1e9
    for file, part in enumerate(_parts(folder, split, "states")):
        part = part[:, :, layers]
        if not file:
            if (needed := n_files * part.nbytes / 1e9) > free:
                gigabytes = f"states of {split} take {needed:.1f} GB, {free:.1f} are free"
                raise MemoryShortError(f"{gigabytes}: train on fewer batches")
            states = np.empty((n_files, *part.shape), part.dtype)
        states[file] = part
    return torch.from_numpy(states).flatten(0, 1).view(torch.bfloat16)


def _parts(folder: Path, split: str, array: str) -> Iterator[np.ndarray]:
    """One of the arrays tokens, own and states, file by file of a split."""
    for file in sorted(folder.glob(f"{split}-*.npz")):
        with np.load(file, allow_pickle=False) as arrays:
            yield arrays[array]


def most_frequent(rows: TextRows, n: int, vocab_size: int) -> Tensor:
    """The `n` tokens that the backbone wrote most often, ascending, int64: a draft vocabulary.

    Where it wrote fewer different ones, the most frequent of what else stands in the text follow, then the first ids.
    """
    texts = rows.tokens[rows.own], rows.tokens.ravel()
    own, every = (np.bincount(tokens, minlength=vocab_size) for tokens in texts)
    return torch.from_numpy(np.sort(np.lexsort((-every, -own))[:n]))
