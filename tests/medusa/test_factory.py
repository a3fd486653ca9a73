"""A drafter is made where one can pay, and refused with the number that forbids it."""

import json

import pytest

from specnb.lm.load import load
from specnb.measure.baseline import Baseline
from specnb.measure.cost import Cost
from specnb.medusa import data, factory
from specnb.medusa import train as training
from specnb.medusa.factory import NoDrafter, Outlook, make_drafter
from specnb.registry import DRAFTERS, resolve
from tests.tiny_models import llama_gguf

CHEAP = Cost.straight("cheap", 1.0, 0.05)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = load(llama_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", n_ctx=2048, all_bytes=True), backend="hf")
    yield model
    model.close()


def test_what_is_measured_first_says_what_has_to_be_kept(target):
    outlook = factory.examine_target(target)
    assert outlook.cost.c > 0 and str(outlook)
    slower = Baseline(baseline_engine="other", baseline_tokens_per_s=200.0, plain_tokens_per_s=100.0)
    assert Outlook(CHEAP, Baseline()).needed < 0.1 < 0.4 < Outlook(CHEAP, slower).needed


def test_no_text_is_written_where_none_can_pay(target, tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "examine_target", lambda _: Outlook(Cost.straight("steep", 9.0, 0.5), Baseline()))
    with pytest.raises(NoDrafter, match="no acceptance"):
        make_drafter(target, tmp_path / "work", tmp_path / "out", 60)
    assert not any(tmp_path.iterdir())


def test_a_drafter_is_trained_timed_and_opens_again(target, tmp_path, monkeypatch):
    short = data.Writing(length=32, batch_size=16, longest_seed=12, longest_answer=16, longest_request=8)
    monkeypatch.setattr(training, "Writing", lambda: short)
    monkeypatch.setattr(factory, "TRIAL_STEPS", 3)
    monkeypatch.setattr(factory, "examine_target", lambda _: Outlook(CHEAP, Baseline()))
    monkeypatch.setattr(factory, "prompts", lambda _name, limit: [[5, 6, 7, 8]] * limit)
    monkeypatch.setitem(training.JUMP_PRESETS, "cpu", training.Recipe(3, batch_size=64, warmup=1))
    table = make_drafter(target, tmp_path / "work", tmp_path / "out", 0)
    methods = table["method"].tolist()
    assert methods[:5] == ["plain", "K = 1", "K = 2", "K = 3", "K = 4"] and all("tree of" in of for of in methods[5:])
    assert (table["identical"] == table["n_prompts"]).all()
    assert "mass accepted" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    facts = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    assert facts["log"][-1]["step"] == facts["recipe"]["steps"] == 3
    again = resolve(DRAFTERS["jump"])(target, heads_checkpoint=tmp_path / "out")
    assert again.name == "jump" and again.heads.config.copied == 1
    again.close()
