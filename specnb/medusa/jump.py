"""One block that drafts step after step: from states of the target's inner layers, then from what it said itself.

The step behind token t is z = S s_t + E e_t+1, where s_t is what some of the target's layers left at t and e the
embedding of the next token; then one block of attention and MLP with a cache of its own, g = block(z), read out by a
norm and the lm_head's rows of a draft vocabulary. The next step is z = O g + E e_t+2. States and embeddings enter with
a mean square of 1.

- `jump` starts the block as a copy of one of the target's own, and the maps by least squares: the copy is fed what the
  layers in front of it would have said. After economize's jump drafter, whose maps are learnt.
- `eagle` starts a fresh block and reads three layers (EAGLE-3, Li et al. 2503.01840).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specnb.errors import HeadsMismatch, InputError
from specnb.io import read_json, reading, validated
from specnb.lm.hf.decoder import FAMILIES, Decoder, with_layers
from specnb.lm.hf.hidden import final_norm
from specnb.lm.hf.int4 import dense_copy
from specnb.lm.tree import COMMITTED, Tree
from specnb.medusa.checkpoint import CONFIG_FILE, LAYOUTS, OWN, TRAINING_FILE, shipped
from specnb.medusa.data import tapped_layers
from specnb.medusa.drafter import CHAIN, HeadsDrafter, Logits, check_heads, fitting_checkpoint, plan_drafts
from specnb.medusa.nets import Backbone, DrafterConfig, frozen_copy

KINDS = ("jump", "eagle")


class JumpConfig(DrafterConfig):
    """The `config.json` of a `JumpNet`.

    `layers` are those whose outputs are read, from 0; `copied` that of the block's first weights, or None for a fresh
    one.
    """

    kind: Literal["jump", "eagle"] = "jump"
    layers: tuple[int, ...] = Field(min_length=1, max_length=4)
    copied: NonNegativeInt | None = None
    draft_vocab: PositiveInt


class JumpNet(nn.Module):
    """The drafter's weights over a target, whose embeddings and lm_head's rows are borrowed.

    Letters: B rows of T tokens, S starts of rounds among them, D hidden size, H query and G key/value heads of d.
    """

    token_map: Tensor
    target: Any  # a PreTrainedModel; its parts are Any, too
    target_norm: Any
    block: Any

    def __init__(self, config: JumpConfig, target: PreTrainedModel, token_map: Tensor) -> None:
        super().__init__()
        D, layers, norm = config.hidden_size, target.get_decoder().layers, final_norm(target)
        self.config = config
        self.from_states = nn.Linear(len(config.layers) * D, D, bias=False)  # S
        self.from_own, self.from_token = (nn.Linear(D, D, bias=False) for _ in range(2))  # O, E
        origin = layers[config.copied or 0]
        self.block = dense_copy(origin) if config.copied is not None else type(origin)(target.config, layer_idx=0)
        self.norm = frozen_copy(norm)
        self.register_buffer("token_map", token_map)
        self.requires_grad_(True).to(target.dtype)
        # borrowed: torch registers no plain tensor, and no module set so: they are not saved, trained or counted
        self.__dict__.update(target=target, target_norm=frozen_copy(norm))
        self.embeddings = target.get_input_embeddings().weight.detach()
        self.shared_lm_head = target.get_output_embeddings().weight.detach()[token_map]

    def full_ids(self, draft_ids: Tensor) -> Tensor:
        """Vocabulary ids of draft ids."""
        return self.token_map[draft_ids]

    def first_input(self, states: Tensor, ids: Tensor) -> Tensor:
        """z `(…, D)` of the target's states `(…, layers, D)` and the tokens behind them `(…)`."""
        return self.from_states(unit(states).flatten(-2)) + self.from_token(unit(self.embeddings[ids]))

    def next_input(self, g: Tensor, ids: Tensor) -> Tensor:
        """z `(…, D)` of the block's last output `(…, D)` and the tokens behind it `(…)`."""
        return self.from_own(unit(g)) + self.from_token(unit(self.embeddings[ids]))

    def logits(self, g: Tensor) -> Tensor:
        """Logits `(…, draft_vocab)` of the block's output `(…, D)`."""
        return F.linear(self.norm(g), self.shared_lm_head)

    @property
    def scaled_rates(self) -> tuple[list[Tensor], str]:
        """The weights of a copied block, and what a `Recipe` calls their share of the rate."""
        weights = [] if self.config.copied is None else self.block.parameters()
        return [weight.detach() for weight in weights], "copy_rate"

    def roll_out(self, states: Tensor, tokens: Tensor, starts: Tensor, n_steps: int) -> Iterator[Tensor]:
        """Yield g of each step: of the first behind all tokens but the last `(B, T - 1, D)`, then `(B, S, D)` each.

        `states (B, T, layers, D)`, `tokens (B, T)`; the step j of start t reads token t + j, and attends to the first
        steps up to t and to its own. Eagle's training-time test, from some positions only.
        """
        first = self.first_input(states[:, :-1], tokens[:, 1:])
        q, k, v = self._project(first, torch.arange(1, tokens.shape[1]))
        ordered = [x.transpose(1, 2) for x in (q, k, v)]
        attended = F.scaled_dot_product_attention(ordered[0], ordered[1], ordered[2], is_causal=True, enable_gqa=True)
        g = self._finish(first, attended.transpose(1, 2))
        yield g
        g = g[:, starts]
        hidden = torch.arange(k.shape[1]) > starts[:, None]  # (S, T - 1)
        own_k, own_v = [], []
        for j in range(2, n_steps + 1):
            places = starts + j
            z = self.next_input(g, tokens[:, places])
            q, new_k, new_v = self._project(z, places)
            own_k.append(new_k)
            own_v.append(new_v)
            q = q.unflatten(2, (k.shape[2], -1)) * q.shape[-1] ** -0.5  # (B, S, G, H / G, d)
            past = torch.einsum("bsgrd,btgd->bsgrt", q, k).masked_fill(hidden[:, None, None], float("-inf"))
            own = torch.einsum("bsgrd,bsigd->bsgri", q, torch.stack(own_k, 2))
            weights = torch.cat([past, own], -1).softmax(-1)
            attended = torch.einsum("bsgrt,btgd->bsgrd", weights[..., : k.shape[1]], v)
            attended = attended + torch.einsum("bsgri,bsigd->bsgrd", weights[..., k.shape[1] :], torch.stack(own_v, 2))
            g = self._finish(z, attended.flatten(2, 3))
            yield g

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `(B, n, H, d)`, keys and values `(B, n, G, d)` of `x (B, n, D)` at `positions (n,)`."""
        attention, h = self.block.self_attn, self.block.input_layernorm(x)
        q, k, v = (p(h).unflatten(-1, (-1, attention.head_dim)) for p in
                   (attention.q_proj, attention.k_proj, attention.v_proj))  # fmt: skip
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = self.target.get_decoder().rotary_emb(x, positions[None])
        return *apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), v

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output, of what its heads gathered, `(B, n, H, d)`."""
        x = x + self.block.self_attn.o_proj(attended.flatten(-2))
        return x + self.block.mlp(self.block.post_attention_layernorm(x))


