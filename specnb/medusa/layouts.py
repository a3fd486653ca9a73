"""How heads lie in files: our own layout and those of others, as tables of names.

A layout says which name in a file is which weight and what its config.json means; the weights decide how many heads,
blocks and lm_heads there are, for configs are known to be wrong (the original repository's says 2 heads where 5 are).
Names left over are faults, and heads that a layout cannot hold are refused when written. All but ours are fed the
normed hidden state (`post_norm`); pre_norm heads are written as they are, for behind the norm their input is the same.

- `specnb`: named as in `nets.Heads`; config.json is `HeadsConfig`.
- `note`: an lm_head for each head, and, where they were trained with a frozen norm, `heads.{i}.norm.weight`.
- `medusa-v1`, `medusa-v2`: the original repository (Cai et al. 2401.10774), with an lm_head a head, and with blocks
  only, for a shared lm_head.
- `vllm`: lm_heads, or one `lm_head.weight` for all with `original_lm_head`. With `truncated_vocab_size` the heads
  choose among the tokens of `token_map`, in any order; lm_heads have rows for these only, or for all. vLLM ignores
  names that it does not know, among them biases that config.json does not announce; here both are told or refused.
"""

import io
import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from specnb.errors import InputError
from specnb.io import read_json, validated, write_atomic
from specnb.medusa.nets import Backbone, Heads, HeadsConfig, expected_shapes, map_faults

CONFIG_FILE = "config.json"
OWN = "specnb"
MAX_CONFIG_BYTES = 1 << 20
SHARED, MAP, PREFIX = "lm_head.weight", "token_map", "medusa_heads."
"""Names of vLLM's: the lm_head of all heads, the draft vocabulary, and what may stand in front of every name."""
GROUPS = {"head": r"(?P<head>\d{1,3})", "layer": r"(?P<layer>\d{1,3})", "n_layers": r"\d{1,3}",
          "part": "(?P<part>weight|bias)"}  # fmt: skip


class ForeignConfig(BaseModel):
    """What is read of the config.json of others; their other settings do not concern heads."""

    vocab_size: int | None = Field(default=None, ge=1)
    truncated_vocab_size: int | None = None
    num_heads: int | None = None
    medusa_num_heads: int | None = None
    num_hidden_layers: int | None = None
    medusa_num_layers: int | None = None
    medusa_fc_bias: bool = False
    original_lm_head: bool = False
    logit_scale: float | None = None
    base_model_name_or_path: str | None = None


@dataclass(frozen=True)
class Source:
    """A file of weights: `tensors` by the names it gives them, and the config.json beside it (empty where none is)."""

    file: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def config_file(self) -> Path:
        return self.file.with_name(CONFIG_FILE)

    @property
    def foreign(self) -> ForeignConfig:
        """The config.json of another project's heads. Raises InputError."""
        return validated(ForeignConfig, self.config, str(self.config_file))


