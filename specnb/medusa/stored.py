"""Heads between a file and a module: their weights under our names, and what is wrong with them so far.

A layout is a pair of name templates and what follows from its config.json; `specnb.medusa.layouts` has them all.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from pydantic import ValidationError
from torch import Tensor

from specnb.errors import InputError
from specnb.medusa.backbone import Backbone
from specnb.medusa.config import HeadsConfig
from specnb.medusa.heads import HEADS, Heads
from specnb.medusa.source import Source

INDEX = r"\d{1,3}"
GROUPS = {
    "head": rf"(?P<head>{INDEX})",
    "layer": rf"(?P<layer>{INDEX})",
    "n_layers": INDEX,
    "part": "(?P<part>weight|bias)",
}


@dataclass(frozen=True)
class Stored:
    """What a layout made of a file.

    `tensors` are named as in `heads.Heads`, and `names` says what the file calls (or should call) each of them.
    `converted` are sentences on what was read otherwise than it lies there, `faults` on what cannot be used.
    """

    config: HeadsConfig
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    converted: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class Layout(Protocol):
    """One way of writing heads; `file` is the name of the weights in a folder."""

    file: str

    def matches(self, source: Source) -> bool:
        """Whether the names in `source` are this layout's."""
        ...

    def read(self, source: Source, backbone: Backbone) -> Stored:
        """Raises InputError where not even a config can be made of it."""
        ...

    def write(self, heads: Heads, folder: Path) -> tuple[str, ...]:
        """Write into a new `folder`; returns what had to be written otherwise. Raises InputError for other heads."""
        ...


@dataclass(frozen=True)
class Names:
    """What a layout calls a block's weight and bias, and a head's own lm_head."""

    block: str
    lm_head: str

    def blocks_in(self, names: Iterable[str]) -> list[re.Match[str]]:
        pattern = _pattern(self.block)
        return [found for name in names if (found := pattern.fullmatch(name))]

    def lm_heads_in(self, names: Iterable[str]) -> list[str]:
        pattern = _pattern(self.lm_head)
        return [name for name in names if pattern.fullmatch(name)]

    def of(self, config: HeadsConfig) -> dict[str, str]:
        """Our name of every weight of such heads -> the layout's."""
        parts = ("weight", "bias") if config.bias else ("weight",)
        names = {
            f"heads.{head}.blocks.{layer}.linear.{part}": self.block.format(head=head, layer=layer, part=part)
            for head in range(config.n_heads)
            for layer in range(config.n_layers)
            for part in parts
        }
        if config.lm_head == "private":
            names |= {
                f"heads.{head}.lm_head.weight": self.lm_head.format(head=head, n_layers=config.n_layers)
                for head in range(config.n_heads)
            }
        return names

    def config_of(self, source: Source, backbone: Backbone, **known: object) -> HeadsConfig:
        """What the weights say: counts from their names, sizes from the first of them, the rest from `known`."""
        blocks = self.blocks_in(source.tensors)
        lm_heads = self.lm_heads_in(source.tensors)
        weights = [found[0] for found in blocks if found["part"] == "weight"]
        facts = {
            "n_heads": 1 + max(int(found["head"]) for found in blocks),
            "n_layers": 1 + max(int(found.groupdict().get("layer", 0)) for found in blocks),
            "bias": any(found["part"] == "bias" for found in blocks),
            "hidden_size": _rows(source, weights, backbone.hidden_size),
            "vocab_size": _rows(source, lm_heads, backbone.vocab_size),
            "lm_head": "private" if lm_heads else "shared",
            "input": "post_norm",
            "backbone_name": (source.config.text("base_model_name_or_path") or "")[:300],
        }
        return checked(facts | known, source.file)


def checked(values: Mapping[str, object], file: Path) -> HeadsConfig:
    """Raises InputError, with the file and every field that is not as it must be."""
    try:
        return HeadsConfig.model_validate(values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()[:5])
        raise InputError(f"{file} is not a set of heads that specnb knows: {wrong[:500]}") from error


def taken(source: Source, names: Mapping[str, str], also: Iterable[str] = ()) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of `names` that are there, under our names; and a fault for each that is neither there nor `also`."""
    known = {*names.values(), *also}
    faults = [f"{name[:80]!r} is unexpected" for name in source.tensors if name not in known]
    return {ours: source.tensors[theirs] for ours, theirs in names.items() if theirs in source.tensors}, faults


def lies(source: Source, config: HeadsConfig, keys: Mapping[str, str]) -> list[str]:
    """Sentences on counts in config.json (`keys`: name there -> name in ours) that the weights contradict."""
    said = {key: (source.config.count(key, 1 << 30), getattr(config, ours)) for key, ours in keys.items()}
    return [
        f"config.json has {key} {there}, the weights have {here}: the weights count"
        for key, (there, here) in said.items()
        if there is not None and there != here
    ]


def expected_shapes(config: HeadsConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of everything in the state dict of such heads."""
    with torch.device("meta"):
        made = [HEADS[config.kind](config, i) for i in range(config.n_heads)]
    shapes = {
        f"heads.{i}.{name}": tuple(tensor.shape)
        for i, head in enumerate(made)
        for name, tensor in head.state_dict().items()
    }
    return shapes | ({"token_map": (config.draft_vocab,)} if config.draft_vocab else {})


def same_rounded(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same shape are equal, or one is the other rounded to its type."""
    one, other = one.detach().cpu(), other.detach().cpu()
    return torch.equal(one.to(other.dtype), other) or torch.equal(other.to(one.dtype), one)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", lambda found: GROUPS[found[1]], re.escape(template)))


def _rows(source: Source, names: list[str], otherwise: int) -> int:
    """Rows of the first of the tensors named, `otherwise` where there is none."""
    return next((source.tensors[name].shape[0] for name in names if source.tensors[name].ndim), otherwise)
