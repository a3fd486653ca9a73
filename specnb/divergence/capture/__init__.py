"""Hooks on a torch model in any process: what each module was given, gave back, kept, and which weights it read.

Eager execution only: a compiled or replayed graph runs past the hooks, which is refused instead of called clean.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from specnb.divergence.capture.at_use import AtUse, Owned
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
    """A call of a module that is running, its step, and the parameters that it was seen to read."""

    module: Module
    step: int
    path: str
    call: int
    arguments: dict[str, Any]
    params: set[int]


class TraceBuilder:
    """The stack of running modules, and what hooks saw; `trace()` gives the trace, after the capture or in between."""

    def __init__(self, model: Module, *, states: bool) -> None:
        dtype = next(map(dtype_name, model.parameters()), None)
        self.facts = {"model": type(model).__name__, "torch": torch.__version__, "dtype": dtype, "steps": []}
        self.running: list[Frame] = []
        self.listens = True
        """Hooks report to it."""
        self._states = states
        # a list of layers has no forward: nothing to see there
        self._hooked = [path for path, item in find_modules(model) if type(item).forward is not Module.forward]
        self._tensors = []
        """Rows of TENSOR_COLUMNS."""
        self._params = []
        """Rows of PARAM_COLUMNS."""
        self._arrays = {}
        """By digest."""
        self._calls, self._order = Counter(), 0

    def paused(self) -> AbstractContextManager[None]:
        """Leave out what runs inside: another torch model, which may share modules with this one."""
        return replaced(self, "listens", False)

    def trace(self) -> ModuleTrace:
        """The trace of what was seen so far. Its facts count modules that have hooks, and name those that never ran."""
        tensors = pd.DataFrame(self._tensors, columns=TENSOR_COLUMNS)
        called = {*tensors["module"]}
        never = [path for path in self._hooked if path not in called]
        n = len(self._hooked)
        facts = self.facts | {"modules": {"hooked": n, "called": n - len(never), "never_called": never}}
        return ModuleTrace(facts, tensors, pd.DataFrame(self._params, columns=PARAM_COLUMNS), self._arrays)

    def forward_of(self, model: Module) -> AbstractContextManager[None]:
        """Hooks run when a model is called; engines call its `forward` (SGLang), or replace the call (vLLM)."""
        original = model.forward

        @wraps(original)
        def forward(*args, **kwargs):
            by_hooks = self.running and self.running[-1].path == ROOT
            if by_hooks or not self.listens:
                return original(*args, **kwargs)
            output = None
            self.enter(ROOT, model, args, kwargs)
            try:
                output = original(*args, **kwargs)
            finally:
                self.leave(ROOT, model, args, output)
            return output

        return replaced(model, "forward", forward)

    def use(self, owned: Owned) -> None:
        """Write down that an operation of the running module read a parameter, once a call."""
        frame = self.running[-1]
        if id(owned.tensor) not in frame.params:
            frame.params.add(id(owned.tensor))
            digest = ""
            with suppress(RuntimeError, TypeError):  # a wrapper without bytes of its own, or on "meta"
                digest = digest_tensor(owned.tensor)
            parameter = owned.owner, owned.path, digest, dtype_name(owned.tensor)
            self._params.append((frame.step, frame.path, frame.call, *parameter))

    def enter(self, path: str, module: Module, args: tuple, kwargs: dict) -> None:
        """Write down what a module is given."""
        if not self.listens:
            return
        arguments = name_arguments(module, args, kwargs)
        with _disable_current_modes():  # the work of a hook reads no parameters
            if path == ROOT:
                self.running.clear()  # a model does not run inside itself: an interrupt left these, unknown to hooks
            steps = self.facts["steps"]
            if path == ROOT or not steps:
                steps.append({"step": len(steps), **step_of(arguments)})
                self._calls.clear()
            self.running.append(Frame(module, len(steps) - 1, path, self._calls[path], arguments, set()))
            self._calls[path] += 1
            self._see("in", named_tensors(arguments))

    def leave(self, _path: str, module: Module, _args: tuple, output: object) -> None:
        """Write down what a module gave."""
        if not self.listens or not self.running or self.running[-1].module is not module:
            return  # `enter` was not reached: another hook raised
        with _disable_current_modes():
            layer = getattr(module, "layer_idx", None)
            if self._states and isinstance(layer, int):
                self._see("state", states_in(self.running[-1].arguments, layer))
            self._see("out", outputs_in(output))
            self.running.pop()

    def _see(self, role: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Write down tensors that the running call was given or gave, as one event of `order`."""
        frame = self.running[-1]
        holder, holder_call = next(((item.path, item.call) for item in self.running[-2:-1]), (ROOT, -1))
        call = frame.step, frame.path, type(frame.module).__name__, frame.call, self._order, role
        for name, tensor in named:
            digest = digest_tensor(tensor)
            if digest not in self._arrays:
                self._arrays[digest] = to_numpy(tensor).copy()
            values = name, tuple(tensor.shape), dtype_name(tensor), digest
            self._tensors.append((*call, *values, holder, holder_call))
        self._order += 1


@contextmanager
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
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            compiled = f"{name or 'the model itself'!r} ({type(module).__name__}) is compiled, and runs past hooks"
            raise InputError(f"{compiled}: run it eagerly (no torch.compile, no CUDA graphs; vLLM: enforce_eager=True)")
    builder, models = TraceBuilder(model, states=states), {OWN: model, **(known or {})}
    parameters = AtUse(models, builder.use, builder.running) if at_use else nullcontext()
    try:
        with watch_modules(model, builder.enter, builder.leave), builder.forward_of(model), parameters:
            yield builder
    finally:
        if path is not None:
            builder.trace().save(Path(path))


@contextmanager
def watch_modules(model: Module, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """Call `before(path, module, args, kwargs)` and `after(path, module, args, output)` around each module's forward.

    What they return, if anything, goes on in the place of arguments and output. `after` is also called when a forward
    raises.
    """
    with ExitStack() as stack:
        for path, module in find_modules(model):
            stack.enter_context(module.register_forward_pre_hook(partial(before, path), with_kwargs=True))
            # also called when forward raises: a call left on a stack would shift all that comes later
            stack.enter_context(module.register_forward_hook(partial(after, path), always_call=True))
        yield
