"""Shadow replay: is what a module gave what its weights make of what it was given?

A pristine copy of the draft reads the whole text in one forward. Every module in it is handed what the same module was
really given in the run under suspicion, and its own output is compared with what was really given back, which then
goes on in its place. So no error travels: a module that is wrong is wrong by itself, however much came in wrong. What a
module is given is compared, too: a difference there was made between modules, by the code of the one that holds them
(attention between its projections) or by somebody who wrote into a buffer meanwhile, and is put down to the holder.
(The idea of shadow modules is that of torch's numeric suite; here the inputs come from another run, in other shapes.)

What remains between sound runs is rounding: sums of other shapes in another order. `floors` measures it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from specnb.divergence.along import Along, Key
from specnb.divergence.names import Arguments, canonical, outputs_in, tensors_in
from specnb.divergence.script import Script

COLUMNS = ("order", "module", "call", "role", "name", "at", "position", "error", "gain", "discrete")
WHICH = ("at", "call", "role", "name")
"""What tells one tensor from another."""
TIMES_FLOOR = 3.0
"""How far above the largest error between sound runs an error must be."""
ROUNDING = {"float64": 1e-15, "float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}
"""Relative L2 error that sums in another order may always have, whether or not the sound runs showed it."""
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@torch.no_grad()
def local_errors(reference: nn.Module, along: Along) -> pd.DataFrame:
    """One row for each tensor that a module was given or gave, and position: `order`, relative L2 `error`, `gain`.

    `module` is who made it: of an output (`role` "out") the module itself, of an input the one that holds it; `at` is
    the module where it was seen. `gain` is <ours, theirs> / <ours, ours>, of the reference's and the run's; of integers
    `error` is 1 where any differs.
    """
    replay = _Replay(along)
    names = canonical(path for path, _ in reference.named_modules())
    hooks = []
    try:
        for path, module in reference.named_modules():
            hooks += replay.put_on(module, names[path])
        ids = torch.tensor([along.text], device=next(reference.parameters()).device)
        reference(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    parts = [part for part in replay.found if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(COLUMNS))


def floors(sound: Sequence[pd.DataFrame], dtype: str) -> pd.Series:
    """The largest error of each tensor in sound runs, by WHICH, and at least what rounding to `dtype` may do."""
    together = pd.concat(sound, ignore_index=True)
    return together.groupby(list(WHICH))["error"].max().clip(lower=ROUNDING[dtype]).rename("floor")


def beyond(errors: pd.DataFrame, floor: pd.Series, script: Script, times: float = TIMES_FLOOR) -> pd.DataFrame:
    """The rows whose error is more than `times` the floor of their tensor, the first in time first.

    With `floor`, `ratio`, and `feed`, the feed of the script in which the position was computed.
    """
    joined = errors.join(floor, on=list(WHICH))
    joined["ratio"] = joined["error"] / joined["floor"]
    joined["feed"] = script.last_feeds[joined["position"]]
    found = joined[(joined["ratio"] > times) | ~np.isfinite(joined["error"])]
    return found.sort_values(["feed", "order", "position"], kind="stable").reset_index(drop=True)


class _Replay:
    """The hooks of the pristine copy."""

    def __init__(self, along: Along) -> None:
        self._along = along
        self._calls: Counter[str] = Counter()
        self._running: list[str] = []
        self._order = 0
        self.found: list[pd.DataFrame] = []

    def put_on(self, module: nn.Module, path: str) -> Iterator[Any]:
        arguments = Arguments(module)

        def before(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            call = self._calls[path]
            named = [pair for name, value in arguments(args, kwargs).items() for pair in tensors_in(name, value)]
            self._compare(Key(path, call, "in", ""), named, self._running[-1] if self._running else path)
            self._running.append(path)
            taken = self._taken(path, call, "in", named)
            return _exchanged(args, taken), _exchanged(kwargs, taken)

        def after(_module: nn.Module, args: tuple, output: object) -> object:
            call = self._calls[path]
            self._calls[path] += 1
            self._running.pop()
            named = list(outputs_in(output))
            self._compare(Key(path, call, "out", ""), named, path)
            return _exchanged(output, self._taken(path, call, "out", named))

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _taken(self, path: str, call: int, role: str, named: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """What stands in the run where the replay has these tensors, by their id; only where the shapes agree."""
        taken = {}
        for name, ours in named:
            theirs = self._theirs(Key(path, call, role, name))
            if theirs is not None and theirs.shape == ours.shape:
                taken[id(ours)] = theirs.to(ours.device, ours.dtype)
        return taken

    def _theirs(self, key: Key) -> Tensor | None:
        """As the module has it: the token axis where it was, the type it had."""
        found = self._along.values.get(key)
        if found is None:
            return None
        whole = torch.from_numpy(np.ascontiguousarray(np.moveaxis(found, 0, self._along.axes[key])))
        return whole.to(TYPES.get(self._along.dtypes[key], whole.dtype))

    def _compare(self, of: Key, named: list[tuple[str, Tensor]], maker: str) -> None:
        self._order += 1
        for name, ours in named:
            key = of._replace(name=name)
            theirs = self._theirs(key)
            if theirs is not None and theirs.shape == ours.shape:
                self.found.append(_apart(ours, theirs, self._along.axes[key]).assign(
                    order=self._order, module=maker, call=key.call, role=key.role, name=name, at=key.module
                )[list(COLUMNS)])  # fmt: skip


def _apart(ours: Tensor, theirs: Tensor, axis: int) -> pd.DataFrame:
    """Of each token: position, error, gain."""
    a, b = (x.cpu().movedim(axis, 0).double() for x in (ours, theirs))
    a, b = (x.reshape(len(x), -1) for x in (a, b))
    dot, own, discrete = (a * b).sum(1), (a * a).sum(1).clamp(min=1e-60), not ours.is_floating_point()
    error = (a != b).any(1).double() if discrete else (a - b).norm(dim=1) / own.sqrt()
    return pd.DataFrame(
        {"position": np.arange(len(a)), "error": error.numpy(), "gain": (dot / own).numpy(), "discrete": discrete}
    )


def _exchanged(value: Any, taken: Mapping[int, Tensor]) -> Any:
    """The same structure with some of its tensors replaced."""
    if isinstance(value, Tensor):
        return taken.get(id(value), value)
    if not taken or isinstance(value, str | bytes):
        return value
    if isinstance(value, dict):
        changed = {key: _exchanged(inner, taken) for key, inner in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_exchanged(inner, taken) for inner in value)
    return value
