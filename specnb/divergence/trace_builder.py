"""The table of a trace while it grows: tensors are copied when they are seen and measured a stack at a time."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specnb.divergence.trace import PARAM_COLUMNS, TENSOR_COLUMNS, Trace, table
from specnb.divergence.tracing.at_use import Owned, Registry, unfollowed, version_of
from specnb.divergence.tracing.fingerprint import STATISTICS, digests, fingerprints
from specnb.divergence.tracing.names import Chooser, dtype_name, is_wrapper
from specnb.divergence.tracing.tokens import Step

PENDING_BYTES = 64 << 20
"""Copies that wait to be measured; more are measured at once."""
STACKED = 1 << 19
"""Values of tensors of one shape that are measured together: fewer calls, as long as they stay in a core's cache."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Frame:
    """A call of a module that is running; `autocast`: the types by device that it was called under; `axes`: which axis
    of these shapes counts tokens, where they do not tell."""

    module: str
    kind: str
    arguments: dict[str, Any]
    autocast: dict[str, torch.dtype] = field(default_factory=dict)
    call: int = 0
    params: set[int] = field(default_factory=set)
    axes: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class _Waiting:
    """A copy of what was seen, and the rows that showed exactly this."""

    copy: torch.Tensor
    token_axis: int
    rows: list[int]


