"""Trained heads as files, in our own layout and those of others: `save`, `load_trained_heads`, `convert`.

A folder of ours has `config.json` (`HeadsConfig`), `heads.safetensors` and, for those we trained, `training.json`. The
frozen norm, the shared lm_head and the embeddings are the backbone's and are not in it; its digest is. Loading is
strict: whatever does not fit is an error that lists all of it, for heads loaded in part draft nothing unnoticed.

Layouts are tables of names. The weights decide how many heads, blocks and lm_heads there are, for configs are known to
be wrong (the original repository's says 2 heads where 5 are). Names left over are faults. All layouts but ours are fed
the normed hidden state (`post_norm`); pre_norm heads are written as they are, for behind the norm their input is the
same.

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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from zipfile import is_zipfile

import safetensors.torch
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from specnb.errors import HeadsMismatch, InputError, require_known
from specnb.io import project_dir, read_json, read_toml, reading, validated, write_atomic
from specnb.lm.files import expand_home
from specnb.medusa.nets import Backbone, Heads, HeadsConfig, ResidualBlock, skeleton

CONFIG_FILE, TRAINING_FILE = "config.json", "training.json"
"""Beside the weights; the second is what a training leaves: recipe, log (lines of step, lr, loss), accuracy."""
OWN, SHARED, MAP = "specnb", "lm_head.weight", "token_map"
"""Our layout; vLLM's names of the lm_head of all heads and of the draft vocabulary."""
PREFIX = "medusa_heads."
"""An optional prefix of every name in a file of vLLM's."""
GROUPS = {"head": r"(?P<head>\d{1,3})", "layer": r"(?P<layer>\d{1,3})", "n_layers": r"\d{1,3}",
          "part": "(?P<part>weight|bias)"}  # fmt: skip


class ForeignConfig(BaseModel):
    """The config.json of others, whose fields named here decide how their weights are read."""

    vocab_size: int | None = Field(default=None, ge=1)
    original_lm_head: bool = False
    logit_scale: float | None = None
    base_model_name_or_path: str | None = None


class Layout(NamedTuple):
    """A table of names, of `layouts.toml`, which says what the fields are."""

    file: str
    block: str
    lm_head: str
    holds: list[str]
    biased: bool
    keys: Mapping[str, str]
    constants: Mapping[str, Any]

    def translate(self, name: str, to: "Layout", n_layers: int = 1) -> str:
        """Return the name that a weight has in another layout."""
        for template, other in ((self.block, to.block), (self.lm_head, to.lm_head)):
            if matches := match_names(template, [name]):
                return other.format(**{"layer": 0} | matches[0].groupdict(), n_layers=n_layers)
        return name  # of the map, and of what other layouts do not have


LAYOUTS = {name: Layout(**fields) for name, fields in read_toml(Path(__file__).with_name("layouts.toml")).items()}


def match_names(template: str, names: Iterable[str]) -> list[re.Match[str]]:
    """Return the matches of those names that are of a layout's template."""
    pattern = template.replace(".", r"\.").format(**GROUPS)
    return [match for name in names if (match := re.fullmatch(pattern, name))]


class HeadsFile(NamedTuple):
    """Weights that are being read: `tensors` by the names of the file, `config` of the config.json beside it.

    `converted` are sentences on what was changed in reading, `faults` on what cannot be used.
    """

    file: Path
    layout: str
    config: HeadsConfig | ForeignConfig
    tensors: dict[str, Tensor]
    converted: list[str]
    faults: list[str]


def _take_norms_out(stored: HeadsFile, backbone: Backbone) -> dict[str, Any]:
    """Take the frozen norms out of a note's file: with them its heads are fed the state in front of the norm."""
    heads = {match["head"] for match in match_names(LAYOUTS["note"].block, stored.tensors)}
    names = [f"heads.{head}.norm.weight" for head in heads]
    if not stored.tensors.keys() >= set(names):  # of some heads only they are unexpected
        stored.converted.append("no norm inside: the heads are fed the normed hidden state")
        return {}
    norms = [stored.tensors.pop(name) for name in names]
    if not all(same_rounded(norm, backbone.norm.weight) for norm in norms):
        stored.faults.append("a norm is not the backbone's final norm: heads of another model, or it was not frozen")
    stored.converted.append("each head has the frozen norm inside: the heads are fed the hidden state in front of it")
    return {"input": "pre_norm"}


