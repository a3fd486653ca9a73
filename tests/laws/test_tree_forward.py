"""The law of trees: a node equals a pass over its path, and a kept path equals plain decoding.

For the toy model and random torch models of several families, in our decoder, and in transformers
with two attention kernels. Planted faults are detected below.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaMLP

from specnb.errors import CapacityError, EngineError, InputError, StateError
from specnb.lm import probe, toy
from specnb.lm.base import TreeModel
from specnb.lm.hf import decoder
from specnb.lm.hf import engine as hf_engine
from specnb.lm.hf.engine import FIRST_ROOM, KeptPastLayer, tree_mask
from specnb.lm.hf.model import HfModel
from specnb.lm.hf.product import Product
from specnb.lm.tree import Tree
from tests.laws.faults import raising
from tests.laws.trees import random_tree
from tests.tiny_models import VOCAB, torch_model

FAMILIES = ("llama", "gpt2", "qwen3", "gpt_neox", "falcon", "deepseek_v3")
NAMES = (
    "toy",
    *(f"{family}, {attention}" for family, attention in product(FAMILIES, ("sdpa", "eager"))),
)
NAMES += ("llama, decoder", "qwen3, decoder")
IDS = [int(i) for i in np.random.default_rng(2).integers(3, VOCAB, 512)]
CLOSE = 2e-5
"""Relative error by float32 rounding between a tree and its paths; wrong positions cause 0.1."""


@cache
def made(name):
    """Return the model `name` of NAMES, opened once."""
    if name == "toy":
        return toy.ToyLM(toy.markov(VOCAB, order=4)._logits_of, toy.letters(VOCAB), n_ctx=64)
    return torch_lm(*name.split(", "))


def torch_lm(family="llama", attention="sdpa", *, n_ctx=64, dtype=torch.float32):
    net = torch_model(family, max_position_embeddings=n_ctx).to(dtype)
    own = attention == "decoder"
    if not own:
        net.set_attn_implementation(attention)
    return HfModel(
        net,
        None,
        name=f"{family}, {attention}",
        n_ctx=n_ctx,
        decoder="auto" if own else "transformers",
    )


def from_scratch(model, ids, rows=None):
    model.reset()
    return model.forward(ids, rows)


def apart(found, expected):
    """Return the largest relative difference of a row."""
    return float(
        (np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max()
    )


def off_by(model, past, tree):
    """Return the error of the nodes of `tree` after `past`, against passes over their paths."""
    nodes = IDS[-len(tree) :]
    found = in_tree(model, past, tree)
    return max(
        apart(found[[node]], from_scratch(model, [*past, *(nodes[i] for i in tree.path(node))], 1))
        for node in range(len(tree))
    )


def in_tree(model, past, tree):
    model.reset()
    if past:
        model.forward(past, 0)
    rows = model.forward_tree(IDS[-len(tree) :], tree)
    assert (
        rows.shape == (len(tree), VOCAB)
        and rows.dtype == np.float32
        and model.n_past == len(past) + len(tree)
    )
    return rows


def off_after(model, past, tree, kept):
    """Return the error in three more passes, against a model that processed only `kept`."""
    nodes = IDS[-len(tree) :]
    in_tree(model, past, tree)
    model.keep_path(kept)
    text = [*past, *(nodes[i] for i in kept)]
    assert model.n_past == len(text)
    found = [model.forward([9]), model.forward([4, 8]), model.forward_tree([5, 6], Tree((-1, -1)))]
    model.keep_path([1])
    found.append(model.forward([7]))
    expected = from_scratch(model, [*text, 9, 4, 8, 6, 7])[len(text) :]
    assert model.n_past == len(text) + 5
    other = from_scratch(model, [*text, 9, 4, 8, 5], 1)
    return apart(np.concatenate(found), np.concatenate([expected[:3], other, expected[3:]]))


trees = st.integers(1, 14).flatmap(
    lambda n: st.tuples(*(st.integers(-1, node - 1) for node in range(n))).map(Tree)
)


@given(tree=trees)
def test_paths_depths_and_mask_of_a_tree(tree):
    paths = {node: tree.path(node) for node in range(len(tree))}
    assert tree.depths == tuple(len(path) - 1 for path in paths.values())
    assert all(tree.seen[node].nonzero()[0].tolist() == path for node, path in paths.items())
    for node in range(-1, len(tree)):
        assert tree.children(node) == tuple(child for child in paths if tree.parents[child] == node)
    rooted = tree.rooted()
    assert rooted.parents[0] == -1 and rooted.children(-1) == (0,) and len(rooted) == len(tree) + 1
    assert all(rooted.path(node + 1) == [0, *(i + 1 for i in path)] for node, path in paths.items())
    with pytest.raises(ValueError, match="read-only"):
        tree.seen[0, 0] = False


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(tree=trees, held=st.integers(0, 30), data=st.data())
def test_a_node_equals_its_path_and_a_kept_path_equals_plain_decoding(name, tree, held, data):
    model = made(name)
    assert isinstance(model, TreeModel) and model.caps.trees and not model.caps.trees_reason
    assert off_by(model, IDS[:held], tree) < CLOSE
    kept = tree.path(data.draw(st.integers(-1, len(tree) - 1)))
    assert off_after(model, IDS[:held], tree, kept) < CLOSE


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_equals_a_forward_pass(name):
    model = made(name)
    from_scratch(model, IDS[:9], 0)
    expected = model.forward(IDS[-8:])
    np.testing.assert_array_equal(in_tree(model, IDS[:9], Tree.chain(8)), expected)
    beside = Tree((*Tree.chain(7).parents, -1))  # one more node, so that it needs the mask
    assert apart(in_tree(model, IDS[:9], beside)[:7], expected[:7]) < CLOSE


@pytest.mark.parametrize("attention", ["decoder", "sdpa", "eager"])
def test_long_trees_after_long_texts(attention):
    """Longer than the cache's first buffer, and than the chains that count as prefill."""
    model = torch_lm(attention=attention, n_ctx=512)
    for held, nodes in ((FIRST_ROOM - 5, 100), (20, 300), (0, 150)):
        tree = random_tree(nodes, held)
        path = tree.path(max(range(nodes), key=tree.depths.__getitem__))
        found = in_tree(model, IDS[:held], tree)[path]
        expected = from_scratch(model, [*IDS[:held], *(IDS[-nodes:][i] for i in path)], len(path))
        assert max(apart(found, expected), off_after(model, IDS[:held], tree, path)) < 5 * CLOSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_node_is_bit_identical_to_its_path_and_a_chain_to_single_steps(dtype, monkeypatch):
    """Also if the past ends near a multiple of the padded key length, and for many leaves."""
    model = torch_lm(attention="decoder", n_ctx=256, dtype=dtype)
    same = np.testing.assert_array_equal if model.caps.same_bits_up_to else lambda *_: None
    for held, nodes in ((0, 5), (9, 20), (61, 6), (60, 64), (125, 12)):
        tree = random_tree(nodes, held)
        ids = IDS[-nodes:]
        rows = in_tree(model, IDS[:held], tree)
        model.keep_path([])
        for leaf in range(nodes):
            path = tree.path(leaf)
            same(rows[path], model.forward([ids[node] for node in path]))
            model.rewind(len(path))
    # a chain needs no gather
    monkeypatch.setattr(decoder, "_paths", lambda n, tree: [(None, list(range(n)))])
    for held, length in ((20, 1), (20, 6), (61, 6)):
        from_scratch(model, IDS[:held], 0)
        steps = np.concatenate([model.forward([token]) for token in IDS[-length:]])
        same(in_tree(model, IDS[:held], Tree.chain(length)), steps)


