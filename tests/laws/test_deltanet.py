"""Laws of Gated DeltaNet: chunks, replays and trees are the recurrence; a rewind gives back the state, window included.

Two judges: `by_hand`, the paper's formula for one path in float64 and plain numpy, and the kernels and the layer of
transformers. Faults that such code has had elsewhere are planted, and the same laws must see them.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from specnb.errors import InputError
from specnb.lm.tree import Tree
from specnb.ssm import conv, delta_tree
from specnb.ssm.conv import commit_window, tree_conv
from specnb.ssm.delta_tree import Factors, chunked, commit, verify
from specnb.ssm.deltanet import Raw, normalise, recurrent, unit
from tests.laws.trees import TREES, random_tree

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SEEN = 1e-3
"""A planted fault must move the result at least that far."""
SMALL = {"batch": 2, "key_heads": 2, "value_heads": 4, "dk": 8, "dv": 6}
QWEN = {"batch": 1, "key_heads": 1, "value_heads": 2, "dk": 128, "dv": 128}


def layer(length, *, seed=0, dtype=torch.float64, gate=0.5, batch=2, key_heads=2, value_heads=4, dk=8, dv=6):
    """q, k as projected, v, g, beta and a state, all random; `gate` scales the gates' logarithms."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    q, k = normal(batch, length, key_heads, dk), normal(batch, length, key_heads, dk)
    v, g = normal(batch, length, value_heads, dv), -gate * normal(batch, length, value_heads).abs()
    beta = normal(batch, length, value_heads).sigmoid()
    return [x.to(dtype) for x in (q, k, v, g, beta)], normal(batch, value_heads, dk, dv).to(dtype)


def block(length, **options):
    """As `layer`, q and k as the rule reads them."""
    (q, k, *rest), state = layer(length, **options)
    return [*normalise(q, k, state.dtype), *rest], state


def by_hand(tokens, state, path):
    """Output of the last token of the path and the state after it, as the paper writes them: S is dv x dk."""
    q, k, v, g, beta = (x.double().numpy() for x in tokens)
    S = state.double().numpy().transpose(0, 1, 3, 2).copy()
    o = np.zeros((*S.shape[:3],))
    for b, h in np.ndindex(*S.shape[:2]):
        key_head = h // (v.shape[2] // k.shape[2])
        for t in path:
            k_t = k[b, t, key_head]
            S[b, h] = np.exp(g[b, t, h]) * S[b, h] @ (np.eye(len(k_t)) - beta[b, t, h] * np.outer(k_t, k_t))
            S[b, h] += beta[b, t, h] * np.outer(v[b, t, h], k_t)
            o[b, h] = S[b, h] @ q[b, t, key_head]
    return o, S.transpose(0, 1, 3, 2)


def apart(got, wanted):
    """Largest difference, as a share of the largest entry (at least 1); nan if either holds one."""
    wanted = torch.as_tensor(np.asarray(wanted), dtype=torch.float64)
    return float((got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)) if wanted.numel() else 0.0


def rows(tokens, at):
    return [x[:, at] for x in tokens]


def raw(tokens):
    return Raw(*tokens[1:])


