"""Training heads: examples, loss, learning rate, resumed runs, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from specnb.errors import EngineError, InputError
from specnb.medusa import data, recipe
from specnb.medusa import train as loop
from specnb.medusa.examples import NO_LABEL, ExampleBatch, Examples, objective
from specnb.medusa.nets import OUTSIDE, backbone_of
from specnb.medusa.recipe import PRESETS, Recipe, recipe_for
from tests.medusa import periodic

N_HEADS = 3
RECIPE = Recipe(30, batch_size=32, peak_lr=1e-2, warmup=3)


@pytest.fixture(scope="module")
def walk(circles, text):
    return Examples(text, "train", periodic.new_heads(circles))


# --- examples ---


@pytest.fixture
def examples(circles, tmp_path):
    """Return examples of two rows of tokens 0, 1, 2, …; each one's hidden state is its position."""

    def make(own, token_map=None):
        tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
        states = torch.arange(24, dtype=torch.bfloat16).reshape(2, 12, 1, 1)
        rows = data.TextRows(tokens, np.broadcast_to(own, tokens.shape).copy())
        data.save_rows(tmp_path / "train-00000.npz", rows, states)
        return Examples(tmp_path, "train", periodic.new_heads(circles, token_map))

    return make


def test_head_i_reads_the_next_tokens_and_predicts_the_one_after_them(examples):
    every = examples(True)
    batch = every.spread(every.n_items)
    since = batch.hidden.long() + 1 + torch.arange(N_HEADS)
    assert (batch.ids == since).all() and (batch.labels == since + 1).all()
    assert (batch.later[..., 0] == since).all() and len(since) == 24 - 2 * (1 + N_HEADS)
    few = examples(True, token_map=torch.tensor([2, 4, 6, 8]))
    assert set(few.spread(99).labels.unique().tolist()) == {OUTSIDE, 0, 1, 2, 3}
    batches = [every.at_step(step, Recipe(1, batch_size=4)).hidden for step in range(9)]
    assert not torch.equal(*batches[:2]) and all(len(b.unique()) == 4 for b in batches)
    with pytest.raises(InputError, match="write more text"):
        every.at_step(0, Recipe(1, batch_size=1000))


def test_only_tokens_that_the_backbone_generated_are_labels(examples):
    own = np.ones(12, dtype=bool)
    own[[0, 1, 2, 7]] = False
    for labels in examples(own).spread(99).labels:
        learned = labels[labels >= 0] % 12
        assert labels[0] != NO_LABEL and not np.isin(learned, np.flatnonzero(~own)).any()
        assert (np.diff(learned) == 1).all(), (
            "no label after a gap, whose context is not the backbone's"
        )


# --- the loop ---


def train(heads, text, folder, recipe=RECIPE, **changed):
    return loop.train(heads, recipe, text, folder, **({"save_every": 10} | changed))


def test_a_larger_rate_on_embeddings_equals_larger_embeddings(circles, walk, text, tmp_path):
    """W e at 8 times the rate equals V (8 e): AdamW's steps ignore the size of gradients."""
    # clipping does depend on it: V's gradients are larger
    batch = walk.spread(64)

    def trained(factor, rate):
        heads = periodic.new_heads(circles, kind="hydra")
        heads.embeddings = factor * heads.embeddings
        recipe = replace(RECIPE, clip=1e9, embedding_rate=rate)
        train(heads, text, tmp_path / f"{factor} {rate}", recipe)
        return heads.draft_logits(N_HEADS - 1, batch.hidden.float(), batch.ids).detach()

    faster, larger, plain = trained(1, 8), trained(8, 1), trained(1, 1)
    assert torch.allclose(faster, larger, atol=1e-3 * float(larger.abs().max()))
    assert not torch.equal(faster, plain)