# --- rejections and failures ----------------------------------------------------------------------


@pytest.fixture(params=["toy", "llama, decoder", "llama, sdpa"])
def model(request):
    model = made(request.param)
    from_scratch(model, IDS[:3])
    return model


def check_untouched(model):
    assert model.n_past == 3
    found = model.forward([8])
    assert apart(found, from_scratch(model, [*IDS[:3], 8], 1)) < CLOSE


@pytest.mark.parametrize(
    ("ids", "tree", "error", "message"),
    [
        ([5], Tree((-1, -1)), InputError, "got 1 ids for a tree of 2 nodes"),
        ([], Tree(()), InputError, "at least one token id"),
        ([5, VOCAB], Tree((-1, -1)), InputError, f"token id {VOCAB} is outside"),
        ([5] * 62, Tree((-1,) * 62), CapacityError, "holds 64 tokens: 3 and 62 more"),
    ],
)
def test_a_rejected_tree_changes_nothing(model, ids, tree, error, message):
    with pytest.raises(error, match=message):
        model.forward_tree(ids, tree)
    assert model.n_past == 3
    model.forward_tree([5] * 61, Tree((-1,) * 61))
    assert model.n_past == 64
    model.keep_path([60])
    model.rewind(1)
    check_untouched(model)


def test_an_unsettled_tree_blocks_all_other_calls(model):
    with pytest.raises(StateError, match="none to settle"):
        model.keep_path([])
    model.forward_tree([5, 6, 7], Tree((-1, 0, -1)))
    for use in (
        lambda: model.forward([5]),
        lambda: model.rewind(1),
        lambda: model.forward_tree([5], Tree((-1,))),
    ):
        with pytest.raises(StateError, match="3 nodes of a tree: call keep_path"):
            use()
    for nodes in ([1], [0, 2], [0, 0], [1, 0], [3], [-1]):
        with pytest.raises(InputError):
            model.keep_path(nodes)
    assert model.n_past == 6
    model.keep_path([])
    check_untouched(model)
    model.reset()
    model.forward_tree([5, 6], Tree((-1, -1)))
    from_scratch(model, IDS[:3])
    check_untouched(model)


