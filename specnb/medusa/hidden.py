"""Hidden states of the training text, computed once: the backbone is frozen, so every epoch would compute the same.

What is kept is the state in front of the final norm, in bfloat16: with it and the norm both contracts of
`HeadsConfig.input` can be trained. One file a file of text: `(rows, length, hidden)`, 23 MB for 64 rows of 320.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import store
from specnb.errors import InputError
from specnb.lm.download import need_space
from specnb.lm.hf_hidden import final_norm
from specnb.medusa import data

ROWS = 4
"""Rows of one forward: wide enough for a CPU's matrix products, small enough for its cache."""


def compute(net: PreTrainedModel, folder: Path, *, on_tokens: Callable[[int], None] = lambda n: None) -> None:
    """Write the states of every file of text in `folder` that has none yet.

    Raises InputError where the text cannot be read or the states are not finite, FetchError where the disk is full.
    """
    todo = [file for file in data.files(folder) if not _states_of(file).is_file()]
    size = net.get_output_embeddings().weight.shape[1]
    for done, file in enumerate(todo):
        tokens = data.open_file(file).tokens
        need_space(folder, tokens.size * size * 2 * (len(todo) - done))
        states = np.concatenate([_states(net, tokens[at : at + ROWS], on_tokens) for at in range(0, len(tokens), ROWS)])
        packed = io.BytesIO()
        np.save(packed, states)
        store.write_atomic(_states_of(file), packed.getvalue())


def read(folder: Path, split: str) -> Tensor:
    """States of a split, `(rows, length, hidden)` bfloat16, in the order of `data.read`. Raises InputError."""
    parts = []
    for file in data.files(folder, split):
        try:
            parts.append(np.load(_states_of(file), allow_pickle=False))
        except (OSError, ValueError) as error:
            raise InputError(f"no hidden states of {file.name} in {folder} ({error}): run --stage hidden") from error
    if not parts or any(part.dtype != np.int16 or part.ndim != 3 for part in parts):
        raise InputError(f"no hidden states of {split} in {folder}: run --stage hidden")
    return torch.from_numpy(np.concatenate(parts)).view(torch.bfloat16)


def _states_of(file: Path) -> Path:
    return file.with_suffix(".hidden.npy")


@torch.inference_mode()
def _states(net: PreTrainedModel, tokens: np.ndarray, on_tokens: Callable[[int], None]) -> np.ndarray:
    """`(rows, length, hidden)` bfloat16, as int16 for numpy, of `tokens (rows, length)`."""
    caught: list[Tensor] = []
    hook = final_norm(net).register_forward_pre_hook(lambda _norm, inputs: caught.append(inputs[0]))
    try:
        net(input_ids=torch.from_numpy(tokens).long().to(net.device), use_cache=False, logits_to_keep=1)
    finally:
        hook.remove()
    if not bool(torch.isfinite(caught[0]).all()):
        raise InputError("the backbone's hidden states are not finite: try another dtype")
    on_tokens(tokens.size)
    return caught[0].to(torch.bfloat16).cpu().view(torch.int16).numpy()
