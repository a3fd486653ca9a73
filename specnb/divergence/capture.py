"""Hooks on a torch model in any process: what each module was given, gave back, kept, and which weights it read.

Eager execution only: a compiled or replayed graph runs past the hooks, which is refused instead of called clean.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from specnb.divergence.trace_builder import Frame, TraceBuilder
from specnb.divergence.tracing.at_use import UNKNOWN, AtUse, Owned, Registry
from specnb.divergence.tracing.names import (
    Arguments,
    Chooser,
    chooser,
    compiled,
    dtype_name,
    is_wrapper,
    named_tensors,
    outputs_in,
    states_in,
)
from specnb.divergence.tracing.paths import canonical
from specnb.divergence.tracing.tokens import IDS, step_of
from specnb.errors import InputError

DEVICES = ("cpu", "cuda")
"""Those whose autocast is kept."""
ROOT = ""
"""The canonical path of the model that is captured."""
SCALARS_KEPT = 8
"""Different values of one plain argument (a flag, a scaling) that the facts hold."""


@contextlib.contextmanager
def capture(
    model: nn.Module,
    path: str | Path | None = None,
    *,
    tag: str = "draft",
    known: Mapping[str, nn.Module] | None = None,
    modules: str | None = None,
    full: str | Chooser | None = None,
    at_use: bool = True,
) -> Iterator[TraceBuilder]:
    """Write down the forwards of `model` inside the block; `trace()` of what it yields is the trace.

    `path`: a folder in which the trace is saved when the block ends, also by an error.
    `known`: other models in the process, by tag, whose weights are told apart from the model's own when an operation
    reads them. `modules`: a regular expression found in the canonical paths of the modules to write down (default all).
    `full`: a regular expression, or a function of (module, role, name), for tensors that are kept as they are.
    `at_use`: follow every operation to the parameters it reads; a model with flex attention, which torch compiles by
    itself, needs it off. Autocast that is entered inside a module's forward does not reach custom operations then.

    One call of the model, by its name or by its `forward`, is one step; its ids and positions are taken from its
    arguments. A module that is called outside of it (a head, as vLLM's compute_logits does) belongs to the step before.
    Results are the same bits as without.

    What another model does inside `paused()` of what is yielded is not written down, though it may share modules.

    Tensors are copied at the hook and measured after the step; those that torch cannot read (sparse, quantised, on
    meta) are told in the facts as `unread`. Hooks go away with the block, also after an error. Raises InputError for a
    compiled model, for a tag used twice, and for a forward in another thread than the block's.
    """
    known = dict(known or {})
    if tag in known or UNKNOWN in (tag, *known):
        raise InputError(
            f"tag {tag!r} with known models {sorted(known)}: give each model a tag of its own, not {UNKNOWN!r}"
        )
    _refuse_graphs(model)
    registry = Registry({tag: model} | known)
    builder = TraceBuilder(registry, chooser(full))
    plain = not any(is_wrapper(one) for one in (*model.parameters(), *model.buffers()))
    chosen = re.compile("") if modules is None else compiled(modules)
    hooks = _Hooks(builder, chosen, plain=plain)
    builder.facts |= _facts(model, tag, known)
    with contextlib.ExitStack() as stack:
        # a list of layers has no forward of its own: nothing to see there
        runs = {path: module for path, module in model.named_modules() if type(module).forward is not nn.Module.forward}
        names = canonical(path for path, _ in model.named_modules())
        for name, module in runs.items():
            for handle in hooks.put_on(module, names[name]):
                stack.callback(handle.remove)
        if model in runs.values():
            stack.enter_context(hooks.forward_of(model))
        if at_use:
            stack.enter_context(AtUse(registry, hooks.note, hooks.is_running, hooks.autocast))
        try:
            yield builder
        finally:
            builder.listens = False
            builder.facts |= hooks.coverage.facts()
            with _disable_current_modes():
                builder.measure()
                if path is not None:
                    builder.trace().save(Path(path))


class _Place(NamedTuple):
    """A module that hooks are on; `chosen`: what it is given and gives is written down."""

    module: nn.Module
    path: str
    kind: str
    arguments: Arguments
    chosen: bool


class _Coverage:
    """Which modules have hooks, are written down, and ran; and plain arguments (flags, scalings) they were given."""

    def __init__(self) -> None:
        self._called: dict[str, int] = {}
        self._written = 0
        self._scalars: dict[str, list[str]] = {}

    def hooked(self, place: _Place) -> None:
        self._called[place.path] = 0
        self._written += place.chosen

    def ran(self, place: _Place, arguments: Mapping[str, Any]) -> None:
        self._called[place.path] += 1
        if place.chosen:
            for name, value in arguments.items():
                if isinstance(value, bool | int | float):
                    self._note_scalar(f"{place.path}:{name}", repr(value))

    def facts(self) -> dict[str, Any]:
        """A module that never ran was not looked at."""
        never = [path for path, times in self._called.items() if not times]
        hooked = len(self._called)
        seen = {"hooked": hooked, "written": self._written, "called": hooked - len(never), "never_called": never}
        return {"modules": seen, "scalars": self._scalars}

    def _note_scalar(self, name: str, text: str) -> None:
        kept = self._scalars.setdefault(name, [])
        if text not in kept and len(kept) < SCALARS_KEPT:
            kept.append(text)


class _Hooks:
    """The stack of running modules: what each is given and gives goes to the builder, and begins its steps."""

    def __init__(self, builder: TraceBuilder, chosen: re.Pattern[str], *, plain: bool) -> None:
        self._builder, self._chosen = builder, chosen
        self.coverage = _Coverage()
        self._running: list[Frame] = []
        self._thread = threading.get_ident()
        self._root_seen, self._first = False, ""
        # The work of a hook reads no parameters. The first is far cheaper, but would silence weights that are wrappers
        # of their own (quantised, distributed), too.
        self._undispatched = torch._C._DisableTorchDispatch if plain else _disable_current_modes

    def put_on(self, module: nn.Module, path: str) -> Iterator[Any]:
        place = self._place(module, path)
        self.coverage.hooked(place)

        def before(given: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if given is module and self._builder.listens:  # a copy that is made inside the block has its hooks, too
                self._enter(place, args, kwargs)

        def after(given: nn.Module, args: tuple, kwargs: dict[str, Any], output: object) -> None:
            if given is module and self._builder.listens:
                self._leave(place, output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        # also called when forward raises: a frame left on the stack would shift all that comes later
        yield module.register_forward_hook(after, with_kwargs=True, always_call=True)

    @contextlib.contextmanager
    def forward_of(self, model: nn.Module) -> Iterator[None]:
        """Hooks run when a model is called; engines call its `forward` (SGLang), or replace the call (vLLM)."""
        place, original, own = self._place(model, ROOT), model.forward, "forward" in vars(model)
        run = getattr(original, "__func__", lambda _, *args, **kwargs: original(*args, **kwargs))

        @functools.wraps(getattr(original, "__func__", original))
        def forward(given: nn.Module, *args: Any, **kwargs: Any) -> Any:
            by_hooks = self._running and self._running[-1].module == ROOT
            if by_hooks or given is not model or not self._builder.listens:
                return run(given, *args, **kwargs)  # given: a copy may be another; listens: others may have kept this
            output = None
            self._enter(place, args, kwargs)
            try:
                output = run(model, *args, **kwargs)
            finally:
                self._leave(place, output)
            return output

        mine = model.forward = MethodType(forward, model)  # bound, so that a copy's is bound to the copy
        try:
            yield
        finally:
            if vars(model).get("forward") is mine:  # else somebody put another one over it: theirs stays
                if own:
                    model.forward = original
                else:
                    del model.forward

    def autocast(self) -> contextlib.ExitStack:
        """The autocast that the running module was called under: torch turns it off where operations are dispatched."""
        entered = contextlib.ExitStack()
        for device, dtype in self._running[-1].autocast.items() if self._running else ():
            entered.enter_context(torch.autocast(device, dtype=dtype))
        return entered

    def note(self, owned: Owned) -> None:
        self._builder.use(self._running[-1], owned)

    def is_running(self) -> bool:
        return bool(self._running)

    def _place(self, module: nn.Module, path: str) -> _Place:
        chosen = self._chosen.search(path) is not None
        return _Place(module, path, type(module).__name__, Arguments(module), chosen)

    def _enter(self, place: _Place, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            raise InputError("the model ran in another thread than `capture` was entered in: enter it in that thread")
        autocast = _autocast() if torch._C._is_any_autocast_enabled() else {}
        with self._undispatched():
            arguments = place.arguments(args, kwargs)
            if place.path == ROOT:
                self._running.clear()  # a model does not run inside itself: an interrupt left these, unknown to hooks
            outermost = not self._running
            frame = Frame(place.path, place.kind, arguments, autocast)
            self._running.append(frame)  # before anything that can fail: `_leave` is called in any case
            if outermost:
                _refuse_recording(arguments)
                if self._begins_step(place.path, arguments):
                    self._builder.begin_step(step_of(self._builder.n_steps, arguments))
            self._builder.count(frame)
            self.coverage.ran(place, arguments)
            if place.chosen:
                self._builder.see(frame, "in", named_tensors(arguments))

    def _begins_step(self, path: str, arguments: Mapping[str, Any]) -> bool:
        """The model does; while it never has, the first module that was called alone, and one that is given ids."""
        self._root_seen |= path == ROOT
        self._first = self._first or path
        alone = not self._root_seen and (path == self._first or not {*IDS}.isdisjoint(arguments))
        return path == ROOT or alone or not self._builder.n_steps

    def _leave(self, place: _Place, output: object) -> None:
        if threading.get_ident() != self._thread or not self._running or self._running[-1].module != place.path:
            return  # `_enter` was not reached: another hook raised, or it refused another thread
        with self._undispatched():
            frame = self._running.pop()
            if place.chosen:
                layer = getattr(place.module, "layer_idx", None)
                if isinstance(layer, int):
                    self._builder.see(frame, "state", states_in(frame.arguments, layer))
                self._builder.see(frame, "out", outputs_in(output))
            frame.arguments.clear()
            if not self._running:
                self._builder.measure()


def _autocast() -> dict[str, torch.dtype]:
    return {one: torch.get_autocast_dtype(one) for one in DEVICES if torch.is_autocast_enabled(one)}


def _refuse_graphs(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"hooks go on a torch nn.Module, got {type(model).__name__}: give the model inside it")
    for path, module in model.named_modules():
        compiled_by = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if compiled_by or isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"module {path or 'the model itself'!r} ({type(module).__name__}) is compiled, and its graph runs "
                "past hooks: run it eagerly (no torch.compile, no CUDA graphs; in vLLM enforce_eager=True)"
            )


def _refuse_recording(arguments: Mapping[str, Any]) -> None:
    """A graph under recording would hold the hook's work, and its replays would show nothing."""
    on_gpu = any(tensor.is_cuda for _, tensor in named_tensors(arguments))
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise InputError("a CUDA graph is being recorded: its replays run past hooks; run eagerly and capture again")


def _facts(model: nn.Module, tag: str, known: Mapping[str, nn.Module]) -> dict[str, Any]:
    first = next(model.parameters(), None)
    return {
        "tag": tag,
        "model": type(model).__name__,
        "known": {name: type(other).__name__ for name, other in known.items()},
        "dtype": None if first is None else dtype_name(first),
        "device": None if first is None else str(first.device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
