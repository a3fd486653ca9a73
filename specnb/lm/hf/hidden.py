"""The hidden state before lm_head, as the last forward computed it: what heads are fed, before and after the norm."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.lm.base import LanguageModel, check_held, check_settled
from specnb.lm.hf.engine import TorchEngine, final_norm


@contextmanager
def pre_norm_states(net: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list that gets, of each forward inside the block, the states before the final norm, `(rows, n, hidden)`."""
    caught = []
    with final_norm(net).register_forward_pre_hook(lambda _norm, inputs: caught.append(inputs[0])):
        yield caught


class HiddenStates:
    """Listens to the final norm of a model. Make one with `HfModel.watch_hidden`.

    Only what the model's last run computed is held (of a prefill the last piece); nothing is copied.
    """

    def __init__(self, engine: TorchEngine, model: LanguageModel) -> None:
        self._engine, self._model = engine, model
        self._start = 0
        """Position of the first row."""
        self._pre = self._post = torch.empty(0)
        """What the norm saw and returned, `(n, hidden)`."""
        self.close = engine.listen(self._hear)
        """Listen no more."""

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """Return the hidden state before and after the final norm of the token at `position`, `(hidden,)` each.

        On the model's device and in its type; made in inference mode, and not to be written to. Raises StateError as
        `check_held` does, and while the nodes of a tree are not settled.
        """
        check_settled(self._model)
        row = check_held(self._model, position, self._start, len(self._pre))
        return self._pre[row], self._post[row]

    def keep_path(self, nodes: Sequence[int]) -> None:
        """Keep these rows of the last forward, which were those of a tree's nodes, in their order."""
        if len(self._pre):  # else nobody listened yet
            rows = torch.tensor(nodes, dtype=torch.long, device=self._pre.device)
            self._pre, self._post = self._pre[rows], self._post[rows]

    def _hear(self, pre_norm: Tensor, post_norm: Tensor) -> None:
        self._start, self._pre, self._post = self._engine.n_held, pre_norm, post_norm


class LayerStates:
    """The outputs of some layers of a model for each of its tokens. Make one with `HfModel.watch_layers`."""

    def __init__(self, engine: TorchEngine, layers: Sequence[int], n_ctx: int) -> None:
        self._engine, net = engine, engine.model
        width = net.get_output_embeddings().weight.shape[1]
        self._states = torch.empty(n_ctx, len(layers), width, dtype=net.dtype, device=net.device)
        self.close = engine.listen(self._hear, layers)

    def __getitem__(self, tokens: slice) -> Tensor:
        """`(n, layers, hidden)` of these tokens, which the model has read."""
        return self._states[tokens]

    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Keep these rows of those from `start` on, which were those of a tree's nodes, in their order."""
        self._states[start : start + len(nodes)] = self._states[start + torch.tensor(nodes, dtype=torch.long)]

    def _hear(self, _pre_norm: Tensor, _post_norm: Tensor, *outputs: Tensor) -> None:
        start = self._engine.n_held
        self._states[start : start + len(outputs[0])] = torch.stack(outputs, 1)
