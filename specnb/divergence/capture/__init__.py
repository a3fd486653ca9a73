"""Hooks on a torch model in any process: inputs, outputs, states and parameter reads of modules.

Eager execution only: compiled models bypass the hooks and are refused; CUDA graphs are not
detected.
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
"""The canonical path of the captured model."""
replaced = patch.object
"""`replaced(owner, name, value)` sets an instance's attribute inside a block, then restores it."""


class Frame(NamedTuple):
    """A running call of a module; `params` has the ids of the parameters seen to be read."""

    module: Module
    step: int
    path: str
    call: int
    arguments: dict[str, Any]
    params: set[int]


class TraceBuilder:
    """Records what hooks see; `trace()` returns the trace, after the capture or during it."""

    def __init__(self, model: Module, *, states: bool) -> None:
        dtype = next(map(dtype_name, model.parameters()), None)
        self.facts = {
            "model": type(model).__name__,
            "torch": torch.__version__,
            "dtype": dtype,
            "steps": [],
        }
        self.running: list[Frame] = []
        self.listens = True
        """Whether hooks record anything."""
        self._states = states
        # Containers such as ModuleList have no forward.
        self._hooked = [
            path for path, item in find_modules(model) if type(item).forward is not Module.forward
        ]
        self._tensors = []
        """Rows of TENSOR_COLUMNS."""
        self._params = []
        """Rows of PARAM_COLUMNS."""
        self._arrays = {}
        """By digest."""
        self._calls = Counter()
        self._order = 0

    def paused(self) -> AbstractContextManager[None]:
        """Record nothing inside the block, for example while a model with shared modules runs."""
        return replaced(self, "listens", False)

    def trace(self) -> ModuleTrace:
        """Return the trace so far; its facts count hooked modules and list those never called."""
        tensors = pd.DataFrame(self._tensors, columns=TENSOR_COLUMNS)
        called = {*tensors["module"]}
        never = [path for path in self._hooked if path not in called]
        n = len(self._hooked)
        facts = self.facts | {
            "modules": {"hooked": n, "called": n - len(never), "never_called": never}
        }
        return ModuleTrace(
            facts, tensors, pd.DataFrame(self._params, columns=PARAM_COLUMNS), self._arrays
        )

    def forward_of(self, model: Module) -> AbstractContextManager[None]:
        """Also record direct calls of `forward`, which bypass hooks (SGLang, vLLM)."""
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
        """Record that an operation of the running module read a parameter, once per call."""
        frame = self.running[-1]
        if id(owned.tensor) not in frame.params:
            frame.params.add(id(owned.tensor))
            digest = ""
            with suppress(RuntimeError, TypeError):  # a wrapper without storage, or a meta tensor
                digest = digest_tensor(owned.tensor)
            parameter = owned.owner, owned.path, digest, dtype_name(owned.tensor)
            self._params.append((frame.step, frame.path, frame.call, *parameter))

    def enter(self, path: str, module: Module, args: tuple, kwargs: dict) -> None:
        """Record the inputs of a module."""
        if not self.listens:
            return
        arguments = name_arguments(module, args, kwargs)
        with _disable_current_modes():  # reads by the hook itself do not count
            if path == ROOT:
                self.running.clear()  # left by an interrupt: a model does not run inside itself
            steps = self.facts["steps"]
            if path == ROOT or not steps:
                steps.append({"step": len(steps), **step_of(arguments)})
                self._calls.clear()
            self.running.append(
                Frame(module, len(steps) - 1, path, self._calls[path], arguments, set())
            )
            self._calls[path] += 1
            self._see("in", named_tensors(arguments))

    def leave(self, _path: str, module: Module, _args: tuple, output: object) -> None:
        """Record the outputs of a module."""
        if not self.listens or not self.running or self.running[-1].module is not module:
            return  # `enter` did not run: another hook raised
        with _disable_current_modes():
            layer = getattr(module, "layer_idx", None)
            if self._states and isinstance(layer, int):
                self._see("state", states_in(self.running[-1].arguments, layer))
            self._see("out", outputs_in(output))
            self.running.pop()

    def _see(self, role: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Record inputs, outputs or states of the running call as one event in `order`."""
        frame = self.running[-1]
        holder, holder_call = next(
            ((item.path, item.call) for item in self.running[-2:-1]), (ROOT, -1)
        )
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
    model: Module,
    path: str | Path | None = None,
    *,
    known: Mapping[str, Module] | None = None,
    at_use: bool = True,
    states: bool = False,
) -> Iterator[TraceBuilder]:
    """Record the forward passes of `model` inside the block; the yielded builder has `trace()`.

    `path`: a folder to which the trace is saved when the block ends, even by an error. `known`:
    other models in the process, by tag, to distinguish reads of their weights from reads of the
    model's own. `at_use`: record the parameters that every operation reads; turn it off for flex
    attention, which torch compiles by itself (or use attn_implementation="eager"). `states`: also
    record cache contents, which `compare` does not need. All of it stays in memory: 1.5 MB per
    token for a model of 135 M parameters.

    One call of the model, or of its `forward`, is one step. A module called outside of it (such as
    a head in vLLM's compute_logits) belongs to the previous step: pass the model itself, not a list
    that contains it. Results are bit-identical to those without capture. Inside `paused()` of the
    builder, nothing is recorded. Calls in another thread are recorded without the parameters that
    they read. Raises InputError for a compiled model.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            compiled = f"{name or 'the model itself'!r} ({type(module).__name__})"
            raise InputError(
                f"{compiled} is compiled and bypasses hooks: "
                "run it eagerly (no torch.compile, no CUDA graphs; vLLM: enforce_eager=True)"
            )
    builder = TraceBuilder(model, states=states)
    models = {OWN: model, **(known or {})}
    parameters = AtUse(models, builder.use, builder.running) if at_use else nullcontext()
    try:
        with (
            watch_modules(model, builder.enter, builder.leave),
            builder.forward_of(model),
            parameters,
        ):
            yield builder
    finally:
        if path is not None:
            builder.trace().save(Path(path))


@contextmanager
def watch_modules(
    model: Module, before: Callable[..., Any], after: Callable[..., Any]
) -> Iterator[None]:
    """Call `before(path, module, args, kwargs)` and `after(path, module, args, output)`.

    They run around the forward of each module. Their return values, unless None, replace the
    arguments and the output. `after` is also called if a forward raises.
    """
    with ExitStack() as stack:
        for path, module in find_modules(model):
            stack.enter_context(
                module.register_forward_pre_hook(partial(before, path), with_kwargs=True)
            )
            # Also called if forward raises: a frame left on the stack would shift all later ones.
            stack.enter_context(
                module.register_forward_hook(partial(after, path), always_call=True)
            )
        yield
