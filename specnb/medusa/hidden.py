"""Hidden states of the training text, computed once: the backbone is frozen, so every epoch would compute the same.

Text that the backbone writes here comes with its states (`data.write`); they are computed where text was given, or
its states were removed. What is kept is the state in front of the final norm, in bfloat16: with it and the norm both
contracts of `HeadsConfig.input` can be trained. One file a file of text: `(rows, length, hidden)`, 19 MB for 64 rows
of 256.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import store
from specnb.errors import InputError, MemoryShortError
from specnb.lm.cache import need_space
from specnb.lm.hf_hidden import pre_norm_states
from specnb.medusa import data

ROWS = 4
"""Rows of one forward: wide enough for a CPU's matrix products, small enough for its cache."""


def compute(
    net: PreTrainedModel, folder: Path, *, backbone: str, on_tokens: Callable[[int], None] = lambda n: None
) -> None:
    """Write the states of every file of text in `folder` that has none yet; `backbone` is the digest of `net`.

    Raises InputError where the text was made with another backbone or cannot be read, or the states are not finite,
    FetchError where the disk is full.
    """
    data.require_backbone(folder, backbone)
    todo = [file for file in data.files(folder) if not _states_of(file).is_file()]
    size = net.get_output_embeddings().weight.shape[1]
    for done, file in enumerate(todo):
        tokens = data.open_file(file).tokens
        need_space(folder, tokens.size * size * 2 * (len(todo) - done))
        save(file, torch.cat([_states(net, tokens[at : at + ROWS], on_tokens) for at in range(0, len(tokens), ROWS)]))


def save(file: Path, states: Tensor) -> None:
    """Keep the states `(rows, length, hidden)` of one file of text.

    Raises InputError where they are not finite, FetchError where the disk is full.
    """
    if not bool(torch.isfinite(states).all()):
        raise InputError("the backbone's hidden states are not finite: try another dtype")
    need_space(file.parent, states.numel() * 2)
    packed = io.BytesIO()
    np.save(packed, states.to(torch.bfloat16).cpu().view(torch.int16).numpy())
    store.write_atomic(_states_of(file), packed.getvalue())


def read(folder: Path, split: str) -> Tensor:
    """States of a split, `(rows, length, hidden)` bfloat16, in the order of `data.read`.

    Raises InputError where they are missing or damaged, MemoryShortError where they do not fit the memory.
    """
    parts = [_open(_states_of(file)) for file in data.files(folder, split)]
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise InputError(f"the hidden states of {split} in {folder} are of several shapes: remove them")
    n_bytes, free = sum(part.nbytes for part in parts), psutil.virtual_memory().available
    if n_bytes > free:
        raise MemoryShortError(
            f"the hidden states of {split} take {n_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free: train "
            "on fewer batches"
        )
    states = np.empty((sum(len(part) for part in parts), *shapes.pop()), dtype=np.int16)
    np.concatenate(parts, out=states)
    return torch.from_numpy(states).view(torch.bfloat16)


def _open(file: Path) -> np.ndarray:
    """The states of one file, not read yet."""
    try:
        states = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"no hidden states in {file} ({error}): run --stage hidden") from error
    if states.dtype != np.int16 or states.ndim != 3:
        raise InputError(f"{file} holds no hidden states: remove it and run --stage hidden")
    return states


def _states_of(file: Path) -> Path:
    return file.with_suffix(".hidden.npy")


@torch.inference_mode()
def _states(net: PreTrainedModel, tokens: np.ndarray, on_tokens: Callable[[int], None]) -> Tensor:
    """`(rows, length, hidden)` bfloat16 of `tokens (rows, length)`."""
    with pre_norm_states(net) as caught:
        net(input_ids=torch.from_numpy(tokens).long().to(net.device), use_cache=False, logits_to_keep=1)
    on_tokens(tokens.size)
    return caught[0].to(torch.bfloat16).cpu()
