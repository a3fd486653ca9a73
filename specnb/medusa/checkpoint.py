"""Read, write and convert files of trained heads, in our own layout and two others.

A folder in our layout has `config.json` (`HeadsConfig`), `heads.safetensors` and, for heads trained
here, `training.json`. The frozen norm, the shared lm_head and the embeddings belong to the backbone
and are not stored; the config has the backbone's digest. Loading is strict: everything that does
not fit is listed in one error, because partly loaded heads run without a warning and draft nothing
useful.

A layout is a table of names. The names of the weights give the number of heads and blocks, because
config.json can be wrong (the original repository's says 2 heads where there are 5). Both other
layouts have an lm_head per head and take the normed hidden state (`post_norm`). `pre_norm` heads
are written unchanged: their blocks also take the normed state.

- `specnb`: the names of `nets.Heads`; config.json is `HeadsConfig`.
- `note`: the Medusa note's. Heads trained with a frozen norm also have `heads.{i}.norm.weight` and
  take the hidden state before the norm.
- `medusa-v1`: the original repository's (Cai et al. 2401.10774).
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from zipfile import is_zipfile

import safetensors.torch
import torch
from pydantic import BaseModel
from torch import Tensor

from specnb.errors import HeadsMismatch, InputError, require_known
from specnb.io import project_dir, read_json, read_toml, reading, validated, write_atomic
from specnb.lm.files import expand_home
from specnb.medusa.nets import Backbone, DrafterConfig, Heads, HeadsConfig, ResidualBlock

CONFIG_FILE = "config.json"
TRAINING_FILE = "training.json"
"""The facts of a training: recipe, log (lines of step, lr, loss), accuracy. Next to the weights."""
OWN = "specnb"
"""Our layout."""
MAP = "token_map"
"""The name of the draft vocabulary in our layout."""
GROUPS = {
    "head": r"(?P<head>\d{1,3})",
    "layer": r"(?P<layer>\d{1,3})",
    "n_layers": r"\d{1,3}",
    "part": "(?P<part>weight|bias)",
}
"""Patterns for the fields of a layout's templates."""


class ForeignConfig(BaseModel):
    """The field that is read from the config.json of another layout."""

    base_model_name_or_path: str | None = None


class Layout(NamedTuple):
    """A table of names; `layouts.toml` describes the fields."""

    file: str
    block: str
    lm_head: str
    keys: Mapping[str, str]

    def translate(self, name: str, to: "Layout") -> str:
        """Return a weight's name in another layout; a foreign one has one block per head."""
        for template, other in ((self.block, to.block), (self.lm_head, to.lm_head)):
            if matches := match_names(template, [name]):
                return other.format(**{"layer": 0} | matches[0].groupdict(), n_layers=1)
        return name  # the token map, or a name without a counterpart


LAYOUTS = {name: Layout(**fields) for name, fields in read_toml(Path(__file__).with_name("layouts.toml")).items()}


def match_names(template: str, names: Iterable[str]) -> list[re.Match[str]]:
    """Return the matches of the names that fit a layout's template."""
    pattern = template.replace(".", r"\.").format(**GROUPS)
    return [match for name in names if (match := re.fullmatch(pattern, name))]


class HeadsFile(NamedTuple):
    """Weights while they are read: `tensors` by the names in the file, and its `config`.

    `converted` are sentences on changes made while reading, `faults` on what cannot be used.
    """

    file: Path
    layout: str
    config: Any  # a DrafterConfig, or ForeignConfig
    tensors: dict[str, Tensor]
    converted: list[str]
    faults: list[str]


