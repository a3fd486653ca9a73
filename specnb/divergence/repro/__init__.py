"""The smallest run that still goes wrong at the same place, and a script of it that needs nothing of this package.

Text and feeds are made shorter as long as the same tensor is the first wrong one (delta debugging; Zeller and
Hildebrandt 2002), within a bounded number of runs. A run costs what a set-up and its two sound runs cost.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from specnb.divergence.errors import named
from specnb.divergence.repro import standalone
from specnb.divergence.repro.standalone import CAPTURED, INPUTS, WEIGHTS
from specnb.divergence.script import Along, Feed, Script
from specnb.divergence.setups import Deploy, Lab, Outcome
from specnb.divergence.tolerances import TIMES_FLOOR
from specnb.divergence.trace import Key, canonical
from specnb.errors import InputError
from specnb.io import write_atomic

MOST_RUNS = 12


@dataclass(frozen=True)
class Repro:
    """The smallest run found. `kind` is "module" where the first module alone shows it, "model" for the whole draft."""

    setup: str
    script: Script
    first: pd.Series
    runs: int
    facts: dict[str, Any]
    """`repro.json`."""
    tensors: dict[str, Tensor]
    """`repro.safetensors`."""

    @property
    def kind(self) -> str:
        return self.facts["kind"]

    def __str__(self) -> str:
        feeds, tokens = len(self.script.feeds), len(self.script.text)
        return (
            f"{self.first['module'] or 'the model'} in {self.setup} with {tokens} token{'s' * (tokens > 1)} in {feeds} "
            f"feed{'s' * (feeds > 1)} ({self.runs} runs): a script of the {self.kind}"
        )

    def write(self, folder: Path) -> Path:
        """Write `repro.json`, `repro.safetensors` and, last, `repro.py` into `folder`; the path of the script."""
        from safetensors.torch import save

        folder = Path(folder)
        contents = {
            "repro.safetensors": save(self.tensors),
            "repro.json": (json.dumps(self.facts, indent=1) + "\n").encode(),
            "repro.py": inspect.getsource(standalone).encode(),
        }
        for name, content in contents.items():
            write_atomic(folder / name, content)
        return folder / "repro.py"


def minimal(
    draft: nn.Module,
    target: nn.Module | None = None,
    *,
    outcome: Outcome,
    deploy: Deploy | None = None,
    runs: int = MOST_RUNS,
) -> Repro:
    """The smallest run found in at most `runs` runs; `outcome` is a wrong one, such as `investigation.case.bad`.

    `draft`, `target` and `deploy` are those that were investigated. Raises InputError where the outcome does not happen
    again, and for a draft that a script cannot build.
    """
    # fed in blocks is a matter of the script, which the outcome has
    setup = "S0" if outcome.setup.in_blocks else outcome.setup.id
    wanted, script, smallest, used = outcome.wrong.iloc[0], outcome.script, None, 0
    same = ["at", "role", "name"]

    def shows(feeds: tuple[Feed, ...]) -> bool:
        """Whether the same tensor is wrong first. The last that shows it, the smallest, is kept."""
        nonlocal smallest, used
        if used == runs:
            return False
        used += 1
        try:
            lab = Lab(draft, target, script=Script(feeds), deploy=deploy)
            again = lab.run(setup)
        except (Exception, SystemExit):  # more is taken back than is left, or the service does not take it
            return False
        if again.clean or not (again.wrong.iloc[0][same] == wanted[same]).all():
            return False
        smallest = lab, again
        return True

    _shrink(script, int(wanted["feed"]), int(wanted["position"]), shows)
    if smallest is None:
        raise InputError(
            f"{named(wanted)} was not wrong again in {used} runs of {setup}: give the deploy that was investigated"
        )
    facts, tensors = _pack(*smallest)
    return Repro(setup, smallest[1].script, smallest[1].wrong.iloc[0], used, facts, tensors)


def _shrink(script: Script, number: int, position: int, shows: Callable[[tuple[Feed, ...]], bool]) -> None:
    """One prefill where that is enough, else feeds up to the first wrong one with less before it."""
    text = script.text
    end = min(script.starts[number] + len(script.feeds[number].ids), len(text))
    # what is wrong may need tokens behind it that came with it
    for length in sorted({position + 1, end}):
        if shows((Feed(text[:length]),)):
            _bisect(length, lambda n: shows((Feed(text[:n]),)))
            return
    prompt, *rest = script.feeds[: number + 1]
    if shows((prompt, *rest)):
        _bisect(len(prompt.ids), lambda n: shows((Feed(prompt.ids[:n], prompt.forget), *rest)))


def _bisect(known: int, shows: Callable[[int], bool]) -> None:
    """Look for the least n that shows it, if all above do."""
    below = 0
    while known - below > 1:
        middle = (known + below) // 2
        below, known = (below, middle) if shows(middle) else (middle, known)


MAX_BYTES = 4 << 30
ALIKE = 0.1
"""How far the error of an isolated module may be from the one that was found: it runs in other shapes."""
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
"""What a configuration says about kernels and does not write into its own file."""


@torch.no_grad()
def _pack(lab: Lab, outcome: Outcome) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors of the first candidate that shows the same error. InputError where none does."""
    first = outcome.wrong.iloc[0]
    for candidate in _candidates(lab, outcome, first):
        packed = _packed(lab, outcome, first, *candidate)
        if _shows(lab, *packed, first):
            return packed
    raise InputError(f"nothing is wrong with {named(first)} when the draft is run again: nothing to write")


