"""How good the pair is: what a blind guess loses, and how often the draft says what the target says."""

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb.errors import InputError


def unigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy in nats a token of `held_out` under the token frequencies of `train`, one added to each count."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.log(counts / counts.sum())[held_out].mean())


def entropy(ids: np.ndarray) -> float:
    """Nats a token under the frequencies of these very ids: no model that ignores the order does better on them."""
    share = np.unique(ids, return_counts=True)[1] / ids.size
    return float(-(share * np.log(share)).sum())


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: np.ndarray, n_new: int) -> np.ndarray:
    """The prompt and `n_new` tokens of the model's own choice, each the argmax of its row; no token stops it."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(model.device)
    kept, last, past = ids, ids, None
    for _ in range(n_new):
        answer = model(last, past_key_values=past, use_cache=True)
        past, last = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
        kept = torch.cat([kept, last], dim=1)
    return kept[0].cpu().numpy()


@torch.no_grad()
def accepted(draft: PreTrainedModel, ids: np.ndarray, n_new: int) -> int:
    """Of the last `n_new` tokens of `ids`, the target's own choices: how many are the draft's most likely token too.

    The draft reads the target's tokens, as it does at the first position of a round: over all of them this is
    alpha_1 at temperature 0.
    """
    if not 0 < n_new < len(ids):
        raise InputError(f"{len(ids)} tokens have no {n_new} continued ones behind a prompt")
    tokens = torch.from_numpy(ids.astype(np.int64)).to(draft.device)
    said = draft(tokens[None, :-1], use_cache=False).logits[0].argmax(-1)
    return int((said == tokens[1:])[-n_new:].sum())
