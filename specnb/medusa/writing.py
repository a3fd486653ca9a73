"""What the layouts of heads share when they write: two files in a folder, and heads brought to what they hold."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from specnb import store
from specnb.errors import InputError
from specnb.medusa.heads import Heads
from specnb.medusa.source import CONFIG_FILE


def write_folder(folder: Path, weights: str, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """The weights, as their name's ending says, and config.json beside them."""
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if weights.endswith(".pt"):
        packed = io.BytesIO()
        torch.save(held, packed)
        data = packed.getvalue()
    else:
        data = safetensors.torch.save(held, metadata={"format": "pt"})
    store.write_atomic(folder / weights, data)
    store.write_atomic(folder / CONFIG_FILE, json.dumps(config, indent=1).encode() + b"\n")


def require_plain(heads: Heads, layout: str, *, truncated: bool = False) -> None:
    """Raises InputError for heads that a foreign layout cannot hold; `truncated`: it holds a draft vocabulary."""
    config = heads.config
    if config.kind != "medusa":
        raise InputError(
            f"{layout} holds Medusa's heads, not those of a {config.kind}: Hydra's own repository trains its skip "
            "connection (res_connection), so ours mean something else there. Keep them in the layout specnb"
        )
    if config.lm_head == "low_rank":
        raise InputError(f"{layout} has no room for an lm_head of low rank: keep the heads in the layout specnb")
    if config.draft_vocab and not truncated:
        raise InputError(f"{layout} has no room for a draft vocabulary of {config.draft_vocab}: take vllm or specnb")


def as_private(heads: Heads) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict with an lm_head for each head, the backbone's where they share it."""
    state = dict(heads.state_dict())
    if heads.config.lm_head == "private":
        return state, ()
    n = heads.config.n_heads
    state |= {f"heads.{i}.lm_head.weight": heads.shared_lm_head for i in range(n)}
    return state, (f"the backbone's lm_head was written {n} times: this layout has one a head",)


def with_bias(state: dict[str, Tensor], said: tuple[str, ...]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict with zero biases where there are none: a loader that is not strict would leave them random."""
    weights = [name for name in state if name.endswith(".linear.weight")]
    zeros = {
        name.removesuffix("weight") + "bias": state[name].new_zeros(state[name].shape[0])
        for name in weights
        if name.removesuffix("weight") + "bias" not in state
    }
    return state | zeros, (*said, "biases of zero were added") if zeros else said