def _candidates(
    lab: Lab, outcome: Outcome, first: pd.Series
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
    """Kind, tensors and plain arguments: the first module by itself, where it is given no more; the whole draft."""
    at, call, along = first["at"], first["call"], outcome.along
    rows = outcome.trace.rows(module=at, call=call)
    keys = {name: Key(at, call, "in", name) for name in rows.loc[rows["role"] == "in", "name"].unique()}
    alone = at and first["role"] == "out" and first["module"] == at and not (rows["role"] == "state").any()
    places = {tuple(key.rsplit(":", 1)): values for key, values in outcome.trace.facts["scalars"].items()}
    scalars = {name: values for (module, name), values in places.items() if module == at}
    steady = all(len(values) == 1 for values in scalars.values())
    if alone and steady and all("." not in name and key in along.values for name, key in keys.items()):
        dtypes = rows.drop_duplicates(["role", "name"]).set_index(["role", "name"])["dtype"]
        given = {INPUTS + name: _tensor(along, key, dtypes["in", name]) for name, key in keys.items()}
        path = _real_path(lab.reference, at)
        weights = _weights(lab.reference.get_submodule(path), f"{path}.")
        yield "module", given | weights, {name: value for name, (value,) in scalars.items()}
    yield "model", _weights(lab.reference, ""), {}


def _packed(
    lab: Lab, outcome: Outcome, first: pd.Series, kind: str, tensors: dict[str, Tensor], scalars: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    model, key = lab.reference, Key(first["at"], int(first["call"]), first["role"], first["name"])
    model_class, config_class = (_path_of(type(item)) for item in (model, getattr(model, "config", None)))
    for path in (model_class, config_class):
        if not path.startswith("transformers."):
            raise InputError(f"the draft is built of {path}, which is not in transformers: a script cannot make it")
    rows = outcome.trace.rows(module=key.module, role=key.role, name=key.name)
    config = model.config
    facts = {
        "schema": 1, "kind": kind, "path": _real_path(model, key.module), "call": key.call, "role": key.role,
        "name": key.name, "token_axis": outcome.along.axes[key], "limit": TIMES_FLOOR * float(first["floor"]),
        "scalars": scalars, "text": list(outcome.along.text), "setup": outcome.setup.id,
        "feeds": [{"ids": list(feed.ids), "forget": feed.forget} for feed in outcome.script.feeds],
        "model_class": model_class, "config_class": config_class,
        "config": json.loads(config.to_json_string(use_diff=False)),
        "implementations": {n: getattr(config, n) for n in IMPLEMENTATIONS if hasattr(config, n)},
        "torch": torch.__version__,
    }  # fmt: skip
    return facts, tensors | {CAPTURED: _tensor(outcome.along, key, rows["dtype"].iloc[0])}


def _shows(lab: Lab, facts: dict[str, Any], tensors: dict[str, Tensor], first: pd.Series) -> bool:
    """Whether the script shows what the lab found.

    Of a module the very error, for without an argument that was not captured it might give something else altogether.
    Of the whole draft any error that a sound run has not: rounding adds up over layers, and `limit` is raised to it.
    """
    try:
        replayed = standalone.rerun(facts, tensors)
    except (Exception, SystemExit):  # it needs more than this
        return False
    errors = standalone.apart(replayed, tensors[CAPTURED], facts["token_axis"])
    if facts["kind"] == "module":
        shown = errors[int(first["position"])]
        return bool(np.isclose(shown, first["error"], rtol=ALIKE, atol=facts["limit"], equal_nan=True))
    sound = _tensor(lab.sound[0], Key(first["at"], facts["call"], facts["role"], facts["name"]), "float32")
    facts["limit"] = max(facts["limit"], TIMES_FLOOR * max(standalone.apart(replayed, sound, facts["token_axis"])))
    return any(not error <= facts["limit"] for error in errors)


def _tensor(along: Along, key: Key, dtype: str) -> Tensor:
    """As the module had it, over the kept positions, in the type it had."""
    whole = np.moveaxis(along.values[key], 0, along.axes[key]).copy()  # a module may write into it
    return torch.from_numpy(whole).to(getattr(torch, dtype))


def _weights(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Parameters and buffers, each with memory of its own: tied ones would be refused."""
    pairs = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    if (size := sum(value.nbytes for _, value in pairs)) > MAX_BYTES:
        raise InputError(f"what to write takes {size / 1e9:.1f} GB: reproduce it on a smaller draft of its class")
    return {f"{WEIGHTS}{prefix}{name}": value.detach().cpu().clone().contiguous() for name, value in pairs}


def _real_path(model: nn.Module, short: str) -> str:
    paths = canonical(path for path, _ in model.named_modules())
    return next(path for path, name in paths.items() if name == short)


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
