"""Training heads: the examples, what is trained, how the rate runs, and that a killed run is no other run."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specnb.errors import EngineError, InputError
from specnb.medusa import data
from specnb.medusa import train as loop
from specnb.medusa.nets import OUTSIDE, backbone_of
from specnb.medusa.train import PRESETS, Examples, Recipe, recipe
from tests.medusa import periodic

N_HEADS = 3
RECIPE = Recipe(30, batch_size=32, peak_lr=1e-2, warmup=3)


@pytest.fixture(scope="module")
def text(circles, tmp_path_factory):
    """A text that walks in circles: all that heads must learn is known."""
    folder = tmp_path_factory.mktemp("text")
    periodic.write_text(circles, folder, length=32)
    return folder


@pytest.fixture(scope="module")
def walk(circles, text):
    return Examples(text, "train", periodic.new_heads(circles))


# --- examples -------------------------------------------------------------------------------------------------------


@pytest.fixture
def examples(tmp_path):
    """Of two rows of tokens 0, 1, 2, …, with hidden states that say which position they are of."""

    def make(own, token_map=None, length=12):
        tokens = np.arange(2 * length, dtype=np.int32).reshape(2, length)
        states = torch.arange(2 * length, dtype=torch.bfloat16).reshape(2, length, 1, 1)
        rows = data.TextRows(tokens, np.broadcast_to(own, tokens.shape).copy())
        data.save_rows(tmp_path / "train-00000.npz", rows, states)
        heads = SimpleNamespace(config=SimpleNamespace(n_heads=N_HEADS, vocab_size=24), token_map=token_map)
        return Examples(tmp_path, "train", heads)

    return make


def test_head_i_is_shown_the_tokens_since_and_says_the_one_behind_them(examples):
    every = examples(True)
    batch = every.spread(len(every))
    at = batch.hidden[:, 0].long()
    for i in range(N_HEADS):
        assert (batch.ids[:, i] == at + 1 + i).all() and (batch.labels[:, i] == at + 2 + i).all()
        assert (batch.later[:, i, 0].long() == at + 1 + i).all()
    assert len(every) == 2 * (12 - 1 - N_HEADS)
    few = examples(True, token_map=torch.tensor([2, 4, 6, 8]))
    assert set(few.spread(99).labels.unique().tolist()) == {OUTSIDE, 0, 1, 2, 3}


def test_nothing_is_learned_of_what_others_wrote(examples):
    own = np.ones(12, dtype=bool)
    own[[0, 1, 2, 7]] = False
    for labels in examples(own).spread(99).labels:
        told = labels[labels >= 0] % 12
        assert labels[0] != loop.NO_LABEL and not np.isin(told, np.flatnonzero(~own)).any()
        assert (np.diff(told) == 1).all(), "no label behind a gap: its context was somebody else's"


def test_no_batch_has_an_example_twice_and_steps_have_others(examples):
    every = examples(True)
    batches = {tuple(every.at_step(s, Recipe(1, batch_size=4)).hidden.flatten().tolist()) for s in range(9)}
    assert len(batches) > 1 and all(len({*batch}) == 4 for batch in batches)
    with pytest.raises(InputError, match="write more text"):
        every.at_step(0, Recipe(1, batch_size=1000))


# --- the loop -------------------------------------------------------------------------------------------------------


def train(heads, text, folder, recipe=RECIPE, **changed):
    return loop.train(heads, recipe, text, folder, **({"save_every": 10} | changed))


def test_a_rate_of_embeddings_is_that_of_larger_embeddings(circles, walk, text, tmp_path):
    """W moved 8 times as far on e is V on 8 e, with W = 8 V: AdamW's steps do not depend on how large gradients are."""
    factor, unclipped = 8.0, replace(RECIPE, clip=1e9)  # clipping would: V's gradients are larger
    faster, larger, plain = (periodic.new_heads(circles, kind="hydra") for _ in range(3))
    larger.embeddings = factor * larger.embeddings
    for name, heads, rate in (("faster", faster, factor), ("larger", larger, 1.0), ("plain", plain, 1.0)):
        train(heads, text, tmp_path / name, replace(unclipped, embedding_rate=rate))
    batch = walk.spread(64)
    logits = [
        torch.stack([h.draft_logits(i, batch.hidden.float(), batch.ids) for i in range(N_HEADS)])
        for h in (faster, larger, plain)
    ]
    assert torch.allclose(logits[0], logits[1], atol=1e-3 * float(logits[1].abs().max()))
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(("kind", "norm"), [("medusa", "post_norm"), ("hydra", "pre_norm")])
def test_a_periodic_text_is_learned_by_heart(circles, walk, text, tmp_path, kind, norm):
    heads = periodic.new_heads(circles, kind=kind, input=norm)
    _, before = loop.objective(heads, RECIPE, walk.spread(loop.HELD_OUT))
    log = train(heads, text, tmp_path, replace(RECIPE, steps=200, peak_lr=2e-2), save_every=200)
    assert max(before["top1"]) < 0.2 and min(log[-1]["top1"]) > 0.8


