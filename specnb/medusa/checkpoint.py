"""Trained heads as files: `save`, `load_trained_heads`, `convert`.

A folder has `config.json` (`HeadsConfig`), `heads.safetensors` and, for those we trained, `training.json`. The frozen
norm, the shared lm_head and the embeddings are the backbone's and are not in it; its digest is. Loading is strict:
whatever does not fit is an error that lists all of it, for heads that were loaded in part draft nothing unnoticed.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

from specnb.errors import HeadsMismatch, InputError, require_known
from specnb.io import project_dir, write_atomic, writing
from specnb.lm.load import load
from specnb.measure.curve import TRAINING_FILE
from specnb.medusa import layouts
from specnb.medusa.layouts import CONFIG_FILE, LAYOUTS, MAP, OWN, HeadsFile
from specnb.medusa.nets import Backbone, Heads, HeadsConfig, expected_shapes, misfits

SHOWN = 12
"""Faults that an error lists."""


@dataclass(frozen=True)
class LoadReport:
    """What was loaded, and how. `converted`: what lay otherwise in the file; `findings`: what a user should mend."""

    path: Path
    layout: str
    config: HeadsConfig
    converted: tuple[str, ...]
    findings: tuple[str, ...]

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


def shipped() -> dict[str, Path]:
    """Name and folder of the trained heads in `data/heads`."""
    root = project_dir() / "data" / "heads"
    return {config.parent.name: config.parent for config in sorted(root.glob(f"*/{CONFIG_FILE}"))}


def open_heads(name_or_path: str | Path) -> HeadsFile:
    """The file of a name of `shipped`, or of a path (`./NAME` for a folder of a shipped name).

    Raises InputError for what can be refused before a model is there: `layouts.open_file`.
    """
    known, name = shipped(), str(name_or_path)[:200]
    path = known.get(name, Path(name_or_path).expanduser())
    if not path.exists():
        require_known("heads (there is no such folder or file)", name, known)
    return layouts.open_file(path)


def save(heads: Heads, folder: Path, *, dtype: str = "bfloat16", facts: Mapping[str, object] | None = None) -> Path:
    """Write `heads` to a new `folder` in our layout; `facts` go to training.json. Returns the folder."""
    kind = getattr(torch, dtype)
    state = {n: t.to(kind) if t.is_floating_point() else t for n, t in heads.state_dict().items()}
    with _new_folder(folder) as new:
        layouts.write_folder(new, LAYOUTS[OWN].file, state, heads.config.model_dump())
        if facts is not None:
            write_atomic(new / TRAINING_FILE, json.dumps(facts, indent=1, allow_nan=False).encode() + b"\n")
    return Path(folder)


def convert(heads: Heads, folder: Path, layout: str) -> list[str]:
    """Write `heads` to a new `folder` in a layout of `layouts.LAYOUTS`, in their types; sentences on what that changed.

    Raises InputError for heads that the layout cannot hold, and then writes nothing.
    """
    with _new_folder(folder) as new:
        return layouts.write(layout, heads, new)


def require_free(folder: Path) -> None:
    """Raises InputError when there is something at `folder`: a model's own has files of the same names."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InputError(f"{folder} is not empty: give a new or an empty folder")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, whose files are moved to `folder` when all went well."""
    require_free(Path(folder))
    target = Path(folder).resolve()
    with writing(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as new:
            yield Path(new)
            target.mkdir(exist_ok=True)
            for file in Path(new).iterdir():
                file.replace(target / file.name)


def load_trained_heads(path: str | Path, net_or_backbone: PreTrainedModel | Backbone) -> tuple[Heads, LoadReport]:
    """Heads from a shipped name, a folder or a file of any layout, put on a model, in its type and on its device.

    Raises HeadsMismatch that lists every key that is missing, unexpected or of another shape or type, weights that are
    not finite, other sizes, another backbone; InputError where there is nothing to read.
    """
    backbone = net_or_backbone if isinstance(net_or_backbone, Backbone) else Backbone.of(net_or_backbone)
    stored = open_heads(path)
    config, names = layouts.read(stored, backbone)
    usable, faults = _usable(stored, config, names, backbone)
    if config.backbone not in ("", backbone.digest):
        faults.append(
            f"the heads were trained on another model ({config.backbone_name or 'not named'}, digest "
            f"{config.backbone[:12]}…, here {backbone.digest[:12]}…)"
        )
    if faults:
        seen = f"{stored.file} cannot be used: {'; '.join(faults[:SHOWN])}"
        raise HeadsMismatch(f"{seen}. Give heads that were trained for this model, or convert the file again")
    heads = Heads(config, backbone, usable.get(MAP))
    heads.load_state_dict(usable, strict=True)
    dtype = backbone.lm_head.dtype
    for kind in sorted({tensor.dtype for tensor in usable.values() if tensor.is_floating_point()}, key=str):
        if torch.promote_types(kind, dtype) != dtype:
            stored.converted.append(f"rounded from {kind} to {dtype}, the model's")
    if not config.backbone:
        named = f" (it names {config.backbone_name})" if config.backbone_name else ""
        stored.converted.append(
            f"no digest of the model that the heads were trained on{named}: only sizes were compared"
        )
    return heads.eval(), LoadReport(
        stored.file, stored.layout, config, converted=tuple(stored.converted), findings=tuple(_untrained(usable))
    )


def _usable(
    stored: HeadsFile, config: HeadsConfig, names: Mapping[str, str], backbone: Backbone
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors that can be put on the backbone, and everything that keeps the others, or all, from it."""
    usable, faults, dtype = {}, [], backbone.lm_head.dtype
    for name, shape in expected_shapes(config).items():
        there = names.get(name, name)
        tensor = stored.tensors.get(there)
        if tensor is None:
            faults.append(f"{there!r} is missing")
        elif tuple(tensor.shape) != shape:
            faults.append(f"{there!r} has shape {tuple(tensor.shape)} instead of {shape}")
        elif tensor.is_floating_point() == (name == MAP):
            faults.append(f"{there!r} is of {tensor.dtype}")
        elif tensor.is_floating_point() and not bool(tensor.to(dtype).isfinite().all()):
            faults.append(f"{there!r} has NaN or infinity (in {dtype})")
        else:
            usable[name] = tensor.clone()  # what the file holds is mapped, and may change under us
    return usable, [*stored.faults, *misfits(config, backbone, usable.get(MAP)), *faults]


def _untrained(tensors: Mapping[str, Tensor]) -> list[str]:
    trained = {name.partition(".linear.")[0] for name, tensor in tensors.items() if tensor.any()}
    blocks = dict.fromkeys(name.partition(".linear.")[0] for name in tensors if ".blocks." in name)
    return [f"{block} is all zero: it was never trained" for block in blocks if block not in trained]


def command(
    path: Annotated[str, typer.Argument(help="a shipped name, a folder or a file of heads")],
    to: Annotated[str, typer.Option(help=" | ".join(LAYOUTS))],
    out: Annotated[Path, typer.Option(help="the folder to write")],
    backbone: Annotated[str, typer.Option(help="the model that the heads sit on")] = "smollm2-135m",
) -> None:
    """Convert trained heads from one layout to another, and tell what was read and what was written."""
    # before a model is opened for nothing
    require_known("layout", to, LAYOUTS)
    open_heads(path)
    require_free(out)
    with closing(load(backbone, backend="hf")) as model:
        heads, report = load_trained_heads(path, model.network)
        typer.echo(str(report))
        for sentence in convert(heads, out, to):
            typer.echo(f"  written: {sentence}")
    typer.echo(f"written to {out}, layout {to}")
