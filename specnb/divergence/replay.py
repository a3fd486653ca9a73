"""Shadow replay: recompute each module of a pristine copy on its recorded inputs, and compare what it gives.

The copy reads the whole text in one forward. Every module in it is handed what the same module was given in the run
under suspicion, and its own output is compared with the run's, which then goes on in its place. So no error travels: a
module that is wrong is wrong by itself. What a module is given is compared, too: a difference there was made between
modules, by the code of the one that holds them or by somebody who wrote into a buffer meanwhile, and is put down to the
holder. (The idea of shadow modules is that of torch's numeric suite.)
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from specnb.divergence.align import Alignment
from specnb.divergence.capture.tensors import is_cache, is_choice, name_arguments, named_tensors, outputs_in, to_numpy
from specnb.divergence.errors import join_tensors
from specnb.divergence.parts import find_modules
from specnb.divergence.tolerances import flat, gains, margins, one_turn, relative_l2
from specnb.divergence.trace import Key, rotary_outputs


@torch.no_grad()
def local_errors(reference: Module, run: Alignment) -> pd.DataFrame:
    """The error table of a run (`errors.COLUMNS`), replayed on the pristine `reference`.

    Of integers `error` is 1 where any differs; of experts chosen by scores the difference of the scores, relative to
    all.
    """
    replay = _Replay(run)
    with ExitStack() as stack:
        for path, module in find_modules(reference):
            for hook in replay.put_on(module, path):
                stack.callback(hook.remove)
        ids = torch.tensor(run.tokens[None], device=next(reference.parameters()).device)
        reference(input_ids=ids, use_cache=False)
    return join_tensors(replay.errors)


class _Replay:
    """The hooks of the pristine copy; `errors`: of each tensor its labels, and its columns by position."""

    def __init__(self, run: Alignment) -> None:
        self._run = run
        self._calls: Counter[str] = Counter()
        self._running: list[str] = []
        self._order = 0
        self.errors: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []

    def put_on(self, module: Module, path: str) -> Iterator[Any]:
        def before(_module: Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            holder = self._running[-1] if self._running else path
            self._running.append(path)
            taken = self._compare("in", named_tensors(name_arguments(module, args, kwargs)), holder)
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
            if whole is None or whole.values.ndim != replayed.ndim:
                continue
            axis, choice = whole.axis, role == "out" and is_choice(replayed) and replayed.ndim > 1
            labels = {"order": self._order, "module": maker, "call": key.call, "role": role, "name": name, "at": at}
            a, b = np.moveaxis(to_numpy(replayed), axis, 0), whole.values.copy()
            discrete = is_choice(replayed) or replayed.dtype is torch.bool
            if a.shape != b.shape or np.iscomplexobj(a) != np.iscomplexobj(b):
                if choice and b.dtype.kind in "iu" and a.shape[:-1] == b.shape[:-1] and not len(whole.gaps):
                    # not `top_k` experts: wrong at each token
                    wrong = {"position": np.arange(len(a)), "error": np.ones(len(a)), "gain": np.ones(len(a))}
                    self.errors.append((labels, wrong | {"discrete": np.full(len(a), True)}))
                continue
            b[whole.gaps] = a[whole.gaps]  # the copy's own goes on where the run made nothing
            recorded = torch.from_numpy(np.moveaxis(b, 0, axis).copy())  # hooks and modules write into it
            taken[id(replayed)] = recorded.to(replayed.device, replayed.dtype)
            beside = [item for _, item in pairs if item.is_floating_point() and item.shape[:-1] == replayed.shape[:-1]]
            scores = next((item for item in beside if item.shape[-1] > replayed.shape[-1]), None) if choice else None
            if scores is not None:  # with weights beside them, the order of the chosen counts
                ordered = any(item.shape == replayed.shape for item in beside)
                scores = flat(np.moveaxis(to_numpy(scores), axis, 0))
                error, discrete = margins(scores, flat(a), flat(b), ordered=ordered), False
            else:
                error = (flat(a) != flat(b)).any(1).astype(float) if discrete else relative_l2(a, b)
            columns = {"position": np.arange(len(a)), "error": error, "gain": gains(a, b),
                       "discrete": np.full(len(a), discrete)}  # fmt: skip
            columns = {name: np.delete(column, whole.gaps) for name, column in columns.items()}
            self.errors.append((labels, columns))
        return taken


def _exchanged(value: Any, taken: Mapping[int, Tensor]) -> Any:
    """The same structure with some of its tensors replaced."""
    return tree_map_only(Tensor, lambda tensor: taken.get(id(tensor), tensor), value, is_leaf=is_cache)


def explain_offset(errors: pd.DataFrame, run: Alignment, sound: Alignment, rotaries: Sequence[str]) -> pd.Series:
    """Mark the rows of `local_errors` that one offset of all positions explains; none where there is no such offset.

    `rotaries` are the rotary modules. A model without any has learned positions, where an offset is an error.
    """
    turns = [
        one_turn(
            *([whole[key].values for key in rotary_outputs(path) if key in whole] for whole in (sound.whole, run.whole))
        )
        for path in rotaries
    ]
    if not turns or not all(turns):
        return pd.Series(False, index=errors.index)
    return errors["module"].isin(rotaries) | (errors["discrete"] & errors["name"].str.contains("position"))