def _take_norms_out(stored: HeadsFile, backbone: Backbone) -> str:
    """Remove the frozen norms from a file in the `note` layout; return the input of its heads."""
    heads = {match["head"] for match in match_names(LAYOUTS["note"].block, stored.tensors)}
    names = [f"heads.{head}.norm.weight" for head in heads]
    if not stored.tensors.keys() >= set(names):  # norms of some heads only are unexpected keys
        stored.converted.append("no norm inside: the heads take the normed hidden state")
        return "post_norm"
    final = backbone.norm.weight.cpu()
    for name in names:
        norm = stored.tensors.pop(name)
        fits = torch.equal(norm.to(final.dtype), final) or torch.equal(final.to(norm.dtype), norm)
        if not fits:  # neither equal nor one rounded to the other's dtype
            stored.faults.append(f"{name} is not the backbone's final norm: other model or trained")
    stored.converted.append("frozen norm inside: the heads take the hidden state before the norm")
    return "pre_norm"


def shipped() -> dict[str, Path]:
    """Return the name and folder of each set of trained heads in `data/heads`."""
    root = project_dir() / "data/heads"
    return {config.parent.name: config.parent for config in sorted(root.glob(f"*/{CONFIG_FILE}"))}


def open_heads(name_or_path: str | Path, schema: type[DrafterConfig] = HeadsConfig) -> HeadsFile:
    """Read weights: a name of `shipped`, a file, or a folder (`./NAME` for a folder of such a name).

    `schema` is the class of config.json in our layout; other layouts hold heads only.
    A `.pt` is opened without running code pickled in it. A state dict may be wrapped in another
    dict, as training checkpoints do; `converted` then says so. Raises InputError for a file that
    does not exist, cannot be read or has no known layout, and for a bad config.json.
    """
    names, name = shipped(), str(name_or_path)
    path = names.get(name, expand_home(name))
    if not path.exists():
        require_known("heads (there is no such folder or file)", name, names)
    candidates = [path] if path.is_file() else [path / layout.file for layout in LAYOUTS.values()]
    file = next(filter(Path.is_file, candidates), None)
    if file is None:
        raise InputError(
            f"{path} holds no heads: give a folder with one of "
            f"{', '.join(candidate.name for candidate in candidates)}, or the file itself"
        )
    config_file = file.with_name(CONFIG_FILE)
    config = read_json(config_file) if config_file.is_file() else {}
    converted = []
    with reading(file):
        if file.suffix == ".safetensors":
            stored = safetensors.torch.load_file(file)
        else:  # only zip archives can be mapped; older files are none
            stored = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
        dicts = {k: v for k, v in stored.items() if isinstance(v, Mapping) and _tensors_of(v)}
        # next to the state of an optimizer, an epoch
        if len(dicts) == 1 and not _layout_of(_tensors_of(stored)):
            [(name, stored)] = dicts.items()
            converted.append(f"the weights were in {name!r}")
        tensors = _tensors_of(stored)
    layout = OWN if file.name == LAYOUTS[OWN].file else _layout_of(tensors)
    if layout is None or (layout != OWN and schema is not HeadsConfig):
        raise InputError(f"{file} has {[*stored][:5]!s:.300}, …: expected names of a layout ({', '.join(LAYOUTS)})")
    if layout == OWN and not config:
        raise InputError(f"no {CONFIG_FILE} next to {file}: it says which hidden state the heads take")
    config = validated(schema if layout == OWN else ForeignConfig, config, str(config_file))
    return HeadsFile(file, layout, config, tensors, converted, [])


def _tensors_of(stored: Mapping[str, Any]) -> dict[str, Tensor]:
    return {str(k): v for k, v in stored.items() if isinstance(v, Tensor)}


def _layout_of(names: Iterable[str]) -> str | None:
    """Return the first layout with blocks of these names; None if there is none."""
    matching = (name for name, layout in LAYOUTS.items() if match_names(layout.block, names))
    return next(matching, None)


def read_config(stored: HeadsFile, backbone: Backbone) -> Any:
    """Return the config of heads; in other layouts, the names of the weights decide.

    Removes norms from `stored` and notes each change in it.
    """
    if stored.layout == OWN:
        return stored.config
    blocks = match_names(LAYOUTS[stored.layout].block, stored.tensors)
    values = {
        "n_heads": 1 + max(int(match["head"]) for match in blocks),
        "n_layers": 1 + max(int(match.groupdict().get("layer", 0)) for match in blocks),
        "bias": any(match["part"] == "bias" for match in blocks),
        "hidden_size": backbone.hidden_size,
        "vocab_size": backbone.vocab_size,
        "lm_head": "private",
        "input": _take_norms_out(stored, backbone) if stored.layout == "note" else "post_norm",
        "backbone_name": stored.config.base_model_name_or_path or "",
    }
    return validated(HeadsConfig, values, f"heads in {stored.file}")


