"""Heads that draft several tokens from one hidden state: Medusa, Hydra and ReDrafter.

Head i predicts the token i + 2 places behind the one whose hidden state h it is fed; the model itself predicts the
next one. A head is h + SiLU(W h + b), zero at the start, in front of an lm_head: untrained, it says what the backbone
says of the next token (Cai et al. 2401.10774, equation 1). Hydra's head i also sees the embeddings of the i + 1
tokens since (Ankner et al. 2402.05109); ReDrafter has one head for all places, which sees them through a recurrent
state (Cheng et al. 2403.09919). Upstream: `ResBlock` and `medusa_head` in FasterDecoding/Medusa,
medusa/model/medusa_model.py. There the linear layer of a block starts at zero too, so that SiLU(W h) does.
"""

import hashlib
from collections import OrderedDict
from copy import copy, deepcopy
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

MOST_HEADS = 16
OUTSIDE = -1
"""The draft id of a token that the draft vocabulary does not hold: no head can say it, and it counts as a miss."""


class DrafterConfig(BaseModel):
    """The part of the `config.json` beside weights that is of all drafters.

    `n_heads` are the most drafts of a round; `backbone` is `Backbone.digest`.
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

    `input` is the norm contract: `pre_norm` heads are fed the hidden state in front of the backbone's final norm and
    apply a frozen copy of it once; `post_norm` heads are fed what comes out of that norm (transformers'
    `hidden_states[-1]` in the Llama family) and apply none. `lm_head` is the backbone's own (`shared`), or one of
    their own for each head (`private`). With `draft_vocab` above 0 heads choose among that many tokens only, and a map
    says which.
    """

    kind: Literal["medusa", "hydra", "redrafter"] = "medusa"
    n_layers: PositiveInt = 1
    input: Literal["pre_norm", "post_norm"] = "pre_norm"
    bias: bool = True
    lm_head: Literal["shared", "private"] = "shared"
    draft_vocab: NonNegativeInt = 0

    @property
    def draft_size(self) -> int:
        """Tokens that the heads choose among."""
        return self.draft_vocab or self.vocab_size

    @property
    def n_nets(self) -> int:
        """Heads with weights of their own."""
        return 1 if self.kind == "redrafter" else self.n_heads


SAMPLES = 1 << 14
"""Weights of each borrowed part that a digest looks at."""


@dataclass(frozen=True)
class Backbone:
    """Borrowed parts, never trained: `norm` is the final norm, `lm_head` and `embeddings` are `(vocab, hidden)`."""

    norm: nn.Module
    lm_head: Tensor
    embeddings: Tensor

    @cached_property
    def digest(self) -> str:
        """Digest of embeddings and lm_head, the same in every engine and type: sha256 over signs of SAMPLES of each.

        Rounding to another type flips no sign (but float16 loses weights below 6e-8); another model, or a training
        step of some size, flips many.
        """
        state = hashlib.sha256()
        for name, part in {"embeddings": self.embeddings, "lm_head": self.lm_head}.items():
            flat = part.flatten()
            places = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64).long()
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
        """The parts of a causal LM of transformers.

        Raises InputError where the logits are more than lm_head(norm(hidden)), for then heads would be fed wrongly.
        """
        name = type(net).__name__
        output, embeddings = net.get_output_embeddings(), net.get_input_embeddings()
        if not isinstance(output, nn.Linear) or output.bias is not None:
            raise InputError(f"heads need an lm_head that is a matrix without bias; that of {name} is {output!r:.100}")
        config = net.config.get_text_config(decoder=True)
        for setting in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, setting, None) not in (None, 1):
                raise InputError(f"heads are not fed to a {setting} of {getattr(config, setting)}, which {name} has")
        lm_head = output.weight.detach()
        return cls(final_norm(net), lm_head, embeddings.weight.detach()[: len(lm_head)])


