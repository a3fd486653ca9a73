"""A backbone with periodic greedy text (circles of tokens), so that the right drafts are known."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from specnb.lm.hf.model import HfModel
from specnb.medusa import data, nets
from specnb.medusa.nets import Backbone, Heads, HeadsConfig
from specnb.medusa.recipe import Recipe
from specnb.medusa.train import train
from specnb.records import Generation, Round
from tests.tiny_models import VOCAB, torch_model

PERIOD = 6
FIRST = 4
CIRCLES = (VOCAB - FIRST) // PERIOD
HIDDEN = 64
NEXT = torch.arange(VOCAB)
for token in range(FIRST, VOCAB):
    start = FIRST + (token - FIRST) // PERIOD * PERIOD
    NEXT[token] = start + (token - start + 1) % PERIOD


def backbone_model(*, dtype: torch.dtype = torch.float32) -> HfModel:
    """Return a llama whose layers add nothing; lm_head maps a token to the next of its circle."""
    net = torch_model("llama", hidden_size=HIDDEN, tie_word_embeddings=False)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in net.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # a norm that differs from itself applied twice, and states that are small without it
        net.model.norm.weight.copy_(torch.exp(0.9 * torch.randn(HIDDEN, generator=draw)))
        net.model.embed_tokens.weight.copy_(0.3 * torch.randn(VOCAB, HIDDEN, generator=draw))
        net.lm_head.weight[NEXT] = 2 * F.normalize(
            net.model.norm(net.model.embed_tokens.weight), dim=-1
        )
    return HfModel(net.to(dtype), None, name="periodic")


def prompts(n: int = CIRCLES) -> list[list[int]]:
    """Return one prompt in each of the first `n` circles."""
    return [[FIRST + PERIOD * i + j % PERIOD for j in range(i, i + 4)] for i in range(n)]


def trained(
    target: HfModel, token_map: torch.Tensor | None = None, *, normed=True, **changed: object
) -> tuple[Heads, list[dict]]:
    """Return heads trained on states that are `normed` or not, and the log of their training."""
    heads = new_heads(target, token_map, **changed)
    norm = heads.norm
    vars(heads)["norm"] = norm if normed else nn.Identity()
    recipe = Recipe(150, batch_size=64, peak_lr=2e-2, warmup=1, eta_min=2e-3, head_weight=1.0)
    with TemporaryDirectory() as folder:
        write_text(target, Path(folder), length=16)
        log = train(heads, recipe, Path(folder), Path(folder))
    vars(heads)["norm"] = norm
    return heads.eval().requires_grad_(False), log


def new_heads(
    target: HfModel | Backbone, token_map: torch.Tensor | None = None, **changed: object
) -> Heads:
    """Return untrained heads on any tiny model, three by default."""
    backbone = target if isinstance(target, Backbone) else Backbone.of(target.network)
    sizes = {name: getattr(backbone, name) for name in ("hidden_size", "vocab_size")}
    sizes |= {"n_heads": 3, "draft_vocab": 0 if token_map is None else len(token_map)}
    config = HeadsConfig(backbone=backbone.digest, **(sizes | changed))
    return nets.new_heads(config, backbone, token_map, 0)


def random_heads(
    target: HfModel | Backbone,
    token_map: torch.Tensor | None = None,
    *,
    spread=0.5,
    seed=1,
    **changed: object,
) -> Heads:
    """Return heads with normally distributed weights; each predicts different tokens."""
    heads = new_heads(target, token_map, **changed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.normal_(0, spread, generator=draw)
    return heads.eval().requires_grad_(False)


def text_of(rounds: list[tuple[int, int, int]], second: float = 0.0) -> Generation:
    """Return a text of rounds (drafted, accepted, tokens).

    Drafting takes `second` per round, and verifying three times that.
    """
    n, of_rounds = 0, []
    for i, (k, accepted, length) in enumerate(rounds):
        tokens = tuple(range(n, n + length))
        of_rounds.append(
            Round(i, k, accepted, (0,) * k, tokens, (), second, 3 * second, 0.0, 0.0, 0.0, k + 1)
        )
        n += length
    return Generation(
        prompt_ids=(1,),
        token_ids=tuple(range(n)),
        rounds=tuple(of_rounds),
        wall_s=1.0,
        stop_reason="length",
    )


def write_text(target: HfModel, folder: Path, *, length: int) -> None:
    """Write a training text: rows along every circle from every place, and their states."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = [torch.arange(FIRST, VOCAB)]
    for _ in range(1, length):
        columns.append(NEXT[columns[-1]])
    rows = torch.stack(columns, dim=1).numpy().astype(np.int32)
    for split in data.SPLITS:
        states = data.forward_tapped(target.network, rows)[1]
        data.save_rows(
            folder / f"{split}-00000.npz", data.TextRows(rows, np.ones(rows.shape, bool)), states
        )
