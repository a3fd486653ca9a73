"""Hidden states before lm_head: available for the last pass, StateError for other positions."""

from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specnb.errors import EngineError, InputError, StateError
from specnb.lm.hf.hidden import final_norm, pre_norm_states
from specnb.lm.hf.model import HfModel
from tests.laws.trees import random_tree
from tests.lm.networks import IDS, network
from tests.tiny_models import torch_model

SLOW = [
    ("gemma3_text", "crop"),
    ("mamba", "snapshots"),
    ("qwen3_5_text", "fused"),
    ("qwen3_5_text", "checkpoint"),
]
STRATEGIES = [
    ("llama", "crop", "auto"),
    ("llama", "crop", "transformers"),
    ("qwen3_5_text", "replay", "auto"),
    ("mamba", "recompute", "auto"),
    *(pytest.param(*pair, "auto", marks=pytest.mark.slow) for pair in SLOW),
]


@cache
def opened(kind, strategy, decoder):
    return HfModel(network(kind), None, name=kind, rollback=strategy, decoder=decoder)


reference = cache(network)


def held(model, text):
    """Return the positions with states, after a comparison with transformers without a cache."""
    assert model.n_past == len(text)
    hidden = model.watch_hidden()
    found = []
    if text:
        net = reference(model.name)
        with torch.inference_mode(), pre_norm_states(net) as before:
            out = net(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        expected = [before[0][0], out.hidden_states[-1][0], out.logits[0]]
    for position in range(-2, len(text) + 3):
        try:
            pre, post = hidden.at(position)
        except StateError as error:
            assert f"for position {position} of {model.name}" in str(error)
            continue
        found.append(position)
        with torch.inference_mode():
            logits = model.network.get_output_embeddings()(final_norm(model.network)(pre[None]))[0]
        for got, rows in zip((pre, post, logits), expected, strict=True):
            torch.testing.assert_close(got, rows[position], atol=2e-3 * float(rows.std()), rtol=0)
    return found


actions = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.integers(1, 9), st.integers(0, 9)),
        st.tuples(st.just("rewind"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("tree"), st.integers(1, 8), st.integers(0, 1000)),
    ),
    max_size=6,
)


@pytest.mark.parametrize(("kind", "strategy", "decoder"), STRATEGIES)
@given(actions=actions)
def test_states_of_the_last_pass_are_available_and_no_others(kind, strategy, decoder, actions):
    """After a repeated pass, the states are those of that pass (for mamba, of its last token)."""
    model = opened(kind, strategy, decoder)
    text = []
    known = []
    model.reset()
    assert held(model, text) == []
    for action, n, extra in actions:
        if len(text) + n > len(IDS):
            continue
        new = IDS[len(text) :][:n]
        if action == "forward":
            model.forward(new, min(extra, n))
            known = [*range(len(text), len(text) + n)]
            text = text + new
        elif action == "tree" and model.caps.trees:
            tree = random_tree(n, extra)
            model.forward_tree(new, tree)
            with pytest.raises(StateError, match="call keep_path"):
                model.watch_hidden().at(len(text))
            path = tree.path(extra % (n + 1) - 1)
            model.keep_path(path)
            known = [*range(len(text), len(text) + len(path))]
            text = text + [new[node] for node in path]
        elif action == "rewind":
            model.rewind(min(n, len(text)))
            text = text[: max(0, len(text) - n)]
            known = [position for position in known if position < len(text)]
        found = held(model, text)
        if strategy == "crop":
            assert found == known
        elif action == "forward":
            assert {*found} >= {*(known if kind != "mamba" else known[-1:])}


def test_the_hook_is_added_once_ignores_other_passes_and_is_removed():
    model = HfModel(network("llama"), None, name="llama", decoder="transformers")
    norm = final_norm(model.network)
    hidden = model.watch_hidden()
    assert model.watch_hidden() is hidden and len(norm._forward_hooks) == 1
    model.forward(IDS[4:6])
    with model.network.lm_head.register_forward_hook(lambda *_: 1 / 0), pytest.raises(EngineError):
        model.forward(IDS[20:23])
    model.forward(IDS[4:6])
    model.locate_nonfinite(IDS[20:30])
    assert held(model, [*IDS[4:6], *IDS[4:6]]) == [2, 3]
    model.close()
    assert not norm._forward_hooks
    for use in (partial(hidden.at, 3), model.watch_hidden):
        with pytest.raises(InputError, match="llama was closed"):
            use()


def test_a_model_with_an_ambiguous_final_norm_is_rejected():
    with pytest.raises(InputError, match="2 norms"):
        HfModel(torch_model("bloom"), None, name="bloom").watch_hidden()
