"""Training text of heads: rows that the frozen backbone generates, and their hidden states.

Heads predict the backbone's own tokens, so they are trained on its own text (Cai et al. 2401.10774,
section 2.3.2). A row is a seed and the backbone's sampled continuation, of a fixed length in
tokens. All rows of a batch are generated together.

Seeds are excerpts of code and prose from the texts that come with Python and, for a model with a
chat template, also requests about such an excerpt. None is in `data/prompts`.

Batches are generated one by one. The random numbers of a batch come from (seed, split, number), so
a run that was stopped resumes after its last batch. States are the outputs of `tapped_layers` and
the input of the final norm, in bfloat16.
"""

import io
import json
import platform
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specnb.decode.generate import prompt_ids
from specnb.errors import InputError, MemoryShortError
from specnb.io import digest, project_dir, read_json, write_atomic
from specnb.lm.base import LanguageModel
from specnb.lm.hf.engine import cache_argument, new_cache
from specnb.lm.hf.hidden import pre_norm_states
from specnb.lm.hf.int4 import dense_copy
from specnb.lm.hf.product import pack
from specnb.machine import auto_dtype, free_bytes, need_bytes
from specnb.measure.experiment import Progress, silent
from specnb.medusa.nets import backbone_of

# --- seeds: what the backbone continues ---

REQUESTS = 0.4
"""The probability that a seed is a request, for a model with a chat template."""
PARAGRAPHS = 2
"""Paragraphs of an excerpt."""


class Writing(NamedTuple):
    """Settings of the text: rows of `length` tokens in batches of `batch_size` rows.

    A seed has at most `longest_seed` tokens.
    """

    length: int = 256
    batch_size: int = 64
    longest_seed: int = 96
    seed: int = 0


