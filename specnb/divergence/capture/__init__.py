"""Hooks on a torch model in any process: what each module was given, gave back, kept, and which weights it read.

Eager execution only: a compiled or replayed graph runs past the hooks, which is refused instead of called clean.
"""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from specnb.divergence.capture.at_use import OWN, AtUse, Owned, Registry
from specnb.divergence.capture.tensors import (
    Arguments,
    ForwardStep,
    digest_tensor,
    dtype_name,
    is_wrapper,
    named_tensors,
    outputs_in,
    states_in,
    step_of,
    to_numpy,
)
from specnb.divergence.trace import PARAM_COLUMNS, TENSOR_COLUMNS, ModuleTrace, canonical
from specnb.errors import InputError

ROOT = ""
"""The canonical path of the model that is captured."""


class Place(NamedTuple):
    """A module that hooks are on."""

    module: Module
    path: str
    arguments: Arguments


@dataclass
class Frame:
    """A call of a module that is running; `axes`: which axis of these shapes counts tokens, where they do not tell.

    `holder`: module and call inside which it runs; the call is -1 for none.
    """

    place: Place
    holder: tuple[str, int]
    arguments: dict[str, Any]
    autocast: dict[str, torch.dtype]
    call: int = 0
    params: set[int] = field(default_factory=set)
    axes: dict[tuple[int, ...], int] = field(default_factory=dict)