@dataclass(frozen=True)
class Stored:
    """Heads between a file and a module.

    `tensors` are named as in `nets.Heads`, and `names` says what the file calls (or should call) each of them.
    `converted` are sentences on what was read otherwise than it lies there, `faults` on what cannot be used.
    """

    config: HeadsConfig
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    converted: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A table of names: `file` in a folder, templates of a `block`'s weight and bias and of a head's own `lm_head`.

    `holds` are the kinds of lm_head that it has room for, and `biased` says that blocks must have biases. `keys` are
    names in its config.json of our counts, and `facts` makes that config.json.
    """

    file: str
    block: str
    lm_head: str
    holds: tuple[str, ...]
    biased: bool = True
    keys: Mapping[str, str] = field(default_factory=dict)
    facts: Callable[[HeadsConfig], dict[str, Any]] = lambda config: {}

    def matches(self, name: str, source: Source) -> bool:
        """Whether the names in `source` are those of this layout, whose own name is `name`."""
        if name == OWN:
            return source.file.name == self.file
        names = [key.removeprefix(PREFIX) for key in source.tensors]
        lm_head = "private" if self.lm_heads_in(names) else "shared"
        return bool(self.blocks_in(names)) and (not name.startswith("medusa-") or lm_head in self.holds)

    def blocks_in(self, names: Iterable[str]) -> list[re.Match[str]]:
        return [match for name in names if (match := _pattern(self.block).fullmatch(name))]

    def lm_heads_in(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if _pattern(self.lm_head).fullmatch(name)]

    def names(self, config: HeadsConfig) -> dict[str, str]:
        """Our name of every weight of such heads -> the layout's."""
        heads, layers = range(config.n_heads), range(config.n_layers)
        names = {
            f"heads.{head}.blocks.{layer}.linear.{part}": self.block.format(head=head, layer=layer, part=part)
            for head in heads
            for layer in layers
            for part in ("weight", "bias")[: 1 + config.bias]
        }
        if config.lm_head == "private":
            names |= {f"heads.{i}.lm_head.weight": self.lm_head.format(head=i, n_layers=len(layers)) for i in heads}
        return names | ({MAP: MAP} if config.draft_vocab else {})

    def config(self, source: Source, backbone: Backbone, **known: object) -> HeadsConfig:
        """What the weights say: counts from their names, sizes from the first of them, the rest from `known`."""
        blocks, lm_heads = self.blocks_in(source.tensors), self.lm_heads_in(source.tensors)
        weights = [match[0] for match in blocks if match["part"] == "weight"]
        values = {
            "n_heads": 1 + max(int(match["head"]) for match in blocks),
            "n_layers": 1 + max(int(match.groupdict().get("layer", 0)) for match in blocks),
            "bias": any(match["part"] == "bias" for match in blocks),
            "hidden_size": _rows(source, weights, backbone.hidden_size),
            "vocab_size": _rows(source, lm_heads, backbone.vocab_size),
            "lm_head": "private" if lm_heads else "shared",
            "input": "post_norm",
            "backbone_name": (source.foreign.base_model_name_or_path or "")[:300],
        }
        return validated(HeadsConfig, values | known, f"heads in {source.file}")


def _original_facts(config: HeadsConfig) -> dict[str, Any]:
    version = {} if config.lm_head == "private" else {"version": "2"}
    return {"medusa_num_heads": config.n_heads, "medusa_num_layers": config.n_layers} | version


def _vllm_facts(config: HeadsConfig) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size, "truncated_vocab_size": config.draft_size, "num_heads": config.n_heads,
        "num_hidden_layers": config.n_layers, "medusa_fc_bias": config.bias,
        "original_lm_head": config.lm_head == "shared",
    }  # fmt: skip


BLOCK, ORIGINAL = "heads.{head}.blocks.{layer}.linear.{part}", "{head}.{layer}.linear.{part}"
COUNTS = {"medusa_num_heads": "n_heads", "medusa_num_layers": "n_layers"}
VLLM_COUNTS = COUNTS | {"num_heads": "n_heads", "num_hidden_layers": "n_layers", "truncated_vocab_size": "draft_size"}
LAYOUTS = {
    OWN: Layout("heads.safetensors", BLOCK, "heads.{head}.lm_head.weight", ("shared", "private", "low_rank")),
    "note": Layout("medusa_heads.pt", "heads.{head}.res_block.linear.{part}", "heads.{head}.lm_head.weight",
                   ("private",), facts=lambda config: {"num_heads": config.n_heads}),
    "medusa-v1": Layout("medusa_lm_head.pt", ORIGINAL, "{head}.{n_layers}.weight", ("private",),
                        keys=COUNTS, facts=_original_facts),
    "medusa-v2": Layout("medusa_lm_head.safetensors", ORIGINAL, "{head}.{n_layers}.weight", ("shared",),
                        keys=COUNTS, facts=_original_facts),
    "vllm": Layout("model.safetensors", "blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight",
                   ("shared", "private"), biased=False, keys=VLLM_COUNTS, facts=_vllm_facts),
}  # fmt: skip


