"""Minimal reproduction of a divergence: what was computed is compared with what the draft's own weights make.

Needs torch, transformers and safetensors. Beside this script lie `repro.json` (what to run) and `repro.safetensors`
(weights, inputs, and the tensor that was captured in the faulty run). Kind "module": one module runs on the inputs that
it was given then. Kind "model": the whole draft reads the text, because the module cannot be told apart from its cache,
masks or caller.

    python repro.py                        exit code 1 while what was captured is not what comes out, else 0
    python repro.py OTHER.safetensors      the same with the tensor `captured` of another run, after a fix
"""

import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHTS, INPUTS, CAPTURED = "weights/", "in/", "captured"


@torch.no_grad()
def main(folder: Path, other: Path | None = None) -> int:
    """Run what `folder` holds, print what was found, and return the exit code."""
    facts = json.loads((folder / "repro.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "repro.safetensors")
    captured = load_file(other)[CAPTURED] if other else tensors[CAPTURED]
    errors = apart(rerun(facts, tensors), captured, facts["token_axis"])
    wrong = [at for at, error in enumerate(errors) if not error <= facts["limit"]]
    print(f"{facts['path'] or 'the model'}, {facts['role']} {facts['name']}, kind {facts['kind']!r}:")
    print(f"{len(wrong)} of {len(errors)} tokens differ by more than {facts['limit']:.2g} (relative L2)")
    for at in wrong[:8]:
        print(f"  token {at}: {errors[at]:.4g}")
    print("DIVERGENT" if wrong else "SOUND")
    return 1 if wrong else 0


def rerun(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor that was captured, as the draft's own weights make it: `(…, tokens, …)`."""
    model = build(facts, tensors)
    module = model.get_submodule(facts["path"])
    seen = watched(module, facts)
    if facts["kind"] == "module":
        given = {name.removeprefix(INPUTS): value for name, value in tensors.items() if name.startswith(INPUTS)}
        module(**given, **facts["scalars"])
    else:
        model(input_ids=torch.tensor([facts["text"]]), use_cache=False)
    if len(seen) <= facts["call"] or seen[facts["call"]] is None:
        raise SystemExit(f"{facts['path']} gave no {facts['role']} {facts['name']}: this is another transformers")
    return seen[facts["call"]]


def build(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """The draft by its class and configuration; what has no weights here stays without memory."""
    config = named_class(facts["config_class"]).from_dict(facts["config"])
    for name, value in facts["implementations"].items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = named_class(facts["model_class"])(config).eval()
    for key, value in tensors.items():
        if key.startswith(WEIGHTS):
            path, _, name = key.removeprefix(WEIGHTS).rpartition(".")
            owner = model.get_submodule(path)
            setattr(owner, name, nn.Parameter(value, requires_grad=False) if name in owner._parameters else value)
    return model


def named_class(path: str) -> Any:
    """A class by its import path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def watched(module: nn.Module, facts: Mapping[str, Any]) -> list[Tensor | None]:
    """A list to which each call of the module adds one tensor that it is given (`role` "in") or gives ("out")."""
    seen: list[Tensor | None] = []
    arguments = inspect.signature(type(module).forward)

    def keep(named: Mapping[str, Any]) -> None:
        value = inner({**named, **named.get("kwargs", {})}, facts["name"])
        seen.append(value.clone() if isinstance(value, Tensor) else None)

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        keep(arguments.bind(module, *args, **kwargs).arguments)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        parts = output if isinstance(output, tuple | list) else (output,)
        keep({"out": parts[0]} | {f"out.{i}": part for i, part in enumerate(parts) if i})

    if facts["role"] == "in":
        module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        module.register_forward_hook(after)
    return seen


def inner(value: Any, name: str) -> Any:
    """A tensor in nested containers by its dotted name; None where there is none."""
    if isinstance(value, Mapping) and name in value:
        return value[name]
    head, _, rest = name.partition(".")
    if isinstance(value, Mapping):
        return inner(value[head], rest) if head in value and rest else value.get(head)
    if isinstance(value, tuple | list) and head.isdecimal() and int(head) < len(value):
        return inner(value[int(head)], rest) if rest else value[int(head)]
    return None


def apart(replayed: Tensor, recorded: Tensor, axis: int) -> list[float]:
    """Relative L2 error of each token; of integers 1 where any differs. Shapes that differ are all wrong."""
    if replayed.shape != recorded.shape:
        return [float("inf")] * recorded.shape[axis]
    a, b = (x.movedim(axis, 0).reshape(x.shape[axis], -1) for x in (replayed, recorded))
    if not replayed.is_floating_point():
        return (a != b).any(1).double().tolist()
    a, b = a.double(), b.double()
    return ((a - b).norm(dim=1) / a.norm(dim=1).clamp(min=1e-30)).tolist()


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent, *map(Path, sys.argv[1:2])))
