"""vLLM's layout of Medusa heads: `model.safetensors` and a config.json of the model type `medusa`.

Blocks are `blocks.{i}.layers.{j}.weight` (`.bias` with `medusa_fc_bias`), lm_heads `lm_heads.{i}.weight`, or one
`lm_head.weight` for all with `original_lm_head`. With `truncated_vocab_size` below `vocab_size` the heads choose among
the tokens of `token_map`, in any order; lm_heads have rows for these only, or for all. vLLM ignores names that it does
not know, among them biases that config.json does not announce; here both are told or refused.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specnb.medusa.backbone import Backbone
from specnb.medusa.config import HeadsConfig
from specnb.medusa.heads import Heads, map_fault
from specnb.medusa.source import Source
from specnb.medusa.stored import Names, Stored, lies, same_rounded, taken
from specnb.medusa.writing import require_plain, write_folder

SHARED, FIRST, MAP, PREFIX = "lm_head.weight", "lm_heads.0.weight", "token_map", "medusa_heads."
NAMES = Names("blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight")
COUNTS = {
    "num_heads": "n_heads",
    "medusa_num_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "medusa_num_layers": "n_layers",
    "truncated_vocab_size": "draft_size",
}


@dataclass(frozen=True)
class Vllm:
    """Medusa's heads with shared or private lm_heads, with or without bias, of any draft vocabulary."""

    file: str = "model.safetensors"

    def matches(self, source: Source) -> bool:
        return bool(NAMES.blocks_in(_plain(source).tensors))

    def read(self, source: Source, backbone: Backbone) -> Stored:
        source = _plain(source)
        vocab_size = source.config.count("vocab_size", 1 << 20) or backbone.vocab_size
        faults = _unlike_ours(source)
        source, map_said, map_faults = _mapped(source, vocab_size)
        source, head_said, head_faults = _own_lm_heads(source, backbone)
        token_map = source.tensors.get(MAP)
        config = NAMES.config_of(
            source, backbone, vocab_size=vocab_size, draft_vocab=0 if token_map is None else len(token_map)
        )
        names = NAMES.of(config) | ({} if token_map is None else {MAP: MAP})
        tensors, unexpected = taken(source, names)
        said = [*lies(source, config, COUNTS), *_bias_said(source, config), *map_said, *head_said]
        return Stored(config, tensors, names, tuple(said), (*faults, *map_faults, *head_faults, *unexpected))

    def write(self, heads: Heads, folder: Path) -> tuple[str, ...]:
        require_plain(heads, "vllm", truncated=True)
        own, state = heads.config, heads.state_dict()
        tensors = {theirs: state[ours] for ours, theirs in NAMES.of(own).items()}
        if own.lm_head == "shared":
            tensors[SHARED] = heads.shared_lm_head
        if own.draft_vocab:
            tensors[MAP] = state[MAP]
        facts = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": own.hidden_size,
            "vocab_size": own.vocab_size,
            "truncated_vocab_size": own.draft_size,
            "num_heads": own.n_heads,
            "num_hidden_layers": own.n_layers,
            "medusa_fc_bias": own.bias,
            "original_lm_head": own.lm_head == "shared",
            "base_model_name_or_path": own.backbone_name,
        }
        write_folder(folder, self.file, tensors, facts)
        return ("the backbone's lm_head was written with the heads",) if own.lm_head == "shared" else ()


def _plain(source: Source) -> Source:
    """The names without their prefix, and the one lm_head of all under its own name."""
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in source.tensors.items()}
    alone = FIRST in tensors and SHARED not in tensors and "lm_heads.1.weight" not in tensors
    if alone and source.config.flag("original_lm_head"):
        tensors[SHARED] = tensors.pop(FIRST)
    return replace(source, tensors=tensors)


def _unlike_ours(source: Source) -> list[str]:
    faults = [] if source.config.number("logit_scale") in (None, 1) else ["logit_scale is not 1: not in our heads"]
    plain = {name.removeprefix(PREFIX) for name in source.tensors}
    if len(plain) < len(source.tensors):
        faults.append(f"some names are there twice, with the prefix {PREFIX!r} and without")
    return faults


def _bias_said(source: Source, config: HeadsConfig) -> list[str]:
    announced = bool(source.config.flag("medusa_fc_bias"))
    if announced == config.bias:
        return []
    there, vllm = ("has none", "expects them") if announced else ("has some", "drops them")
    return [f"config.json has medusa_fc_bias {announced}, the file {there}: vLLM {vllm}, here the weights count"]


def _mapped(source: Source, vocab_size: int) -> tuple[Source, list[str], list[str]]:
    """lm_heads with the rows of `token_map` only, in ascending order of the map; sentences on it, and faults."""
    tensors = dict(source.tensors)
    token_map = tensors.get(MAP)
    heads = {name for name, tensor in tensors.items() if name == SHARED or NAMES.lm_heads_in([name])}
    truncated = source.config.count("truncated_vocab_size", 1 << 20) or vocab_size
    if token_map is None:
        fault = f"truncated_vocab_size is {truncated} of {vocab_size}, but there is no {MAP}"
        return source, [], [fault] if truncated < vocab_size else []
    if truncated == vocab_size and all(len(tensors[name]) == vocab_size for name in heads if tensors[name].ndim):
        del tensors[MAP]
        return replace(source, tensors=tensors), [f"{MAP} is not used: the heads have the whole vocabulary"], []
    if token_map.dtype == torch.int32:
        token_map = token_map.long()
    if fault := map_fault(token_map, vocab_size, in_order=False):
        return replace(source, tensors={n: t for n, t in tensors.items() if n != MAP}), [], [f"{MAP}: {fault}"]
    ascending, order = token_map.sort()
    said = [] if torch.equal(ascending, token_map) else [f"{MAP} was sorted, and the lm_heads with it"]
    for name in heads:
        rows = {len(token_map): order, vocab_size: ascending}.get(len(tensors[name]) if tensors[name].ndim else -1)
        tensors[name] = tensors[name] if rows is None else tensors[name][rows]
    return replace(source, tensors=tensors | {MAP: ascending}), said, []


def _own_lm_heads(source: Source, backbone: Backbone) -> tuple[Source, list[str], list[str]]:
    """Without the lm_head of all: left out where it is the backbone's, else given to each head."""
    tensors = dict(source.tensors)
    if SHARED not in tensors:
        there = NAMES.lm_heads_in(tensors)
        return source, [], [] if there else [f"{SHARED!r} and {FIRST!r} are missing: vLLM would run a random lm_head"]
    weight, token_map = tensors.pop(SHARED), tensors.get(MAP)
    if token_map is not None and int(token_map[-1]) >= backbone.vocab_size:
        return replace(source, tensors=tensors), [], []  # of another vocabulary, which is told elsewhere
    own = backbone.lm_head.cpu() if token_map is None else backbone.lm_head.cpu()[token_map]
    if weight.shape != own.shape:
        fault = f"{SHARED!r} has shape {tuple(weight.shape)} instead of {tuple(own.shape)}"
        return replace(source, tensors=tensors), [], [fault]
    if same_rounded(weight, own):
        return replace(source, tensors=tensors), [f"{SHARED} is the backbone's own: shared"], []
    heads = {int(found["head"]) for found in NAMES.blocks_in(tensors)}
    tensors |= {NAMES.lm_head.format(head=head): weight for head in heads}
    return replace(source, tensors=tensors), [f"{SHARED} is not the backbone's: each head has it as its own"], []