def read_library(split: str) -> dict[str, list[str]]:
    """Return the texts of a split: Python's modules as code, its language reference as prose."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[!_]*.py"))
    code = [module.read_text(encoding="utf-8", errors="replace") for module in modules]
    held_out = split == "held_out"
    return {
        kind: [text for i, text in enumerate(texts, 1) if (i % HELD_OUT_EVERY == 0) == held_out]
        for kind, texts in (("code", code), ("prose", topics.values()))
    }


def draw_seeds(
    model: LanguageModel, texts: Mapping[str, Sequence[str]], writing: Writing, rng: Generator
) -> list[tuple[int, ...]]:
    """Draw the seeds of a batch, as token ids, from `texts` by kind.

    Excerpts that are too long are cut. A request that is too long is drawn again, because the
    answer begins at its end.
    """
    requests = read_json(project_dir() / "data/heads/seeds.json")
    seeds = []
    while len(seeds) < writing.batch_size:
        kind = rng.choice([*texts])
        text = texts[kind][int(rng.integers(len(texts[kind])))]
        paragraphs = [part for part in text.split("\n\n") if part.strip()]
        start = int(rng.integers(len(paragraphs)))
        prompt = excerpt = "\n\n".join(paragraphs[start : start + PARAGRAPHS]).strip("\n")
        if model.vocab.chat_template and rng.random() < REQUESTS:
            request = rng.choice(requests[kind]).format(text=excerpt)
            prompt = [{"role": "user", "content": request}]
        ids = prompt_ids(model, prompt)
        if isinstance(prompt, str) or len(ids) <= writing.longest_seed:
            seeds.append(ids[: writing.longest_seed])
    return seeds


# --- rows: seeds, and the backbone's continuations ---

TEMPERATURE = 0.8
REPEAT = 8
"""A run of this many tokens that occurred earlier in its row is a repeat."""


class TextRows(NamedTuple):
    """Generated rows: `tokens (rows, length)` int32 and `own (rows, length)` bool.

    `own` marks the tokens that heads learn: those of the continuation up to and including its first
    end-of-generation token, except repeats. The row continues after that token, since all rows of a
    batch have one length, but decoding would have stopped there.
    """

    tokens: np.ndarray
    own: np.ndarray

    @property
    def n_own(self) -> int:
        return int(self.own.sum())

    def digest(self) -> str:
        """sha256 over both arrays."""
        return digest(self.tokens.tobytes() + np.packbits(self.own).tobytes())


def mark_own(tokens: np.ndarray, seed_lengths: np.ndarray, eog: Collection[int]) -> np.ndarray:
    """Return `TextRows.own` of `tokens (rows, length)`, for seeds of `seed_lengths (rows,)`."""
    own = np.zeros(tokens.shape, bool)
    for row, ids in enumerate(tokens.tolist()):
        earlier = set()
        for place, token in enumerate(ids):
            generated = place >= seed_lengths[row]
            run = tuple(ids[max(0, place + 1 - REPEAT) : place + 1])
            own[row, place] = generated and run not in earlier
            earlier.add(run)
            if generated and token in eog:
                break
    return own


def tapped_layers(n_layers: int) -> list[int]:
    """Return the layers, from 0, whose outputs are stored: low, middle, at two thirds, and high.

    EAGLE-3 reads the first, the second and the last of them.

    >>> tapped_layers(30)
    [2, 15, 20, 27]
    """
    high = n_layers - 3
    return [max(0, layer) for layer in (min(2, high), n_layers // 2, 2 * n_layers // 3, high)]


def dense_dtype(model: LanguageModel) -> torch.dtype | None:
    """Return the dtype of the dense copy that writes text for an int4 model; None without a copy.

    The int4 kernel multiplies four rows at a time, so its passes over a batch of rows take several
    times as long as dense ones. The copy has the same weights, dequantized to bfloat16 if the CPU
    has it in hardware, else float32. Its states differ from those of int4 by rounding. Other models,
    and an int4 model without memory for the copy, write themselves.
    """
    layers = [module for module in model.network.modules() if isinstance(module, nn.Linear)]
    n_weights = sum(layer.in_features * layer.out_features for layer in layers)
    if model.caps.dtype != "int4" or need_bytes(8 * n_weights) > free_bytes():
        return None
    return getattr(torch, auto_dtype())


@contextmanager
def attention_in_groups(net: PreTrainedModel) -> Iterator[None]:
    """Compute the attention of one new token per row by `attend_in_groups` inside the block.

    For query heads that share keys, without a mask, torch's SDPA takes ten times as long on a CPU.
    """
    AttentionInterface.register("groups", attend_in_groups)
    AttentionMaskInterface.register("groups", sdpa_mask)
    before = net.config._attn_implementation
    net.set_attn_implementation("groups" if before == "sdpa" else before)
    try:
        yield
    finally:
        net.set_attn_implementation(before)


def attend_in_groups(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any):
    """Attend by two matrix products if there is one query per row and no mask, else by SDPA.

    `q (B, H, n, d)`, `k` and `v (B, G, length, d)`, for G groups of H / G heads that share keys.
    """
    if q.shape[2] > 1 or mask is not None:
        return sdpa_attention_forward(module, q, k, v, mask, **options)
    q = q.view(*k.shape[:2], -1, k.shape[-1]) * options["scaling"]  # (B, G, H / G, d)
    attended = (q @ k.transpose(2, 3)).softmax(-1) @ v
    return attended.flatten(1, 2)[:, None], None


@torch.inference_mode()
def write_rows(
    net: PreTrainedModel, seeds: Sequence[tuple[int, ...]], length: int, rng: Generator
) -> tuple[np.ndarray, Tensor]:
    """Continue `seeds` to `length` tokens; also return states `(rows, length, layers, hidden)`."""
    options = {cache_argument(net): new_cache(net), "use_cache": True}
    seed_lengths = np.array([len(seed) for seed in seeds])
    tokens = np.zeros((len(seeds), length), np.int32)
    for row, seed in zip(tokens, seeds, strict=True):
        row[: len(seed)] = seed
    states = []
    begin = 0
    with attention_in_groups(net):
        for end in range(seed_lengths.min(), length + 1):
            # 1. Feed what is new: first the shortest seed's length of every row, then one token.
            logits, state = forward_tapped(net, tokens[:, begin:end], **options)
            states.append(state)
            begin = end
            # 2. Sample the next token of every row whose seed has ended.
            if end < length:
                growing = seed_lengths <= end
                tokens[growing, end] = sample(logits, rng)[growing]
    return tokens, torch.cat(states, 1)


def sample(logits: Tensor, rng: Generator) -> np.ndarray:
    """Sample one token per row of `logits (rows, vocab)` at TEMPERATURE."""
    below = (logits.float() / TEMPERATURE).softmax(-1).cumsum(-1).cpu()
    points = torch.from_numpy(rng.random((len(below), 1), np.float32)) * below[:, -1:]
    return torch.searchsorted(below, points)[:, 0].numpy()


@torch.inference_mode()
def forward_tapped(
    net: PreTrainedModel,
    tokens: np.ndarray,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run one forward pass over `tokens (rows, n)`.

    Return the logits `(rows, vocab)` at the last token, and states `(rows, n, layers, hidden)` in
    bfloat16 on the CPU: the outputs of `tapped_layers`, then the input of the final norm.
    """
    ids = torch.from_numpy(tokens).long().to(net.device)
    with pre_norm_states(net) as final:
        out = net(input_ids=ids, output_hidden_states=True, logits_to_keep=1, **options)
    tapped = [out.hidden_states[1 + layer] for layer in tapped_layers(len(out.hidden_states) - 1)]
    return out.logits[:, -1], torch.stack([*tapped, final[0]], 2).to(torch.bfloat16).cpu()


