"""One transformer block that drafts autoregressively from states of the target's inner layers.

The first step after token t reads the target's states, each later step the block's own output:

    z_1 = S s_t + E e_(t+1)              s_t      outputs of some of the target's layers at t
    z_j = O g_(j-1) + E e_(t+j)          e_(t+j)  the target's embedding of token t + j
    g_j = block(z_j)                     g_j      output of one block of attention and MLP
    logits_j = U norm(g_j)               U        the lm_head's rows of the draft vocabulary

S, O and E are `from_states`, `from_own` and `from_token`. The block has its own KV cache. States,
block outputs and embeddings are scaled to a mean square of 1. In shapes, B is rows, T tokens, S
starts of rounds, and D the hidden size.

- `jump` initializes the block with a copy of a target layer, and the maps by least squares, so that
  they approximate the layer's input. After economize's jump drafter, whose maps are trained.
- `eagle` initializes the block at random and reads three layers (EAGLE-3, Li et al. 2503.01840).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from specnb.errors import InputError
from specnb.lm.hf.decoder import FAMILIES, Decoder, with_layers
from specnb.lm.hf.hidden import final_norm
from specnb.lm.hf.int4 import dense_copy
from specnb.lm.tree import COMMITTED, Tree
from specnb.medusa.data import tapped_layers
from specnb.medusa.drafter import HeadsDrafter, Logits, check_heads, heads_drafter
from specnb.medusa.nets import Backbone, DrafterConfig, DrafterNet, frozen_copy

KINDS = ("jump", "eagle")


class JumpConfig(DrafterConfig):
    """The `config.json` of a `JumpNet`.

    `layers` are the target layers whose outputs are read, from 0. `copied` is the layer that
    initializes the block, or None for a random initialization.
    """

    kind: Literal["jump", "eagle"] = "jump"
    layers: tuple[int, ...] = Field(min_length=1, max_length=4)
    copied: NonNegativeInt | None = None
    draft_vocab: PositiveInt


class JumpNet(DrafterNet):
    """The drafter's network; it also uses the target's embeddings and rows of its lm_head."""

    target: Any  # a PreTrainedModel; its parts are also Any
    target_norm: Any
    block: Any

    def __init__(self, config: JumpConfig, target: PreTrainedModel, token_map: Tensor) -> None:
        super().__init__(config, Backbone.of(target), token_map)
        D = config.hidden_size
        norm = final_norm(target)
        self.from_states = nn.Linear(len(config.layers) * D, D, bias=False)  # S
        self.from_own = nn.Linear(D, D, bias=False)  # O
        self.from_token = nn.Linear(D, D, bias=False)  # E
        origin = target.get_decoder().layers[config.copied or 0]
        untrained = config.copied is None
        self.block = type(origin)(target.config, layer_idx=0) if untrained else dense_copy(origin)
        self.norm = frozen_copy(norm)
        self.requires_grad_(True).to(target.dtype)
        # Not registered, so these are not saved, trained or counted.
        self.__dict__.update(target=target, target_norm=frozen_copy(norm))

    def first_input(self, states: Tensor, ids: Tensor) -> Tensor:
        """Return z_1 `(…, D)` from the target's states `(…, layers, D)` and next tokens `(…)`."""
        return self.from_states(unit(states).flatten(-2)) + self.from_token(self._embedded(ids))

    def next_input(self, g: Tensor, ids: Tensor) -> Tensor:
        """Return z_j `(…, D)` from the block's last output `(…, D)` and next tokens `(…)`."""
        return self.from_own(unit(g)) + self.from_token(self._embedded(ids))

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return the target's embeddings of `ids`, `(…, D)`, scaled, in the dtype of E."""
        return unit(self.embeddings[ids]).to(self.from_token.weight.dtype)

    def logits(self, g: Tensor) -> Tensor:
        """Return logits `(…, draft_vocab)` from the block's output `(…, D)`."""
        return F.linear(self.norm(g), self.shared_lm_head)

    @property
    def scaled_rates(self) -> tuple[list[Tensor], str]:
        """The weights of a copied block, and the `Recipe` field that scales their learning rate."""
        weights = [] if self.config.copied is None else self.block.parameters()
        return [weight.detach() for weight in weights], "copy_rate"

    def roll_out(
        self, states: Tensor, tokens: Tensor, starts: Tensor, n_steps: int
    ) -> Iterator[Tensor]:
        """Yield g of each step: `(B, T - 1, D)` for all tokens but the last, then `(B, S, D)`.

        `states (B, T, layers, D)`, `tokens (B, T)`, `starts (S,)`. Step j from start t reads token
        t + j, and attends to the first steps up to t and to the steps from t so far. This is
        EAGLE-3's training-time test, but only from some positions.
        """
        cache = DynamicCache()
        # 1. The first step, for all tokens.
        z = self.first_input(states[:, :-1], tokens[:, 1:])
        g = self._run(z, torch.arange(1, tokens.shape[1]), cache)
        yield g
        # 2. Further steps from the starts.
        g = g[:, starts]
        visible = torch.arange(tokens.shape[1] - 1) <= starts[:, None]  # (S, keys)
        own = torch.eye(len(starts), dtype=torch.bool)
        for j in range(2, n_steps + 1):
            visible = torch.cat([visible, own], 1)
            z = self.next_input(g, tokens[:, starts + j])
            g = self._run(z, starts + j, cache, mask=visible[None, None])
            yield g

    def _run(
        self, z: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None = None
    ) -> Tensor:
        """Return the block output for `z (B, n, D)` at `positions (n,)`; `mask (1, 1, n, keys)`."""
        rotations = self.target.get_decoder().rotary_emb(z, positions[None])
        return self.block(
            z, attention_mask=mask, position_embeddings=rotations, past_key_values=cache
        )


