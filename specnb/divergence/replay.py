"""Shadow replay: recompute each module of a pristine copy on its recorded inputs, and compare what it gives.

The copy reads the whole text in one forward. Every module in it is handed what the same module was given in the run
under suspicion, and its own output is compared with the run's, which then goes on in its place. So no error travels: a
module that is wrong is wrong by itself. What a module is given is compared, too: a difference there was made between
modules, by the code of the one that holds them or by somebody who wrote into a buffer meanwhile, and is put down to the
holder. (The idea of shadow modules is that of torch's numeric suite.)
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module

from specnb.divergence.align import Alignment, Whole
from specnb.divergence.capture.tensors import Arguments, is_choice, named_tensors, outputs_in
from specnb.divergence.errors import table
from specnb.divergence.tolerances import TURNED_ALIKE
from specnb.divergence.trace import Key, canonical


@torch.no_grad()
def local_errors(reference: Module, run: Alignment) -> pd.DataFrame:
    """The error table of a run (`errors.COLUMNS`), replayed on the pristine `reference`.

    Of integers `error` is 1 where any differs; of experts chosen by scores the difference of the scores, relative to
    all.
    """
    replay = _Replay(run)
    names = canonical(path for path, _ in reference.named_modules())
    with ExitStack() as stack:
        for path, module in reference.named_modules():
            for hook in replay.put_on(module, names[path]):
                stack.callback(hook.remove)
        ids = torch.tensor(run.tokens[None], device=next(reference.parameters()).device)
        reference(input_ids=ids, use_cache=False)
    return table(replay.errors)


class _Replay:
    """The hooks of the pristine copy; `errors`: of each tensor its labels, and its columns by position."""

    def __init__(self, run: Alignment) -> None:
        self._run = run
        self._calls: Counter[str] = Counter()
        self._running: list[str] = []
        self._order = 0
        self.errors: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []

    def put_on(self, module: Module, path: str) -> Iterator[Any]:
        arguments = Arguments(module)

        def before(_module: Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            holder = self._running[-1] if self._running else path
            self._running.append(path)
            taken = self._compare("in", named_tensors(arguments(args, kwargs)), holder)
            return _exchanged(args, taken), _exchanged(kwargs, taken)

        def after(_module: Module, args: tuple, output: object) -> object:
            taken = self._compare("out", outputs_in(output), path)
            self._running.pop()
            self._calls[path] += 1
            return _exchanged(output, taken)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _compare(self, role: str, named: Iterable[tuple[str, Tensor]], maker: str) -> dict[int, Tensor]:
        """Note how far the run's tensors of the running module are from these; what goes on in their place, by id."""
        self._order += 1
        at, taken, pairs = self._running[-1], {}, list(named)
        for name, replayed in pairs:
            key = Key(at, self._calls[at], role, name)
            whole = self._run.whole.get(key)
            if whole is None:
                continue
            recorded = _recorded(whole, replayed)
            labels = {"order": self._order, "module": maker, "call": key.call, "role": role, "name": name, "at": at}
            if recorded is None:
                if role == "out" and _has_other_columns(whole, replayed):  # not `top_k` experts: wrong at each token
                    n = len(replayed)
                    wrong = {"position": np.arange(n), "error": np.ones(n), "gain": np.ones(n)}
                    self.errors.append((labels, wrong | {"discrete": np.full(n, True)}))
                continue
            taken[id(replayed)] = recorded.to(replayed.device, replayed.dtype)
            columns = _columns(replayed, recorded, whole.axis)
            margins = _margins(replayed, recorded, [item for _, item in pairs])
            if margins is not None and len(margins) == len(columns["error"]):
                columns |= {"error": margins, "discrete": np.zeros(len(margins), bool)}
            columns = {name: np.delete(column, whole.gaps) for name, column in columns.items()}
            self.errors.append((labels, columns))
        return taken


def _recorded(whole: Whole, replayed: Tensor) -> Tensor | None:
    """The run's tensor in place of `replayed`, which stays where the run made nothing; None for another shape."""
    recorded = torch.from_numpy(np.moveaxis(whole.values, 0, whole.axis).copy())  # hooks and modules write into it
    if recorded.shape != replayed.shape or recorded.is_complex() != replayed.is_complex():
        return None
    gaps = torch.from_numpy(whole.gaps)
    return recorded.index_copy_(whole.axis, gaps, replayed.cpu().index_select(whole.axis, gaps).to(recorded.dtype))


def _has_other_columns(whole: Whole, replayed: Tensor) -> bool:
    """Tell whether a module chose more or fewer integers for each token than it should."""
    values = whole.values
    if not is_choice(replayed) or len(whole.gaps) or whole.axis or len(values) != len(replayed):
        return False
    return values.ndim == replayed.ndim == 2 and values.dtype.kind in "iu"