# --- a folder of rows and their states ---

FACTS_FILE = "facts.json"
"""Holds what a text was generated with: settings, Python version, model, backbone digest."""
SPLITS = ("train", "held_out")
HELD_OUT_EVERY = 20
"""Number of texts of the library for each one that is held out."""


def write_splits(
    model: LanguageModel,
    folder: Path,
    *,
    batches: dict[str, int],
    writing: Writing,
    progress: Progress = silent,
) -> None:
    """Generate the batches of each split that `folder` lacks, with their hidden states.

    `batches` is the number of batches per split. Raises InputError when the folder holds text of
    other settings, another model, or an older version of specnb.
    """
    dtype = dense_dtype(model)
    settings = {"writing": writing._asdict(), "python": platform.python_version()}
    settings |= {"backbone": backbone_of(model).digest, "model": model.name}
    if dtype:
        settings["written_in"] = str(dtype)
    facts = folder / FACTS_FILE
    if not facts.is_file():
        write_atomic(facts, json.dumps(settings, indent=1).encode())
    elif read_json(facts) != settings:
        other = f"text of other settings, another model or an older version (see {FACTS_FILE})"
        raise InputError(f"{folder} holds {other}: delete it or use another folder")
    parts = [(split, number) for split, n in batches.items() for number in range(n)]
    missing = [part for part in parts if not _part_file(folder, *part).is_file()]
    if not missing:
        return
    texts = {split: read_library(split) for split in batches}
    writer = dense_copy(model.network).to(dtype) if dtype else model.network
    pack(writer)
    for done, (split, number) in enumerate(missing, start=len(parts) - len(missing)):
        progress(done, len(parts), "generating training text and its hidden states")
        rng = np.random.default_rng([writing.seed, SPLITS.index(split), number])
        seeds = draw_seeds(model, texts[split], writing, rng)
        tokens, states = write_rows(writer, seeds, writing.length, rng)
        own = mark_own(tokens, np.array([*map(len, seeds)]), model.vocab.eog)
        save_rows(_part_file(folder, split, number), TextRows(tokens, own), states)


def _part_file(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05d}.npz"


def save_rows(file: Path, rows: TextRows, states: Tensor) -> None:
    """Write rows and their states atomically. Raises InputError for states with NaN or Inf."""
    if not states.isfinite().all():
        raise InputError("the backbone's hidden states are not finite: try another dtype")
    packed = io.BytesIO()
    np.savez(packed, **rows._asdict(), states=states.to(torch.bfloat16).view(torch.int16).numpy())
    write_atomic(file, packed.getvalue())


def read(folder: Path, split: str) -> TextRows:
    """Read all rows of a split."""
    arrays = [np.concatenate([*_parts(folder, split, name)]) for name in TextRows._fields]
    return TextRows(*arrays)


def read_states(folder: Path, split: str, layers: Any) -> Tensor:
    """Read the states of a split, `(rows, length, layers, hidden)` bfloat16, ordered as by `read`.

    `layers` indexes the stored layers. Raises MemoryShortError when states do not fit in memory.
    """
    n_files = len([*folder.glob(f"{split}-*.npz")])
    for file, part in enumerate(_parts(folder, split, "states")):
        part = part[:, :, layers]
        if file == 0:
            needed = n_files * part.nbytes / 1e9
            free = free_bytes() / 1e9
            if needed > free:
                size = f"states of {split} take {needed:.1f} GB, {free:.1f} GB are free"
                raise MemoryShortError(f"{size}: train on fewer batches")
            states = np.empty((n_files, *part.shape), part.dtype)
        states[file] = part
    return torch.from_numpy(states).flatten(0, 1).view(torch.bfloat16)


def _parts(folder: Path, split: str, array: str) -> Iterator[np.ndarray]:
    """Yield one of the arrays tokens, own and states from each file of a split."""
    for file in sorted(folder.glob(f"{split}-*.npz")):
        with np.load(file, allow_pickle=False) as arrays:
            yield arrays[array]


def most_frequent(rows: TextRows, n: int, vocab_size: int) -> Tensor:
    """Return the `n` most frequent of the backbone's own tokens, ascending, int64 `(n,)`.

    They are a draft vocabulary. Where there are fewer distinct ones, the most frequent other tokens
    of the text follow, then the lowest ids.
    """
    texts = rows.tokens[rows.own], rows.tokens.ravel()
    own, every = (np.bincount(tokens, minlength=vocab_size) for tokens in texts)
    return torch.from_numpy(np.sort(np.lexsort((-every, -own))[:n]))