def backbone_of(target: LanguageModel) -> Backbone:
    """Return the parts of a model in torch. Raises InputError for an engine or a model that heads cannot sit on."""
    if not hasattr(target, "network"):
        raise InputError(f"{target.caps.engine} shows no hidden states of {target.name}: open it with ?backend=hf")
    return Backbone.of(target.network)


class ResidualBlock(nn.Module):
    """x + SiLU(W [x; conditions] + b), with W and b zero at the start: then it is the identity."""

    def __init__(self, size: int, *, conditions: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size * (1 + conditions), size, bias=bias)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """`x (…, size)`; `seen (…, conditions * size)`, the embeddings this block is conditioned on."""
        return x + F.silu(self.linear(x if seen is None else torch.cat([x, seen], dim=-1)))


class Cell(nn.Module):
    """Fold embeddings into a state s = SiLU(W e + U s) of their size, zero at first (2403.09919, section 3)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.from_token, self.from_state = nn.Linear(size, size), nn.Linear(size, size, bias=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the last state `(…, size)` along `embeddings (…, n, size)`."""
        state = torch.zeros_like(embeddings[..., 0, :])
        for embedding in embeddings.unbind(-2):
            state = F.silu(self.from_token(embedding) + self.from_state(state))
        return state


class Head(nn.Module):
    """Head `index` without the lm_head that all may share: its blocks, of which the first sees the tokens since.

    Hydra's sees their embeddings side by side, ReDrafter's the last state of a `cell` along them.
    """

    def __init__(self, config: HeadsConfig, index: int) -> None:
        super().__init__()
        conditions = {"medusa": 0, "hydra": index + 1, "redrafter": 1}[config.kind]
        self.cell = Cell(config.hidden_size) if config.kind == "redrafter" else None
        self.blocks = nn.ModuleList(
            ResidualBlock(config.hidden_size, conditions=0 if layer else conditions, bias=config.bias)
            for layer in range(config.n_layers)
        )
        private = config.lm_head == "private"
        self.lm_head = nn.Linear(config.hidden_size, config.draft_size, bias=False) if private else None

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Features `(…, hidden)` of normed hidden states `x (…, hidden)`; `seen (…, n, hidden)` of the tokens since."""
        if seen is not None:
            seen = self.cell(seen) if self.cell else seen.flatten(-2)
        for block in self.blocks:
            x, seen = block(x, seen), None
        return x


class Heads(nn.Module):
    """All heads over one backbone, from hidden states to logits over the draft vocabulary.

    The backbone's embeddings and its lm_head's rows for the draft vocabulary, `shared_lm_head (draft_size, hidden)`,
    are borrowed, and its final norm is a frozen copy: none of them is a parameter. `token_map (draft_vocab,)` int64
    holds the vocabulary id of each draft id, ascending, or is None where the two are the same. Config, backbone and
    map fit.
    """

    def __init__(self, config: HeadsConfig, backbone: Backbone, token_map: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(Head(config, i) for i in range(config.n_nets))
        self.register_buffer("token_map", token_map)
        weight = backbone.lm_head
        self.to(device=weight.device, dtype=weight.dtype)
        # borrowed: torch registers no plain tensor, and no module set so: they are not saved, trained or counted
        self.__dict__.update(norm=frozen_copy(backbone.norm))
        self.shared_lm_head = weight if token_map is None else weight[token_map]
        self.embeddings = backbone.embeddings
        if config.lm_head == "private":
            with torch.no_grad():
                for head in self.heads:
                    head.lm_head.weight.copy_(self.shared_lm_head)

    @property
    def paced(self) -> tuple[list[Tensor], str]:
        """Weights on embeddings, `(hidden, n hidden)`, and the name in a `Recipe` of the rate at which they move."""
        size = self.config.hidden_size
        of_hydra = [head.blocks[0].linear.weight[:, size:] for head in self.heads if self.config.kind == "hydra"]
        of_cells = [head.cell.from_token.weight for head in self.heads if head.cell]
        return [weight.detach() for weight in of_hydra + of_cells], "embedding_rate"

    def normed(self, hidden: Tensor) -> Tensor:
        """Return what the blocks are fed, from hidden states `(…, hidden)` as the norm contract has them."""
        return self.norm(hidden) if self.config.input == "pre_norm" else hidden

    def features(self, head: int, normed: Tensor, ids: Tensor | None = None) -> Tensor:
        """Features `(…, hidden)` of one head; `ids (…, at least head + 1)` are the tokens since the hidden state.

        Medusa's heads take no notice of them.
        """
        net = self.heads[head % self.config.n_nets]
        if self.config.kind == "medusa":
            return net(normed)
        return net(normed, self.embeddings[ids[..., : head + 1]].to(normed.dtype))

    def logits(self, head: int, features: Tensor) -> Tensor:
        """Logits `(…, draft_size)` of one head's features, in the features' dtype."""
        private = self.heads[head % self.config.n_nets].lm_head
        return private(features) if private else F.linear(features, self.shared_lm_head)

    def draft_logits(self, head: int, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits `(batch, draft_size)` float32 of one head: `hidden (batch, hidden)`, `ids (batch, head + 1)`."""
        return self.logits(head, self.features(head, self.normed(hidden), ids)).float()

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Logits `(n_heads, draft_size)` float32 of all heads of a Medusa for one `hidden (hidden,)`.

        One product with the shared lm_head for all: its weights are read once.
        """
        if self.config.lm_head == "private":
            return torch.cat([self.draft_logits(i, hidden[None]) for i in range(self.config.n_heads)])
        normed = self.normed(hidden)
        features = torch.stack([self.features(i, normed) for i in range(self.config.n_heads)])
        return F.linear(features, self.shared_lm_head).float()

    def full_ids(self, draft_ids: Tensor) -> Tensor:
        """Vocabulary ids of draft ids."""
        return draft_ids if self.token_map is None else self.token_map[draft_ids]

    def cost(self) -> tuple[int, int]:
        """Parameters of the heads' own, and bytes that one draft of all heads reads.

        A Medusa's features meet the shared lm_head in one product, those of the others head after head.
        """
        weights = list(self.parameters())
        n_bytes = sum(weight.nbytes for weight in weights)
        if self.config.lm_head == "shared":
            n_bytes += self.shared_lm_head.nbytes * (1 if self.config.kind == "medusa" else self.config.n_heads)
        return sum(weight.numel() for weight in weights), n_bytes


def new_heads(config: HeadsConfig, backbone: Backbone, token_map: Tensor | None, seed: int) -> Heads:
    """Untrained heads, whose first weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Heads(config, backbone, token_map)


def frozen_copy(norm: nn.Module) -> nn.Module:
    """A copy of a norm, which is not trained."""
    bare = copy(norm)
    # whoever listens to the backbone's norm must not be copied with it: a hook may lead to the whole network
    bare._forward_hooks, bare._forward_pre_hooks = OrderedDict(), OrderedDict()
    return deepcopy(bare).requires_grad_(False)


def draft_ids(net: Any) -> Tensor:
    """The draft id of every vocabulary id, `(vocab_size,)` on the CPU; OUTSIDE where heads have none."""
    token_map, every = net.token_map, torch.arange(net.config.vocab_size)
    if token_map is None:
        return every
    ids = torch.full_like(every, OUTSIDE)
    ids[token_map.cpu()] = every[: len(token_map)]
    return ids


def skeleton(config: HeadsConfig) -> Heads:
    """Return such heads without their numbers: names and shapes that a state dict has to have."""
    with torch.device("meta"):
        table = torch.empty(config.vocab_size, config.hidden_size)
        token_map = torch.zeros(config.draft_vocab, dtype=torch.long) if config.draft_vocab else None
        return Heads(config, Backbone(nn.Identity(), table, table), token_map)
