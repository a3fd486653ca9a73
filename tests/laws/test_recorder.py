"""The law of the shipped replay: it restores the state that the papers' formulas give.

The reference is numpy in float64, token by token, with the formulas of the two papers: Mamba-2
(arXiv 2405.21060) and Gated DeltaNet (arXiv 2412.06464). `test_rollback` tests that blocks, single
steps and rewinds agree in whole models; here the replay is compared with the formulas.
"""

import numpy as np
import pytest
import torch

from specnb.chapters.delta_rule import unit
from specnb.lm.hf import record as hf_record
from specnb.lm.hf.engine import recurrent_layers
from tests.laws.test_deltanet import by_hand
from tests.tiny_models import VOCAB, hf_model

CONFIGS = {"mamba2": {"n_groups": 2, "chunk_size": 4}, "qwen3_5_text": {"linear_value_head_dim": 6}}
IDS = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 20)]
PROMPT, K = 5, 6
PIECES = {"one block": [K], "steps": [1] * K, "mixed": [1, 4, 1]}
CLOSE = 1e-5


def arrays(*tensors):
    return [tensor.detach().double().numpy() for tensor in tensors]


def scanned(state, inputs, options):
    """h <- exp(dt A) h + dt x B^T per head; state (batch, heads, head_dim, state_size)."""
    A, bias = arrays(options["A"], options["dt_bias"])
    (h,), (x, dt, B) = arrays(state), arrays(*inputs)
    dt = np.clip(np.logaddexp(0, dt + bias), *options["dt_limit"])
    B = np.repeat(B, x.shape[2] // B.shape[2], axis=2)
    for t in range(x.shape[1]):
        h = (
            np.exp(dt[:, t] * A)[..., None, None] * h
            + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        )
    return h


def delta_ruled(state, inputs, _options):
    """Return the state after the paper's delta rule, with keys of unit length."""
    k, v, g, beta = inputs
    return by_hand([unit(k), unit(k), v, g, beta], state, range(k.shape[1]))[1]


FORMULAS = {"mamba2": scanned, "qwen3_5_text": delta_ruled}


@pytest.fixture(scope="module", params=FORMULAS)
def model(request):
    family = request.param
    return hf_model(family, config=CONFIGS[family], rollback="replay")


def replay_error(model, pieces, accepted):
    """Return the largest relative error of a layer's state after a replay of `accepted` tokens."""
    recorder, at = model.rollback._recorder, PROMPT
    model.reset()
    model.forward(IDS[:PROMPT])
    for n in pieces:
        model.forward(IDS[at : at + n])
        at += n
    expected = {}
    for index, calls in recorder._inputs.items():
        base = recorder.base.layers[index][1][0]
        options = recorder._options[index]
        inputs = hf_record._first(calls, K)
        assert inputs[0].shape[1] == K and float(base.abs().max()) > 0.01, (
            "a state of zeros would agree with anything"
        )
        expected[index] = FORMULAS[model.name](base, [x[:, :accepted] for x in inputs], options)
    model.rewind(K - accepted)
    states = {
        index: layer.recurrent_states[0] for index, layer in recurrent_layers(model._engine.cache)
    }
    assert expected.keys() == states.keys()
    return max(
        float(np.abs(states[i].double().numpy() - wanted).max() / np.abs(wanted).max())
        for i, wanted in expected.items()
    )


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_the_shipped_replay_equals_the_formula_for_all_accepted_lengths(model, pieces):
    for accepted in range(K + 1):
        assert replay_error(model, pieces, accepted) < CLOSE


def reversed_pieces(calls, n):
    return type(calls[0])(
        *(torch.cat(parts[::-1], dim=1)[:, :n] for parts in zip(*calls, strict=True))
    )


def test_the_law_detects_tokens_replayed_in_another_order(model, monkeypatch):
    right = hf_record._first
    monkeypatch.setattr(
        hf_record,
        "_first",
        lambda calls, n: right(calls, n) if n == K else reversed_pieces(calls, n),
    )
    assert replay_error(model, PIECES["steps"], 3) > 1e-3
