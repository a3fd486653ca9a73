"""Training text: sampled continuations, exact resumption, and the tokens that heads learn from."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specnb.errors import InputError
from specnb.lm.hf.hidden import final_norm
from specnb.lm.hf.int4 import BlockLinear, round_network
from specnb.lm.vocab import Vocabulary
from specnb.medusa import data
from specnb.medusa.data import Writing
from tests.tiny_models import torch_model

END = 2
ROLE = {"user": 3, "assistant": 4}
TEMPLATE = (
    "{% for m in messages %}{{ '\x10' if m.role == 'user' else '\x11' }}"
    "{{ m.content }}\x12{% endfor %}"
    "{% if add_generation_prompt %}\x11{% endif %}"
)
CONTROL = {"\x10": ROLE["user"], "\x11": ROLE["assistant"], "\x12": END}
WRITING = Writing(length=40, batch_size=3, longest_seed=16)


class Writer:
    """A model whose tokenizer has one token per character."""

    name = "writer"

    def __init__(self, network=None, template=TEMPLATE, dtype="float32"):
        self.network = network
        self.caps = SimpleNamespace(dtype=dtype)
        pieces = (b"", b"", b"<end>", b"<user>", b"<assistant>", *[b"a"] * 59)
        self.vocab = Vocabulary(
            pieces, eog=frozenset({END}), special=frozenset({END, 3, 4}), chat_template=template
        )

    def encode(self, text, *, special=True):
        return [CONTROL.get(c, 5 + ord(c) % 59) for c in text]


@pytest.fixture(scope="module")
def net():
    return torch_model("llama", max_position_embeddings=128).eval()


def written(writer, folder, batches=2, **changed):
    data.write_splits(writer, folder, batches={"train": batches}, writing=WRITING, **changed)
    return data.read(folder, "train")


@pytest.mark.parametrize("kind", ["llama", "mamba", "gpt2"])
def test_generated_tokens_follow_the_rows_and_states_are_layer_outputs(tmp_path, kind, monkeypatch):
    """Three families: attention, recurrent state, learned positions; states equal in bfloat16."""
    monkeypatch.setattr(data, "TEMPERATURE", 1e-4)  # sampling is greedy
    net = torch_model(kind, max_position_embeddings=128).eval()
    rows = written(Writer(net), tmp_path)
    assert rows.tokens.shape == (6, WRITING.length) and 0 < rows.n_own < rows.tokens.size
    states = data.read_states(tmp_path, "train", range(5)).float()

    ids = torch.from_numpy(rows.tokens).long()
    with torch.inference_mode():
        logits, *_, (_, layer, _) = net(ids, output_hidden_states=True, return_dict=False)
        from_states = net.get_output_embeddings()(final_norm(net)(states[:, :, -1]))
    chosen = logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert (logits[:, :-1].amax(-1) - chosen)[torch.from_numpy(rows.own[:, 1:])].max() < 1e-3
    assert (from_states - logits).abs().max() < 0.02 * logits.abs().max()
    at = data.tapped_layers(2).index(0)
    assert (states[:, :, at] - layer).abs().max() < 0.02 * layer.abs().max()


def test_no_text_of_the_library_is_in_both_splits():
    train, held_out = (data.read_library(split) for split in data.SPLITS)
    for kind in ("code", "prose"):
        assert len(train[kind]) > 10 * len(held_out[kind]) > 0
        assert {*train[kind]}.isdisjoint(held_out[kind])


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_requests_are_rendered_whole_for_models_with_a_chat_template(template):
    writing = WRITING._replace(batch_size=40, longest_seed=400)
    rng = np.random.default_rng(0)
    seeds = data.draw_seeds(Writer(template=template), data.read_library("train"), writing, rng)
    requests = [seed for seed in seeds if seed[0] == ROLE["user"]]
    assert bool(requests) == bool(template)
    assert all(seed[-2:] == (END, ROLE["assistant"]) for seed in requests)
    assert len(seeds) == 40 and all(0 < len(seed) <= 400 for seed in seeds)


def test_a_stopped_run_resumes_with_the_same_text(net, tmp_path):
    whole = written(Writer(net), tmp_path / "whole", 3)

    def interrupt(done, total, _what):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written(Writer(net), tmp_path / "parts", 3, progress=interrupt)
    assert whole.digest() == written(Writer(net), tmp_path / "parts", 3).digest()
    with pytest.raises(InputError, match="other settings"):
        written(Writer(torch_model("llama", seed=9)), tmp_path / "whole")


def test_a_dense_copy_writes_the_text_of_an_int4_model(tmp_path):
    int4 = torch_model("llama", max_position_embeddings=128).bfloat16().eval()
    round_network(int4)
    rows = written(Writer(int4, dtype="int4"), tmp_path)
    assert "float" in json.loads((tmp_path / "facts.json").read_text())["written_in"]
    states = data.read_states(tmp_path, "train", 0).float()  # of the first layer
    served = data.forward_tapped(int4, rows.tokens)[1][:, :, 0].float()
    assert 0 < (states - served).norm() < 0.05 * served.norm()
    assert isinstance(int4.lm_head, BlockLinear)
    ids = torch.from_numpy(rows.tokens).long()
    assert len(int4(ids, output_hidden_states=True).hidden_states) == 3, (
        "the copy has hooks of its own"
    )


def test_seeds_repeats_and_tokens_after_an_end_are_not_learned():
    circle = [*range(10, 22)]
    tokens = np.array(
        [[7, END, *circle, *circle, 30, 31], [7, 8, 9, *circle[:10], END, *range(30, 44)]]
    )
    own = data.mark_own(tokens, np.array([2, 3]), {END})
    assert own[0].tolist() == [False] * 2 + [True] * 19 + [False] * 5 + [True] * 2, (
        "an end in the seed is no end"
    )
    assert own[1].tolist() == [False] * 3 + [True] * 11 + [False] * 14


def test_the_draft_vocabulary_is_the_most_frequent_generated_tokens():
    tokens = np.array([[5, 5, 5, 9, 9, 1, 7]], dtype=np.int32)
    rows = data.TextRows(tokens, np.array([[True] * 6 + [False]]))
    assert data.most_frequent(rows, 2, 10).tolist() == [5, 9]
    assert data.most_frequent(rows, 5, 10).tolist() == [0, 1, 5, 7, 9], (
        "7 was not its own, 0 is not in the text"
    )
