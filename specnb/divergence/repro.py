"""One module of a draft on the inputs that it was given: what it gave then, and what its weights make of them.

Needs torch, transformers and safetensors. Beside this script lie `repro.json` (what to run) and `repro.safetensors`
(weights, inputs, and the tensor `captured` in the faulty run).

    python repro.py                        exit code 1 while what was captured is not what comes out, else 0
    python repro.py OTHER.safetensors      the same with the tensor `captured` of another run, after a fix
"""

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


def main(folder: Path, other: Path | None = None) -> int:
    """Run what `folder` holds, print what comes out, and return the exit code."""
    facts = json.loads((folder / "repro.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "repro.safetensors")
    captured = load_file(other)["captured"] if other else tensors["captured"]
    errors = apart(rerun(facts, tensors), captured, facts["token_axis"])
    wrong = [at for at, error in enumerate(errors) if not error <= facts["limit"]]
    differ = f"{len(wrong)} of {len(errors)} tokens differ by more than {facts['limit']:.2g} (relative L2)"
    print(f"{facts['path']}, {facts['name']}: {differ}")
    for at in wrong[:8]:
        print(f"  token {at}: {errors[at]:.4g}")
    print("DIVERGENT" if wrong else "SOUND")
    return 1 if wrong else 0


@torch.no_grad()
def rerun(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor that was captured, as the module's own weights make it: `(…, tokens, …)`."""
    config = imported(facts["config_class"]).from_dict(facts["config"])
    for name, value in facts["implementations"].items():
        setattr(config, name, value)
    with torch.device("meta"):  # what has no weights here stays without memory
        module = imported(facts["model_class"])(config).eval().get_submodule(facts["path"])
    given = dict(facts["scalars"])
    for key, value in tensors.items():
        role, _, name = key.partition("/")
        if role == "in":
            given[name] = value
        elif role == "weights":
            path, _, name = name.rpartition(".")
            owner = module.get_submodule(path)
            setattr(owner, name, nn.Parameter(value, requires_grad=False) if name in owner._parameters else value)
    output = module(**given)
    return (output if isinstance(output, tuple | list) else (output,))[int(facts["name"].partition(".")[2] or 0)]


def imported(path: str) -> Any:
    """A class by its import path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def apart(replayed: Tensor, recorded: Tensor, axis: int) -> list[float]:
    """Relative L2 error of each token; of integers 1 where any differs. Shapes that differ are all wrong."""
    if replayed.shape != recorded.shape:
        return [float("inf")] * recorded.shape[axis]
    a, b = (x.movedim(axis, 0).reshape(x.shape[axis], -1) for x in (replayed, recorded))
    if not replayed.is_floating_point():
        return (a != b).any(1).double().tolist()
    return ((a.double() - b).norm(dim=1) / a.double().norm(dim=1).clamp(min=1e-30)).tolist()


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent, *map(Path, sys.argv[1:2])))
# --- the script ends here; the package makes it, with what lies beside it ---------------------------------------------

from dataclasses import dataclass

import numpy as np
from safetensors.torch import save

from specnb.divergence.errors import named
from specnb.divergence.setups import Outcome
from specnb.divergence.tolerances import TIMES_FLOOR
from specnb.divergence.trace import Key, canonical
from specnb.errors import InputError
from specnb.io import write_atomic

IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
"""What a configuration says about kernels and does not write into its own file."""


@dataclass(frozen=True)
class Repro:
    """The first wrong module of an outcome, with its inputs and weights."""

    outcome: Outcome
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    def __str__(self) -> str:
        return f"{self.facts['path']} in {self.outcome.setup.id} with {len(self.outcome.script.text)} tokens"

    def write(self, folder: Path) -> None:
        """Write `repro.json`, `repro.safetensors` and, last, `repro.py` into `folder`."""
        script = Path(__file__).read_text(encoding="utf-8").partition("# --- the script ends here")[0]
        write_atomic(folder / "repro.safetensors", save(self.tensors))
        write_atomic(folder / "repro.json", (json.dumps(self.facts, indent=1) + "\n").encode())
        write_atomic(folder / "repro.py", script.encode())


def isolated(draft: nn.Module, outcome: Outcome) -> Repro:
    """The reproduction of a wrong outcome of this draft.

    Raises InputError where the module by itself does not show what is wrong: it is in its cache, or in its caller.
    """
    first, along, trace, config = outcome.wrong.iloc[0], outcome.along, outcome.trace, getattr(draft, "config", None)
    at, call, output = first["at"], int(first["call"]), Key(*first[["at", "call", "role", "name"]])
    classes = [f"{type(item).__module__}.{type(item).__qualname__}" for item in (draft, config)]
    if foreign := [path for path in classes if not path.startswith("transformers.")]:
        raise InputError(f"the draft is built of {foreign[0]}, which is not in transformers: a script cannot make it")
    path = {name: path for path, name in canonical(path for path, _ in draft.named_modules()).items()}.get(at)
    if not path or output.role == "in" or len(trace.rows(module=at, role="state")):
        raise InputError(f"{named(first)} goes wrong by its cache or its caller: no script of one module shows that")
    module, scalars = draft.get_submodule(path), trace.facts["scalars"]
    facts = {
        "schema": 1, "kind": "module", "path": path, "call": call, "name": output.name, "text": list(along.text),
        "token_axis": along.axes[output], "limit": TIMES_FLOOR * float(first["floor"]), "setup": outcome.setup.id,
        "model_class": classes[0], "config_class": classes[1], "torch": torch.__version__,
        "scalars": {key.rpartition(":")[2]: values[-1] for key, values in scalars.items() if key.startswith(f"{at}:")},
        "config": json.loads(config.to_json_string(use_diff=False)),
        "implementations": {name: getattr(config, name) for name in IMPLEMENTATIONS if hasattr(config, name)},
    }  # fmt: skip
    tensors = {}
    for name, value in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        tensors[f"weights/{name}"] = value.detach().cpu().clone().contiguous()
    for row in trace.rows(module=at, call=call).drop_duplicates(["role", "name"]).itertuples():
        key, dtype = Key(at, call, row.role, row.name), getattr(torch, row.dtype)
        if key in along.values and (row.role == "in" or key == output):
            whole = np.moveaxis(along.values[key], 0, along.axes[key]).copy()  # a module may write into it
            tensors["captured" if key == output else f"in/{row.name}"] = torch.from_numpy(whole).to(dtype)
    try:
        error = apart(rerun(facts, tensors), tensors["captured"], facts["token_axis"])[int(first["position"])]
    except (Exception, SystemExit):  # a module may need more than it was seen to be given
        error = np.nan
    if not np.isclose(error, first["error"], rtol=0.1, atol=facts["limit"]):  # all tokens at once: other shapes
        raise InputError(f"{named(first)} by itself does not show what is wrong: it needs more than its inputs")
    return Repro(outcome, facts, tensors)
