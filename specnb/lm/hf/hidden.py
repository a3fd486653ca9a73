"""Hidden states before and after the final norm, and of layers: the inputs of draft heads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.errors import StateError
from specnb.lm.base import LanguageModel, check_settled
from specnb.lm.hf.engine import TorchEngine, final_norm


@contextmanager
def pre_norm_states(net: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the final norm's inputs `(batch, n, hidden)` in all forward passes of the block."""
    states = []
    with final_norm(net).register_forward_pre_hook(lambda _norm, inputs: states.append(inputs[0])):
        yield states


class HiddenStates:
    """The hidden states of a model's last forward pass. Create it with `HfModel.watch_hidden`.

    It holds only the states of the last pass (for a prefill, its last chunk), without a copy.
    """

    def __init__(self, engine: TorchEngine, model: LanguageModel) -> None:
        self._engine = engine
        self._model = model
        self._start = 0
        """Position of the first row."""
        self._pre = self._post = torch.empty(0)
        """Input and output of the final norm, `(n, hidden)`."""
        self.close = engine.listen(self._receive)
        """Remove the hook."""

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """Return the states `(hidden,)` at `position`, before and after the final norm.

        They are inference tensors on the model's device and in its dtype: do not write to them.
        Raises StateError while a tree is not settled, if the last forward pass did not compute this
        position, or if the token was rolled back since.
        """
        check_settled(self._model)
        n_past = self._model.n_past
        if not self._start <= position < min(self._start + len(self._pre), n_past):
            raise StateError(
                f"no hidden state is held for position {position} of {self._model.name}, whose "
                f"state has {n_past} tokens: process the token again"
            )
        row = position - self._start
        return self._pre[row], self._post[row]

    def keep_path(self, nodes: Sequence[int]) -> None:
        """Keep the rows of these nodes of a tree, in this order."""
        if len(self._pre):  # empty if no pass has run since `watch_hidden`
            rows = torch.tensor(nodes, dtype=torch.long, device=self._pre.device)
            self._pre = self._pre[rows]
            self._post = self._post[rows]

    def _receive(self, pre_norm: Tensor, post_norm: Tensor) -> None:
        self._start = self._engine.n_held
        self._pre = pre_norm
        self._post = post_norm


class LayerStates:
    """Outputs of some layers for all tokens of the state. Create it with `HfModel.watch_layers`."""

    def __init__(self, engine: TorchEngine, layers: Sequence[int], n_ctx: int) -> None:
        self._engine = engine
        net = engine.model
        width = net.get_output_embeddings().in_features
        self._states = torch.empty(n_ctx, len(layers), width, dtype=net.dtype, device=net.device)
        self.close = engine.listen(self._receive, layers)

    def __getitem__(self, tokens: slice) -> Tensor:
        """Return the outputs `(n, layers, hidden)` of tokens that the model has processed."""
        return self._states[tokens]

    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Keep the rows of these nodes of a tree, in this order; `start` is the row of node 0."""
        rows = start + torch.tensor(nodes, dtype=torch.long)
        self._states[start : start + len(nodes)] = self._states[rows]

    def _receive(self, _pre_norm: Tensor, _post_norm: Tensor, *outputs: Tensor) -> None:
        start = self._engine.n_held
        self._states[start : start + len(outputs[0])] = torch.stack(outputs, 1)
