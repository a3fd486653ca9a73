"""Laws of the diagonal SSM: a tree is its paths, replay gives the same bits, one cached state a round is enough.

The judge is `by_hand`: the recurrence of one path in float64 and plain numpy. Faults that such code has had elsewhere
are planted one by one, and the same laws must see them.
"""

import copy

import numpy as np
import pytest
import torch

from specnb.errors import InputError
from specnb.lm.tree import Tree
from specnb.ssm import mamba
from specnb.ssm.mamba import Activations, mamba1, multi_step, recurrent, replay, silence, time_step, tree_scan
from tests.book.kernel_calls import record_calls
from tests.laws.trees import TREES, random_tree
from tests.tiny_models import torch_model

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
KINDS = ("mamba2", "mamba1")
HEADS, HEAD_DIM, GROUPS, COLUMNS = 6, 4, 2, 5


def layer(kind, *, seed=0, length=16, batch=2, dtype=torch.float64, strength=1.0):
    """A random state, block, A, C and D; `strength` scales the time steps, and with them the decays."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    dt = strength * time_step(normal(batch, length, HEADS))
    if kind == "mamba1":
        block = mamba1(normal(batch, length, HEADS), dt, normal(batch, length, COLUMNS))
        A, C = -torch.exp(normal(HEADS, COLUMNS)), normal(batch, length, 1, COLUMNS)
    else:
        grouped = batch, length, GROUPS, COLUMNS
        block = Activations(normal(batch, length, HEADS, HEAD_DIM), dt, normal(*grouped))
        A, C = -torch.exp(normal(HEADS)), normal(*grouped)
    state = normal(batch, HEADS, block.x.shape[-1], COLUMNS)
    return state, block, A, C, normal(HEADS)


def by_hand(state, block, A, C, D, path):
    """Output of the last token of the path, and the state after it: float64, one step after another."""
    h, x, dt, B, A, C, D = (tensor.double().numpy() for tensor in (state, *block, A, C, D))
    repeat = HEADS // B.shape[2]
    y = None
    for t in path:
        B_t, C_t = (np.repeat(part[:, t], repeat, axis=1) for part in (B, C))
        decay = np.exp(dt[:, t, :, None] * A.reshape(HEADS, -1))
        h = decay[:, :, None, :] * h + (dt[:, t, :, None] * x[:, t])[..., None] * B_t[:, :, None, :]
        y = np.einsum("bhpn,bhn->bhp", h, C_t) + D[:, None] * x[:, t]
    return y, h


def apart(got, wanted):
    """Largest difference, as a share of the largest entry (at least 1)."""
    wanted = torch.as_tensor(wanted)
    return float((got.double() - wanted).abs().max() / max(1.0, float(wanted.abs().max())))


def tree_error(kind, tree, dtype=torch.float64, **options):
    made = layer(kind, length=len(tree), dtype=dtype, **options)
    state, block, A, C, D = made
    wanted = np.stack([by_hand(*made, tree.path(node))[0] for node in range(len(tree))], axis=1)
    return apart(tree_scan(state, block, A, C, tree, D), wanted)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrence_equals_the_sum_by_hand(kind, dtype):
    state, block, A, C, D = made = layer(kind, dtype=dtype)
    y, states = recurrent(state, block, A, C, D, every_state=True)
    for t in range(16):
        wanted_y, wanted_state = by_hand(*made, range(t + 1))
        assert apart(y[:, t], wanted_y) < TOLERANCE[dtype]
        assert apart(states[:, t], wanted_state) < TOLERANCE[dtype]
    assert torch.equal(recurrent(state, block, A, C, D)[1], states[:, -1])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_tree_equals_each_of_its_paths_alone(kind, tree, dtype):
    assert tree_error(kind, tree, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("strength", [1e-6, 30.0, 3000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tree_holds_where_nothing_and_where_everything_decays(kind, strength):
    """At 3,000 a node decays by e^-10,000 and more: the inverse of any accumulated decay overflows."""
    assert tree_error(kind, TREES["4-ary"], torch.float32, strength=strength) < TOLERANCE[torch.float32]
    assert tree_error(kind, TREES["chain"], torch.float32, strength=strength) < TOLERANCE[torch.float32]


def after_one_strong_decay(kind):
    """A chain whose first token forgets everything (e^-10,000s) and whose others hardly decay."""
    state, block, A, C, D = layer(kind, dtype=torch.float32)
    dt = torch.cat([torch.full_like(block.dt[:, :1], 30_000.0), 0.3 * block.dt[:, 1:]], dim=1)
    block = block._replace(x=torch.cat([block.x[:, :1] / 30_000.0, block.x[:, 1:]], dim=1), dt=dt)
    wanted = [by_hand(state, block, A, C, D, range(t + 1))[0] for t in range(16)]
    return apart(tree_scan(state, block, A, C, Tree.chain(16), D), np.stack(wanted, axis=1))


@pytest.mark.parametrize("kind", KINDS)
def test_digits_survive_one_strong_decay(kind, monkeypatch):
    assert after_one_strong_decay(kind) < TOLERANCE[torch.float32]
    monkeypatch.setattr(mamba, "_path_times", differences_of_running_sums)
    assert after_one_strong_decay(kind) > 10 * TOLERANCE[torch.float32]


def differences_of_running_sums(seen, dt):
    since = torch.einsum("im,bmh->bih", seen.to(dt.dtype), dt)
    return since, (since.transpose(1, 2)[..., None] - since.transpose(1, 2)[..., None, :]) * seen


def decay_of_own_token_only(seen, dt):
    below = torch.tril(seen.to(dt.dtype), diagonal=-1)
    return dt, dt.transpose(1, 2)[..., None] * below


def decay_counts_the_writer_too(seen, dt):
    since, between = true_path_times(seen, dt)
    return since, between + dt.transpose(1, 2)[..., None, :] * seen


def decay_of_the_past_misses_the_node(seen, dt):
    since, between = true_path_times(seen, dt)
    return since - dt, between


def siblings_count_as_ancestors(seen, dt):
    return true_path_times(torch.tril(torch.ones_like(seen)), dt)


true_path_times = mamba._path_times


@pytest.mark.parametrize(
    "fault",
    [
        decay_of_own_token_only,
        decay_counts_the_writer_too,
        decay_of_the_past_misses_the_node,
        siblings_count_as_ancestors,
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_tree_law_sees_planted_faults_of_the_decay(kind, fault, monkeypatch):
    monkeypatch.setattr(mamba, "_path_times", fault)
    assert tree_error(kind, TREES["random 0"]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_tree_law_sees_a_sibling_that_leaks(kind, monkeypatch):
    """The packed tree run as one causal sequence: what a mask forgotten in one kernel does."""
    causal = property(lambda tree: torch.tril(torch.ones(len(tree), len(tree), dtype=torch.bool)))
    monkeypatch.setattr(Tree, "seen", causal)
    assert tree_error(kind, TREES["chain"]) < 1e-12, "a chain has no siblings: the fault does not show there"
    assert tree_error(kind, TREES["random 0"]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_replay_gives_the_bits_of_the_plain_run_for_every_accepted_length(kind, dtype):
    state, block, A, C, D = layer(kind, dtype=dtype)
    before, (_, states) = state.clone(), recurrent(state, block, A, C, D, every_state=True)
    for n in range(17):
        got = replay(state, block, A, range(n))
        assert torch.equal(got, states[:, n - 1] if n else state)
        assert got.data_ptr() != state.data_ptr()
    assert torch.equal(state, before)


@pytest.mark.parametrize("kind", KINDS)
def test_replay_along_a_path_gives_the_bits_of_its_tokens_alone_and_of_identity_updates(kind):
    tree = TREES["random 1"]
    state, block, A, C, D = layer(kind, length=len(tree), dtype=torch.float32)
    for node in range(len(tree)):
        path = tree.path(node)
        got = replay(state, block, A, path)
        assert torch.equal(got, recurrent(state, block.take(path), A, C[:, path], D)[1])
        accepted = torch.zeros(2, len(tree), dtype=torch.bool)
        accepted[:, path] = True
        assert torch.equal(got, recurrent(state, silence(block, accepted), A, C, D)[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rejected_time_steps_are_identities_whatever_they_hold(dtype):
    raw, bias = torch.tensor([[[3.0, -2.0], [50.0, 80.0]]], dtype=dtype), torch.tensor([9.0, -9.0], dtype=dtype)
    accepted = torch.tensor([[True, False]])
    dt = time_step(raw, bias, accepted=accepted)
    assert torch.equal(dt[:, 1], torch.zeros_like(dt[:, 1]))
    assert torch.equal(dt[:, 0], time_step(raw, bias)[:, 0])
    state = torch.randn(1, 2, 3, 4)
    block = Activations(torch.randn(1, 2, 2, 3), dt, torch.randn(1, 2, 1, 4))
    A = torch.tensor([-1.0, -16.0])
    assert torch.equal(replay(state, block, A, [1]), state)
    block.x[:, 1], block.B[:, 1, 0, 0] = float("inf"), float("nan")
    assert torch.equal(replay(state, silence(block, accepted), A, [1]), state)
    assert not torch.isfinite(replay(state, block, A, [1])).all(), "the time step alone does not silence inf and NaN"


def test_a_time_step_limit_would_make_rejected_slots_decay():
    """Zamba2 and Nemotron-H clamp dt from below: softplus(-1e4) = 0 is lifted to 0.001 again."""
    raw, accepted = torch.zeros(1, 1, 2), torch.tensor([[False]])
    with pytest.raises(InputError, match=r"0\.001.*replay"):
        time_step(raw, limit=(0.001, float("inf")), accepted=accepted)
    assert time_step(raw - 100, limit=(0.001, 0.1)).eq(0.001).all()
    assert time_step(raw + 100, limit=(0.0, 0.1)).eq(0.1).all()


def rounds_apart(kind, *, rounds, shift=0, seed=0):
    """Rounds of 4 drafts with one cached state: worst output difference, and whether states kept their bits.

    Alternates zero drafts, none accepted, all accepted and random lengths; drafts that are rejected are garbage.
    `shift` plants an accepted length that is off by that much.
    """
    rng = np.random.default_rng(seed)
    pool, block, A, C, D = layer(kind, length=256, batch=1, dtype=torch.float32, seed=seed)
    state, truth = pool, pool
    cached, path, worst, same = block.take([]), [], 0.0, True
    for number in range(rounds):
        k = (4, 0, 4, 4)[number % 4]
        n_accepted = min(k, (0, 0, 4, int(rng.integers(5)))[number % 4])
        slots = rng.integers(256, size=k + 1)
        made = multi_step(state, cached, path, block.take(slots), A, C[:, slots], D)
        wanted, states = recurrent(truth, block.take(slots), A, C[:, slots], D, every_state=True)
        worst, same = max(worst, apart(made.y, wanted)), same and torch.equal(made.accepted_state, truth)
        truth = states[:, n_accepted].clone()
        state, cached, path = made.accepted_state, block.take(slots), range(max(0, n_accepted + 1 + shift))
    return worst, same


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_rounds_from_one_cached_state_stay_bit_for_bit(kind):
    worst, same = rounds_apart(kind, rounds=1000)
    assert same
    assert worst == 0.0


@pytest.mark.parametrize(("shift", "rounds"), [(-1, 8), (1, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_round_law_sees_a_replay_that_is_off_by_one(kind, shift, rounds):
    worst, same = rounds_apart(kind, rounds=rounds, shift=shift)
    assert not same
    assert worst > 1e-3


def test_a_replay_beyond_a_block_that_was_all_accepted_is_refused():
    with pytest.raises(InputError, match="every slot is in the block"):
        rounds_apart("mamba2", rounds=8, shift=1)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_random_trees_end_in_the_bits_of_one_plain_run(kind):
    rng = np.random.default_rng(0)
    start, pool, A, C, D = layer(kind, length=256, batch=1, dtype=torch.float32)
    state, committed, outputs = start, [], []
    for number in range(300):
        tree, slots = random_tree(6, number), rng.integers(256, size=6)
        y = tree_scan(state, pool.take(slots), A, C[:, slots], tree, D)
        path = tree.path(int(rng.integers(-1, 6)))
        state = replay(state, pool.take(slots), A, path)
        committed += [int(slots[node]) for node in path]
        outputs.append(y[:, path])
    plain, last = recurrent(start, pool.take(committed), A, C[:, committed], D)
    assert len(committed) > 300
    assert torch.equal(state, last)
    assert apart(torch.cat(outputs, dim=1), plain.double()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_multi_step_commits_a_path_of_a_tree_and_runs_on(kind):
    tree = TREES["random 2"]
    state, block, A, C, D = made = layer(kind, length=len(tree))
    path = tree.path(len(tree) - 1)
    new = [3, 1, 4]
    got = multi_step(state, block, path, block.take(new), A, C[:, new], D)
    for n in range(1, 4):
        assert apart(got.y[:, n - 1], by_hand(*made, path + new[:n])[0]) < 1e-12
    assert apart(got.accepted_state, by_hand(*made, path)[1]) < 1e-12
    assert apart(got.last_state, by_hand(*made, path + new)[1]) < 1e-12


BAD = {
    "heads of dt": (lambda s, b, A, C, D: (s, b._replace(dt=b.dt[..., 1:]), A, C, D), "dt has shape"),
    "columns of B": (lambda s, b, A, C, D: (s, b._replace(B=b.B[..., 1:]), A, C, D), "B has shape"),
    "length of C": (lambda s, b, A, C, D: (s, b, A, C[:, 1:], D), "C has shape"),
    "heads of A": (lambda s, b, A, C, D: (s, b, A[1:], C, D), "A has shape"),
    "heads of D": (lambda s, b, A, C, D: (s, b, A, C, D[1:]), "D has shape"),
    "batch of state": (lambda s, b, A, C, D: (s[1:], b, A, C, D), "x has shape"),
    "axes of state": (lambda s, b, A, C, D: (s[0], b, A, C, D), "four axes"),
    "groups": (lambda s, b, A, C, D: (s, b._replace(B=b.B.repeat(1, 1, 2, 1)), A, C, D), "groups must divide"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD.keys())
def test_shapes_that_do_not_belong_together_are_named(spoil, message):
    state, block, A, C, D = spoil(*layer("mamba2"))
    with pytest.raises(InputError, match=message):
        recurrent(state, block, A, C, D)
    with pytest.raises(InputError, match=message):
        tree_scan(state, block, A, C, Tree.chain(16), D)


@pytest.mark.parametrize("path", [[16], [-1], [2, 1], [1, 1], ["a"], [0.0]])
def test_paths_that_leave_the_block_or_run_backwards_are_refused(path):
    state, block, A, _, _ = layer("mamba2")
    with pytest.raises(InputError, match="path"):
        replay(state, block, A, path)


def test_a_tree_of_another_size_is_refused_and_an_empty_block_is_none():
    state, block, A, C, D = layer("mamba2")
    with pytest.raises(InputError, match="15 nodes for a block of 16"):
        tree_scan(state, block, A, C, Tree.chain(15), D)
    y, last = recurrent(state, block.take([]), A, C[:, :0], D)
    assert y.shape == (2, 0, HEADS, HEAD_DIM)
    assert torch.equal(last, state) and last.data_ptr() != state.data_ptr()


def test_a_record_is_counted_in_the_type_it_is_kept_in():
    _, block, _, _, _ = layer("mamba2", length=3, batch=1, dtype=torch.float32)
    block = block._replace(x=block.x.bfloat16(), B=block.B.bfloat16())
    assert block.nbytes == 3 * ((HEADS * HEAD_DIM + GROUPS * COLUMNS) * 2 + HEADS * 4)


MAMBA2 = {
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 16,
    "chunk_size": 4,
    "conv_kernel": 4,
    "expand": 2,
}


def as_block(given):
    """Mamba-2's arguments of one call: chunk scans have a length, single updates do not and repeat per channel."""
    x, dt, B, C = (given[name] for name in ("hidden_states", "dt", "B", "C"))
    A, D, bias = given["A"], given["D"], given["dt_bias"]
    if x.dim() == 3:
        x, dt, B, C = (tensor.unsqueeze(1) for tensor in (x, dt[..., 0], B, C))
        A, D, bias = A[:, 0, 0], D[:, 0], bias[:, 0]
    return Activations(x, time_step(dt, bias), B), A, C, D


