"""The built-in small pair: gpt-oss models with random weights, created on the fly.

Both are Transformers' GptOssForCausalLM: attention with sinks, alternating sliding and full layers,
YaRN, routing to four experts. The draft has fewer layers and half the experts. Hidden and
intermediate sizes are equal, as in gpt-oss 20b and 120b, so one model can run with the other's
experts. Random weights suffice: a divergence depends on the operands of an operation, not on what
the model has learned.
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
"""Dtypes of the small models."""
SHAPES = read_toml(Path(__file__).with_suffix(".toml"))
"""Configuration values of each role, and shared values."""


class SmallPair(NamedTuple):
    """A draft and its larger target, with the same vocabulary."""

    draft: Module
    target: Module


def pair(*, seed: int = 0, dtype: str = "float32") -> SmallPair:
    """Return the small pair (7 MB in float32); `seed` and `dtype` (of DTYPES) fix its bits."""
    return SmallPair(*(make(role, seed=seed, dtype=dtype) for role in ("draft", "target")))


def make(role: str, *, seed: int = 0, dtype: str = "float32") -> Module:
    """Return one model of the pair, "draft" or "target". Leaves global random generators alone."""
    from transformers import GptOssConfig, GptOssForCausalLM

    # transformers modifies its arguments
    config = GptOssConfig(**copy.deepcopy(SHAPES["shared"] | SHAPES[role]))
    with torch.random.fork_rng(devices=[]):  # building draws weights, which are overwritten below
        model = GptOssForCausalLM(config).eval()
    # Each role has its own random stream, so that the two models share no weights.
    draw = torch.Generator().manual_seed(2 * seed + list(SHAPES).index(role))
    for name, parameter in model.named_parameters():
        value = _values(name, torch.randn(parameter.shape, generator=draw))
        # As in loading, norms and RoPE frequencies stay float32; `Module.to` would round them.
        parameter.data = value if "norm" in name else value.to(getattr(torch, dtype))
    return model


def copy_of(model: Module) -> Module:
    """Return a deep copy of `model` in evaluation mode."""
    return copy.deepcopy(model).eval()


def open_net(model: Module, name: str) -> HfModel:
    """Wrap `model` to decode with Transformers' own modules, in which faults can be planted."""
    return HfModel(model, None, name=name, decoder="transformers")


def decoy_twin(model: Module, *, seed: int = 1) -> Module:
    """Return a copy of `model` with the values of each parameter permuted."""
    twin = copy_of(model)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            order = torch.randperm(parameter.numel(), generator=draw).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return twin


def _values(name: str, noise: Tensor) -> Tensor:
    """Return weights large enough for the logits to depend on the whole context."""
    if "norm" in name:
        return 1 + 0.1 * noise
    if "embed_tokens" in name or name.endswith("sinks"):
        return noise
    if name.endswith("bias"):
        return 0.1 * noise
    return (
        (4.0 if name == "lm_head.weight" else 1.5) / SHAPES["shared"]["hidden_size"] ** 0.5 * noise
    )
