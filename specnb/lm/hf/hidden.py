"""The hidden state before lm_head, as the last forward computed it: what heads are fed, before and after the norm."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb.errors import InputError, StateError
from specnb.lm.base import LanguageModel, check_settled
from specnb.lm.hf.engine import PREFILL_WIDTH, TorchEngine


def final_norm(net: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and lm_head. Raises InputError where there is not exactly one candidate."""
    width = net.get_output_embeddings().weight.shape[1]
    decoder = net.get_decoder() if hasattr(net, "get_decoder") else net.base_model
    children = dict(decoder.named_children())
    names = [n for n, c in children.items() if getattr(getattr(c, "weight", None), "shape", ()) == (width,)]
    if len(names) != 1:
        raise InputError(
            f"{type(net).__name__} has {len(names)} candidates for its final norm ({', '.join(names) or 'none'}): "
            "heads cannot tell which of them stands before lm_head"
        )
    return children[names[0]]


@contextmanager
def pre_norm_states(net: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list that gets, of each forward inside the block, the states before the final norm, `(rows, n, hidden)`."""
    caught: list[Tensor] = []
    with final_norm(net).register_forward_pre_hook(lambda _norm, inputs: caught.append(inputs[0])):
        yield caught


class HiddenRows(NamedTuple):
    """What one run of the norm saw, for the positions from `start` on: `pre` and `post` are `(n, hidden)`."""

    start: int
    pre: Tensor
    post: Tensor


class HiddenStates:
    """Listens to the final norm of a model. Make one with `HfModel.watch_hidden`.

    Only what the last forward computed is held, and of a prefill in pieces the last ones; nothing is copied.
    """

    def __init__(self, engine: TorchEngine, model: LanguageModel) -> None:
        self._engine, self._model = engine, model
        self._rows: list[HiddenRows] = []
        self._feed = engine.n_feeds
        self._hook = final_norm(engine.model).register_forward_hook(self._hear)

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """Of the token at `position` of the state: the hidden state before and after the final norm, `(hidden,)` each.

        On the model's device and in its type; made in inference mode, and not to be written to. Raises StateError
        where the last forward did not compute this position, where it was taken back since, and while the nodes of a
        tree are not settled.
        """
        check_settled(self._model, self._model.unsettled)
        n_past = self._model.n_past
        # rows behind the state are of tokens that were taken back, or of the second of a doubled step
        for rows in reversed(self._rows) if position < n_past else ():
            if rows.start <= position < rows.start + len(rows.pre):
                return rows.pre[position - rows.start], rows.post[position - rows.start]
        raise StateError(
            f"no hidden state is held for position {position} of {self._model.name}, whose state has {n_past} tokens: "
            "the last forward since watch_hidden did not compute it; feed the token again"
        )

    def keep_path(self, nodes: Sequence[int]) -> None:
        """Of the rows of the last forward, which were those of a tree's nodes, keep these, in their order."""
        if self._rows:  # else nobody listened yet
            start, pre, post = self._rows[-1]
            kept = torch.tensor(nodes, dtype=torch.long, device=pre.device)
            self._rows = [HiddenRows(start, pre[kept], post[kept])]

    def close(self) -> None:
        """Listen no more."""
        self._hook.remove()
        self._rows.clear()

    def _hear(self, _norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not self._engine.feeding:  # heads may borrow this very norm
            return
        if self._engine.n_feeds != self._feed:
            self._feed = self._engine.n_feeds
            self._rows.clear()
        self._rows.append(HiddenRows(self._engine.held, inputs[0][0], output[0]))
        while sum(len(rows.pre) for rows in self._rows[1:]) >= PREFILL_WIDTH:
            del self._rows[0]