@torch.no_grad()
def test_agrees_with_transformers_mamba2_in_blocks_and_in_single_steps(monkeypatch):
    from transformers import DynamicCache
    from transformers.models.mamba2 import modeling_mamba2

    model = torch_model("mamba2", num_hidden_layers=1, **MAMBA2).eval()
    chunks = record_calls(monkeypatch, modeling_mamba2, "mamba2_chunk_scan")
    steps = record_calls(monkeypatch, modeling_mamba2, "mamba2_selective_state_update")
    cache, state, ids = DynamicCache(config=model.config), torch.zeros(2, 8, 8, 16), torch.arange(28).reshape(2, 14)
    for piece in ids.split((7, 5, 1, 1), dim=1):
        model(piece, cache_params=cache)
        calls = chunks if piece.shape[1] > 1 else steps
        given, returned = calls[-1]
        block, A, C, D = as_block(given)
        y, state = recurrent(state, block, A, C, D)
        scanned = returned[0] if piece.shape[1] > 1 else returned.unsqueeze(1)
        assert apart(y, scanned) < 1e-5
        assert apart(state, cache.layers[0].recurrent_states[0]) < 1e-5
    assert (len(chunks), len(steps)) == (2, 2)
    assert float(state.abs().max()) > 0.1, "a state of zeros would agree with anything"


