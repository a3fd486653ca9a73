"""Laws of trees in a Gated DeltaNet: each node has the output of its path alone.

The code is `chapters.delta_rule`. It is compared with `by_hand`, the paper's formula for one path
in float64 numpy, and with the kernel of transformers. Known faults of such code are planted, and
the laws must detect them.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specnb.chapters import delta_rule
from specnb.chapters.delta_rule import recurrent, unit, verify_tree
from specnb.lm.tree import Tree
from tests.laws.trees import TREES, random_tree

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SEEN = 1e-3
"""Minimum change of the result that a planted fault must cause."""
QWEN = {"key_heads": 1, "value_heads": 2, "dk": 128, "dv": 128}


def block(
    length,
    *,
    seed=0,
    dtype=torch.float64,
    gate=0.5,
    key_heads=2,
    value_heads=4,
    dk=8,
    dv=6,
    raw=False,
):
    """Random q, k, v, g, beta and state; `gate` scales the log gates, `raw` skips normalization."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    q = normal(1, length, key_heads, dk)
    k = normal(1, length, key_heads, dk)
    v = normal(1, length, value_heads, dv)
    g = -gate * normal(1, length, value_heads).abs()
    beta = normal(1, length, value_heads).sigmoid()
    state = normal(1, value_heads, dk, dv)
    q, k = (x.to(dtype) for x in (q, k))
    q, k = (q, k) if raw else (unit(q) / dk**0.5, unit(k))
    return [q, k, *(x.to(dtype) for x in (v, g, beta))], state.to(dtype)


def by_hand(tokens, state, path):
    """Return the last token's output and the state after it, as in the paper: S is dv x dk."""
    q, k, v, g, beta = (x.double().numpy() for x in tokens)
    S = state.double().numpy().transpose(0, 1, 3, 2).copy()
    o = np.zeros(S.shape[:3])
    for b, h in np.ndindex(*S.shape[:2]):
        key_head = h // (v.shape[2] // k.shape[2])
        for t in path:
            k_t = k[b, t, key_head]
            S[b, h] = (
                np.exp(g[b, t, h])
                * S[b, h]
                @ (np.eye(len(k_t)) - beta[b, t, h] * np.outer(k_t, k_t))
            )
            S[b, h] += beta[b, t, h] * np.outer(v[b, t, h], k_t)
            o[b, h] = S[b, h] @ q[b, t, key_head]
    return o, S.transpose(0, 1, 3, 2)