def test_a_killed_run_ends_with_the_same_weights_and_no_other_run_goes_on_with_it(circles, text, tmp_path):
    whole, killed, again, other = (periodic.new_heads(circles, kind="hydra") for _ in range(4))
    log = train(whole, text, tmp_path / "whole")

    def kill(step, *_):
        if step == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(killed, text, tmp_path / "killed", on_step=kill)
    resumed = train(again, text, tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert log == resumed and len(log) == 3
    periodic.write_text(circles, tmp_path / "text", length=24)
    for changed, where in (({"recipe": replace(RECIPE, peak_lr=1e-3)}, text), ({}, tmp_path / "text")):
        with pytest.raises(InputError, match=f"another run: {'recipe' if changed else 'data'}"):
            train(other, where, tmp_path / "whole", **changed)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_rate_of_a_recipe_never_falls_to_zero(preset):
    preset = recipe(preset)
    for changed in ({"eta_min": 0.0}, {"eta_min": 1.0}, {"steps": 0}, {"teacher": 2.0}):
        with pytest.raises(InputError):
            replace(preset, **changed)
    rates = [preset.lr(step) for step in range(preset.steps)]
    assert rates[0] > 0 and max(rates) == preset.peak_lr and rates[-1] == pytest.approx(preset.eta_min, rel=1e-9)
    assert (np.diff(rates[: preset.warmup]) > 0).all() and (np.diff(rates[preset.warmup :]) <= 0).all()


# --- the loss -------------------------------------------------------------------------------------------------------


def test_a_heads_own_figures_are_not_weighted(circles, walk):
    heads = periodic.new_heads(circles)
    batch = walk.spread(64)
    with torch.no_grad():
        light, a = loop.objective(heads, replace(RECIPE, head_weight=0.5), batch)
        heavy, b = loop.objective(heads, replace(RECIPE, head_weight=1.0), batch)
    assert a["head_loss"] == b["head_loss"]
    assert float(heavy) == pytest.approx(sum(a["head_loss"]), rel=1e-5)
    assert float(light) == pytest.approx(sum(a["head_loss"] * 0.5 ** np.arange(N_HEADS)), rel=1e-5)


def test_soft_targets_are_the_backbones_own_rows(circles, walk):
    """A head that says exactly what the backbone says in the later state has no soft loss; others have."""
    batch = walk.spread(16)
    heads, soft = periodic.new_heads(circles), replace(RECIPE, teacher=1.0)
    with torch.no_grad():
        right = [
            loop.objective(heads, soft, batch._replace(hidden=later, later=later[:, None].expand(-1, N_HEADS, -1)))[0]
            for later in batch.later.unbind(1)
        ]
        assert max(right) < 1e-5 < loop.objective(heads, soft, batch)[0]


def test_labels_outside_the_draft_vocabulary_count_as_misses(circles):
    heads = periodic.new_heads(circles)
    hidden, later = torch.randn(4, periodic.HIDDEN), torch.randn(4, N_HEADS, periodic.HIDDEN)
    best = heads.draft_logits(0, hidden).argmax(-1)
    labels = best[:, None].expand(-1, N_HEADS).clone()
    labels[:2], labels[3] = OUTSIDE, loop.NO_LABEL
    batch = loop.ExampleBatch(hidden, torch.zeros(4, N_HEADS, dtype=torch.long), labels, later)
    shares = loop.objective(heads, RECIPE, batch)[1]["rank_shares"][0]
    assert shares == pytest.approx([1 / 3, 0, 0, 0, 0], abs=1e-5)


def test_bad_numbers_stop_the_run(circles, text, tmp_path):
    heads = periodic.new_heads(circles)
    with torch.no_grad():
        heads.heads[1].blocks[0].linear.bias[0] = float("nan")
    with pytest.raises(EngineError):
        train(heads, text, tmp_path)
    assert not any(tmp_path.iterdir())


# --- the command ----------------------------------------------------------------------------------------------------


def test_all_stages_from_the_command_line(tmp_path, specnb, monkeypatch):
    """On the embedded hybrid, whose heads are as good as any, from the text it writes to a folder that opens."""
    from specnb.lm.load import load
    from specnb.medusa import checkpoint

    short = data.Writing(length=32, batch_size=4, longest_seed=12)
    monkeypatch.setattr(loop, "Writing", lambda: short)
    words = ["heads", "train", "--target", "tiny-hybrid", "--preset", "minute", "--steps", "4", "--batch-size", "16",
             "--draft-vocab", "16", "--work", str(tmp_path / "work"), "--batches", "2"]  # fmt: skip
    written = checkpoint.write_atomic

    def kill_at_config(path, content):
        if path.name == "config.json":
            raise KeyboardInterrupt
        written(path, content)

    with monkeypatch.context() as killed:
        killed.setattr(checkpoint, "write_atomic", kill_at_config)
        assert specnb(*words, "--out", str(tmp_path / "out"))[0] == 130
    code, shown, error = specnb(*words, "--out", str(tmp_path / "out"))
    assert code == 0 and "export: " in shown, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "work"], "nothing is left of the first export"
    facts = json.loads((tmp_path / "out" / "training.json").read_text())
    assert facts["log"][-1]["step"] == facts["recipe"]["steps"] == 4
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "tiny-hybrid" in card and all(f"{share:.3f}" in card for share in facts["log"][-1]["top1"])
    model = load("tiny-hybrid")
    heads, report = checkpoint.load_trained_heads(tmp_path / "out", backbone_of(model))
    assert not report.findings and heads.config.draft_vocab == 16
    model.close()
    monkeypatch.setattr("specnb.lm.load.load", lambda _: pytest.fail("a model was opened"))
    for wrong in (["--kind", "beam"], ["--out", str(tmp_path)]):
        assert specnb(*words, *wrong)[0] == 2
