"""What a reproduction holds: the first wrong tensor, and the least that makes it again without this package."""

import ast
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from specnb.divergence.align import Key
from specnb.divergence.along import Along
from specnb.divergence.ladder import TIMES_FLOOR
from specnb.divergence.offline.result import named
from specnb.divergence.reproduction import standalone
from specnb.divergence.reproduction.standalone import CAPTURED, INPUTS, WEIGHTS
from specnb.divergence.setups import Lab, Outcome
from specnb.divergence.tracing.paths import canonical
from specnb.errors import InputError

MAX_BYTES = 4 << 30
ROOM = "transformers."
"""Where a draft's class must come from, for a script to build it again."""
ALIKE = 0.1
"""How far the error of an isolated module may be from the one that was found: it runs in other shapes."""
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
"""What a configuration says about kernels and does not write into its own file."""

Packed = tuple[dict[str, Any], dict[str, Tensor]]
"""`repro.json` and `repro.safetensors`."""


@torch.no_grad()
def pack(lab: Lab, outcome: Outcome) -> Packed:
    """The isolated module where that shows the same error, else the whole draft.

    Raises InputError for a draft that a script cannot build again, for weights of more than MAX_BYTES, and where not
    even the whole draft shows the error.
    """
    first = outcome.wrong.iloc[0]
    for kind in (_module, _model):
        made = kind(lab, outcome, first)
        if made is not None and _shows(*made, first, _sound(lab, made[0], first["at"])):
            return made
    raise InputError(f"nothing is wrong with {named(first)} when the draft is run again: nothing to write")


def _module(lab: Lab, outcome: Outcome, first: pd.Series) -> Packed | None:
    """The first module by itself; None where it is given more than tensors with tokens and plain values."""
    at = first["at"]
    if first["role"] != "out" or first["module"] != at or not at:
        return None
    rows = outcome.trace.rows(module=at, call=first["call"])
    names = rows.loc[rows["role"] == "in", "name"].unique()
    keys = {name: Key(at, first["call"], "in", name) for name in names}
    if (rows["role"] == "state").any() or any("." in n or k not in outcome.along.values for n, k in keys.items()):
        return None
    scalars = _scalars(outcome.trace.facts["scalars"], at)
    if scalars is None:
        return None
    dtypes = rows.drop_duplicates(["role", "name"]).set_index(["role", "name"])["dtype"]
    given = {INPUTS + name: _tensor(outcome.along, key, dtypes["in", name]) for name, key in keys.items()}
    path = _real_path(lab.reference, at)
    weights = _weights(lab.reference.get_submodule(path), f"{path}.")
    return _packed(lab, outcome, first, "module", given | weights, scalars)


def _model(lab: Lab, outcome: Outcome, first: pd.Series) -> Packed:
    return _packed(lab, outcome, first, "model", _weights(lab.reference, ""), {})


def _packed(
    lab: Lab, outcome: Outcome, first: pd.Series, kind: str, tensors: dict[str, Tensor], scalars: dict[str, Any]
) -> Packed:
    model, key = lab.reference, Key(first["at"], int(first["call"]), first["role"], first["name"])
    for one in (type(model), type(getattr(model, "config", None))):
        if not one.__module__.startswith(ROOM):
            where = f"{one.__module__}.{one.__qualname__}"
            raise InputError(f"the draft is built of {where}, which is not in transformers: a script cannot make it")
    rows = outcome.trace.rows(module=key.module, role=key.role, name=key.name)
    config = model.config
    facts = {
        "schema": 1, "kind": kind, "path": _real_path(model, key.module), "call": key.call, "role": key.role,
        "name": key.name, "token_axis": outcome.along.axes[key], "limit": TIMES_FLOOR * float(first["floor"]),
        "scalars": scalars, "text": list(outcome.along.text), "setup": outcome.setup.id,
        "feeds": [{"ids": list(feed.ids), "forget": feed.forget} for feed in outcome.script.feeds],
        "model_class": _path_of(type(model)), "config_class": _path_of(type(config)),
        "config": json.loads(config.to_json_string(use_diff=False)),
        "implementations": {n: getattr(config, n) for n in IMPLEMENTATIONS if hasattr(config, n)},
        "torch": torch.__version__,
    }  # fmt: skip
    captured = _tensor(outcome.along, key, rows["dtype"].iloc[0])
    _refuse_large(tensors.values())
    return facts, tensors | {CAPTURED: captured}


def _shows(facts: dict[str, Any], tensors: dict[str, Tensor], first: pd.Series, sound: Tensor) -> bool:
    """Whether the script shows what the lab found.

    Of a module the very error, for without an argument that was not captured it might give something else altogether.
    Of the whole draft any error that a sound run has not: rounding adds up over layers, and `limit` is raised to it.
    """
    try:
        ours = standalone.rerun(facts, tensors)
    except (RuntimeError, TypeError, ValueError, AttributeError, ImportError, LookupError, SystemExit):
        # it needs more than this
        return False
    errors = standalone.apart(ours, tensors[CAPTURED], facts["token_axis"])
    if facts["kind"] == "module":
        shown = errors[int(first["position"])]
        return bool(np.isclose(shown, first["error"], rtol=ALIKE, atol=facts["limit"], equal_nan=True))
    facts["limit"] = max(facts["limit"], TIMES_FLOOR * max(standalone.apart(ours, sound, facts["token_axis"])))
    return any(not error <= facts["limit"] for error in errors)


def _sound(lab: Lab, facts: dict[str, Any], at: str) -> Tensor:
    key = Key(at, facts["call"], facts["role"], facts["name"])
    return _tensor(lab.sound[0], key, "float32")


def _tensor(along: Along, key: Key, dtype: str) -> Tensor:
    """As the module had it, over the kept positions, in the type it had."""
    whole = np.moveaxis(along.values[key], 0, along.axes[key]).copy()  # a module may write into it
    return torch.from_numpy(whole).to(getattr(torch, dtype))


def _weights(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Parameters and buffers, each with memory of its own: tied ones would be refused."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    _refuse_large(value for _, value in named)  # before they are copied
    return {f"{WEIGHTS}{prefix}{name}": value.detach().cpu().clone().contiguous() for name, value in named}


def _refuse_large(tensors: Iterable[Tensor]) -> None:
    if (size := sum(value.nbytes for value in tensors)) > MAX_BYTES:
        raise InputError(f"what to write takes {size / 1e9:.1f} GB: reproduce it on a smaller draft of its class")


def _scalars(seen: dict[str, list[str]], at: str) -> dict[str, Any] | None:
    """Plain arguments of the module; None where one took several values, or is no literal (nan)."""
    found = {}
    for key, texts in seen.items():
        module, _, name = key.rpartition(":")
        if module == at:
            try:
                (text,) = texts
                found[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                return None
    return found


def _real_path(model: nn.Module, short: str) -> str:
    paths = canonical(path for path, _ in model.named_modules())
    return next(path for path, name in paths.items() if name == short)


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
