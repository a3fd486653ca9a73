"""Medusa and Hydra heads: networks that draft several tokens from one hidden state.

The backbone predicts token t + 1 from the hidden state of token t. Head i predicts token t + 2 + i
from the same state (Cai et al. 2401.10774, equation 1):

    x_i = h + SiLU(W_i h + b_i)                       Medusa
    x_i = h + SiLU(W_i [h; e_1; …; e_(i+1)] + b_i)    Hydra (Ankner et al. 2402.05109)
    p_i = softmax(U_i x_i)

Symbols:

    t        the last token that the backbone has processed; token t + 1 is the newest
    h        its hidden state after the final norm, (hidden,); `normed` in code
    i        the head, from 0 to `n_heads` - 1
    W_i, b_i a `ResidualBlock`, (hidden, hidden) for Medusa, (hidden, (2 + i) hidden) for Hydra;
             zero before training, so untrained heads return the backbone's logits for token t + 1
    e_j      the backbone's embedding of token t + j, (hidden,)
    U_i      the lm_head, (draft_size, hidden): the backbone's, or that of head i

A head has `n_layers` blocks; only the first block of a Hydra head reads embeddings. Upstream:
`ResBlock` and `medusa_head` in FasterDecoding/Medusa, medusa/model/medusa_model.py.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.hf.hidden import final_norm
from specnb.lm.hf.int4 import dense_copy
from specnb.lm.hf.product import can_multiply

MOST_HEADS = 16
MOST_LAYERS = 8
MANY_ROWS = 16
"""Number of rows from which float32 is faster than emulated bfloat16, despite the conversion."""
OUTSIDE = -1
"""Draft id of tokens outside the draft vocabulary, which heads cannot draft."""


class DrafterConfig(BaseModel):
    """The fields of `config.json` that all trained drafters share.

    `n_heads` is the maximum number of tokens drafted in a round; `backbone` is `Backbone.digest`.
    """

    model_config = ConfigDict(frozen=True)

    format_version: Literal[1] = 1
    n_heads: int = Field(ge=1, le=MOST_HEADS)
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    backbone: str = ""
    backbone_name: str = ""


class HeadsConfig(DrafterConfig):
    """The `config.json` of heads.

    `input` is the hidden state that the heads take. `pre_norm` heads take the input of the
    backbone's final norm and apply a frozen copy of the norm. `post_norm` heads take the output of
    the norm (transformers' `hidden_states[-1]` in the Llama family) and apply none. `lm_head` is
    `shared` (the backbone's) or `private` (one per head). A `draft_vocab` above 0 restricts drafts
    to that many tokens, listed in the token map.
    """

    kind: Literal["medusa", "hydra"] = "medusa"
    n_layers: int = Field(default=1, ge=1, le=MOST_LAYERS)
    input: Literal["pre_norm", "post_norm"] = "pre_norm"
    bias: bool = True
    lm_head: Literal["shared", "private"] = "shared"
    draft_vocab: NonNegativeInt = 0

    @property
    def draft_size(self) -> int:
        """Number of tokens that heads can draft."""
        return self.draft_vocab or self.vocab_size


# --- parts of the backbone that drafters use ---

SAMPLES = 1 << 14
"""Number of weights per matrix in a digest."""


@dataclass(frozen=True)
class Backbone:
    """The parts of a model that drafters use; none is trained.

    `norm` is the final norm; `lm_head` and `embeddings` are `(vocab, hidden)`.
    """

    norm: nn.Module
    lm_head: Tensor
    embeddings: Tensor

    @cached_property
    def digest(self) -> str:
        """The sha256 of the signs of SAMPLES weights, each of embeddings and lm_head.

        It does not depend on engine or dtype: rounding flips no sign, except that float16 loses
        weights below 6e-8. Other models, or further training, change many signs.
        """
        state = hashlib.sha256()
        for name, part in {"embeddings": self.embeddings, "lm_head": self.lm_head}.items():
            flat = part.flatten()
            n = min(SAMPLES, flat.numel())
            places = torch.linspace(0, flat.numel() - 1, n, dtype=torch.float64).long()
            signs = (flat[places.to(flat.device)] > 0).cpu().numpy()
            state.update(f"{name} {tuple(part.shape)} ".encode() + signs.tobytes())
        return state.hexdigest()

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.lm_head.shape[1]

    @classmethod
    def of(cls, net: PreTrainedModel) -> "Backbone":
        """Return the parts of a transformers causal LM.

        Raises InputError for a model whose logits are not lm_head(norm(hidden)), as heads assume.
        """
        name = type(net).__name__
        output = net.get_output_embeddings()
        embeddings = net.get_input_embeddings()
        if not isinstance(output, nn.Linear) or output.bias is not None:
            raise InputError(
                f"got lm_head {output!r:.100} in {name}, heads need a linear layer without bias"
            )
        config = net.config.get_text_config(decoder=True)
        for setting in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            value = getattr(config, setting, None)
            if value not in (None, 1):
                raise InputError(
                    f"{name} has {setting} = {value}, which heads do not support: use another model"
                )
        lm_head = output.weight.detach()
        return cls(final_norm(net), lm_head, embeddings.weight.detach()[: len(lm_head)])


def backbone_of(target: LanguageModel) -> Backbone:
    """Return the parts of a torch model.

    Raises InputError for other engines and for unsupported models.
    """
    if not hasattr(target, "network"):
        raise InputError(
            f"{target.caps.engine} does not expose hidden states of {target.name}: "
            "open it with ?backend=hf"
        )
    return Backbone.of(target.network)


def frozen_copy(norm: nn.Module) -> nn.Module:
    """Return a copy of a norm without gradients."""
    return dense_copy(norm).requires_grad_(False)


class DrafterNet(nn.Module):
    """Base class of trained drafters. Parts of the backbone are not saved, trained or counted.

    `shared_lm_head (draft_size, hidden)` and `embeddings (vocab, hidden)` are the backbone's.
    `token_map (draft_vocab,)` int64 maps draft ids to vocabulary ids, in ascending order; None for
    the entire vocabulary.
    """

    token_map: Tensor | None

    def __init__(self, config: Any, backbone: Backbone, token_map: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("token_map", token_map)
        # Plain tensors are not registered.
        self.shared_lm_head = backbone.lm_head if token_map is None else backbone.lm_head[token_map]
        self.embeddings = backbone.embeddings

    def full_ids(self, draft_ids: Any) -> Any:
        """Return the vocabulary ids of draft ids (a tensor or an int)."""
        return draft_ids if self.token_map is None else self.token_map[draft_ids]

    def draft_ids(self) -> Tensor:
        """Return the draft id (or OUTSIDE) of every vocabulary id, `(vocab_size,)` on the CPU."""
        every = torch.arange(self.config.vocab_size)
        if self.token_map is None:
            return every
        ids = torch.full_like(every, OUTSIDE)
        ids[self.token_map.cpu()] = every[: len(self.token_map)]
        return ids


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch in a block, and restore the CPU generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T`; many rows in float32, then rounded, if the CPU emulates bfloat16."""
    emulated = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not can_multiply(x.dtype)
    if emulated and x.numel() >= MANY_ROWS * x.shape[-1]:
        return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


# --- Medusa and Hydra heads ---


class ResidualBlock(nn.Module):
    """x + SiLU(W [x; condition] + b). W and b start at 0: the untrained block is the identity."""

    def __init__(self, size: int, *, conditions: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size * (1 + conditions), size, bias=bias)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """Map `x (…, size)` to `(…, size)`.

        `condition (…, conditions * size)` has concatenated embeddings.
        """
        return x + F.silu(
            self.linear(x if condition is None else torch.cat([x, condition], dim=-1))
        )


class Head(nn.Module):
    """The residual blocks of head `index`, and its lm_head if that is private.

    The first block of a Hydra head also reads embeddings.
    """

    def __init__(self, config: HeadsConfig, index: int) -> None:
        super().__init__()
        conditions = index + 1 if config.kind == "hydra" else 0
        self.blocks = nn.ModuleList(
            ResidualBlock(
                config.hidden_size, conditions=0 if layer else conditions, bias=config.bias
            )
            for layer in range(config.n_layers)
        )
        self.lm_head = None
        if config.lm_head == "private":
            self.lm_head = nn.Linear(config.hidden_size, config.draft_size, bias=False)

    def forward(self, x: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Return features `(…, hidden)`, the lm_head's input, for normed states `x (…, hidden)`.

        A Hydra head needs `embeddings (…, index + 1, hidden)`.
        """
        condition = None if embeddings is None else embeddings.flatten(-2)
        for block in self.blocks:
            x = block(x, condition)
            condition = None
        return x


class Heads(DrafterNet):
    """All heads of one backbone: from hidden states to logits over the draft vocabulary.

    `norm` is a frozen copy of the backbone's norm. Config, backbone and token map must match
    (`load_trained_heads` checks it).
    """

    norm: nn.Module

    def __init__(
        self, config: HeadsConfig, backbone: Backbone, token_map: Tensor | None = None
    ) -> None:
        super().__init__(config, backbone, token_map)
        self.heads = nn.ModuleList(Head(config, i) for i in range(config.n_heads))
        self.to(device=backbone.lm_head.device, dtype=backbone.lm_head.dtype)
        self.__dict__["norm"] = frozen_copy(backbone.norm)  # not registered
        if config.lm_head == "private":
            with torch.no_grad():
                for head in self.heads:
                    head.lm_head.weight.copy_(self.shared_lm_head)

    @property
    def scaled_rates(self) -> tuple[list[Tensor], str]:
        """Weights on embeddings, whose learning rate is scaled.

        They are `(hidden, n * hidden)`, n = 0 for Medusa. The second value is the name of the
        `Recipe` field with the scale.
        """
        size = self.config.hidden_size
        return [
            head.blocks[0].linear.weight.detach()[:, size:] for head in self.heads
        ], "embedding_rate"

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the blocks' input for hidden states `(…, hidden)`, as set by `config.input`."""
        return self.norm(hidden) if self.config.input == "pre_norm" else hidden

    def features(self, head: int, normed: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return features `(…, hidden)` of one head.

        `ids (…, n)`, n > head, are the tokens after the hidden state; Medusa heads ignore them.
        """
        if self.config.kind == "medusa":
            return self.heads[head](normed)
        return self.heads[head](normed, self.embeddings[ids[..., : head + 1]].to(normed.dtype))

    def logits(self, head: int, features: Tensor) -> Tensor:
        """Return logits `(…, draft_size)` of one head's features, in their dtype."""
        private = self.heads[head].lm_head
        return multiply(features, private.weight if private else self.shared_lm_head)

    def draft_logits(self, head: int, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return one head's logits `(batch, draft_size)` float32.

        `hidden (batch, hidden)`; `ids (batch, n)`, n > head, as in `features`.
        """
        return self.logits(head, self.features(head, self.normed(hidden), ids)).float()

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `(n_heads, draft_size)` float32 of Medusa heads for `hidden (hidden,)`.

        A shared lm_head is read once for all heads.
        """
        heads = range(self.config.n_heads)
        if self.config.lm_head == "private":
            return torch.cat([self.draft_logits(i, hidden[None]) for i in heads])
        normed = self.normed(hidden)
        features = torch.stack([self.features(i, normed) for i in heads])
        return F.linear(features, self.shared_lm_head).float()

    def cost(self) -> tuple[int, int]:
        """Return the number of trained parameters, and the bytes read to draft with all heads.

        Medusa heads read a shared lm_head once; Hydra heads run in sequence and read it once each.
        """
        weights = list(self.parameters())
        n_bytes = sum(weight.nbytes for weight in weights)
        if self.config.lm_head == "shared":
            n_bytes += self.shared_lm_head.nbytes * (
                1 if self.config.kind == "medusa" else self.config.n_heads
            )
        return sum(weight.numel() for weight in weights), n_bytes


def new_heads(
    config: HeadsConfig, backbone: Backbone, token_map: Tensor | None, seed: int
) -> Heads:
    """Return untrained heads, seeded by `seed`."""
    with seeded(seed):
        return Heads(config, backbone, token_map)