class TraceBuilder:
    """Collects what hooks see; `trace()` gives the trace, once the capture has ended or in between."""

    def __init__(self, registry: Registry) -> None:
        self.facts: dict[str, Any] = {"steps": []}
        self._registry = registry
        self._tensors: list[dict[str, Any]] = []
        self._params: list[dict[str, Any]] = []
        self._arrays: dict[str, np.ndarray] = {}
        self._calls: Counter[str] = Counter()
        self._order = 0
        self._step: ForwardStep | None = None
        self.listens = True
        """Hooks report to it."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Leave out what runs inside: another torch model, which may share modules with this one."""
        return replaced(self, "listens", False)

    def begin_step(self, step: ForwardStep) -> None:
        """A call of the outermost module begins."""
        self._step = step
        self._calls.clear()
        seen = {"step": step.index, "batch": step.batch, "length": step.length, "first_position": step.first}
        self.facts["steps"].append(seen | {"token_ids": step.ids})

    def count(self, frame: Frame) -> None:
        """Count this module's calls within the step."""
        frame.call = self._calls[frame.place.path]
        self._calls[frame.place.path] += 1

    def see(self, frame: Frame, role: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Write down tensors that a call was given or gave, as one event of `order`; name those that cannot be read."""
        for name, tensor in named:
            if why := unreadable(tensor):
                self.facts.setdefault("unread", {})[f"{frame.place.path}:{role}:{name}"] = why
            else:
                # without a graph, and without a conjugation or sign that is still to be applied
                self._row(frame, role, name, tensor.detach().resolve_conj().resolve_neg())
        self._order += 1

    def use(self, frame: Frame, owned: Owned) -> None:
        """Write down that an operation of this call read a parameter, once a call."""
        if id(owned.tensor) in frame.params:
            return
        frame.params.add(id(owned.tensor))
        row = {"step": self._step.index, "module": frame.place.path, "call": frame.call, "owner": owned.owner}
        row |= {"owner_path": owned.path, "object_id": id(owned.tensor), "digest": self._registry.digest(owned)}
        self._params.append(row | {"dtype": dtype_name(owned.tensor)})

    def trace(self) -> ModuleTrace:
        """The trace of what was seen so far."""
        tensors = pd.DataFrame(self._tensors, columns=TENSOR_COLUMNS)
        return ModuleTrace(
            dict(self.facts), tensors, pd.DataFrame(self._params, columns=PARAM_COLUMNS), dict(self._arrays)
        )

    def _row(self, frame: Frame, role: str, name: str, tensor: Tensor) -> None:
        shape, step, digest = tuple(tensor.shape), self._step, digest_tensor(tensor)
        axis = self._axis(frame, role, name, tensor)
        if axis >= 0 and digest not in self._arrays:
            self._arrays[digest] = to_numpy(tensor).copy()
        self._tensors.append({
            "step": step.index, "module": frame.place.path, "kind": type(frame.place.module).__name__,
            "call": frame.call, "order": self._order, "role": role, "name": name, "shape": shape,
            "dtype": dtype_name(tensor), "token_axis": axis, "first_position": step.first_position(role, axis, shape),
            "digest": digest, "holder": frame.holder[0], "holder_call": frame.holder[1],
        })  # fmt: skip

    def _axis(self, frame: Frame, role: str, name: str, tensor: Tensor) -> int:
        """Tell which axis counts tokens; where the shape does not, that of such an input, else the outer one."""
        shape = tuple(tensor.shape)
        if not self._step.ambiguous(role, shape):
            return self._step.token_axis(role, name, shape)
        outer = 1 if tensor.stride(1) >= tensor.stride(2) else 2  # heads are cut out of each token's features
        return frame.axes.setdefault(shape, outer)


def unreadable(tensor: Tensor) -> str:
    """Describe a tensor that has no values to be copied and measured one by one; "" where it has."""
    readable = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    return "" if readable and not is_wrapper(tensor) else f"{type(tensor).__name__}, {tensor.layout}, {tensor.dtype}"


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """The attribute `name` of this one instance is `value` inside, and what it was before afterwards."""
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(before)


@contextlib.contextmanager
def capture(
    model: Module, path: str | Path | None = None, *, tag: str = OWN,
    known: Mapping[str, Module] | None = None, at_use: bool = True, states: bool = False,
) -> Iterator[TraceBuilder]:  # fmt: skip
    """Write down the forwards of `model` inside the block; `trace()` of what it yields is the trace.

    `path`: a folder in which the trace is saved when the block ends, also by an error. `known`: other models in the
    process, by tag, whose weights are told apart from the model's own when an operation reads them. `at_use`: follow
    every operation to the parameters it reads; a model with flex attention, which torch compiles by itself, needs it
    off (or attn_implementation="eager"). `states`: keep what caches hold, too, which `compare` does not need. All that
    has tokens is kept: 1.5 MB a token for a model of 135 M parameters.

    One call of the model, by its name or by its `forward`, is one step. A module that is called outside of it (a head,
    as vLLM's compute_logits does) belongs to the step before: give the model itself, not a list that holds it. Results
    are the same bits as without. What another model does inside `paused()` of what is yielded is not written down.
    Tensors that torch cannot read (sparse, quantised, on meta) are named in the facts as `unread`. Raises InputError
    for a compiled model, and for a forward in another thread than the block's.
    """
    _refuse_graphs(model)
    registry = Registry({tag: model} | dict(known or {}))
    builder = TraceBuilder(registry)
    builder.facts |= _facts(model, tag)
    hooks = _Hooks(builder, states=states)
    with contextlib.ExitStack() as stack:
        # a list of layers has no forward of its own: nothing to see there
        runs = {path: module for path, module in model.named_modules() if type(module).forward is not Module.forward}
        names = canonical(path for path, _ in model.named_modules())
        for name, module in runs.items():
            for handle in hooks.put_on(module, names[name]):
                stack.callback(handle.remove)
        if model in runs.values():
            stack.enter_context(hooks.forward_of(model))
        if at_use:
            stack.enter_context(AtUse(registry, builder.use, hooks.running, hooks.autocast))
        try:
            yield builder
        finally:
            builder.listens = False
            builder.facts |= hooks.facts()
            if path is not None:
                with _disable_current_modes():
                    builder.trace().save(Path(path))


class _Hooks:
    """The stack of running modules: what each is given and gives goes to the builder, and begins its steps."""

    def __init__(self, builder: TraceBuilder, *, states: bool) -> None:
        self._builder, self._states = builder, states
        self._called: dict[str, int] = {}
        self.running: list[Frame] = []
        self._thread = threading.get_ident()

    def put_on(self, module: Module, path: str) -> Iterator[Any]:
        place = Place(module, path, Arguments(module))
        self._called[path] = 0

        def before(given: Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if given is module and self._builder.listens:  # a copy that is made inside the block has its hooks, too
                self._enter(place, args, kwargs)

        def after(given: Module, args: tuple, kwargs: dict[str, Any], output: object) -> None:
            if given is module and self._builder.listens:
                self._leave(place, output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        # also called when forward raises: a frame left on the stack would shift all that comes later
        yield module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def forward_of(self, model: Module) -> contextlib.AbstractContextManager[None]:
        """Hooks run when a model is called; engines call its `forward` (SGLang), or replace the call (vLLM)."""
        place, original = Place(model, ROOT, Arguments(model)), model.forward
        run = getattr(original, "__func__", lambda _, *args, **kwargs: original(*args, **kwargs))

        @functools.wraps(getattr(original, "__func__", original))
        def forward(given: Module, *args: Any, **kwargs: Any) -> Any:
            by_hooks = self.running and self.running[-1].place.path == ROOT
            if by_hooks or given is not model or not self._builder.listens:  # given: a copy of the model may be another
                return run(given, *args, **kwargs)
            output = None
            self._enter(place, args, kwargs)
            try:
                output = run(model, *args, **kwargs)
            finally:
                self._leave(place, output)
            return output

        return replaced(model, "forward", MethodType(forward, model))  # bound, so that a copy's is bound to the copy

    def facts(self) -> dict[str, Any]:
        """Count modules that have hooks, and those that ran; name those that never did."""
        never, n = [path for path, times in self._called.items() if not times], len(self._called)
        seen = {"hooked": n, "called": n - len(never), "never_called": never}
        return {"modules": seen}

    def autocast(self) -> contextlib.ExitStack:
        """The autocast that the running module was called under: torch turns it off where operations are dispatched."""
        entered = contextlib.ExitStack()
        for device, dtype in self.running[-1].autocast.items() if self.running else ():
            entered.enter_context(torch.autocast(device, dtype=dtype))
        return entered

    def _enter(self, place: Place, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            raise InputError("the model ran in another thread than `capture` was entered in: enter it in that thread")
        autocast = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
        with _disable_current_modes():  # the work of a hook reads no parameters
            arguments = place.arguments(args, kwargs)
            if place.path == ROOT:
                self.running.clear()  # a model does not run inside itself: an interrupt left these, unknown to hooks
            begins = not self.running and (place.path == ROOT or not self._builder.facts["steps"])
            holder = (self.running[-1].place.path, self.running[-1].call) if self.running else (ROOT, -1)
            frame = Frame(place, holder, arguments, autocast)
            self.running.append(frame)  # before anything that can fail: `_leave` is called in any case
            if begins:
                self._builder.begin_step(step_of(len(self._builder.facts["steps"]), arguments))
            self._builder.count(frame)
            self._called[place.path] += 1
            self._builder.see(frame, "in", named_tensors(arguments))

    def _leave(self, place: Place, output: object) -> None:
        if threading.get_ident() != self._thread or not self.running or self.running[-1].place.path != place.path:
            return  # `_enter` was not reached: another hook raised, or it refused another thread
        with _disable_current_modes():
            frame = self.running.pop()
            layer = getattr(place.module, "layer_idx", None)
            if self._states and isinstance(layer, int):
                self._builder.see(frame, "state", states_in(frame.arguments, layer))
            self._builder.see(frame, "out", outputs_in(output))
            frame.arguments.clear()


def _refuse_graphs(model: Module) -> None:
    for path, module in model.named_modules():
        compiled_by = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if compiled_by or isinstance(module, torch.jit.ScriptModule):
            compiled = f"{path or 'the model itself'!r} ({type(module).__name__}) is compiled, and runs past hooks"
            raise InputError(f"{compiled}: run it eagerly (no torch.compile, no CUDA graphs; vLLM: enforce_eager=True)")


def _facts(model: Module, tag: str) -> dict[str, Any]:
    first = next(model.parameters(), None)
    facts = {"tag": tag, "model": type(model).__name__, "torch": torch.__version__}
    return facts | {"dtype": None if first is None else dtype_name(first)}
