"""The embedded small pair of the divergence lab: the gpt-oss architecture, made on the fly.

Both are transformers' GptOss classes: attention with sinks, sliding and full layers in turn, YaRN, routing to four
experts. The draft has fewer layers and half the experts; hidden and intermediate size are equal, as those of gpt-oss
20b and 120b are, so that one model's experts fit into the other without an error. The weights are random: a divergence
is a matter of which operands an op gets, not of what the model knows.
"""

import copy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from specnb.io import read_toml
from specnb.lm.hf.model import HfModel

DTYPES = ("float32", "bfloat16")
"""The types the small models are made in."""
SHAPES = read_toml(Path(__file__).with_suffix(".toml"))
"""The configuration: what differs between the two, and what is shared."""


class SmallPair(NamedTuple):
    """A draft and the larger target it runs beside, with the same vocabulary."""

    draft: Module
    target: Module


def pair(*, seed: int = 0, dtype: str = "float32") -> SmallPair:
    """The embedded pair (7 MB in float32). Same seed and dtype (a name in DTYPES) give the same bits."""
    return SmallPair(*(make(role, seed=seed, dtype=dtype) for role in ("draft", "target")))


def make(role: str, *, seed: int = 0, dtype: str = "float32") -> Module:
    """One model of the pair: `role` is a name in SHAPES. Global generators stay untouched."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**copy.deepcopy(SHAPES["shared"] | SHAPES[role]))  # transformers writes into what it gets
    with torch.random.fork_rng(devices=[]):  # building draws weights, which are overwritten below
        model = GptOssForCausalLM(config).eval()
    # the two roles draw from different streams: no weight of the target may be one of the draft's
    draw = torch.Generator().manual_seed(2 * seed + list(SHAPES).index(role))
    for name, parameter in model.named_parameters():
        value = _values(name, torch.randn(parameter.shape, generator=draw))
        # as loading does: norms stay float32, and so do the RoPE frequencies, which `Module.to` would round
        parameter.data = value if "norm" in name else value.to(getattr(torch, dtype))
    return model


def copy_of(model: Module) -> Module:
    """A separate copy of `model`: the draft beside itself. Nothing is shared but the configuration's values."""
    return copy.deepcopy(model).eval()


def open_net(model: Module, name: str) -> HfModel:
    """Return a model that decodes tokens by transformers' own modules, in which faults are planted."""
    return HfModel(model, None, name=name, decoder="transformers")


def decoy_twin(model: Module, *, seed: int = 1) -> Module:
    """A model of the same configuration with other weights: each parameter's own values in another order."""
    twin = copy_of(model)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            order = torch.randperm(parameter.numel(), generator=draw).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return twin


def _values(name: str, noise: Tensor) -> Tensor:
    """Weights large enough for logits to depend on the whole past and to differ clearly between tokens."""
    if "norm" in name:
        return 1 + 0.1 * noise
    if "embed_tokens" in name or name.endswith("sinks"):
        return noise
    if name.endswith("bias"):
        return 0.1 * noise
    return (4.0 if name == "lm_head.weight" else 1.5) / SHAPES["shared"]["hidden_size"] ** 0.5 * noise
