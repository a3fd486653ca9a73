"""Hooks on a torch model in any process: what each module was given, gave back, kept, and which weights it read.

Eager execution only: a compiled or replayed graph runs past the hooks, which is refused instead of called clean.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from specnb.divergence.capture.at_use import AtUse, Owned, Registry
from specnb.divergence.capture.tensors import (
    digest_tensor,
    dtype_name,
    name_arguments,
    named_tensors,
    outputs_in,
    states_in,
    step_of,
    to_numpy,
)
from specnb.divergence.parts import find_modules
from specnb.divergence.trace import OWN, PARAM_COLUMNS, TENSOR_COLUMNS, ModuleTrace
from specnb.errors import InputError

ROOT = ""
"""The canonical path of the model that is captured."""
replaced = patch.object
"""`replaced(owner, name, value)`: the attribute of this one instance is `value` inside, and what it was afterwards."""


class Frame(NamedTuple):
    """A call of a module that is running, and the parameters that it was seen to read."""

    module: Module
    path: str
    call: int
    arguments: dict[str, Any]
    params: set[int]


class TraceBuilder:
    """The stack of running modules, and what hooks saw; `trace()` gives the trace, after the capture or in between."""

    def __init__(self, registry: Registry, facts: Mapping[str, Any], *, states: bool) -> None:
        self.facts: dict[str, Any] = {**facts, "steps": []}
        self.running: list[Frame] = []
        self.listens = True
        """Hooks report to it."""
        self._registry, self._states = registry, states
        self._hooked: list[str] = []
        self._tensors = []
        """Rows of TENSOR_COLUMNS."""
        self._params = []
        """Rows of PARAM_COLUMNS."""
        self._arrays: dict[str, np.ndarray] = {}
        self._calls: Counter[str] = Counter()
        self._order = 0

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Leave out what runs inside: another torch model, which may share modules with this one."""
        return replaced(self, "listens", False)

    def trace(self) -> ModuleTrace:
        """The trace of what was seen so far. Its facts count modules that have hooks, and name those that never ran."""
        tensors = pd.DataFrame(self._tensors, columns=TENSOR_COLUMNS)
        called = {*tensors["module"]}
        never = [path for path in self._hooked if path not in called]
        n = len(self._hooked)
        facts = self.facts | {"modules": {"hooked": n, "called": n - len(never), "never_called": never}}
        return ModuleTrace(facts, tensors, pd.DataFrame(self._params, columns=PARAM_COLUMNS), dict(self._arrays))

    def put_on(self, module: Module, path: str) -> Iterator[Any]:
        """Put hooks on a module, and yield what removes them."""
        self._hooked.append(path)

        def before(_module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if self.listens:
                self._enter(module, path, name_arguments(module, args, kwargs))

        def after(_module: Module, _args: tuple, output: object) -> None:
            if self.listens:
                self._leave(module, output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        # also called when forward raises: a frame left on the stack would shift all that comes later
        yield module.register_forward_hook(after, always_call=True)

    def forward_of(self, model: Module) -> contextlib.AbstractContextManager[None]:
        """Hooks run when a model is called; engines call its `forward` (SGLang), or replace the call (vLLM)."""
        original = model.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            by_hooks = self.running and self.running[-1].path == ROOT
            if by_hooks or not self.listens:
                return original(*args, **kwargs)
            output = None
            self._enter(model, ROOT, name_arguments(model, args, kwargs))
            try:
                output = original(*args, **kwargs)
            finally:
                self._leave(model, output)
            return output

        return replaced(model, "forward", forward)

    def use(self, owned: Owned) -> None:
        """Write down that an operation of the running module read a parameter, once a call."""
        frame, step = self.running[-1], len(self.facts["steps"]) - 1
        if id(owned.tensor) not in frame.params:
            frame.params.add(id(owned.tensor))
            parameter = owned.owner, owned.path, self._registry.digest(owned), dtype_name(owned.tensor)
            self._params.append((step, frame.path, frame.call, *parameter))

    def _enter(self, module: Module, path: str, arguments: dict[str, Any]) -> None:
        with _disable_current_modes():  # the work of a hook reads no parameters
            if path == ROOT:
                self.running.clear()  # a model does not run inside itself: an interrupt left these, unknown to hooks
            steps = self.facts["steps"]
            if not self.running and (path == ROOT or not steps):
                steps.append({"step": len(steps), **step_of(arguments)})
                self._calls.clear()
            self.running.append(Frame(module, path, self._calls[path], arguments, set()))
            self._calls[path] += 1
            self._see("in", named_tensors(arguments))

    def _leave(self, module: Module, output: object) -> None:
        if not self.running or self.running[-1].module is not module:
            return  # `_enter` was not reached: another hook raised
        with _disable_current_modes():
            layer = getattr(module, "layer_idx", None)
            if self._states and isinstance(layer, int):
                self._see("state", states_in(self.running[-1].arguments, layer))
            self._see("out", outputs_in(output))
            self.running.pop()

    def _see(self, role: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Write down tensors that the running call was given or gave, as one event of `order`."""
        frame, step = self.running[-1], len(self.facts["steps"]) - 1
        holder, holder_call = next(((item.path, item.call) for item in self.running[-2:-1]), (ROOT, -1))
        call = step, frame.path, type(frame.module).__name__, frame.call, self._order, role
        for name, tensor in named:
            digest = digest_tensor(tensor)
            if digest not in self._arrays:
                self._arrays[digest] = to_numpy(tensor).copy()
            values = name, tuple(tensor.shape), dtype_name(tensor), digest
            self._tensors.append((*call, *values, holder, holder_call))
        self._order += 1


@contextlib.contextmanager
def capture(
    model: Module, path: str | Path | None = None, *,
    known: Mapping[str, Module] | None = None, at_use: bool = True, states: bool = False,
) -> Iterator[TraceBuilder]:  # fmt: skip
    """Write down the forwards of `model` inside the block; `trace()` of what it yields is the trace.

    `path`: a folder in which the trace is saved when the block ends, also by an error. `known`: other models in the
    process, by tag, whose weights are told apart from the model's own when an operation reads them. `at_use`: follow
    every operation to the parameters it reads; a model with flex attention, which torch compiles by itself, needs it
    off (or attn_implementation="eager"). `states`: keep what caches hold, too, which `compare` does not need. All that
    is seen is kept: 1.5 MB a token for a model of 135 M parameters.

    One call of the model, by its name or by its `forward`, is one step. A module that is called outside of it (a head,
    as vLLM's compute_logits does) belongs to the step before: give the model itself, not a list that holds it. Results
    are the same bits as without. What another model does inside `paused()` of what is yielded is not written down.
    What another thread runs is written down without the parameters that it reads. Raises InputError for a compiled
    model.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            compiled = f"{name or 'the model itself'!r} ({type(module).__name__}) is compiled, and runs past hooks"
            raise InputError(f"{compiled}: run it eagerly (no torch.compile, no CUDA graphs; vLLM: enforce_eager=True)")
    registry, dtype = Registry({OWN: model, **(known or {})}), next(map(dtype_name, model.parameters()), None)
    facts = {"model": type(model).__name__, "torch": torch.__version__, "dtype": dtype}
    builder = TraceBuilder(registry, facts, states=states)
    with contextlib.ExitStack() as stack:
        for name, module in find_modules(model):
            if type(module).forward is not Module.forward:  # a list of layers has none: nothing to see there
                for handle in builder.put_on(module, name):
                    stack.callback(handle.remove)
        if type(model).forward is not Module.forward:
            stack.enter_context(builder.forward_of(model))
        if at_use:
            stack.enter_context(AtUse(registry, builder.use, builder.running))
        try:
            yield builder
        finally:
            builder.listens = False
            if path is not None:
                with _disable_current_modes():
                    builder.trace().save(Path(path))