@torch.no_grad()
def test_tree_agrees_with_transformers_mamba2_run_path_by_path(monkeypatch):
    from transformers import DynamicCache
    from transformers.models.mamba2 import modeling_mamba2

    model = torch_model("mamba2", num_hidden_layers=1, **MAMBA2).eval()
    cache = DynamicCache(config=model.config)
    model(torch.arange(9)[None], cache_params=cache)
    steps = record_calls(monkeypatch, modeling_mamba2, "mamba2_selective_state_update")
    tree, ids = Tree((-1, 0, 0, 1, 1, 2, 5, -1, 7)), [11, 12, 13, 12, 14, 11, 15, 16, 12]
    nodes, ends = [], []
    for node in range(len(tree)):
        own = copy.deepcopy(cache)
        for token in tree.path(node):
            model(torch.tensor([[ids[token]]]), cache_params=own)
        nodes.append(steps[-1])
        ends.append(own.layers[0].recurrent_states[0])
    blocks = [as_block(given) for given, _ in nodes]
    block = Activations(*(torch.cat(parts, dim=1) for parts in zip(*(b[0] for b in blocks), strict=True)))
    _, A, _, D = blocks[0]
    C = torch.cat([b[2] for b in blocks], dim=1)
    state = cache.layers[0].recurrent_states[0]
    y = tree_scan(state, block, A, C, tree, D)
    for node, (_, returned) in enumerate(nodes):
        assert apart(y[:, node], returned) < 1e-5
        assert apart(replay(state, block, A, tree.path(node)), ends[node]) < 1e-6


