"""Heads on a model in llama.cpp: its parts are those that torch has, they draft, and they learn from its states."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.lm.gguf.header import read_header
from specnb.lm.gguf.model import GgufModel
from specnb.lm.load import load
from specnb.medusa import accuracy, data
from specnb.medusa.accuracy import Reference
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.drafter import HeadsDrafter
from specnb.medusa.gates import judge_gates
from specnb.medusa.nets import backbone_of
from specnb.prompts import prompts
from tests.medusa.periodic import random_heads
from tests.tiny_models import VOCAB, llama_gguf

PROMPT = [4, 9, 6, 7]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return llama_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def llama(file):
    with closing(GgufModel.open(file, exact="true", threads=1)) as model:
        yield model


def test_both_engines_show_the_same_parts_and_states(file, llama):
    with closing(load(file, backend="hf")) as other:
        parts, theirs = backbone_of(llama), backbone_of(other)
        assert parts.digest == theirs.digest
        for name in ("lm_head", "embeddings"):
            torch.testing.assert_close(getattr(parts, name).float(), getattr(theirs, name), atol=1e-2, rtol=1e-2)
        states, expected = (accuracy.states(model, [*PROMPT * 5], 9) for model in (llama, other))
        torch.testing.assert_close(states.post_norm.float(), expected.post_norm, atol=0.03, rtol=0.03)
        np.testing.assert_allclose(states.logits, expected.logits, atol=1e-3)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("contract", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_draft_from_the_state_of_the_last_computed_token(llama, kind, contract, temperature):
    """Of either contract: heads that would norm the state are fed what is behind the norm."""
    heads = random_heads(backbone_of(llama), torch.arange(1, VOCAB, 2), kind=kind, input=contract, spread=0.1)
    drafting, settings = HeadsDrafter(llama, heads), {"max_new_tokens": 24, "ignore_eog": True}
    settings["temperature"] = temperature
    text = generate(llama, PROMPT, drafter=drafting, k=3, **settings)
    assert text.total_draft_tokens > 20 and text.drafter == kind
    if not temperature and llama.caps.same_bits_up_to > 3:
        assert text.token_ids == generate(llama, PROMPT, **settings).token_ids
    llama.reset()
    llama.forward(PROMPT)
    llama.forward([9])  # so that the last forward is not the prompt's
    row = drafting.rows([*PROMPT, 9, 5], [7])[0]
    state = accuracy.states(llama, [*PROMPT, 9], 1).post_norm
    np.testing.assert_allclose(row[1::2], heads.draft_logits(0, state, torch.tensor([[5]]))[0].numpy(), atol=0.05)


def test_gates_are_judged_by_the_states_that_llama_cpp_shows(llama):
    """Random heads draft in vain, but they sit on this model and are served what they are scored on."""
    heads = random_heads(backbone_of(llama), spread=0.1)
    reference = Reference(llama, [[*PROMPT, token] for token in range(10, 15)], 12)
    result = judge_gates(reference, heads, LoadReport(Path(), "specnb", heads.config))
    assert not {"loader", "zero blocks", "serving", "schedule"} & {*result.failed}
    assert reference.baseline.baseline_engine


def test_texts_are_the_models_own_and_have_its_states(llama, monkeypatch):
    monkeypatch.setattr(data, "DRAWING_TEMPERATURE", 1e-4)  # then what is drawn is the best
    seeds = [data.Seed("prose", tuple(ids)) for ids in ([4, 9], [5, 6, 7], [8, 11, 5, 10])]
    writing = data.Writing(length=24, batch_size=3)
    rows, states = data.write_rows(llama, seeds, None, writing, [0])
    assert rows.tokens.shape == (3, 24) and states.shape == (3, 24, 1, 32)
    for tokens, own, along in zip(rows.tokens, rows.own, states, strict=True):
        alone = accuracy.states(llama, tokens.tolist(), 24)
        torch.testing.assert_close(along[:, 0], alone.post_norm.float(), atol=0.03, rtol=0.03)
        best = alone.logits.max(axis=1)[:-1]
        chosen = np.take_along_axis(alone.logits[:-1], tokens[1:, None].astype(int), 1)[:, 0]
        assert (best - chosen)[own[1:]].max() < 1e-3 and own.sum() > 15


def test_a_model_that_heads_cannot_sit_on_is_refused(llama, file, monkeypatch):
    header = read_header(file)
    header.values["llama.final_logit_softcapping"] = 30.0
    monkeypatch.setattr(llama, "headers", lambda: [header])
    with pytest.raises(InputError, match="final_logit_softcapping"):
        backbone_of(llama)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["medusa", "hydra", "redrafter"])
def test_the_shipped_heads_draft_for_the_real_model_in_llama_cpp(opened, kind):
    target, prompt = opened("smollm2-135m"), prompts("edit")[0]
    text = generate(target, prompt, drafter=kind, k=4, max_new_tokens=48)
    assert text.tau > 1.2
    if target.caps.same_bits_up_to > 4:
        assert text.token_ids == generate(target, prompt, max_new_tokens=48).token_ids
