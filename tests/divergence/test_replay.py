"""Scripts and shadow replay: missing values are omitted, and captures stay unchanged."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from specnb.divergence.capture import capture
from specnb.divergence.errors import judge_errors, locate
from specnb.divergence.script import Feed, Script, feed_script
from specnb.divergence.setups import local_errors
from specnb.divergence.trace import Key
from specnb.errors import InputError

TEXT = np.random.default_rng(0).integers(0, 256, 20).tolist()
SCRIPT = Script.drafting(TEXT, prompt=12, k=3, vocab_size=256)
BLOCKS = Script.blocks(TEXT, width=5)


def test_a_script_ends_with_its_text_despite_rollbacks():
    assert SCRIPT.text == tuple(TEXT) == Script.blocks(TEXT, width=4).text and any(
        feed.forget for feed in SCRIPT.feeds
    )
    for feeds in ([], [((),)], [((1,), 1)], [((1, 2),), ((3,), 4)], [((1,), -1)]):
        with pytest.raises(InputError):
            Script([Feed(*feed) for feed in feeds])


def test_missing_values_of_a_run_are_omitted_or_taken_from_the_copy(divergence_lab):
    lab = divergence_lab
    script = lab.script
    with capture(lab.draft) as builder:
        feed_script(lab.draft, script)
    trace = builder.trace()
    with pytest.raises(InputError, match="not those of the script"):
        BLOCKS.align(trace)
    aligned = script.align(trace)
    for position, (number, token) in enumerate(zip(aligned.last_step, script.text, strict=True)):
        assert script.feeds[number].ids[position - script.starts[number]] == token
    lacking = (trace.tensors["module"] == "lm_head") & (trace.tensors["step"] == 0)
    partly = script.align(replace(trace, tensors=trace.tensors[~lacking]))
    assert "lm_head" in {key.module for key in partly.rows.keys() - partly.whole.keys()}
    assert not any(len(whole.gaps) for whole in partly.whole.values())
    key = Key("layers.0.mlp.experts", 0, "out", "out")
    aligned.whole[key].values[3:5] = 0
    aligned.whole[key] = aligned.whole[key]._replace(gaps=np.array([3, 4]))
    errors = local_errors(lab.reference, aligned)
    assert locate(judge_errors(errors, lab.floor, aligned.last_step)).empty
    of_key = errors[(errors["module"] == key.module) & (errors["role"] == "out")]
    assert {3, 4}.isdisjoint(of_key["position"])


class InPlace(nn.Module):
    """Writes into its input, and returns logits of all tokens or of each step's last."""

    def __init__(self, *, last):
        super().__init__()
        self.embed = nn.Embedding(256, 4)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 7)
        self.last = last

    def forward(self, input_ids, use_cache=False):
        hidden = self.act(self.embed(input_ids))
        return self.head(hidden[:, -1:] if self.last else hidden)


def test_a_replay_does_not_change_the_captured_values():
    model = InPlace(last=True)
    with capture(model, at_use=False) as builder, torch.no_grad():
        for feed in BLOCKS.feeds:
            model(input_ids=torch.tensor([feed.ids]))
    aligned = BLOCKS.align(builder.trace())
    before = {key: whole.values.copy() for key, whole in aligned.whole.items()}
    local_errors(InPlace(last=False), aligned)
    assert any(len(whole.gaps) for whole in aligned.whole.values())
    assert all(np.array_equal(whole.values, before[key]) for key, whole in aligned.whole.items())