def _columns(replayed: Tensor, recorded: Tensor, axis: int) -> dict[str, np.ndarray]:
    """Columns with a value for each token: position, error, gain, discrete."""
    a, b = (x.cpu().movedim(axis, 0) for x in (replayed, recorded))
    a, b = ((torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double() for x in (a, b))
    a, b = (x.reshape(len(x), -1) for x in (a, b))
    # masks hold infinities, and the difference of two is no number
    same = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
    a, b = a.masked_fill(same, 0.0), b.masked_fill(same, 0.0)
    dot, norm = (a * b).sum(1), (a * a).sum(1).clamp(min=1e-60)
    discrete = not (replayed.is_floating_point() or replayed.is_complex())
    error = (a != b).any(1).double() if discrete else _or_inf((a - b).norm(dim=1) / norm.sqrt())
    return {
        "position": np.arange(len(a)), "error": error.numpy(), "gain": (dot / norm).numpy(),
        "discrete": np.full(len(a), discrete),
    }  # fmt: skip


def _or_inf(error: Tensor) -> Tensor:
    """A difference that is no number, of an infinity or NaN on one side only, is as large as can be."""
    return torch.where(error.isnan(), torch.inf, error)


def _margins(replayed: Tensor, recorded: Tensor, beside: Sequence[Tensor]) -> np.ndarray | None:
    """By how much the scores of what was chosen differ, relative to all scores `(tokens,)`: a near-tie is rounding.

    None where `replayed` is no choice `(…, k)` among columns of a tensor beside it.
    """
    if not is_choice(replayed) or not replayed.numel() or replayed.ndim < 2:
        return None
    if min(int(replayed.min()), int(recorded.min())) < 0:  # how an expert that is not there is written
        return None
    top = max(int(replayed.max()), int(recorded.max()), replayed.shape[-1])
    floats = [item for item in beside if item.is_floating_point() and item.shape[:-1] == replayed.shape[:-1]]
    scores = next((item for item in floats if item.shape[-1] > top), None)
    if scores is None:
        return None
    a, b = (torch.gather(scores.double(), -1, item.long().to(scores.device)) for item in (replayed, recorded))
    if not any(item.shape == replayed.shape for item in floats):  # with weights beside them, the order counts
        a, b = a.sort(-1).values, b.sort(-1).values
    apart = _or_inf((a - b).norm(dim=-1) / scores.double().norm(dim=-1).clamp(min=1e-30))
    return torch.where((replayed.cpu() == recorded).all(-1).to(apart.device), 0.0, apart).cpu().numpy().ravel()


def _exchanged(value: Any, taken: Mapping[int, Tensor]) -> Any:
    """The same structure with some of its tensors replaced."""
    if isinstance(value, Tensor):
        return taken.get(id(value), value)
    if not taken or isinstance(value, str | bytes):
        return value
    if isinstance(value, dict):
        changed = {key: _exchanged(inner, taken) for key, inner in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple | list):
        changed = [_exchanged(inner, taken) for inner in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value) if item.init)
        return dataclasses.replace(value, **{name: _exchanged(inner, taken) for name, inner in held})
    return value


def explain_offset(errors: pd.DataFrame, run: Alignment, sound: Alignment, rotaries: Sequence[str]) -> pd.Series:
    """Mark the rows of `local_errors` that one offset of all positions explains; none where there is no such offset.

    `rotaries` are the rotary modules: cosines first, sines second in what they give, or both as complex numbers. A
    model without any has learned positions, where an offset is an error.
    """
    if not rotaries or not all(one_offset(run, sound, path) for path in rotaries):
        return pd.Series(False, index=errors.index)
    return errors["module"].isin(rotaries) | (errors["discrete"] & errors["name"].str.contains("position"))


def one_offset(run: Alignment, sound: Alignment, module: str) -> bool:
    """Tell whether the rows of a rotary module are turned, and by the same angles at every position."""
    recorded, replayed = (_phases(item, module) for item in (run, sound))
    if recorded is None or replayed is None or recorded.shape != replayed.shape:  # angles of more or fewer features
        return False
    turn = recorded * replayed.conj() / np.abs(replayed) ** 2
    # of length 1, too: longer cosines and sines would scale every product of a query and a key
    off = max(np.abs(turn - turn[:1]).max(), np.abs(np.abs(turn) - 1).max())
    return bool(off < TURNED_ALIKE < np.abs(turn[:1] - 1).max())


def _phases(run: Alignment, module: str) -> np.ndarray | None:
    cos, sin = (run.whole.get(Key(module, 0, "out", name)) for name in ("out", "out.1"))
    if cos is not None and np.iscomplexobj(cos.values):
        return cos.values
    if cos is None or sin is None or cos.values.shape != sin.values.shape:
        return None
    return cos.values.astype(float) + 1j * sin.values