def unit(x: Tensor) -> Tensor:
    """Return `x` scaled to a mean square of 1 along the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


# --- drafting ---


class JumpDrafter(HeadsDrafter):
    """Drafts with a `JumpNet`: one pass over the target's new states, then one per further level.

    In a chain, a pass processes only the newest draft token; in a tree, it recomputes all nodes so
    far. In the next round, the target's states overwrite the KV cache entries of draft tokens.
    """

    def __init__(self, target: Any, net: Any) -> None:
        super().__init__(target, net, states=target.watch_layers(net.config.layers))
        lm_head = nn.Linear(*net.shared_lm_head.shape[::-1], bias=False)
        lm_head.weight = nn.Parameter(net.shared_lm_head, requires_grad=False)
        network = with_layers(net.target, [net.block], norm=net.norm, lm_head=lm_head)
        self._block = Decoder(network, target.caps.n_ctx, rows=1)
        # cached steps of the target's states: step t reads state t and token t + 1
        self._n_read = 0

    def start(self, tokens: Sequence[int]) -> None:
        super().start(tokens)
        self._n_read = 0

    def close(self) -> None:
        self._states.close()

    def _logits(self, tokens: Sequence[int]) -> Logits:
        net = self.heads
        n = len(tokens) - 1
        n_read = min(self._n_read, n - 1)
        z = net.first_input(self._states[n_read:n], torch.tensor(tokens[n_read + 1 :]))
        first = self._block.decode(z, n_read, keep=1)
        self._n_read = n
        outputs: dict[tuple[int, ...], Tensor] = {(): first.pre_norm[-1]}  # of the block, by path
        inputs = []

        def step(head: int, paths: Sequence[Sequence[int]]) -> Tensor:
            if not head:
                return first.logits.float()
            level = [tuple(path) for path in paths]
            newest = torch.stack([outputs[path[:-1]] for path in level])
            z = net.next_input(newest, torch.tensor([path[-1] for path in level]))
            if self._plan is None:
                decoded = self._block.decode(z, n + head - 1, keep=1)
            else:
                inputs.append(z)
                nodes = {path: node for node, path in enumerate([*outputs, *level], COMMITTED)}
                tree = Tree(tuple(nodes[path[:-1]] for path in nodes if path))
                decoded = self._block.decode(torch.cat(inputs), n, keep=len(z), tree=tree)
            outputs.update(zip(level, decoded.pre_norm[-len(z) :].unbind(), strict=True))
            return decoded.logits.float()

        return step


check_jump = partial(check_heads, schema=JumpConfig)
"""Check the options of `jump_drafter` before a model is opened. Raises InputError."""


def jump_drafter(
    target: Any,
    *,
    kinds: Sequence[str] = KINDS,
    **options: Any,
) -> HeadsDrafter:
    """Return a drafter with a trained `JumpNet` for a torch target; `options` as `heads_drafter`.

    Raises InputError for another engine and if there is no drafter, HeadsMismatch for weights of
    another model.
    """
    read_layers("jump", target)  # rejects other engines and families

    def build(config: JumpConfig, _: Backbone, token_map: Tensor) -> JumpNet:
        return JumpNet(config, target.network, token_map)

    return heads_drafter(
        target, kinds=kinds, drafter_of=JumpDrafter, build=build, schema=JumpConfig, **options
    )


eagle_drafter = partial(jump_drafter, kinds=("eagle",))
"""Return a drafter with the shipped EAGLE-3-like network trained on the target."""


def read_layers(kind: str, model: Any) -> dict[str, Any]:
    """Return the `JumpConfig` fields for the layers that a kind of drafter reads and copies.

    Raises InputError for engines without hidden states, and for unsupported model families.
    """
    if not hasattr(model, "watch_layers"):
        raise InputError(
            f"{model.caps.engine} does not expose layer states of {model.name}: "
            "open it with ?backend=hf"
        )
    if type(model.network) not in FAMILIES:
        families = ", ".join(family.__name__ for family in FAMILIES)
        raise InputError(f"got {type(model.network).__name__}, expected one of {families}")
    n_layers = len(model.network.get_decoder().layers)
    first, middle, inner, high = tapped_layers(n_layers)
    if kind == "eagle":
        return {"layers": (first, middle, high)}
    return {"layers": (inner, n_layers - 1), "copied": n_layers - 1}
