"""Short trainings, the ablation and planted faults of notebook 05, on a backbone that walks in circles."""

from types import SimpleNamespace

import pytest
import torch

from specnb.medusa import faults, study
from specnb.medusa.nets import Backbone
from specnb.medusa.study import VARIANTS, ablate, variant_heads
from specnb.medusa.train import Recipe
from tests.medusa import periodic
from tests.tiny_models import VOCAB

RECIPE = Recipe(6, batch_size=16, peak_lr=1e-2, warmup=1)
MAP = torch.arange(4, VOCAB)


def test_an_ablation_costs_what_a_hand_counts_and_trains_all_but_one(circles, tmp_path):
    steps, config = [], periodic.new_heads(circles, MAP).config
    periodic.write_text(circles, tmp_path, length=32)
    table = ablate(circles, config, MAP, RECIPE, tmp_path, progress=lambda *step: steps.append(step))
    table = table.set_index("variant")
    assert [at for at, *_ in steps] == list(range(len(VARIANTS))) and list(table.index) == [*VARIANTS]
    trained = table["top1"].notna()
    assert list(table.index[~trained]) == ["private, all tokens"] and (table["draft_ms"] > 0).all()
    assert all(len(shares) == 3 and all(0 <= s <= 1 for s in shares) for shares in table.loc[trained, "top1"])
    d, v, n, a = periodic.HIDDEN, len(MAP), 3, 4  # a: bytes of a float32
    block, hydra = d * d + d, sum(d * d * (2 + i) + d for i in range(n))
    # of a Hydra head after head, each with a product of its own
    for name, parameters, read in (
        ("shared lm_head", n * block, n * block + v * d), ("Hydra", hydra, hydra + n * v * d),
        ("private lm_heads", n * (block + v * d), n * (block + v * d)),
        ("shared, all tokens", n * block, n * block + VOCAB * d),
    ):  # fmt: skip
        assert table.loc[name, "parameters"] == parameters
        assert table.loc[name, "read_mb"] == pytest.approx(a * read / 1e6)


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
    monkeypatch.setattr(study, "load", lambda name, **options: seen.update(options) or SimpleNamespace(
        network=circles.network, close=lambda: None))  # fmt: skip

    def write(writer, folder, **options):
        seen.update(options)
        periodic.write_text(circles, folder, length=40)
        options["on_tokens"](100)

    monkeypatch.setattr(study.data, "write", write)
    params = SimpleNamespace(target="x", dtype="float32", rows=4, row_tokens=40, seed=3)
    table = study.write_text(params, tmp_path / "text", progress=lambda *step: steps.append(step[:2]))
    assert seen["writing"].length == 40 and seen["writing"].seed == 3 and seen["exact"] is False
    assert table["train_own"][0] == table["train_tokens"][0] and steps == [(100, 320)]