# the recurrence


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_recurrence_is_the_formula_of_the_paper(dtype):
    tokens, state = block(12, dtype=dtype)
    made = recurrent(*tokens, state, every_state=True)
    for t in range(12):
        output, after = by_hand(tokens, state, range(t + 1))
        assert apart(made.outputs[:, t], output) < TOLERANCE[dtype]
        assert apart(made.states[:, t], after) < TOLERANCE[dtype]
    assert torch.equal(made.state, made.states[:, -1])
    from_zeros = recurrent(*tokens)
    assert apart(from_zeros.state, by_hand(tokens, torch.zeros_like(state), range(12))[1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("sizes", [SMALL, QWEN, {**SMALL, "key_heads": 4}], ids=["small", "qwen", "one head each"])
@pytest.mark.parametrize("length", [1, 5, 70])
def test_transformers_kernels_agree_the_recurrent_one_bit_for_bit(length, sizes):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    (q, k, v, g, beta), state = layer(length, dtype=torch.float32, **sizes)
    tokens = [*normalise(q, k), v, g, beta]
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    made = recurrent(*tokens, state)
    outputs, after = theirs.torch_recurrent_gated_delta_rule(q, k, v, g, beta, **options)
    assert torch.equal(made.outputs, outputs)
    assert torch.equal(made.state, after)
    in_chunks, chunk_state = chunked(*tokens, state)
    outputs, after = theirs.torch_chunk_gated_delta_rule(q, k, v, g, beta, **options)
    for got, wanted in [(made.outputs, outputs), (made.state, after), (in_chunks, outputs), (chunk_state, after)]:
        assert apart(got, wanted) < 1e-5


@given(length=st.integers(0, 40), chunk=st.integers(1, 41), seed=st.integers(0, 99), gate=st.sampled_from([0, 0.5, 9]))
@settings(max_examples=40, deadline=None)
def test_chunks_of_any_size_are_the_recurrence(length, chunk, seed, gate):
    for dtype, tolerance in TOLERANCE.items():
        tokens, state = block(length, seed=seed, gate=gate, dtype=dtype)
        outputs, after = chunked(*tokens, state, chunk=chunk)
        wanted = recurrent(*tokens, state)
        assert outputs.shape == wanted.outputs.shape
        assert apart(outputs, wanted.outputs) < tolerance
        assert apart(after, wanted.state) < tolerance


def test_padding_changes_nothing():
    tokens, state = block(11)
    padded = [torch.cat([x, torch.zeros_like(x[:, :5])], dim=1) for x in tokens]
    for rule in (recurrent, chunked):
        short, long = rule(*tokens, state), rule(*padded, state)
        assert apart(long[0][:, :11], short[0]) < 1e-15
        assert apart(long[1], short[1]) < 1e-15


# replay


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_replay_gives_the_state_after_every_accepted_length(dtype):
    """The raw record bit for bit, equal also to decoding one token a call; the factors up to rounding."""
    tokens, state = block(17, dtype=dtype)
    states = recurrent(*tokens, state, every_state=True).states
    factors = verify(*tokens, state, Tree.chain(17)).factors
    single = state
    for n in range(18):
        wanted = states[:, n - 1] if n else state
        assert torch.equal(single, wanted)
        assert torch.equal(raw(tokens).replay(state, n), wanted)
        assert apart(factors.replay(state, n), wanted) < TOLERANCE[dtype]
        single = recurrent(*rows(tokens, slice(n, n + 1)), single).state if n < 17 else single


@pytest.mark.parametrize("wrong", [-1, 1])
def test_replay_law_sees_an_accepted_length_off_by_one(wrong):
    tokens, state = block(9)
    wanted = recurrent(*rows(tokens, slice(0, 4)), state).state
    factors = verify(*tokens, state, Tree.chain(9)).factors
    for record in (raw(tokens), factors):
        assert apart(record.replay(state, 4), wanted) < 1e-12
        assert apart(record.replay(state, 4 + wrong), wanted) > SEEN


def test_replay_gives_the_bits_of_single_steps_on_the_views_that_a_layer_hands_out():
    """q, k and v are slices of the convolution's (B, C, T): the layout depends on T, and must not reach the sums."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    (q, k, v, g, beta), state = layer(5, dtype=torch.float32, **(QWEN | {"key_heads": 8, "value_heads": 16}))
    laid_out = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1).mT.contiguous().mT
    q, k, v = (x.unflatten(-1, (-1, 128)) for x in laid_out.split([1024, 1024, 2048], dim=-1))
    stepped = state
    for t in range(5):
        step = [x[:, t : t + 1] for x in (q, k, v, g, beta)]
        options = {"initial_state": stepped, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        _, stepped = torch_recurrent_gated_delta_rule(*step, **options)
    assert k.stride(-1) == 5
    assert torch.equal(Raw(unit(k), v, g, beta).replay(state, 5), stepped)


def test_a_bfloat16_record_replays_the_bits_of_its_model_in_half_the_bytes():
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    (q, k, v, g, beta), state = layer(6, dtype=torch.float32, **QWEN)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    _, wanted = torch_recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    kept = Raw(k, v, g, beta)
    assert torch.equal(replace(kept, k=unit(kept.k)).replay(state, 6), wanted)
    assert kept.nbytes == 6 * ((128 + 2 * 128) * 2 + 2 * 2 * 4)


def drift(dtype, *, rounds, gate, forget=0):
    """Rounds of one block verified and a part of it committed, each by its own copy of the state: (raw, factors) apart.

    Zero drafts, none accepted, all accepted, and random paths of random trees take turns; the judge is fed the
    committed tokens one by one. `forget` plants a commit that lacks that many tokens.
    """
    rng = np.random.default_rng(3)
    pool, start = block(400, batch=1, dtype=dtype, gate=gate, seed=3)
    by_raw = by_factors = judge = start
    worst = np.zeros(2)
    for number in range(rounds):
        tree = [Tree(()), Tree.chain(5), Tree.chain(5), random_tree(6, number)][number % 4]
        node = [-1, -1, 4, int(rng.integers(-1, 6))][number % 4]
        tokens = rows(pool, rng.integers(0, 400, len(tree)))
        path = tree.path(node)
        factors = verify(*tokens, by_factors, tree).factors
        by_raw = commit(by_raw, raw(tokens), tree, node)
        by_factors = factors.take(path).replay(by_factors, max(0, len(path) - forget))
        for i in path:
            judge = recurrent(*rows(tokens, slice(i, i + 1)), judge).state
        worst = np.maximum(worst, [apart(by_raw, judge), apart(by_factors, judge)])
    return worst


@pytest.mark.parametrize("gate", [0.0, 0.5])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_thousand_rounds_of_commits_do_not_drift(dtype, gate):
    """Also with gates of 1: then nothing fades, and errors have the whole run to add up."""
    by_raw, by_factors = drift(dtype, rounds=1000, gate=gate)
    assert by_raw == 0
    assert by_factors < TOLERANCE[dtype]


def test_drift_law_sees_a_commit_that_lacks_a_token():
    assert drift(torch.float64, rounds=8, gate=0.5, forget=1)[1] > SEEN


# trees


def tree_error(tree, dtype=torch.float64, gate=0.5, *, tokens=None, state=None, **sizes):
    """Worst output and worst committed state (raw, factors) over all nodes, against each path alone by hand."""
    if tokens is None:
        tokens, state = block(len(tree), dtype=dtype, gate=gate, **sizes)
    outputs, factors = verify(*tokens, state, tree)
    worst = np.zeros(3)
    for node in range(len(tree)):
        output, after = by_hand(tokens, state, tree.path(node))
        states = (commit(state, record, tree, node) for record in (raw(tokens), factors))
        worst = np.maximum(worst, [apart(outputs[:, node], output), *(apart(s, after) for s in states)])
    return worst


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_every_node_gets_what_its_path_alone_would_give_it(tree, dtype):
    assert (tree_error(tree, dtype, batch=1) < TOLERANCE[dtype]).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_trees_hold_at_the_widths_of_qwen3_next(dtype):
    assert (tree_error(random_tree(16, 7), dtype, **QWEN) < TOLERANCE[dtype]).all()


@given(data=st.data(), n_nodes=st.integers(1, 12), gate=st.sampled_from([0.0, 0.1, 3.0, 200.0]))
@settings(max_examples=40, deadline=None)
def test_any_tree_is_its_paths(data, n_nodes, gate):
    tree = Tree([data.draw(st.integers(-1, node - 1)) for node in range(n_nodes)])
    assert (tree_error(tree, gate=gate, batch=1) < 1e-12).all()


def test_serial_raw_commit_along_a_path_gives_the_bits_of_its_tokens_alone():
    tree = TREES["random 1"]
    tokens, state = block(len(tree), dtype=torch.float32)
    for node in range(len(tree)):
        alone = recurrent(*rows(tokens, tree.path(node)), state).state
        assert torch.equal(commit(state, raw(tokens), tree, node), alone)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("closed", [-1e3, -3e38, -torch.inf])
def test_a_gate_that_forgets_everything_harms_nobody(closed, dtype):
    """In some nodes and heads only: elsewhere the digits of ordinary gates must survive, without inf or nan."""
    for name in ("random 0", "4-ary", "chain"):
        tokens, state = block(len(TREES[name]), batch=1, dtype=dtype)
        tokens[3][:, ::3, ::2] = closed
        assert (tree_error(TREES[name], tokens=tokens, state=state) < TOLERANCE[dtype]).all()
        assert apart(chunked(*tokens, state)[1], recurrent(*tokens, state).state) < TOLERANCE[dtype]


def differences_of_running_sums(g, seen, forbid=-torch.inf):
    sums = g @ seen.to(g.dtype).mT
    return (sums[..., None] - sums[..., None, :]).masked_fill(~seen, forbid).exp(), sums.exp()[..., None]


def masked_after_the_exponential(g, seen):
    sums = g @ seen.to(g.dtype).mT
    return (sums[..., None] - sums[..., None, :]).exp() * seen, sums.exp()[..., None]


def own_gate_only(g, seen):
    return (g[..., None] * seen.tril(-1)).masked_fill(~seen, -torch.inf).exp(), g.exp()[..., None]


def from_the_parent_only(g, seen):
    return true_fades(g, seen)[0], g.exp()[..., None]


def the_writers_gate_too(g, seen):
    pairs, start = true_fades(g, seen)
    return pairs * g.exp()[..., None, :], start


def siblings_are_ancestors(g, seen):
    return true_fades(g, torch.ones_like(seen).tril())


true_fades = delta_tree._fades


@pytest.mark.parametrize("fault", [own_gate_only, from_the_parent_only, the_writers_gate_too, siblings_are_ancestors])
def test_tree_law_sees_planted_faults_of_the_decay(fault, monkeypatch):
    monkeypatch.setattr(delta_tree, "_fades", fault)
    assert tree_error(TREES["random 0"], batch=1)[0] > SEEN
    assert tree_error(TREES["random 0"], batch=1)[2] > SEEN


def test_tree_law_sees_the_tree_run_as_one_sequence(monkeypatch):
    """The mask forgotten: right on a chain, which has no siblings, wrong wherever there are some."""
    monkeypatch.setattr(Tree, "seen", property(lambda tree: torch.ones(len(tree), len(tree)).tril().bool()))
    assert (tree_error(TREES["chain"]) < 1e-12).all()
    assert tree_error(TREES["star"])[0] > SEEN


def test_gate_law_sees_exponents_formed_for_nodes_that_are_no_ancestors(monkeypatch):
    """e^(a_i - a_j) of a sibling behind a closed gate is inf, and inf times a mask of 0 is nan."""
    tokens, state = block(16, batch=1, dtype=torch.float32)
    tokens[3][:, 3::2] = -1e3
    assert (tree_error(TREES["star"], tokens=tokens, state=state) < 1e-5).all()
    monkeypatch.setattr(delta_tree, "_fades", masked_after_the_exponential)
    assert not torch.isfinite(verify(*tokens, state, TREES["star"]).outputs).all()


def test_gate_law_sees_digits_lost_in_differences_of_running_sums(monkeypatch):
    tokens, state = block(16, batch=1, dtype=torch.float32, gate=0.01)
    tokens[3][:, 0] = -3e4
    assert (tree_error(TREES["chain"], tokens=tokens, state=state) < 1e-5).all()
    monkeypatch.setattr(delta_tree, "_fades", differences_of_running_sums)
    assert tree_error(TREES["chain"], tokens=tokens, state=state)[0] > 1e-4


# the convolution and its window


def columns(tree, *, kernel=4, width=3, dtype=torch.float64, channels=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (2, channels, len(tree)), (2, channels, width), (channels, kernel), (channels,)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def conv_by_hand(x, window, weight, bias, path):
    """The convolution at the end of a path and the window after it, from all columns laid side by side."""
    x, window, weight, bias = (part.double().numpy() for part in (x, window, weight, bias))
    line = np.concatenate([window, x[..., path]], axis=-1)
    kernel = weight.shape[-1]
    return (line[..., line.shape[-1] - kernel :] * weight).sum(-1) + bias, line[..., len(path) :]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("kernel", "width"), [(4, 3), (4, 4), (3, 3), (2, 1), (1, 0), (1, 2)])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_every_node_is_convolved_over_its_own_path(tree, kernel, width, dtype):
    x, window, weight, bias = parts = columns(tree, kernel=kernel, width=width, dtype=dtype)
    made = tree_conv(*parts, tree)
    for node in range(len(tree)):
        wanted, after = conv_by_hand(*parts, tree.path(node))
        assert apart(made[..., node], wanted) < TOLERANCE[dtype]
        assert torch.equal(commit_window(window, x, tree, node).double(), torch.from_numpy(after))
    assert torch.equal(commit_window(window, x, tree, -1), window)
    assert apart(tree_conv(x, window, weight, None, tree), made.double() - bias.double()[:, None]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_on_a_chain_it_is_the_cached_convolution_of_transformers(dtype):
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, causal_conv1d_update

    tree = Tree.chain(9)
    x, window, weight, bias = parts = columns(tree, width=4, dtype=dtype)
    made = tree_conv(*parts, tree)
    cached = window.clone()
    steps = torch.cat([causal_conv1d_update(x[..., t : t + 1], cached, weight, bias) for t in range(9)], dim=-1)
    whole = causal_conv1d_fn(torch.cat([window, x], dim=-1), weight, bias)[..., 4:]
    tolerance = TOLERANCE.get(dtype, 0.01)
    assert apart(made, steps.double()) < tolerance
    assert apart(made, whole.double()) < tolerance
    assert torch.equal(commit_window(window, x, tree, 8), cached)


def test_conv_law_sees_a_window_forgotten_and_one_left_behind():
    tree = Tree.chain(4)
    x, window, weight, bias = columns(tree)
    later, *_ = columns(tree, seed=1)
    wanted = tree_conv(later, commit_window(window, x, tree, 1), weight, bias, tree)
    for stale in (torch.zeros_like(window), window, commit_window(window, x, tree, 2), x[..., :3]):
        got = tree_conv(later, stale, weight, bias, tree)
        assert all(apart(got[..., i], wanted[..., i]) > SEEN for i in range(3))
        assert apart(got[..., 3], wanted[..., 3]) == 0, "the fourth token reads drafts only: a late test would miss it"


def test_conv_law_sees_neighbours_read_instead_of_ancestors(monkeypatch):
    tree = TREES["root and star"]
    x, window, weight, bias = columns(tree)
    wanted = tree_conv(x, window, weight, bias, tree)
    monkeypatch.setattr(conv, "_taps", lambda t, kernel, width: true_taps(Tree.chain(len(t)), kernel, width))
    assert apart(tree_conv(x, window, weight, bias, tree)[..., 2:], wanted[..., 2:]) > SEEN


true_taps = conv._taps


# a layer of transformers


@torch.no_grad()
def test_a_layer_of_transformers_run_path_by_path_is_the_tree():
    """Convolution, lengths, rule and both states at once: outputs at every node, caches after every node."""
    from transformers import DynamicCache, Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    }
    config = Qwen3_5TextConfig(hidden_size=24, num_hidden_layers=1, layer_types=["linear_attention"], **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = Qwen3_5GatedDeltaNet(config, layer_idx=0).eval()
        for parameter in module.parameters():
            parameter.normal_(0, 0.5) if parameter.dim() > 1 else None
        prompt, tree = torch.randn(1, 7, 24), random_tree(14, 11)
        drafted = torch.randn(1, 14, 24)
    cache = DynamicCache(config=config)
    module(prompt, cache_params=cache)
    window, state = (copy.deepcopy(x[0]) for x in (cache.layers[0].conv_states, cache.layers[0].recurrent_states))

    projected = module.in_proj_qkv(drafted).mT
    mixed = functional.silu(tree_conv(projected, window, module.conv1d.weight.squeeze(1), module.conv1d.bias, tree)).mT
    q, k, v = mixed.split([16, 16, 24], dim=-1)
    g = -module.A_log.exp() * functional.softplus(module.in_proj_a(drafted) + module.dt_bias)
    tokens = [*normalise(q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8))), v.unflatten(-1, (4, 6)), g]
    tokens.append(module.in_proj_b(drafted).sigmoid())
    outputs, factors = verify(*tokens, state, tree)
    gated = module.norm(outputs.reshape(-1, 6), module.in_proj_z(drafted).reshape(-1, 6))
    made = module.out_proj(gated.reshape(1, 14, 24))

    for node in range(14):
        own = copy.deepcopy(cache)
        for i in tree.path(node):
            wanted = module(drafted[:, i : i + 1], cache_params=own)
        assert apart(made[:, node], wanted[:, 0]) < 1e-5
        for record in (raw(tokens), factors):
            assert apart(commit(state, record, tree, node), own.layers[0].recurrent_states[0]) < 1e-5
        assert apart(commit_window(window, projected, tree, node), own.layers[0].conv_states[0]) < 1e-5
    assert float(state.abs().max()) > 0.1, "a state of zeros would agree with anything"


# what is refused, and what is left alone


def test_arguments_stay_as_they_are_and_no_state_is_shared():
    """A cache is overwritten in place with what comes back; a shared state would rewrite its own snapshot."""
    tree = Tree.chain(5)
    tokens, state = block(5, dtype=torch.float32)
    before = [x.clone() for x in (*tokens, state)]
    none = rows(tokens, slice(0, 0))
    factors = verify(*tokens, state, tree).factors
    made = [
        recurrent(*tokens, state).state,
        recurrent(*none, state, every_state=True).state,
        chunked(*tokens, state)[1],
        chunked(*none, state)[1],
        *(commit(state, record, tree, node) for record in (raw(tokens), factors) for node in (-1, 3)),
    ]
    x, window, weight, _ = columns(tree)
    made += [commit_window(window, x, tree, -1), tree_conv(x, window, weight[:, :1], None, tree)]
    for result in made:
        result.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(before, (*tokens, state), strict=True))
    assert not (window == 7.0).any()
    assert not (x == 7.0).any()


def test_a_block_of_no_tokens_is_no_event():
    tokens, state = block(0, dtype=torch.float32)
    made = recurrent(*tokens, state, every_state=True)
    outputs, factors = verify(*tokens, state, Tree(()))
    assert made.outputs.shape == outputs.shape == chunked(*tokens, state)[0].shape == (2, 0, 4, 6)
    assert made.states.shape == (2, 0, 4, 8, 6)
    assert torch.equal(made.state, state)
    assert torch.equal(factors.replay(state, 0), state)
    x, window, weight, bias = columns(Tree(()))
    assert tree_conv(x, window, weight, bias, Tree(())).shape == (2, 5, 0)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((0,), r"parents\[0\] is 0"),
        ((-1, 1), r"parents\[1\] is 1.*earlier node"),
        ((-1, 2, 1), r"parents\[1\] is 2"),
        ((-2,), r"parents\[0\] is -2"),
        ((-1, 0.5), "whole numbers"),
        (None, "whole numbers"),
        ("ab", "whole numbers"),
    ],
)
def test_parents_that_make_no_tree_are_refused(parents, message):
    with pytest.raises(InputError, match=message):
        Tree(parents)


def test_parents_may_come_as_a_tensor_and_trees_name_their_nodes():
    tree = Tree(torch.tensor([-1, 0, 0, 2]))
    assert tree == Tree([-1, 0, 0, 2])
    assert (tree.path(3), tree.path(-1)) == ([0, 2, 3], [])
    for node in (4, -2):
        with pytest.raises(InputError, match=f"0 to 3.*{node}"):
            tree.path(node)


def spoiled(index, change):
    """A block one of whose tensors (q, k, v, g, beta, state) was changed."""
    tokens, state = block(4, dtype=torch.float32)
    parts = [*tokens, state]
    parts[index] = change(parts[index])
    return parts


BAD = {
    "q of other width": (0, lambda x: x[..., 1:], r"k must be \(B, T, HK, dk\).*q \(2, 4, 2, 7\)"),
    "k of other length": (1, lambda x: x[:, 1:], r"k must be"),
    "v of other batch": (2, lambda x: x[:1], r"v must be"),
    "v of other heads": (2, lambda x: x[:, :, 1:], r"must be"),
    "g with an axis more": (3, lambda x: x[..., None], r"g must be \(B, T, HV\)"),
    "beta of whole numbers": (4, lambda x: x.long(), "beta must hold floats, got torch.int64"),
    "state transposed": (5, lambda x: x.mT, r"state must be \(B, HV, dk, dv\)"),
    "state in bfloat16": (5, lambda x: x.bfloat16(), "float32 or float64, got torch.bfloat16"),
}


@pytest.mark.parametrize(("index", "change", "message"), BAD.values(), ids=BAD.keys())
def test_tensors_that_do_not_fit_are_named(index, change, message):
    parts = spoiled(index, change)
    for rule in (recurrent, chunked):
        with pytest.raises(InputError, match=message):
            rule(*parts)
    with pytest.raises(InputError):
        verify(*parts, Tree.chain(4))
    if index:
        with pytest.raises(InputError):
            Raw(*parts[1:5]).replay(parts[5], 2)


def test_heads_that_do_not_group_lengths_and_nodes_that_are_not_there_are_refused():
    tokens, state = block(4, key_heads=3)
    with pytest.raises(InputError, match="multiple of key heads, got 4 and 3"):
        recurrent(*tokens, state)
    tokens, state = block(4)
    with pytest.raises(InputError, match="at least 1 token, got 0"):
        chunked(*tokens, state, chunk=0)
    factors = verify(*tokens, state, Tree.chain(4)).factors
    for record in (raw(tokens), factors, Factors(factors.k, factors.u, factors.g)):
        for n in (5, -1):
            with pytest.raises(InputError, match=f"4 tokens.*got {n}"):
                record.replay(state, n)
        with pytest.raises(InputError, match="3 nodes"):
            commit(state, record, Tree.chain(3), 1)
        with pytest.raises(InputError, match="0 to 3"):
            commit(state, record, Tree.chain(4), 4)
    with pytest.raises(InputError, match="5 nodes"):
        verify(*tokens, state, Tree.chain(5))


def test_columns_and_filters_that_do_not_fit_are_refused():
    tree = Tree.chain(4)
    x, window, weight, bias = columns(tree)
    for args, message in [
        ((x[:1], window, weight, bias), "alike"),
        ((x[..., 1:], window, weight, bias), "4 nodes"),
        ((x, window[..., 1:], weight, bias), "2 columns of the window"),
        ((x, window, weight[1:], bias), "5 channels"),
        ((x, window, weight[:, None], bias), "channels, kernel"),
        ((x, window, weight[:, :0], bias), "kernel 1 to 4"),
        ((x, window, weight, bias[1:]), r"bias must be \(5,\), one a channel, got \(4,\)"),
    ]:
        with pytest.raises(InputError, match=message):
            tree_conv(*args, tree)
    with pytest.raises(InputError, match="0 to 3"):
        commit_window(window, x, tree, 4)