@torch.no_grad()
def test_agrees_with_transformers_mamba1_in_prefill_and_in_single_steps(monkeypatch):
    from transformers import DynamicCache
    from transformers.models.mamba import modeling_mamba

    model = torch_model("mamba", num_hidden_layers=1, intermediate_size=64, state_size=16, time_step_rank=4).eval()
    scans = record_calls(monkeypatch, modeling_mamba, "mamba_selective_scan")
    steps = record_calls(monkeypatch, modeling_mamba, "mamba_selective_state_update")
    cache, state = DynamicCache(config=model.config), torch.zeros(1, 64, 1, 16)
    for piece in torch.arange(3, 13)[None].split((8, 1, 1), dim=1):
        model(piece, cache_params=cache)
        single = piece.shape[1] == 1
        given, returned = (steps if single else scans)[-1]
        x, dt, B, C = (given[name] for name in ("hidden_states", "dt", "B", "C"))
        flat = (lambda tensor: tensor.unsqueeze(1)) if single else (lambda tensor: tensor.transpose(1, 2))
        dt = time_step(flat(dt), given["dt_bias" if single else "delta_bias"])
        y, state = recurrent(state, mamba1(flat(x), dt, flat(B)), given["A"], flat(C).unsqueeze(2), given["D"])
        silu = torch.nn.functional.silu(flat(given["z"]))
        scanned = flat(returned if single else returned[0])
        assert apart(y.squeeze(-1) * silu, scanned) < 1e-5
        assert apart(state.squeeze(2), cache.layers[0].recurrent_states[0]) < 1e-5
    assert (len(scans), len(steps)) == (1, 2)
    assert float(state.abs().max()) > 0.1