@pytest.mark.parametrize(
    ("error", "seen"),
    [(RuntimeError("no memory"), EngineError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
@pytest.mark.parametrize(
    ("name", "owner", "method"),
    [
        ("llama, decoder", Product, "multiply"),
        ("llama, decoder", decoder.Decoder, "gather"),
        ("llama, sdpa", LlamaMLP, "forward"),
        ("llama, sdpa", KeptPastLayer, "gather"),
    ],
)
def test_a_failed_tree_restores_the_state(monkeypatch, name, owner, method, error, seen):
    """Either the forward pass fails, or `keep_path`."""
    model = made(name)
    from_scratch(model, IDS[:3])
    with monkeypatch.context() as patch, pytest.raises(seen):
        patch.setattr(owner, method, raising(error))
        model.forward_tree([5, 6], Tree((-1, -1)))
        model.keep_path([1])
    check_untouched(model)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("mistral", {}, "window of the past"),
        (
            "gpt_neo",
            {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "window_size": 8,
                "attention_types": [[["global", "local"], 1]],
            },
            "window of the past",
        ),
        ("bloom", {}, "index in the cache"),
        ("bart", {}, "index in the cache"),
        ("falcon", {"alibi": True}, "index in the cache"),
        ("mamba2", {}, "the rollback strategy of this model is replay"),
    ],
)
def test_models_without_exact_trees_report_the_reason(kind, config, why):
    model = HfModel(torch_model(kind, **config), None, name=kind)
    assert not model.caps.trees and why in model.caps.trees_reason
    with pytest.raises(InputError, match=f"{kind} cannot compute trees: .*{why}"):
        model.forward_tree([5, 6], Tree((-1, -1)))
    assert model.n_past == 0


# --- broken trees ---------------------------------------------------------------------------------


def one_off(gather):
    return lambda self, start, nodes: gather(self, start, [max(node - 1, 0) for node in nodes])


FAULTS = {
    "siblings are visible": (Tree, "seen", property(lambda tree: np.tri(len(tree), dtype=bool))),
    "index for depth": (Tree, "depths", property(lambda tree: tuple(range(len(tree))))),
    "boolean mask": (
        hf_engine,
        "tree_mask",
        lambda *args, **kwargs: tree_mask(*args, **kwargs) == 0,
    ),
    "one off": (KeptPastLayer, "gather", one_off(KeptPastLayer.gather)),
    "nothing gathered": (
        KeptPastLayer,
        "gather",
        lambda layer, start, nodes: layer.keep(start + len(nodes)),
    ),
    "paths in the order of nodes": (
        decoder,
        "_paths",
        lambda n, tree: [(torch.arange(n), list(range(n)))],
    ),
    "decoder is one off": (decoder.Decoder, "gather", one_off(decoder.Decoder.gather)),
}
"""Owner, name and replacement of each planted fault."""
BROKEN = {
    "llama, decoder": ("index for depth", "paths in the order of nodes", "decoder is one off"),
    "llama, sdpa": ("siblings are visible", "index for depth", "one off", "nothing gathered"),
    "llama, eager": ("siblings are visible", "index for depth", "boolean mask", "one off"),
}


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, faults in BROKEN.items() for fault in faults]
)
def test_a_planted_fault_is_detected_by_the_law_and_by_the_probe(name, fault, monkeypatch):
    model = made(name)
    tree = Tree((-1, -1, 0, 1, 1, 4))
    family, _, attention = name.partition(", ")
    model.reset()
    assert probe.probe_trees(model) == ""
    monkeypatch.setattr(*FAULTS[fault])
    wrong = max(off_by(model, IDS[:9], tree), off_after(model, IDS[:9], tree, tree.path(5)))
    assert wrong > 100 * CLOSE
    model.reset()
    assert "do not get the logits" in probe.probe_trees(model)
    assert (
        attention == "decoder"
        or "do not get the logits" in torch_lm(family, attention).caps.trees_reason
    )


def test_a_model_whose_trees_fail_opens_without_tree_support(monkeypatch):
    monkeypatch.setattr(hf_engine, "tree_mask", raising(TypeError("masks are made otherwise now")))
    model = torch_lm()
    model.forward(IDS[:3])
    assert not model.caps.trees
    with pytest.raises(InputError, match=r"cannot compute trees: a tree fails: .*made otherwise"):
        model.forward_tree(IDS[3:5], Tree((-1, -1)))
    assert model.n_past == 3 and model.unsettled is None
