"""Variants, planted faults and the text of notebook 05, on a backbone that walks in circles."""

from types import SimpleNamespace

import pytest
import torch

from specnb.medusa import faults, study
from specnb.medusa.nets import Backbone
from specnb.medusa.study import variant_heads
from tests.medusa import periodic


@pytest.mark.parametrize("contract", ["pre_norm", "post_norm"])
def test_without_the_norm_the_blocks_are_fed_the_bare_state(circles, contract):
    state = torch.randn(2, periodic.HIDDEN, generator=torch.Generator().manual_seed(0))
    config = periodic.new_heads(circles, input=contract).config
    bare = variant_heads(config, None, Backbone.of(circles.network), 0, norm=False)
    assert torch.equal(bare.normed(bare.as_input(state)), state) and bare.config.input == "pre_norm"


def test_a_fault_that_was_not_planted_is_not_named(circles, fitted):
    cases = [
        faults.Planted("claimed", "double norm", fitted["medusa"], SimpleNamespace(findings=())),
        faults.Planted("none", "", periodic.new_heads(circles), None),  # said to be sound, and never loaded
    ]
    assert not faults.judge(circles, cases, periodic.prompts(6), max_new_tokens=12)["named"].any()


def test_the_text_of_the_notebook_is_written_by_the_backbone(circles, tmp_path, monkeypatch):
    seen, steps = {}, []
    writer = SimpleNamespace(network=circles.network, close=lambda: None)
    monkeypatch.setattr(study, "load", lambda name, **options: seen.update(options) or writer)

    def write(_writer, folder, **options):
        seen.update(options)
        periodic.write_text(circles, folder, length=40)
        options["on_tokens"](100)

    monkeypatch.setattr(study.data, "write", write)
    params = SimpleNamespace(target="x", dtype="float32", rows=4, row_tokens=40, seed=3)
    table = study.write_text(params, tmp_path / "text", progress=lambda *step: steps.append(step[:2]))
    assert (seen["writing"].length, seen["writing"].seed, seen["exact"]) == (40, 3, False)
    assert table["train_own"][0] == table["train_tokens"][0] and steps == [(100, 320)]