def open_source(path: Path) -> Source:
    """The weights at `path`: a file, or a folder with one of a layout's names in it, or with a single `.pt`.

    A `.pt` is opened without running what is pickled in it, and mapped. Raises InputError where there is none, or it
    cannot be read.
    """
    file = path if path.is_file() else _weights_in(path)
    beside = file.with_name(CONFIG_FILE)
    config = read_json(beside, MAX_CONFIG_BYTES) if beside.is_file() else {}
    try:
        if file.suffix == ".safetensors":
            return Source(file, config, safetensors.torch.load_file(file))
        if file.suffix == ".pt":
            return Source(
                file, config, _state(torch.load(file, map_location="cpu", weights_only=True, mmap=True), file)
            )
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(f"{file} is refused: it holds code, where only tensors are read") from error
    except Exception as error:  # a damaged file makes torch and safetensors raise what they like
        raise InputError(f"{file} cannot be read ({str(error)[:200]}): damaged, or no file of heads") from error
    raise InputError(f"{file} is no file of heads: they are in .safetensors or .pt files")


def _weights_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(f"no heads at {folder}: give a folder with trained heads, or the file of their weights")
    known, single = [folder / layout.file for layout in LAYOUTS.values()], sorted(folder.glob("*.pt"))
    if file := next((file for file in known if file.is_file()), single[0] if len(single) == 1 else None):
        return file
    raise InputError(
        f"{folder} holds no heads ({len(single)} .pt files, and none of {', '.join(f.name for f in known)})"
    )