def unit(x: Tensor) -> Tensor:
    """`x` with a mean square of 1 along the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


# --- drafting ---


class JumpDrafter(HeadsDrafter):
    """Drafts with a `JumpNet`: reads the states of what became true in one forward, then feeds itself.

    Of a chain only the newest draft is computed, of a tree all nodes again at each level. The entries that drafts left
    in its cache are overwritten with those of true states in the next round.
    """

    heads: Any
    target: Any

    def __init__(self, target: Any, net: Any) -> None:
        super().__init__(target, net, states=target.watch_layers(net.config.layers))
        lm_head = nn.Linear(*net.shared_lm_head.shape[::-1], bias=False)
        lm_head.weight = nn.Parameter(net.shared_lm_head, requires_grad=False)
        network = with_layers(net.target, [net.block], norm=net.norm, lm_head=lm_head)
        self._block = Decoder(network, target.caps.n_ctx, rows=1)
        self._n_read = 0  # steps in the cache that are those of true states: step t reads state t and token t + 1

    def start(self, tokens: Sequence[int]) -> None:
        super().start(tokens)
        self._n_read = 0

    def close(self) -> None:
        self._states.close()

    def _logits(self, tokens: Sequence[int]) -> Logits:
        net, n = self.heads, len(tokens) - 1
        n_read = min(self._n_read, n - 1)
        z = net.first_input(self._states[n_read:n], torch.tensor(tokens[n_read + 1 :]))
        first = self._block.decode(z, n_read, keep=1)
        self._n_read = n
        outputs: dict[tuple[int, ...], Tensor] = {(): first.pre_norm[-1]}  # the block's, behind each path
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


def open_jump(name_or_path: str | Path) -> tuple[Path, JumpConfig]:
    """Return the folder of a trained `JumpNet`, of a path or a shipped name, and its config. Raises InputError."""
    folder = shipped().get(str(name_or_path), Path(name_or_path))
    return folder, validated(JumpConfig, read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))


check_jump = partial(check_heads, read=open_jump)
"""Refuse what `jump_drafter` would, as far as it can be told before a model is opened. Raises InputError."""


def jump_drafter(
    target: Any, *, heads_checkpoint: str | Path | None = None, tree: str | int = CHAIN, kinds: Sequence[str] = KINDS
) -> JumpDrafter:  # fmt: skip
    """Draft for a torch target with a trained `JumpNet`: of a folder, a shipped name, or what was trained on it.

    `tree` is that of `drafter.heads_drafter`. Raises InputError for another engine and where there is none,
    HeadsMismatch for weights of another model.
    """
    read_layers("jump", target)  # for the refusal
    folder, config = open_jump(heads_checkpoint or fitting_checkpoint(target, kinds))
    if config.backbone != Backbone.of(target.network).digest:
        raise HeadsMismatch(f"{folder} was trained on {config.backbone_name}, whose weights are not this model's")
    with reading(folder):
        tensors = load_file(folder / LAYOUTS[OWN].file)
        tensors.pop("masks", None)  # empty ones, in files of older versions
        net = JumpNet(config, target.network, tensors["token_map"])
        net.load_state_dict(tensors)
    facts = folder / TRAINING_FILE
    training = read_json(facts) if facts.is_file() else {}
    drafter = JumpDrafter(target, net.eval())
    plan_drafts(drafter, tree, training)
    return drafter


eagle_drafter = partial(jump_drafter, kinds=("eagle",))
"""The shipped drafter of EAGLE-3's shape that was trained on the target."""


def read_layers(kind: str, model: Any) -> dict[str, Any]:
    """Return the layers that a drafter of that kind reads of a torch model, and the one that it copies."""
    if not hasattr(model, "watch_layers"):
        raise InputError(f"{model.caps.engine} shows no inner layers of {model.name}: open it with ?backend=hf")
    if type(model.network) not in FAMILIES:
        families = ", ".join(family.__name__ for family in FAMILIES)
        raise InputError(f"{type(model.network).__name__} has no block that drafts: give one of {families}")
    n_layers = len(model.network.get_decoder().layers)
    first, middle, inner, high = tapped_layers(n_layers)
    if kind == "eagle":
        return {"layers": (first, middle, high)}
    return {"layers": (inner, n_layers - 1), "copied": n_layers - 1}


def new_jump(config: JumpConfig, model: Any, token_map: Tensor, seed: int) -> JumpNet:
    """Return an untrained drafter for a torch model; its first weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return JumpNet(config, model.network, token_map)