def _sort_rows(stored: HeadsFile, backbone: Backbone) -> dict[str, Any]:
    """Sort vLLM's token map and the lm_heads with it; no lm_head that is the backbone's own stays."""
    tensors, layout, foreign = stored.tensors, LAYOUTS["vllm"], stored.config
    sizes = {"vocab_size": foreign.vocab_size or backbone.vocab_size, "draft_vocab": len(tensors.get(MAP, ()))}
    if foreign.logit_scale not in (None, 1):
        stored.faults.append("logit_scale is not 1: not in our heads")
    lm_heads = [match[0] for match in match_names(layout.lm_head, tensors)]
    if not lm_heads and SHARED not in tensors:
        stored.faults.append(f"{SHARED!r} and lm_heads are missing: vLLM would run a random lm_head")
    if len(lm_heads) == 1 and foreign.original_lm_head:
        tensors[SHARED] = tensors.pop(lm_heads[0])
    rows = backbone.lm_head.cpu()
    if MAP in tensors:
        token_map = tensors[MAP]
        tensors[MAP], order = token_map.long().flatten().sort()
        if not _is_map(tensors[MAP], backbone.vocab_size):
            return sizes  # `_list_faults` says so
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
            blocks = match_names(layout.block, tensors)
            tensors |= {layout.lm_head.format(head=match["head"]): shared for match in blocks}
            stored.converted.append(f"{SHARED} is not the backbone's: each head has it as its own")
    return sizes


NORMALISE = {"note": _take_norms_out, "vllm": _sort_rows}
"""Bring a file of these layouts into our order, and return those values of HeadsConfig that the layout decides."""


def shipped() -> dict[str, Path]:
    """Name and folder of the trained heads in `data/heads`."""
    root = project_dir() / "data/heads"
    return {config.parent.name: config.parent for config in sorted(root.glob(f"*/{CONFIG_FILE}"))}


def open_heads(name_or_path: str | Path) -> HeadsFile:
    """Read the weights of a name of `shipped`, or of a file or folder (`./NAME` for a folder of such a name).

    A `.pt` is opened without running what is pickled in it. `converted` lists what was removed
    around a state dict: a dict that wraps it, and a common prefix of the names. Raises InputError
    for a file that is not there, cannot be read or has no known layout, and for a bad config.json.
    """
    known, name = shipped(), str(name_or_path)
    path = known.get(name, expand_home(name))
    if not path.exists():
        require_known("heads (there is no such folder or file)", name, known)
    candidates = [path] if path.is_file() else [path / layout.file for layout in LAYOUTS.values()]
    file = next(filter(Path.is_file, candidates), None)
    if file is None:
        raise InputError(
            f"{path} holds no heads: give a folder with one of "
            f"{', '.join(candidate.name for candidate in candidates)}, or the file itself"
        )
    beside = file.with_name(CONFIG_FILE)
    config = read_json(beside) if beside.is_file() else {}
    converted = []
    with reading(file):
        if file.suffix == ".safetensors":
            stored = safetensors.torch.load_file(file)
        else:  # only a zip archive can be mapped; older files are not one
            stored = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
        dicts = {k: v for k, v in stored.items() if isinstance(v, Mapping) and _tensors_of(v)}
        # next to the state of an optimizer, an epoch
        if len(dicts) == 1 and not _layout_of(_tensors_of(stored)):
            [(name, stored)] = dicts.items()
            converted.append(f"the weights were in {name!r}")
        tensors = _tensors_of(stored)
    while not (layout := _layout_of(tensors)):
        first = {name.partition(".")[0] for name in tensors}
        if len(first) != 1 or first == {""}:
            break
        tensors = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
        converted.append(f"every name began with {first.pop()!r}")
    if file.name == LAYOUTS[OWN].file:
        layout = OWN
    if layout is None:
        raise InputError(f"{file} has {[*stored][:5]!s:.300}, …: expected names of a layout ({', '.join(LAYOUTS)})")
    if layout == OWN and not config:
        raise InputError(f"no {CONFIG_FILE} beside {file}: without it nobody knows what the heads are fed")
    config = validated(HeadsConfig if layout == OWN else ForeignConfig, config, str(beside))
    return HeadsFile(file, layout, config, tensors, converted, [])


def _tensors_of(stored: Mapping[str, Any]) -> dict[str, Tensor]:
    return {str(k).removeprefix(PREFIX): v for k, v in stored.items() if isinstance(v, Tensor)}


def _layout_of(names: Iterable[str]) -> str | None:
    """Return the first layout with blocks of these names; None if there is none.

    medusa-v1 and medusa-v2 name their blocks alike; only v1 has lm_heads.
    """
    for name, layout in LAYOUTS.items():
        needed = [layout.block, layout.lm_head] if name == "medusa-v1" else [layout.block]
        if all(match_names(template, names) for template in needed):
            return name
    return None