class TraceBuilder:
    """Collects what hooks see; `trace()` gives the trace, once the capture has ended or in between."""

    def __init__(self, registry: Registry, full: Chooser) -> None:
        self.facts: dict[str, Any] = {"steps": []}
        self._registry, self._full = registry, full
        self._tensors: list[dict[str, Any]] = []
        self._params: list[dict[str, Any]] = []
        self._arrays: dict[str, np.ndarray] = {}
        self._calls: Counter[str] = Counter()
        self._axes: dict[tuple[str, int, str, str], int] = {}
        self._order = 0
        self._step: Step | None = None
        self._waiting: dict[tuple, _Waiting] = {}
        self._bytes = 0
        self.listens = True
        """Whether hooks come to it."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not written down: another torch model, which may share modules with this one."""
        listened, self.listens = self.listens, False
        try:
            with unfollowed(self._registry):
                yield
        finally:
            self.listens = listened

    @property
    def n_steps(self) -> int:
        return len(self.facts["steps"])

    def begin_step(self, step: Step) -> None:
        """A call of the outermost module begins."""
        self._step = step
        self._calls.clear()
        seen = {"step": step.index, "batch": step.batch, "length": step.length, "first_position": step.first}
        self.facts["steps"].append(seen | {"token_ids": step.ids})

    def count(self, frame: Frame) -> None:
        """Number the call: the how manieth of its module in this step it is."""
        frame.call = self._calls[frame.module]
        self._calls[frame.module] += 1

    def see(self, frame: Frame, role: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write down tensors that a call was given or gave, as one event of `order`; name those that cannot be read."""
        for name, tensor in named:
            if why := unreadable(tensor):
                self.facts.setdefault("unread", {})[f"{frame.module}:{role}:{name}"] = why
            else:
                self._row(frame, role, name, plain(tensor))
        self._order += 1

    def use(self, frame: Frame, owned: Owned) -> None:
        """Write down that an operation of this call read a parameter, once a call."""
        if id(owned.tensor) in frame.params:
            return
        frame.params.add(id(owned.tensor))
        row = {"step": self._step.index, "module": frame.module, "call": frame.call, "owner": owned.owner}
        row |= {"owner_path": owned.path, "object_id": id(owned.tensor), "digest": self._registry.digest(owned)}
        self._params.append(row | {"dtype": dtype_name(owned.tensor)})

    def trace(self) -> Trace:
        """The trace of what was seen so far."""
        self.measure()
        return Trace(
            dict(self.facts),
            table(self._tensors, TENSOR_COLUMNS),
            table(self._params, PARAM_COLUMNS),
            dict(self._arrays),
        )

    def _row(self, frame: Frame, role: str, name: str, tensor: torch.Tensor) -> None:
        """A row that an interrupt, want of memory or a chooser's error left half written would spoil the table."""
        key = len(self._tensors)
        try:
            self._written(key, frame, role, name, tensor)
        except BaseException:
            del self._tensors[key:]
            for what in ("full", "tokens", "token_l2"):
                self._arrays.pop(f"{key}.{what}", None)
            for waiting in self._waiting.values():
                waiting.rows[:] = [row for row in waiting.rows if row < key]
            raise

    def _written(self, key: int, frame: Frame, role: str, name: str, tensor: torch.Tensor) -> None:
        shape, step = tuple(tensor.shape), self._step
        axis = self._axis(frame, role, name, tensor)
        self._tensors.append(
            {
                "row": key,
                "step": step.index,
                "module": frame.module,
                "kind": frame.kind,
                "call": frame.call,
                "order": self._order,
                "role": role,
                "name": name,
                "shape": shape,
                "dtype": dtype_name(tensor),
                "device": str(tensor.device),
                "contiguous": tensor.is_contiguous(),
                "storage": tensor.untyped_storage().data_ptr(),
                "version": version_of(tensor),
                "token_axis": axis,
                "first_position": step.first_position(role, axis, shape),
            }
        )
        if self._full(frame.module, role, name):
            self._arrays[f"{key}.full"] = _array(tensor)
        self._wait(key, tensor, axis)

    def _axis(self, frame: Frame, role: str, name: str, tensor: torch.Tensor) -> int:
        """Which axis counts tokens: where the shape does not tell, as in other steps, else as in the inputs."""
        step, shape, place = self._step, tuple(tensor.shape), (frame.module, frame.call, role, name)
        if step.ambiguous(role, shape):
            outer = 1 if tensor.stride(1) >= tensor.stride(2) else 2  # heads are cut out of each token's features
            known = self._axes.get(place, frame.axes.get(shape, outer))
            return frame.axes.setdefault(shape, known) if role == "in" else known
        axis = step.token_axis(role, name, shape)
        if len(shape) == 4:
            self._axes[place] = axis
        return axis

    def _wait(self, key: int, tensor: torch.Tensor, axis: int) -> None:
        """An output is mostly the next module's input: measured once, if every bit is still what it was.

        The memory alone would not tell: buffers are freed, used again, and written without torch counting it.
        """
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, axis)
        known = self._waiting.get(place) if tensor.device.type == "cpu" else None
        if known is not None and _same_bits(known.copy, tensor):
            known.rows.append(key)
            return
        if known is not None:  # other content in the same place: the older copy keeps waiting under a name of its own
            self._waiting[(key, *place)] = known
        self._waiting[place] = _Waiting(tensor.clone(), axis, [key])
        self._bytes += tensor.nbytes
        if self._bytes > PENDING_BYTES:
            self.measure()

    def measure(self) -> None:
        """Make digests, statistics and sketches of what waits, in float32 also where the model is under autocast."""
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            self._measure()

    def _measure(self) -> None:
        stacks: dict[tuple, list[_Waiting]] = defaultdict(list)
        for waiting in self._waiting.values():
            kind = (waiting.copy.shape, waiting.copy.dtype, waiting.copy.device, waiting.token_axis)
            stacks[kind].append(waiting)
        for (shape, *_), stack in stacks.items():
            n = max(STACKED // max(shape.numel(), 1), 1)
            for start in range(0, len(stack), n):
                self._measure_stack(stack[start : start + n])
        self._waiting.clear()
        self._bytes = 0

    def _measure_stack(self, stack: list[_Waiting]) -> None:
        copies = stack[0].copy[None] if len(stack) == 1 else torch.stack([waiting.copy for waiting in stack])
        prints = fingerprints(copies, stack[0].token_axis)
        columns = {name: prints.statistics[name].tolist() for name in STATISTICS}
        for i, (waiting, text) in enumerate(zip(stack, digests(copies), strict=True)):
            values = {name: column[i] for name, column in columns.items()} | {"digest": text}
            for key in waiting.rows:
                self._tensors[key] |= values
                if prints.tokens is not None:
                    self._arrays[f"{key}.tokens"] = prints.tokens[i]
                    self._arrays[f"{key}.token_l2"] = prints.token_l2[i]


def unreadable(tensor: torch.Tensor) -> str:
    """Why a tensor has no values that can be copied and measured one by one; "" where it has."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized or tensor.device.type == "meta":
        return "quantised" if tensor.is_quantized else "on meta"
    if is_wrapper(tensor):
        return type(tensor).__name__
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "inside a torch.func transform"
    return "" if _measurable(tensor.dtype) else dtype_name(tensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without a graph behind them and without a conjugation or sign that is still to be applied."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


@functools.cache
def _measurable(dtype: torch.dtype) -> bool:
    """Whether torch can turn values of this type into float32."""
    try:
        torch.stack([torch.zeros(1).to(dtype)]).to(torch.complex64 if dtype.is_complex else torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """As numbers, NaN would differ from itself and -0 would equal 0."""
    kind = _BITS.get(a.element_size())
    return kind is not None and torch.equal(a.view(kind), b.view(kind))


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A copy in numpy; types that numpy lacks become float32, exactly."""
    lacking = tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64)
    return (tensor.float() if lacking else tensor).cpu().numpy().copy()
