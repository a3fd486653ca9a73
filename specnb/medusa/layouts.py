"""How heads lie in files: our own layout and those of others, as tables of names.

The weights decide how many heads, blocks and lm_heads there are, for configs are known to be wrong (the original
repository's says 2 heads where 5 are). Names left over are faults. All layouts but ours are fed the normed hidden state
(`post_norm`); pre_norm heads are written as they are, for behind the norm their input is the same.

- `specnb`: named as in `nets.Heads`; config.json is `HeadsConfig`.
- `note`: an lm_head for each head, and, where they were trained with a frozen norm, `heads.{i}.norm.weight`.
- `medusa-v1`, `medusa-v2`: the original repository (Cai et al. 2401.10774), with an lm_head a head, and with blocks
  only, for a shared lm_head.
- `vllm`: lm_heads, or one `lm_head.weight` for all with `original_lm_head`. With a `token_map`, in any order, heads
  choose among its tokens; lm_heads have rows for these only, or for all. vLLM ignores names that it does not know,
  among them biases that config.json does not announce.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from specnb.errors import InputError
from specnb.io import read_json, reading, validated, write_atomic
from specnb.medusa.nets import Backbone, Heads, HeadsConfig, expected_shapes, map_faults

CONFIG_FILE = "config.json"
OWN, SHARED, MAP = "specnb", "lm_head.weight", "token_map"
"""Our layout; vLLM's names of the lm_head of all heads and of the draft vocabulary."""
PREFIX = "medusa_heads."
"""What may stand in front of every name in a file of vLLM's."""
GROUPS = {"head": r"(?P<head>\d{1,3})", "layer": r"(?P<layer>\d{1,3})", "n_layers": r"\d{1,3}",
          "part": "(?P<part>weight|bias)"}  # fmt: skip


class ForeignConfig(BaseModel):
    """The config.json of others, whose fields named here decide how their weights are read."""

    model_config = ConfigDict(extra="allow")

    vocab_size: int | None = Field(default=None, ge=1)
    original_lm_head: bool = False
    logit_scale: float | None = None
    base_model_name_or_path: str | None = None


@dataclass(frozen=True)
class Layout:
    """A table of names: `file` in a folder, templates of a `block`'s weight and bias and of a head's own `lm_head`.

    `holds` are the kinds of lm_head that it has room for, and `biased` says that blocks must have biases. `keys` are
    names in its config.json -> attributes of HeadsConfig, `constants` what else stands there.
    """

    file: str
    block: str
    lm_head: str
    holds: tuple[str, ...]
    biased: bool = True
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)

    def blocks_in(self, names: Iterable[str]) -> list[re.Match[str]]:
        return [match for name in names if (match := _pattern(self.block).fullmatch(name))]

    def lm_heads_in(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if _pattern(self.lm_head).fullmatch(name)]

    def names(self, config: HeadsConfig) -> dict[str, str]:
        """Our name of every weight of such heads -> the layout's."""
        heads, layers, parts = range(config.n_heads), range(config.n_layers), ("weight", "bias")[: 1 + config.bias]
        places = [{"head": head, "layer": layer, "part": part} for head in heads for layer in layers for part in parts]
        names = {BLOCK.format(**place): self.block.format(**place) for place in places}
        if config.lm_head == "private":
            lm_heads = {"n_layers": config.n_layers}
            names |= {LM_HEAD.format(head=head): self.lm_head.format(head=head, **lm_heads) for head in heads}
        return names | ({MAP: MAP} if config.draft_vocab else {})


BLOCK, LM_HEAD = "heads.{head}.blocks.{layer}.linear.{part}", "heads.{head}.lm_head.weight"
ORIGINAL = "{head}.{layer}.linear.{part}"
COUNTS = {"medusa_num_heads": "n_heads", "medusa_num_layers": "n_layers"}
VLLM = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "truncated_vocab_size": "draft_size",
        "num_heads": "n_heads", "num_hidden_layers": "n_layers", "medusa_fc_bias": "bias",
        "original_lm_head": "shares_lm_head"}  # fmt: skip