def _state(loaded: Any, file: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, of one inside a training checkpoint, or of a list of them, one a head."""
    if not isinstance(loaded, Mapping):
        raise InputError(f"{file} holds a {type(loaded).__name__}, not the state dict of heads")
    if any(isinstance(value, Tensor) for value in loaded.values()):
        return {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    states = {str(name): tensors for name, value in loaded.items() if (tensors := _heads_in(value))}
    if len(states) != 1:
        raise InputError(
            f"{file} holds {len(states)} state dicts with heads ({', '.join(list(states)[:5]) or 'none'}), not one: "
            "save the state dict of the heads alone"
        )
    return next(iter(states.values()))


def _heads_in(value: Any) -> dict[str, Tensor]:
    """Tensors of a state dict, or of a list of those of single heads; empty for anything else."""
    if isinstance(value, list) and all(isinstance(state, Mapping) for state in value):
        value = {f"heads.{i}.{name}": tensor for i, state in enumerate(value) for name, tensor in state.items()}
    tensors = isinstance(value, Mapping) and all(isinstance(tensor, Tensor) for tensor in value.values())
    return {str(name): tensor for name, tensor in value.items()} if tensors else {}


def layout_of(source: Source) -> str:
    """The name of the layout of a file. Raises InputError, with some of the names in it, when it has none."""
    name = next((name for name, layout in LAYOUTS.items() if layout.matches(name, source)), None)
    if name is None:
        names = ", ".join(sorted(source.tensors)[:5])[:300]
        raise InputError(f"{source.file} is in none of the layouts {', '.join(LAYOUTS)}: it has {names}, …")
    return name


def read(name: str, source: Source, backbone: Backbone) -> Stored:
    """The heads in a file of the layout `name`, under our names. Raises InputError where not even a config fits."""
    if name == OWN:
        if not source.config:
            raise InputError(f"no {CONFIG_FILE} beside {source.file}: without it nobody knows what the heads are fed")
        config = validated(HeadsConfig, source.config, str(source.config_file))
        return _stored(source, config, {key: key for key in expected_shapes(config)}, [], [])
    layout, sentences, faults, known = LAYOUTS[name], [], [], {}
    if name == "vllm":
        source = _of_vllm(source, backbone, sentences, faults)
        vocab_size = source.foreign.vocab_size or backbone.vocab_size
        known = {"vocab_size": vocab_size, "draft_vocab": len(source.tensors.get(MAP, ()))}
    config = layout.config(source, backbone, **known)
    norms: set[str] = set()
    if name == "note":
        norms = {f"heads.{i}.norm.weight" for i in range(config.n_heads)} & source.tensors.keys()
        config = _of_note(source, config, norms, backbone, sentences, faults)
    counts = {key: (getattr(source.foreign, key), getattr(config, field)) for key, field in layout.keys.items()}
    sentences += [
        f"config.json has {key} {there}, the weights have {here}: the weights count"
        for key, (there, here) in counts.items()
        if there is not None and there != here
    ]
    if name == "vllm" and (announced := source.foreign.medusa_fc_bias) != config.bias:
        there, vllm = ("has none", "expects them") if announced else ("has some", "drops them")
        sentences.append(
            f"config.json has medusa_fc_bias {announced}, the file {there}: vLLM {vllm}, here the weights count"
        )
    return _stored(source, config, layout.names(config), sentences, faults, norms)


def _stored(
    source: Source,
    config: HeadsConfig,
    names: Mapping[str, str],
    sentences: list[str],
    faults: list[str],
    also: Iterable[str] = (),
) -> Stored:
    """The tensors of `names` that are there; a fault for each tensor that is neither in `names` nor in `also`."""
    known = {*names.values(), *also}
    faults = faults + [f"{name[:80]!r} is unexpected" for name in source.tensors if name not in known]
    tensors = {field: source.tensors[there] for field, there in names.items() if there in source.tensors}
    return Stored(config, tensors, names, tuple(sentences), tuple(faults))


def _of_note(
    source: Source, config: HeadsConfig, norms: set[str], backbone: Backbone, sentences: list[str], faults: list[str]
) -> HeadsConfig:
    """The config, with the input that the norms in the file tell of."""
    if not norms:
        sentences.append("no norm inside: the heads are fed the normed hidden state")
        return config
    if len(norms) < config.n_heads:
        faults.append(f"a norm is in {len(norms)} of {config.n_heads} heads: in all or none")
    faults += [
        f"{name!r} is not the backbone's final norm: the heads were trained on another model, or it was not frozen"
        for name in sorted(norms)
        if not same_rounded(source.tensors[name], backbone.norm.weight)
    ]
    sentences.append("each head has the frozen norm inside: the heads are fed the hidden state in front of it")
    return config.model_copy(update={"input": "pre_norm"})


def _of_vllm(source: Source, backbone: Backbone, sentences: list[str], faults: list[str]) -> Source:
    """The names without their prefix, lm_heads in the order of the map, and no lm_head that is the backbone's own."""
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in source.tensors.items()}
    names = LAYOUTS["vllm"]
    if len(tensors) < len(source.tensors):
        faults.append(f"some names are there twice, with the prefix {PREFIX!r} and without")
    if source.foreign.logit_scale not in (None, 1):
        faults.append("logit_scale is not 1: not in our heads")
    private = names.lm_heads_in(tensors)
    if len(private) == 1 and SHARED not in tensors and source.foreign.original_lm_head:
        tensors[SHARED] = tensors.pop(private[0])
    _order_by_map(source.foreign, tensors, backbone, sentences, faults)
    token_map, shared = tensors.get(MAP), tensors.pop(SHARED, None)
    if shared is None:
        if not names.lm_heads_in(tensors):
            faults.append(f"{SHARED!r} and lm_heads are missing: vLLM would run a random lm_head")
    elif token_map is None or int(token_map[-1]) < backbone.vocab_size:  # else: of another vocabulary, told elsewhere
        rows = backbone.lm_head.cpu() if token_map is None else backbone.lm_head.cpu()[token_map]
        if shared.shape != rows.shape:
            faults.append(f"{SHARED!r} has shape {tuple(shared.shape)} instead of {tuple(rows.shape)}")
        elif same_rounded(shared, rows):
            sentences.append(f"{SHARED} is the backbone's own: shared")
        else:
            tensors |= {names.lm_head.format(head=match["head"]): shared for match in names.blocks_in(tensors)}
            sentences.append(f"{SHARED} is not the backbone's: each head has it as its own")
    return replace(source, tensors=tensors)