def apart(actual, wanted):
    """Return the largest difference relative to the largest entry (at least 1), or NaN."""
    wanted = torch.as_tensor(np.asarray(wanted), dtype=torch.float64)
    return float((actual.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


def tree_error(tree, tokens=None, state=None, **options):
    """Return the largest error over all nodes, against `by_hand` for each path."""
    if tokens is None:
        tokens, state = block(len(tree), **options)
    outputs = verify_tree(*tokens, state, tree)
    alone = [by_hand(tokens, state, tree.path(node))[0] for node in range(len(tree))]
    # NaN propagates
    return np.max([apart(outputs[:, node], output) for node, output in enumerate(alone)])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_recurrence_equals_the_formula_of_the_paper(dtype):
    tokens, state = block(12, dtype=dtype)
    outputs, after = recurrent(*tokens, state)
    for t in range(12):
        assert apart(outputs[:, t], by_hand(tokens, state, range(t + 1))[0]) < TOLERANCE[dtype]
    assert apart(after, by_hand(tokens, state, range(12))[1]) < TOLERANCE[dtype]


def test_recurrence_is_bit_identical_to_transformers_kernel():
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    (q, k, *rest), state = block(70, dtype=torch.float32, raw=True, **QWEN)
    expected = torch_recurrent_gated_delta_rule(
        q, k, *rest, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    actual = recurrent(unit(q) / q.shape[-1] ** 0.5, unit(k), *rest, state)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_each_node_has_the_output_of_its_path_alone(tree, dtype):
    assert tree_error(tree, dtype=dtype) < TOLERANCE[dtype]


def test_a_tree_equals_its_paths_at_the_head_sizes_of_qwen3_next():
    assert tree_error(random_tree(16, 7), dtype=torch.float32, **QWEN) < TOLERANCE[torch.float32]


@given(data=st.data(), n_nodes=st.integers(1, 12), gate=st.sampled_from([0.0, 0.1, 3.0, 200.0]))
def test_random_trees_equal_their_paths(data, n_nodes, gate):
    tree = Tree([data.draw(st.integers(-1, node - 1)) for node in range(n_nodes)])
    assert tree_error(tree, gate=gate) < 1e-12


@pytest.mark.parametrize("closed", [-1e3, -torch.inf])
def test_a_closed_gate_does_not_affect_other_nodes(closed):
    """Gates are closed in some nodes and heads; all outputs stay precise, without inf or NaN."""
    for name in ("random 0", "4-ary", "chain"):
        tokens, state = block(len(TREES[name]), dtype=torch.float32)
        tokens[3][:, ::3, ::2] = closed
        assert tree_error(TREES[name], tokens, state) < TOLERANCE[torch.float32]


true_fades = delta_rule._fades


def own_gate_only(g, seen):
    return (g[..., None] * seen.tril(-1)).masked_fill(~seen, -torch.inf).exp(), g.exp()[..., None]


def from_the_parent_only(g, seen):
    return true_fades(g, seen)[0], g.exp()[..., None]


def the_writers_gate_too(g, seen):
    pairs, start = true_fades(g, seen)
    return pairs * g.exp()[..., None, :], start


def siblings_are_ancestors(g, seen):
    return true_fades(g, torch.ones_like(seen).tril())


def masked_after_the_exponential(g, seen):
    sums = g @ seen.to(g.dtype).mT
    return (sums[..., None] - sums[..., None, :]).exp() * seen, sums.exp()[..., None]


def differences_of_running_sums(g, seen):
    sums = g @ seen.to(g.dtype).mT
    return (sums[..., None] - sums[..., None, :]).masked_fill(~seen, -torch.inf).exp(), sums.exp()[
        ..., None
    ]


@pytest.mark.parametrize(
    "fault", [own_gate_only, from_the_parent_only, the_writers_gate_too, siblings_are_ancestors]
)
def test_the_tree_law_detects_planted_faults_of_the_decay(fault, monkeypatch):
    monkeypatch.setattr(delta_rule, "_fades", fault)
    assert tree_error(TREES["random 0"]) > SEEN


def test_the_tree_law_detects_a_tree_processed_as_one_sequence(monkeypatch):
    """Without the mask, only a chain is correct, because it has no siblings."""
    monkeypatch.setattr(Tree, "seen", property(lambda tree: np.tri(len(tree), dtype=bool)))
    assert tree_error(TREES["chain"]) < 1e-12
    assert tree_error(TREES["star"]) > SEEN


@pytest.mark.parametrize(
    ("fault", "tree", "gate", "closed", "nodes"),
    [
        # e^(a_i - a_j) of a sibling after a closed gate is inf, and inf times a mask of 0 is NaN
        (masked_after_the_exponential, "star", 0.5, -1e3, slice(3, None, 2)),
        # in differences of running sums, small gates after a closed one lose their digits
        (differences_of_running_sums, "chain", 0.01, -3e4, slice(0, 1)),
    ],
)
def test_the_gate_law_detects_planted_faults(fault, tree, gate, closed, nodes, monkeypatch):
    tokens, state = block(16, dtype=torch.float32, gate=gate)
    tokens[3][:, nodes] = closed
    assert tree_error(TREES[tree], tokens, state) < 1e-5
    monkeypatch.setattr(delta_rule, "_fades", fault)
    assert not tree_error(TREES[tree], tokens, state) < 1e-4