LAYOUTS = {
    OWN: Layout("heads.safetensors", BLOCK, LM_HEAD, ("shared", "private")),
    "note": Layout("medusa_heads.pt", "heads.{head}.res_block.linear.{part}", LM_HEAD,
                   ("private",), keys={"num_heads": "n_heads"}),
    "medusa-v1": Layout("medusa_lm_head.pt", ORIGINAL, "{head}.{n_layers}.weight", ("private",), keys=COUNTS),
    "medusa-v2": Layout("medusa_lm_head.safetensors", ORIGINAL, "{head}.{n_layers}.weight", ("shared",), keys=COUNTS,
                        constants={"version": "2"}),
    "vllm": Layout("model.safetensors", "blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight",
                   ("shared", "private"), biased=False, keys=VLLM,
                   constants={"architectures": ["MedusaModel"], "model_type": "medusa"}),
}  # fmt: skip


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", lambda match: GROUPS[match[1]], re.escape(template)))


@dataclass(frozen=True)
class HeadsFile:
    """Weights that are being read: `tensors` by the names of the file, `config` of the config.json beside it.

    `converted` are sentences on what was read otherwise than it lies there, `faults` on what cannot be used.
    """

    file: Path
    layout: str
    config: HeadsConfig | ForeignConfig
    tensors: dict[str, Tensor]
    converted: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def open_file(path: Path) -> HeadsFile:
    """The weights at `path`: a file, or a folder with one of a layout's names in it, or with a single `.pt`.

    A `.pt` is opened without running what is pickled in it, and mapped. Raises InputError where there is none, it
    cannot be read, is in no layout, or its config.json is none.
    """
    file = path if path.is_file() else _weights_in(path)
    beside = file.with_name(CONFIG_FILE)
    config = read_json(beside) if beside.is_file() else {}
    with reading(file):
        if file.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(file)
        else:
            tensors = _state(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    tensors = {str(name).removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    layout = _layout_of(file, tensors)
    if layout == OWN and not config:
        raise InputError(f"no {CONFIG_FILE} beside {file}: without it nobody knows what the heads are fed")
    config = validated(HeadsConfig if layout == OWN else ForeignConfig, config, str(beside))
    return HeadsFile(file, layout, config, tensors)


def _weights_in(folder: Path) -> Path:
    known, single = [folder / layout.file for layout in LAYOUTS.values()], sorted(folder.glob("*.pt"))
    if file := next((file for file in known if file.is_file()), single[0] if len(single) == 1 else None):
        return file
    seen = f"{len(single)} .pt files, and none of {', '.join(file.name for file in known)}"
    raise InputError(f"{folder} holds no heads ({seen}): give a folder with trained heads, or the file itself")


def _state(loaded: Any) -> Mapping[str, Tensor]:
    """A state dict, or the only one inside a training checkpoint. Raises ValueError where it is not the only one."""
    if not any(isinstance(value, Tensor) for value in loaded.values()):
        (loaded,) = (value for value in loaded.values() if isinstance(value, Mapping) and value)
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}


def _layout_of(file: Path, tensors: Mapping[str, Tensor]) -> str:
    if file.name == LAYOUTS[OWN].file:
        return OWN
    for name, layout in LAYOUTS.items():
        # v1 and v2 name blocks alike, and only v1 has lm_heads
        if layout.blocks_in(tensors) and (name != "medusa-v1" or layout.lm_heads_in(tensors)):
            return name
    names = ", ".join(sorted(tensors)[:5])[:300]
    raise InputError(f"{file} is in none of the layouts {', '.join(LAYOUTS)}: it has {names}, …")


def read(stored: HeadsFile, backbone: Backbone) -> tuple[HeadsConfig, dict[str, str]]:
    """The config of the heads in a file, and our name of each weight -> that in the file.

    What lies otherwise there is put right in `stored`, which is told of it. Raises InputError where not even a config
    fits.
    """
    if stored.layout == OWN:
        config = stored.config
        names = {key: key for key in expected_shapes(config)}
    else:
        config = _foreign(stored, stored.config, backbone)
        names = LAYOUTS[stored.layout].names(config)
    known = set(names.values())
    stored.faults.extend(f"{there[:80]!r} is unexpected" for there in stored.tensors if there not in known)
    return config, names


def _foreign(stored: HeadsFile, foreign: ForeignConfig, backbone: Backbone) -> HeadsConfig:
    """What the weights of others say: counts from their names, sizes from the first of them."""
    layout, vllm = LAYOUTS[stored.layout], stored.layout == "vllm"
    if vllm:
        _put_right_vllm(stored, foreign, backbone)
    blocks, lm_heads = layout.blocks_in(stored.tensors), layout.lm_heads_in(stored.tensors)
    n_heads = 1 + max(int(match["head"]) for match in blocks)
    vocab_size = foreign.vocab_size or backbone.vocab_size
    values = {
        "n_heads": n_heads,
        "n_layers": 1 + max(int(match.groupdict().get("layer", 0)) for match in blocks),
        "bias": any(match["part"] == "bias" for match in blocks),
        "hidden_size": _rows(stored, [match[0] for match in blocks if match["part"] == "weight"], backbone.hidden_size),
        "vocab_size": vocab_size if vllm else _rows(stored, lm_heads, backbone.vocab_size),
        "draft_vocab": len(stored.tensors.get(MAP, ())) if vllm else 0,
        "lm_head": "private" if lm_heads else "shared",
        "input": "pre_norm" if stored.layout == "note" and _has_norms(stored, n_heads, backbone) else "post_norm",
        "backbone_name": (foreign.base_model_name_or_path or "")[:300],
    }
    config = validated(HeadsConfig, values, f"heads in {stored.file}")
    for key, name in layout.keys.items():
        there, here = getattr(foreign, key, None), getattr(config, name)
        if there not in (None, here):
            stored.converted.append(
                f"config.json has {key} {there!r:.80}, the weights have {here!r}: the weights count"
            )
    return config


def _rows(stored: HeadsFile, names: list[str], otherwise: int) -> int:
    """Rows of the first of the tensors named, `otherwise` where there is none."""
    return next((stored.tensors[name].shape[0] for name in names if stored.tensors[name].ndim), otherwise)


def _has_norms(stored: HeadsFile, n_heads: int, backbone: Backbone) -> bool:
    """Take the frozen norms out of a note's file: with them its heads are fed the state in front of the norm."""
    names = [f"heads.{i}.norm.weight" for i in range(n_heads)]
    if not stored.tensors.keys() >= set(names):  # of some heads only they are unexpected
        stored.converted.append("no norm inside: the heads are fed the normed hidden state")
        return False
    norms = [stored.tensors.pop(name) for name in names]
    if not all(same_rounded(norm, backbone.norm.weight) for norm in norms):
        stored.faults.append("a norm is not the backbone's final norm: heads of another model, or it was not frozen")
    stored.converted.append("each head has the frozen norm inside: the heads are fed the hidden state in front of it")
    return True


def _put_right_vllm(stored: HeadsFile, foreign: ForeignConfig, backbone: Backbone) -> None:
    """Sort the token map and the lm_heads with it; no lm_head that is the backbone's own stays."""
    tensors, layout = stored.tensors, LAYOUTS["vllm"]
    if foreign.logit_scale not in (None, 1):
        stored.faults.append("logit_scale is not 1: not in our heads")
    lm_heads = layout.lm_heads_in(tensors)
    if not lm_heads and SHARED not in tensors:
        stored.faults.append(f"{SHARED!r} and lm_heads are missing: vLLM would run a random lm_head")
    if len(lm_heads) == 1 and foreign.original_lm_head:
        tensors[SHARED] = tensors.pop(lm_heads[0])
    rows = backbone.lm_head.cpu()
    if MAP in tensors:
        token_map = tensors[MAP]
        tensors[MAP], order = token_map.long().flatten().sort()
        if map_faults(tensors[MAP], backbone.vocab_size):
            return  # `misfits` says so
        if not torch.equal(tensors[MAP], token_map):
            stored.converted.append(f"{MAP} was sorted, and the lm_heads with it")
        for name in {SHARED, *lm_heads} & tensors.keys():  # they have rows for its tokens, or for all
            if len(tensors[name]) in (len(token_map), len(rows)):
                tensors[name] = tensors[name][order if len(tensors[name]) == len(token_map) else tensors[MAP]]
        rows = rows[tensors[MAP]]
    if SHARED in tensors and tensors[SHARED].shape == rows.shape:
        shared = tensors.pop(SHARED)
        if same_rounded(shared, rows):
            stored.converted.append(f"{SHARED} is the backbone's own: shared")
        else:
            tensors |= {layout.lm_head.format(head=match["head"]): shared for match in layout.blocks_in(tensors)}
            stored.converted.append(f"{SHARED} is not the backbone's: each head has it as its own")


def write(name: str, heads: Heads, folder: Path) -> list[str]:
    """Write into a new `folder` in the layout `name`; returns what had to be written otherwise.

    Raises InputError for heads that the layout cannot hold.
    """
    layout, config, state, sentences = LAYOUTS[name], heads.config, dict(heads.state_dict()), []
    if name == OWN:
        write_folder(folder, layout.file, state, config.model_dump())
        return []
    _require_room(name, heads)
    if layout.holds == ("private",) and config.lm_head == "shared":
        state |= {LM_HEAD.format(head=i): heads.shared_lm_head for i in range(config.n_heads)}
        sentences.append(f"the backbone's lm_head was written {config.n_heads} times: this layout has one a head")
        config = config.model_copy(update={"lm_head": "private"})
    if layout.biased and not config.bias:  # a loader that is not strict would leave them random
        weights = [key for key in state if key.endswith(".linear.weight")]
        state |= {key.removesuffix("weight") + "bias": state[key].new_zeros(len(state[key])) for key in weights}
        sentences.append("biases of zero were added")
        config = config.model_copy(update={"bias": True})
    tensors = {there: state[here] for here, there in layout.names(config).items()}
    if name == "vllm" and config.lm_head == "shared":
        tensors[SHARED] = heads.shared_lm_head
        sentences.append("the backbone's lm_head was written with the heads")
    facts = dict(layout.constants) | {key: getattr(config, attribute) for key, attribute in layout.keys.items()}
    write_folder(folder, layout.file, tensors, facts | {"base_model_name_or_path": config.backbone_name})
    return sentences


def _require_room(name: str, heads: Heads) -> None:
    """Raises InputError for heads that another project's layout cannot hold."""
    config, holds = heads.config, LAYOUTS[name].holds
    blocks = [[block.state_dict() for block in head.blocks] for head in heads.heads]
    differ = any(not torch.equal(block[key], of[0][key]) for of in blocks for block in of for key in block)
    reasons = {
        "Hydra's heads, whose skip connection its own repository trains": config.kind != "medusa",
        "lm_heads of their own": config.lm_head == "private" and "private" not in holds,
        f"a draft vocabulary of {config.draft_vocab}": bool(config.draft_vocab) and name != "vllm",
        f"{config.n_layers} blocks a head": name == "note" and config.n_layers > 1,
        "different blocks in a head, for it runs one block again and again": name.startswith("medusa-") and differ,
    }
    if missing := [reason for reason, applies in reasons.items() if applies]:
        others = " or ".join(sorted({OWN, "vllm"} - {name}))
        raise InputError(f"{name} has no room for {'; '.join(missing)}: take {others}")


def write_folder(folder: Path, weights: str, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """The weights, as their name's ending says, and config.json beside them."""
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if weights.endswith(".pt"):
        packed = io.BytesIO()
        torch.save(held, packed)
        data = packed.getvalue()
    else:
        data = safetensors.torch.save(held, metadata={"format": "pt"})
    write_atomic(folder / weights, data)
    write_atomic(folder / CONFIG_FILE, json.dumps(config, indent=1).encode() + b"\n")


def same_rounded(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, or one is the other rounded to its type."""
    tensor, other = tensor.detach().cpu(), other.detach().cpu()
    return torch.equal(tensor.to(other.dtype), other) or torch.equal(other.to(tensor.dtype), tensor)