def _order_by_map(
    config: ForeignConfig, tensors: dict[str, Tensor], backbone: Backbone, sentences: list[str], faults: list[str]
) -> None:
    """Sort the token map, and give the lm_heads the rows of its tokens only, in that order."""
    vocab_size = config.vocab_size or backbone.vocab_size
    truncated = config.truncated_vocab_size or vocab_size
    lm_heads = [name for name in tensors if name == SHARED or LAYOUTS["vllm"].lm_heads_in([name])]
    if MAP not in tensors:
        if truncated < vocab_size:
            faults.append(f"truncated_vocab_size is {truncated} of {vocab_size}, but there is no {MAP}")
        return
    token_map = tensors.pop(MAP)
    if truncated == vocab_size and all(len(tensors[name]) == vocab_size for name in lm_heads if tensors[name].ndim):
        sentences.append(f"{MAP} is not used: the heads have the whole vocabulary")
        return
    token_map = token_map.long() if token_map.dtype == torch.int32 else token_map
    if wrong := map_faults(token_map, vocab_size, in_order=False):
        faults += [f"{MAP}: {fault}" for fault in wrong]
        return
    tensors[MAP], order = token_map.sort()
    if not torch.equal(tensors[MAP], token_map):
        sentences.append(f"{MAP} was sorted, and the lm_heads with it")
    for name in lm_heads:
        rows = {len(token_map): order, vocab_size: tensors[MAP]}.get(len(tensors[name]) if tensors[name].ndim else -1)
        tensors[name] = tensors[name] if rows is None else tensors[name][rows]


def write(name: str, heads: Heads, folder: Path) -> tuple[str, ...]:
    """Write into a new `folder` in the layout `name`; returns what had to be written otherwise.

    Raises InputError for heads that the layout cannot hold.
    """
    layout, config, state = LAYOUTS[name], heads.config, dict(heads.state_dict())
    if name == OWN:
        write_folder(folder, layout.file, state, config.model_dump())
        return ()
    _require_room(name, heads)
    sentences = []
    if layout.holds == ("private",) and config.lm_head == "shared":
        state |= {f"heads.{i}.lm_head.weight": heads.shared_lm_head for i in range(config.n_heads)}
        sentences.append(f"the backbone's lm_head was written {config.n_heads} times: this layout has one a head")
        config = config.model_copy(update={"lm_head": "private"})
    if layout.biased and not config.bias:  # a loader that is not strict would leave them random
        weights = [key for key in state if key.endswith(".linear.weight")]
        state |= {key.removesuffix("weight") + "bias": state[key].new_zeros(len(state[key])) for key in weights}
        sentences.append("biases of zero were added")
        config = config.model_copy(update={"bias": True})
    tensors = {there: state[field] for field, there in layout.names(config).items()}
    if name == "vllm" and config.lm_head == "shared":
        tensors[SHARED] = heads.shared_lm_head
        sentences.append("the backbone's lm_head was written with the heads")
    write_folder(folder, layout.file, tensors, layout.facts(config) | {"base_model_name_or_path": config.backbone_name})
    return tuple(sentences)


def _require_room(name: str, heads: Heads) -> None:
    """Raises InputError for heads that another project's layout cannot hold."""
    config, layout = heads.config, LAYOUTS[name]
    blocks = [[block.state_dict() for block in head.blocks] for head in heads.heads]
    reasons = {
        "Hydra's heads, whose skip connection its own repository trains": config.kind != "medusa",
        f"an lm_head that is {config.lm_head}": config.lm_head not in layout.holds
        and not (config.lm_head == "shared" and layout.holds == ("private",)),
        f"a draft vocabulary of {config.draft_vocab}": bool(config.draft_vocab) and name != "vllm",
        f"{config.n_layers} blocks a head": name == "note" and config.n_layers > 1,
        "different blocks in a head, for it runs one block again and again": name.startswith("medusa-")
        and any(not torch.equal(block[key], of[0][key]) for of in blocks for block in of for key in block),
    }
    if missing := [reason for reason, holds in reasons.items() if holds]:
        others = " or ".join(sorted({"specnb", "vllm"} - {name}))
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


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", lambda match: GROUPS[match[1]], re.escape(template)))


def _rows(source: Source, names: list[str], otherwise: int) -> int:
    """Rows of the first of the tensors named, `otherwise` where there is none."""
    return next((source.tensors[name].shape[0] for name in names if source.tensors[name].ndim), otherwise)