def write_layout(heads: Heads, folder: Path, name: str) -> list[str]:
    """Write `heads` to a new `folder` in the layout `name`, in their own dtype.

    Return a sentence on each change. Foreign layouts hold Medusa heads of one block with bias, over
    the whole vocabulary. For other heads InputError is raised, and nothing is written.
    """
    if name == OWN:
        save_heads(heads, folder, dtype=None)
        return []
    source = LAYOUTS[OWN]
    layout = LAYOUTS[name]
    config = heads.config
    if config.kind != "medusa" or config.draft_vocab or config.n_layers > 1 or not config.bias:
        raise InputError(f"{name} cannot hold these heads, use {OWN}: {config}")
    state = dict(heads.state_dict())
    sentences = []
    if config.lm_head == "shared":
        for head in range(config.n_heads):
            state[source.lm_head.format(head=head)] = heads.shared_lm_head
        sentences.append(f"the backbone's lm_head was written for each of {config.n_heads} heads")
    tensors = {source.translate(key, layout): state[key] for key in state}
    facts = {key: getattr(config, attribute) for key, attribute in layout.keys.items()}
    facts["base_model_name_or_path"] = config.backbone_name
    _write(folder, layout.file, tensors, {CONFIG_FILE: _json(facts)})
    return sentences


def _write(folder: Path, weights: str, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    """Write a new `folder` with the file `weights` and text `files`, all or nothing."""
    require_free(folder)
    copies = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    if weights.endswith(".pt"):
        torch.save(copies, packed := io.BytesIO())
        data = packed.getvalue()
    else:
        data = safetensors.torch.save(copies, metadata={"format": "pt"})
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_atomic(partial / weights, data)
    for name, text in files.items():
        write_atomic(partial / name, text.encode())
    partial.replace(folder)


def _json(values: Mapping[str, object]) -> str:
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


# --- loading and writing ---


class LoadReport(NamedTuple):
    """The loader's report: `converted` are differences from our layout, `findings` need fixing.

    `training` is the training.json next to the weights, or empty.
    """

    path: Path
    layout: str
    config: HeadsConfig
    converted: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    training: Mapping[str, Any] = MappingProxyType({})

    @property
    def log(self) -> Sequence[Mapping[str, Any]]:
        """The lines of the training log."""
        return self.training.get("log", ())

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"{self.path}: {config.n_heads} {config.kind} heads, layout {self.layout}",
            f"  blocks per head: {config.n_layers}, hidden size {config.hidden_size}",
            f"  input {config.input}, {config.lm_head} lm_head",
            f"  draft vocabulary: {config.draft_size:,} of {config.vocab_size:,} tokens",
            *(f"  converted: {sentence}" for sentence in self.converted),
            *(f"  WARNING: {sentence}" for sentence in self.findings),
        ]
        return "\n".join(lines)


def save_heads(
    net: Any,
    folder: Path,
    *,
    dtype: str | None = "bfloat16",
    facts: Mapping[str, object] | None = None,
    card: str = "",
) -> Path:
    """Write a trained drafter to a new `folder` in our layout, and return the folder.

    `facts` of the training go to training.json, the `card` to README.md. A killed write leaves
    `folder` free.
    """
    state = net.state_dict()
    if dtype:
        kind = getattr(torch, dtype)
        state = {n: t.to(kind) if t.is_floating_point() else t for n, t in state.items()}
    files = {CONFIG_FILE: _json(net.config.model_dump())}
    if facts is not None:
        files[TRAINING_FILE] = _json(facts)
    if card:
        files["README.md"] = card
    _write(folder, LAYOUTS[OWN].file, state, files)
    return folder