def read_heads_config(stored: HeadsFile, backbone: Backbone) -> HeadsConfig:
    """Return the config of heads. Of others' the names of the weights say it; sizes have to be the backbone's.

    Normalises `stored` in place and notes each change in it.
    """
    if stored.layout == OWN:
        return stored.config
    layout = LAYOUTS[stored.layout]
    special = NORMALISE[stored.layout](stored, backbone) if stored.layout in NORMALISE else {}
    blocks, lm_heads = (match_names(template, stored.tensors) for template in (layout.block, layout.lm_head))
    values = {
        "n_heads": 1 + max(int(match["head"]) for match in blocks),
        "n_layers": 1 + max(int(match.groupdict().get("layer", 0)) for match in blocks),
        "bias": any(match["part"] == "bias" for match in blocks),
        "hidden_size": backbone.hidden_size,
        "vocab_size": backbone.vocab_size,
        "lm_head": "private" if lm_heads else "shared",
        "input": "post_norm",
        "backbone_name": stored.config.base_model_name_or_path or "",
    }
    return validated(HeadsConfig, values | special, f"heads in {stored.file}")


def write_layout(heads: Heads, folder: Path, name: str) -> list[str]:
    """Write `heads` to a new `folder` in the layout `name`, in their types; sentences on what that changed.

    Raises InputError for heads that the layout cannot hold, and then writes nothing.
    """
    if name == OWN:
        save_heads(heads, folder, dtype=None)
        return []
    layout, config, state, sentences = LAYOUTS[name], heads.config, dict(heads.state_dict()), []
    # the original repository runs one block of a head again and again
    blocks = [[block.state_dict() for block in head.blocks] for head in heads.heads]
    alike = all(torch.equal(block[key], of[0][key]) for of in blocks for block in of for key in block)
    fits = config.kind == "medusa" and config.lm_head in ("shared", *layout.holds)
    if name != "vllm":
        fits = fits and not config.draft_vocab and alike and (config.n_layers == 1 or name != "note")
    if not fits:
        raise InputError(f"{name} has no room for such heads, {OWN} has: {config}")
    if layout.holds == ["private"] and config.lm_head == "shared":
        state |= {LAYOUTS[OWN].lm_head.format(head=i): heads.shared_lm_head for i in range(config.n_heads)}
        sentences.append(f"the backbone's lm_head was written {config.n_heads} times: this layout has one a head")
    if layout.biased and not config.bias:  # a loader that is not strict would leave them random
        weights = [key for key in state if key.endswith(".linear.weight")]
        state |= {key.removesuffix("weight") + "bias": state[key].new_zeros(len(state[key])) for key in weights}
        sentences.append("biases of zero were added")
    tensors = {LAYOUTS[OWN].translate(key, layout, config.n_layers): tensor for key, tensor in state.items()}
    facts = {key: getattr(config, attribute) for key, attribute in layout.keys.items()} | layout.constants
    if name == "vllm" and config.lm_head == "shared":
        tensors[SHARED], facts["original_lm_head"] = heads.shared_lm_head, True
        sentences.append("the backbone's lm_head was written with the heads")
    _write(folder, layout.file, tensors, facts | {"base_model_name_or_path": config.backbone_name})
    return sentences


def _write(
    folder: Path, weights: str, tensors: Mapping[str, Tensor], config: Mapping[str, object],
    facts: Mapping[str, object] | None = None,
) -> None:  # fmt: skip
    """Write into a new `folder` the weights, as their name's ending says, `facts` as training.json, and config.json."""
    require_free(folder)
    held = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    if weights.endswith(".pt"):
        torch.save(held, packed := io.BytesIO())
        data = packed.getvalue()
    else:
        data = safetensors.torch.save(held, metadata={"format": "pt"})
    write_atomic(folder / weights, data)
    for name, values in ((TRAINING_FILE, facts), (CONFIG_FILE, config)):
        if values is not None:
            write_atomic(folder / name, json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")


def same_rounded(tensor: Tensor, other: Tensor) -> bool:
    """Say whether a file's tensor and another are equal, or one is the other rounded to its type."""
    other = other.cpu()
    return torch.equal(tensor.to(other.dtype), other) or torch.equal(other.to(tensor.dtype), tensor)


# --- loading and writing ---


class LoadReport(NamedTuple):
    """The loader's report: `converted` are differences from our layout, `findings` what a user should mend.

    `training` is the training.json beside the weights, empty where there is none.
    """

    path: Path
    layout: str
    config: HeadsConfig
    converted: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    training: Mapping[str, Any] = MappingProxyType({})

    @property
    def log(self) -> Sequence[Mapping[str, Any]]:
        """Lines of the training's log."""
        return self.training.get("log", ())

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"{self.path}: {config.n_heads} {config.kind} heads, layout {self.layout}",
            f"  {config.n_layers} blocks a head, of {config.hidden_size}; {config.input}, {config.lm_head} lm_head",
            f"  {config.draft_size:,} of {config.vocab_size:,} tokens",
            *(f"  converted: {sentence}" for sentence in self.converted),
            *(f"  DOUBTFUL: {sentence}" for sentence in self.findings),
        ]
        return "\n".join(lines)