def test_a_killed_run_resumes_exactly_and_its_checkpoint_fits_no_other_run(circles, text, tmp_path):
    whole, killed, again = (periodic.new_heads(circles, kind="hydra") for _ in range(3))
    log = train(whole, text, tmp_path / "whole")

    def kill(step, *_):
        if step == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(killed, text, tmp_path / "killed", on_step=kill)
    assert log == train(again, text, tmp_path / "killed") and len(log) == 3
    for weights in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(*weights)
    periodic.write_text(circles, tmp_path / "text", length=24)
    with pytest.raises(InputError, match="another run: recipe and data"):
        train(again, tmp_path / "text", tmp_path / "whole", replace(RECIPE, peak_lr=1e-3))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_learning_rate_never_falls_to_zero(preset):
    preset = recipe_for(preset)
    for changed in ({"eta_min": 0.0}, {"eta_min": 1.0}, {"steps": 0}, {"teacher": 2.0}):
        with pytest.raises(InputError):
            replace(preset, **changed)
    rates = np.array([preset.lr(step) for step in range(preset.steps)])
    assert rates[0] > 0 and max(rates) == preset.peak_lr
    assert rates[-1] == pytest.approx(preset.eta_min, rel=1e-9)
    rising = np.diff(rates) > 0
    assert rising[: preset.warmup - 1].all() and not rising[preset.warmup :].any()


# --- the loss ---


def test_soft_targets_are_the_backbones_rows(circles, walk):
    """A head with the backbone's logits of the later state has no soft loss; other heads do."""
    batch = walk.spread(16)
    heads = periodic.new_heads(circles)
    soft = replace(RECIPE, teacher=1.0)
    later = batch.hidden[:, None].expand(-1, N_HEADS, -1)
    right, _ = objective(heads, soft, batch._replace(later=later))
    assert right < 1e-5 < objective(heads, soft, batch)[0]


def test_labels_outside_the_draft_vocabulary_count_as_misses(circles):
    heads = periodic.new_heads(circles)
    hidden = torch.randn(4, periodic.HIDDEN)
    labels = heads.draft_logits(0, hidden).argmax(-1)[:, None].repeat(1, N_HEADS)
    labels[:2], labels[3] = OUTSIDE, NO_LABEL
    _, figures = objective(heads, RECIPE, ExampleBatch(hidden, labels, labels, hidden[:, None]))
    assert figures["rank_shares"][0] == pytest.approx([1 / 3, 0, 0, 0, 0], abs=1e-5)


@pytest.mark.parametrize("product", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_stops_the_run(text, tmp_path, monkeypatch, product):
    monkeypatch.setattr(recipe, "auto_dtype", lambda device: product)
    heads = periodic.new_heads(periodic.backbone_model(dtype=torch.bfloat16))
    with torch.no_grad():
        heads.heads[1].blocks[0].linear.bias[0] = float("nan")
    with pytest.raises(EngineError):
        train(heads, text, tmp_path)
    assert not any(tmp_path.iterdir())


# --- the command ---


def test_all_stages_from_the_command_line(tmp_path, specnb, monkeypatch):
    from specnb.lm.load import load
    from specnb.medusa import checkpoint

    model = load("tiny-hybrid")
    monkeypatch.setattr(model, "close", lambda: None)
    monkeypatch.setattr("specnb.lm.load.load", lambda _: model)
    # few and short rows: length, batch_size, longest_seed, seed
    monkeypatch.setattr(data.Writing.__new__, "__defaults__", (32, 4, 12, 0))
    out = tmp_path / "out"
    words = "heads train --target tiny-hybrid --preset minute --steps 4 --batch-size 16 "
    words = f"{words} --draft-vocab 16 --batches 2 --work {tmp_path}/work --out".split()
    written = checkpoint.write_atomic

    def kill_at_config(path, content):
        if path.name == "config.json":
            raise KeyboardInterrupt
        written(path, content)

    with monkeypatch.context() as killed:
        killed.setattr(checkpoint, "write_atomic", kill_at_config)
        assert specnb(*words, str(out))[0] == 130
    code, shown, error = specnb(*words, str(out))
    assert code == 0 and "export: " in shown, error
    assert {*tmp_path.iterdir()} == {out, tmp_path / "work"}, "the first export left nothing"
    facts = json.loads((out / "training.json").read_text())
    assert facts["log"][-1]["step"] == facts["recipe"]["steps"] == 4
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "tiny-hybrid" in card and f"{facts['log'][-1]['top1'][0]:.3f}" in card
    heads, report = checkpoint.load_trained_heads(out, backbone_of(model))
    assert not report.findings and heads.config.draft_vocab == 16
    monkeypatch.setattr("specnb.lm.load.load", lambda _: pytest.fail("a model was opened"))
    for wrong in ([str(out), "--kind", "beam"], [str(tmp_path)]):
        assert specnb(*words, *wrong)[0] == 2