def require_free(folder: Path) -> None:
    """Raise InputError if `folder` is not empty: a model's folder has files of the same names."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InputError(f"{folder} is not empty: give a new or an empty folder")


def load_trained_heads(
    path: str | Path,
    backbone: Backbone,
    build: Callable[..., Any] = Heads,
    schema: type[DrafterConfig] = HeadsConfig,
) -> tuple[Any, LoadReport]:
    """Load trained weights of any layout onto a model, in its dtype and on its device.

    `path` is a shipped name, a folder or a file. `build(config, backbone, token_map)` returns the
    untrained network. Raises HeadsMismatch for other sizes, another backbone, weights that are not
    finite, and keys that are missing, unexpected or of another shape or dtype. Raises InputError if
    there is nothing to read.
    """
    stored = open_heads(path, schema)
    config, layout = read_config(stored, backbone), LAYOUTS[stored.layout]
    # Clones: the file is mapped into memory and may change. Older versions wrote an empty tensor.
    tensors = {
        layout.translate(name, LAYOUTS[OWN]): tensor.clone()
        for name, tensor in stored.tensors.items()
        if tensor.numel()
    }
    faults = stored.faults + _list_faults(tensors, config, backbone)
    if not faults:
        try:
            net = build(config, backbone, tensors.get(MAP))
            net.load_state_dict(tensors)
        except RuntimeError as error:  # lists missing and unexpected keys, and other shapes
            faults = [" ".join(str(error).split())]
    if faults:
        refused = f"{stored.file} cannot be used: {'; '.join(faults):.2000}"
        raise HeadsMismatch(f"{refused}. Use heads trained for this model, or convert the file again")
    dtype = backbone.lm_head.dtype
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    for other in sorted(dtypes, key=str):
        if torch.promote_types(other, dtype) != dtype:
            stored.converted.append(f"rounded from {other} to {dtype}, the model's")
    if not config.backbone:
        named = config.backbone_name or "not named"
        stored.converted.append(f"no digest of the heads' backbone ({named}): only sizes were compared")
    findings = tuple(
        f"{name} is all zero: it was never trained"
        for name, module in net.named_modules()
        if isinstance(module, ResidualBlock) and not any(weight.any() for weight in module.parameters())
    )
    facts = stored.file.with_name(TRAINING_FILE)
    training = read_json(facts) if facts.exists() else {}
    report = LoadReport(stored.file, stored.layout, config, tuple(stored.converted), findings, training)
    return net.eval(), report


def _list_faults(tensors: dict[str, Tensor], config: Any, backbone: Backbone) -> list[str]:
    """List the reasons why a state dict cannot be used with the backbone."""
    dtype = backbone.lm_head.dtype
    faults = [
        f"the heads have {size} {getattr(config, size)}, the backbone {getattr(backbone, size)}"
        for size in ("hidden_size", "vocab_size")
        if getattr(config, size) != getattr(backbone, size)
    ]
    if config.backbone not in ("", backbone.digest):
        digests = f"digest {config.backbone[:12]}…, here {backbone.digest[:12]}…"
        named = config.backbone_name or "not named"
        faults.append(f"the heads were trained on another model ({named}, {digests})")
    token_map = tensors.get(MAP, torch.empty(0))
    if len(token_map) != config.draft_vocab:
        expected = f"config.json says {config.draft_vocab}"
        faults.append(f"{MAP!r} holds {len(token_map)} tokens, {expected}")
    if len(token_map):
        inside = (token_map >= 0) & (token_map < config.vocab_size)
        if not inside.all() or not torch.equal(token_map, token_map.unique()):
            faults.append(f"{MAP!r} must hold ascending ids of the vocabulary, each once")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() == (name == MAP):
            faults.append(f"{name!r} has dtype {tensor.dtype}")
        elif not tensor.to(dtype).isfinite().all():
            faults.append(f"{name!r} has NaN or infinity (in {dtype})")
    return faults