def save_heads(
    heads: Heads, folder: Path, *, dtype: str | None = "bfloat16", facts: Mapping[str, object] | None = None
) -> Path:
    """Write `heads` to a new `folder` in our layout; `facts` go to training.json. Returns the folder."""
    state = heads.state_dict()
    if dtype:
        state = {n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in state.items()}
    _write(folder, LAYOUTS[OWN].file, state, heads.config.model_dump(), facts)
    return folder


def require_free(folder: Path) -> None:
    """Raises InputError when there is something at `folder`: a model's own has files of the same names."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InputError(f"{folder} is not empty: give a new or an empty folder")


def load_trained_heads(path: str | Path, backbone: Backbone) -> tuple[Heads, LoadReport]:
    """Load heads from a shipped name, a folder or a file of any layout, put on a model, in its type and on its device.

    Raises HeadsMismatch that lists every key that is missing, unexpected or of another shape or type, weights that are
    not finite, other sizes, another backbone; InputError where there is nothing to read.
    """
    stored = open_heads(path)
    config, layout = read_heads_config(stored, backbone), LAYOUTS[stored.layout]
    # clones, for what the file holds is mapped, and may change under us
    tensors = {layout.translate(name, LAYOUTS[OWN]): tensor.clone() for name, tensor in stored.tensors.items()}
    if faults := stored.faults + _list_faults(tensors, config, backbone):
        refused = f"{stored.file} cannot be used: {'; '.join(faults):.2000}"
        raise HeadsMismatch(f"{refused}. Give heads that were trained for this model, or convert the file again")
    heads = Heads(config, backbone, tensors.get(MAP))
    heads.load_state_dict(tensors)
    dtype = backbone.lm_head.dtype
    for kind in sorted({tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}, key=str):
        if torch.promote_types(kind, dtype) != dtype:
            stored.converted.append(f"rounded from {kind} to {dtype}, the model's")
    if not config.backbone:
        named = config.backbone_name or "not named"
        stored.converted.append(f"no digest of the model of these heads ({named}): only sizes were compared")
    findings = tuple(
        f"{name} is all zero: it was never trained"
        for name, module in heads.named_modules()
        if isinstance(module, ResidualBlock) and not any(weight.any() for weight in module.parameters())
    )
    card = stored.file.with_name(TRAINING_FILE)
    training = read_json(card) if card.exists() else {}
    return heads.eval(), LoadReport(stored.file, stored.layout, config, tuple(stored.converted), findings, training)


def _list_faults(tensors: dict[str, Tensor], config: HeadsConfig, backbone: Backbone) -> list[str]:
    """List what keeps a state dict from the backbone."""
    dtype = backbone.lm_head.dtype
    faults = [
        f"these heads have {size} {getattr(config, size)}, the backbone {getattr(backbone, size)}: another model"
        for size in ("hidden_size", "vocab_size")
        if getattr(config, size) != getattr(backbone, size)
    ]
    if config.backbone not in ("", backbone.digest):
        digests = f"digest {config.backbone[:12]}…, here {backbone.digest[:12]}…"
        faults.append(f"the heads were trained on another model ({config.backbone_name or 'not named'}, {digests})")
    if MAP in tensors and not _is_map(tensors[MAP], config.vocab_size):
        faults.append(f"{MAP!r} does not hold ascending ids of the vocabulary, each once")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() == (name == MAP):
            faults.append(f"{name!r} is of {tensor.dtype}")
        elif not tensor.to(dtype).isfinite().all():
            faults.append(f"{name!r} has NaN or infinity (in {dtype})")
    try:
        skeleton(config).load_state_dict(tensors, assign=True)
    except RuntimeError as error:  # it lists what is missing, unexpected, or of another shape
        faults.append(" ".join(str(error).split()))
    return faults


def _is_map(token_map: Tensor, vocab_size: int) -> bool:
    """Say whether ids `(n,)` are ascending, each once, and in the vocabulary."""
    inside = (token_map >= 0) & (token_map < vocab_size)
    return torch.equal(token_map, token_map.unique()) and bool(inside.all())
