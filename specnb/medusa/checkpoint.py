"""Read and write files of trained drafters, in our own layout and in the Medusa note's.

A folder in our layout (`specnb`) has `config.json` (`HeadsConfig` or `JumpConfig`),
`heads.safetensors` (state dict of `nets.Heads` or `jump.JumpNet`) and, for drafters trained here,
`training.json`. The frozen norm, the shared lm_head and the embeddings belong to the backbone and
are not stored; the config has the backbone's digest.

The note's layout (`note`) is one file of Medusa heads, each with one block and its own lm_head:
`heads.{i}.res_block.linear.weight`, `.bias`, `heads.{i}.lm_head.weight`. Heads in old files take
the hidden state after the final norm. New files also have `heads.{i}.norm.weight`, a frozen copy of
the norm; their heads take the state before it.

Loading is strict, because partly loaded heads run without a warning and draft nothing useful. One
error lists all mismatches.
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import safetensors.torch
import torch
from torch import Tensor

from specnb.errors import HeadsMismatch, InputError, require_known
from specnb.io import project_dir, read_json, reading, validated, write_atomic
from specnb.lm.files import expand_home
from specnb.medusa.nets import Backbone, DrafterConfig, Heads, HeadsConfig, ResidualBlock

CONFIG_FILE = "config.json"
TRAINING_FILE = "training.json"
"""Training metadata next to the weights: recipe, log (entries of step, lr, loss), accuracy."""
OWN, NOTE = "specnb", "note"
LAYOUTS = {OWN: "heads.safetensors", NOTE: "medusa_heads.pt"}
"""The layouts, with the file name of the weights in a folder."""
OWN_BLOCK, NOTE_BLOCK = ".blocks.0.", ".res_block."
"""The part of weight names that differs between the layouts."""
HEAD_NAME = re.compile(r"heads\.(\d{1,3})\.(blocks\.\d{1,3}|res_block)\.linear\.(weight|bias)")
MAP = "token_map"
"""Name of the tensor with the draft vocabulary in our layout."""


class LoadReport(NamedTuple):
    """The loader's report: `converted` lists differences from our layout, `findings` problems.

    `config` is None for the note's layout before it is converted. `training` is the content of
    training.json, or empty.
    """

    path: Path
    layout: str
    config: Any  # a DrafterConfig
    converted: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    training: Mapping[str, Any] = {}

    @property
    def log(self) -> Sequence[Mapping[str, Any]]:
        """The entries of the training log."""
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


# --- reading ---


def shipped() -> dict[str, Path]:
    """Return the names and folders of the trained drafters in `data/heads`."""
    root = project_dir() / "data/heads"
    return {config.parent.name: config.parent for config in sorted(root.glob(f"*/{CONFIG_FILE}"))}


def open_heads(
    name_or_path: str | Path, schema: type[DrafterConfig] = HeadsConfig
) -> tuple[LoadReport, dict[str, Tensor]]:
    """Read weights from a file, a folder, or a name of `shipped` (use `./NAME` for a folder NAME).

    Return the report so far, and the weights by their names in the file. `schema` is the class of
    config.json. Code pickled in a `.pt` file is not run. Raises InputError
    for a file that does not exist, cannot be read or has no known layout, and for a missing or
    invalid config.json.
    """
    file = _find_weights(str(name_or_path))
    converted = ()
    with reading(file):
        if file.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(file)
        else:  # only zip archives can be mapped, not older files
            stored = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
            key, tensors = _unwrap(file, stored)
            converted = (f"the weights were in {key!r}",) if key else ()
    names = filter(None, map(HEAD_NAME.fullmatch, tensors))
    if any(name[2] == "res_block" for name in names):
        return LoadReport(file, NOTE, None, converted), tensors
    config_file = file.with_name(CONFIG_FILE)
    if not config_file.is_file():
        raise InputError(
            f"no {CONFIG_FILE} next to {file}: add it, it defines the input of the heads"
        )
    config = validated(schema, read_json(config_file), str(config_file))
    return LoadReport(file, OWN, config, converted), tensors


def _find_weights(name: str) -> Path:
    """Return the weights file of a shipped name, a folder or a file. Raises InputError."""
    names = shipped()
    path = names.get(name, expand_home(name))
    if not path.exists():
        require_known("heads (there is no such folder or file)", name, names)
    for file in (path, *(path / file_name for file_name in LAYOUTS.values())):
        if file.is_file():
            return file
    raise InputError(
        f"no heads in {path}: give a folder with {' or '.join(LAYOUTS.values())}, or such a file"
    )


def _unwrap(file: Path, stored: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Return the key ("" if not nested) and the state dict of heads in a file or checkpoint."""
    of_heads = {
        key: state
        for key, state in {"": stored, **stored}.items()
        if isinstance(state, Mapping) and any(HEAD_NAME.fullmatch(str(name)) for name in state)
    }
    if len(of_heads) != 1:
        raise InputError(
            f"{file} has {[*stored][:5]!s:.300}, …: "
            f"expected one state dict of heads, in the layout {' or '.join(LAYOUTS)}"
        )
    [(key, state)] = of_heads.items()
    return key, {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def load_trained_heads(
    path: str | Path,
    backbone: Backbone,
    build: Callable[..., Any] = Heads,
    schema: type[DrafterConfig] = HeadsConfig,
) -> tuple[Any, LoadReport]:
    """Load trained weights of either layout for a model, in its dtype and on its device.

    `path` is a shipped name, a folder or a file. `build(config, backbone, token_map)` returns the
    untrained network. Raises HeadsMismatch for other sizes, another backbone, non-finite weights,
    and keys that are missing, unexpected or of another shape or dtype. Raises InputError as
    `open_heads` does.
    """
    report, stored = open_heads(path, schema)
    # 1. Clone, because the mapped file may change. Skip the empty tensor that older versions wrote.
    tensors = {name: tensor.clone() for name, tensor in stored.items() if tensor.numel()}
    faults = []
    if report.layout == NOTE:
        report, tensors, faults = _convert_note(report, tensors, backbone)
    config = report.config
    # 2. Reject weights that do not fit.
    faults += _list_faults(tensors, config, backbone)
    if not faults:
        try:
            net = build(config, backbone, tensors.get(MAP))
            net.load_state_dict(tensors)
        except RuntimeError as error:  # lists missing and unexpected keys, and wrong shapes
            faults = [" ".join(str(error).split())]
    if faults:
        raise HeadsMismatch(
            f"{report.path} cannot be used: {'; '.join(faults):.2000}. "
            "Use heads trained for this model, or convert the file again"
        )
    # 3. Report conversions and suspicious weights.
    if not config.backbone:
        unchecked = (
            f"no digest of the heads' backbone ({config.backbone_name or 'not named'}): "
            "only sizes were compared"
        )
        report = report._replace(converted=(*report.converted, unchecked))
    findings = tuple(
        f"{name} is all zero: it was never trained"
        for name, module in net.named_modules()
        if isinstance(module, ResidualBlock)
        and not any(weight.any() for weight in module.parameters())
    )
    facts = report.path.with_name(TRAINING_FILE)
    training = read_json(facts) if facts.exists() else {}
    return net.eval(), report._replace(findings=findings, training=training)


def _convert_note(
    report: LoadReport, tensors: dict[str, Tensor], backbone: Backbone
) -> tuple[LoadReport, dict[str, Tensor], list[str]]:
    """Convert weights in the note's layout: return report with config, weights, and mismatches."""
    names = [*filter(None, map(HEAD_NAME.fullmatch, tensors))]
    heads = {name[1] for name in names}
    norms = [f"heads.{head}.norm.weight" for head in heads]
    faults = []
    has_norms = tensors.keys() >= set(norms)  # else norms are unexpected keys
    input_state = "no norm inside: the heads take the normed hidden state"
    if has_norms:
        input_state = "frozen norm inside: the heads take the hidden state before the norm"
        final = backbone.norm.weight.cpu()
        for name in norms:
            norm = tensors.pop(name)
            # equal, or one rounded to the other's dtype
            if not torch.equal(norm.to(final.dtype), final) and not torch.equal(
                final.to(norm.dtype), norm
            ):
                faults.append(
                    f"{name} differs from the backbone's final norm: wrong model, or trained norm"
                )
    values = {
        "n_heads": 1 + max(map(int, heads)),
        "bias": any(name[3] == "bias" for name in names),
        "hidden_size": backbone.hidden_size,
        "vocab_size": backbone.vocab_size,
        "lm_head": "private",
        "input": "pre_norm" if has_norms else "post_norm",
    }
    renamed = {name.replace(NOTE_BLOCK, OWN_BLOCK): tensor for name, tensor in tensors.items()}
    config = validated(HeadsConfig, values, f"heads in {report.path}")
    return (
        report._replace(config=config, converted=(*report.converted, input_state)),
        renamed,
        faults,
    )


def _list_faults(tensors: dict[str, Tensor], config: Any, backbone: Backbone) -> list[str]:
    """Return the reasons why a state dict cannot be used with the backbone."""
    dtype = backbone.lm_head.dtype
    faults = [
        f"the heads have {size} {getattr(config, size)}, the backbone {getattr(backbone, size)}"
        for size in ("hidden_size", "vocab_size")
        if getattr(config, size) != getattr(backbone, size)
    ]
    if config.backbone not in ("", backbone.digest):
        faults.append(
            f"the heads were trained on another model ({config.backbone_name or 'not named'}, "
            f"digest {config.backbone[:12]}…, here {backbone.digest[:12]}…)"
        )
    token_map = tensors.get(MAP, torch.empty(0))
    if len(token_map) != config.draft_vocab:
        faults.append(f"{MAP!r} has {len(token_map)} tokens, config.json has {config.draft_vocab}")
    if len(token_map):
        inside = (token_map >= 0) & (token_map < config.vocab_size)
        if not inside.all() or not torch.equal(token_map, token_map.unique()):
            faults.append(f"{MAP!r} must list distinct vocabulary ids in ascending order")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() == (name == MAP):
            faults.append(f"{name!r} has dtype {tensor.dtype}")
        elif not tensor.to(dtype).isfinite().all():
            faults.append(f"{name!r} has NaN or infinity (in {dtype})")
    return faults


# --- writing ---


def save_heads(
    net: Any,
    folder: Path,
    *,
    dtype: str | None = "bfloat16",
    facts: Mapping[str, object] | None = None,
    card: str = "",
) -> Path:
    """Write a trained drafter to a new `folder` in our layout, and return the folder.

    `dtype` is that of the file; None keeps that of the weights. Training `facts` are written to
    training.json, `card` to README.md. An interrupted write does not create `folder`. Raises
    InputError if it is not empty.
    """
    kind = getattr(torch, dtype) if dtype else None
    state = {
        name: tensor.to(dtype=kind if tensor.is_floating_point() else None)
        .cpu()
        .contiguous()
        .clone()
        for name, tensor in net.state_dict().items()
    }
    files = {
        LAYOUTS[OWN]: safetensors.torch.save(state, metadata={"format": "pt"}),
        CONFIG_FILE: _json(net.config.model_dump()),
    }
    if facts is not None:
        files[TRAINING_FILE] = _json(facts)
    if card:
        files["README.md"] = card.encode()
    return _write(folder, files)


def write_layout(heads: Heads, folder: Path, layout: str) -> list[str]:
    """Write `heads` to a new `folder` in a layout, in their own dtype; return the changes made.

    The note's layout supports Medusa heads of one block with bias, over the entire vocabulary. No
    norm is written: when loaded again, the heads take the state after the final norm. For other
    heads InputError is raised, and nothing is written.
    """
    if layout == OWN:
        save_heads(heads, folder, dtype=None)
        return []
    config = heads.config
    if config.kind != "medusa" or config.draft_vocab or config.n_layers > 1 or not config.bias:
        raise InputError(f"layout {layout} does not support these heads, use {OWN}: {config}")
    state = dict(heads.state_dict())
    changes = []
    if config.lm_head == "shared":
        state |= {
            f"heads.{head}.lm_head.weight": heads.shared_lm_head for head in range(config.n_heads)
        }
        changes.append(f"the backbone's lm_head was written for each of {config.n_heads} heads")
    renamed = {
        name.replace(OWN_BLOCK, NOTE_BLOCK): tensor.cpu().clone() for name, tensor in state.items()
    }
    torch.save(renamed, packed := io.BytesIO())
    _write(folder, {LAYOUTS[NOTE]: packed.getvalue()})
    return changes


def require_free(folder: Path) -> None:
    """Raise InputError if `folder` is not empty: a model's folder has files of the same names."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InputError(f"{folder} is not empty: give a new or an empty folder")


def _write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write `files` to a new `folder` atomically."""
    require_free(folder)
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name, content in files.items():
        write_atomic(partial / name, content)
    partial.replace(folder)
    return folder


def _json(values: Mapping[str, object]) -> bytes:
    return (json.dumps(values, indent=1, allow_nan=False) + "\n").encode()
