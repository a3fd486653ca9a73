"""Training heads: what is trained, how the rate runs, what is reported, and that a killed run is no other run."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from specnb.errors import EngineError, InputError, NonFiniteLogits
from specnb.medusa import data
from specnb.medusa import train as loop
from specnb.medusa.nets import OUTSIDE
from specnb.medusa.train import PRESETS, Recipe, recipe
from tests.medusa import periodic

N_HEADS = 3
RECIPE = Recipe(30, batch_size=32, peak_lr=1e-2, warmup=3)


@pytest.fixture(scope="module")
def walk(circles, tmp_path_factory):
    """Examples of a text that walks in circles: all that heads must learn is known."""
    folder = tmp_path_factory.mktemp("text")
    periodic.write_text(circles, folder, length=32)
    return data.Examples.of(folder, "train", periodic.new_heads(circles))


def train(heads, walk, folder, recipe=RECIPE, **changed):
    return loop.train(heads, recipe, walk, walk, folder, **({"save_every": 10, "data": "a"} | changed))


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_rate_of_embeddings_is_that_of_larger_embeddings(circles, walk, tmp_path, kind):
    """W moved 8 times as far on e is V on 8 e, with W = 8 V: AdamW's steps do not depend on how large gradients are."""
    factor, made = 8.0, replace(RECIPE, clip=1e9)  # clipping would: V's gradients are larger
    faster, larger = periodic.new_heads(circles, kind=kind), periodic.new_heads(circles, kind=kind)
    norm, lm_head, embeddings = larger._borrowed
    larger._borrowed = norm, lm_head, factor * embeddings
    plain = periodic.new_heads(circles, kind=kind)
    for name, heads, rate in (("faster", faster, factor), ("larger", larger, 1.0), ("plain", plain, 1.0)):
        train(heads, walk, tmp_path / name, replace(made, embedding_rate=rate))
    batch = walk.spread(64)
    said = [
        torch.stack([h.draft_logits(i, batch.hidden.float(), batch.ids) for i in range(N_HEADS)])
        for h in (faster, larger, plain)
    ]
    assert torch.allclose(said[0], said[1], atol=1e-3 * float(said[1].abs().max()))
    assert torch.equal(said[0], said[2]) == (kind == "medusa"), "a Medusa sees no embeddings"


@pytest.mark.parametrize(("kind", "norm"), [("medusa", "post_norm"), ("hydra", "pre_norm")])
def test_a_periodic_text_is_learned_by_heart(circles, walk, tmp_path, kind, norm):
    heads = periodic.new_heads(circles, kind=kind, input=norm)
    before = loop.evaluate(heads, RECIPE, walk)
    log = train(heads, walk, tmp_path, replace(RECIPE, steps=200, peak_lr=2e-2), save_every=200)
    assert max(before["top1"]) < 0.2 and min(log[-1]["top1"]) > 0.8


def test_a_killed_run_ends_with_the_same_weights(circles, walk, tmp_path):
    whole, killed = periodic.new_heads(circles, kind="hydra"), periodic.new_heads(circles, kind="hydra")
    log = train(whole, walk, tmp_path / "whole")

    def kill(report):
        if report.step == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(killed, walk, tmp_path / "killed", on_step=kill)
    again = periodic.new_heads(circles, kind="hydra")
    resumed = train(again, walk, tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    strip = [{k: v for k, v in line.items() if k != "seconds"} for line in log]
    assert strip == [{k: v for k, v in line.items() if k != "seconds"} for line in resumed]
    assert len(resumed) == 3


@pytest.mark.parametrize("changed", [{"recipe": replace(RECIPE, peak_lr=1e-3)}, {"data": "b"}])
def test_a_checkpoint_of_another_run_is_not_gone_on_with(circles, walk, tmp_path, changed):
    train(periodic.new_heads(circles), walk, tmp_path)
    with pytest.raises(InputError, match=f"another run: {next(iter(changed))}"):
        train(periodic.new_heads(circles), walk, tmp_path, **changed)


@pytest.mark.parametrize("name", PRESETS)
def test_the_rate_never_falls_to_zero(name):
    made = PRESETS[name]
    rates = [made.lr(step) for step in range(made.steps)]
    assert rates[0] > 0 and max(rates) == made.peak_lr and rates[-1] == pytest.approx(made.eta_min, rel=1e-9)
    assert min(rates[made.warmup :]) == rates[-1]
    assert (np.diff(rates[: made.warmup]) > 0).all() and (np.diff(rates[made.warmup :]) <= 0).all()


@pytest.mark.parametrize(
    "changed",
    [{"eta_min": 0.0}, {"eta_min": 1.0}, {"steps": 0}, {"teacher": 2.0}, {"embedding_rate": 0}],
)
def test_recipes_that_cannot_be(changed):
    with pytest.raises(InputError):
        replace(RECIPE, **changed)
    with pytest.raises(InputError, match="report"):
        recipe("fast")


def test_a_heads_own_figures_are_not_weighted(circles, walk):
    heads = periodic.new_heads(circles)
    batch = walk.spread(64)
    with torch.no_grad():
        light, a = loop.objective(heads, replace(RECIPE, head_weight=0.5), batch)
        heavy, b = loop.objective(heads, replace(RECIPE, head_weight=1.0), batch)
    assert torch.equal(a.head_loss, b.head_loss) and light < heavy
    assert heavy == pytest.approx(float(a.head_loss.sum()), rel=1e-5)
    assert light == pytest.approx(float((a.head_loss * 0.5 ** torch.arange(N_HEADS)).sum()), rel=1e-5)


def test_soft_targets_are_the_backbones_own_rows(circles, walk):
    """A head that says exactly what the backbone says in the later state has no soft loss; others have."""
    batch = walk.spread(16)
    heads, soft = periodic.new_heads(circles), replace(RECIPE, teacher=1.0)
    with torch.no_grad():
        right = [
            loop.objective(heads, soft, batch._replace(hidden=later, later=later[:, None].expand(-1, N_HEADS, -1)))[0]
            for later in batch.later.unbind(1)
        ]
        wrong = loop.objective(heads, soft, batch)[0]
    assert max(right) < 1e-5 < wrong


def test_labels_outside_the_draft_vocabulary_count_as_misses(circles):
    heads = periodic.new_heads(circles)
    hidden, later = torch.randn(4, periodic.HIDDEN), torch.randn(4, N_HEADS, periodic.HIDDEN)
    best = heads.draft_logits(0, hidden).argmax(-1)
    labels = best[:, None].expand(-1, N_HEADS).clone()
    labels[:2] = OUTSIDE
    labels[3] = data.NO_LABEL
    batch = data.Batch(hidden, torch.zeros(4, N_HEADS, dtype=torch.long), labels, later)
    assert loop.objective(heads, RECIPE, batch)[1].top1[0] == pytest.approx(1 / 3)
    assert loop.rank_shares(heads, batch)[0].tolist() == pytest.approx([1 / 3, 0, 0, 0, 0])


def test_bad_numbers_stop_the_run(circles, walk, tmp_path):
    heads = periodic.new_heads(circles)
    with torch.no_grad():
        heads.heads[1].blocks[0].linear.bias[0] = float("nan")
    with pytest.raises((NonFiniteLogits, EngineError)):
        train(heads, walk, tmp_path)
    assert not any(tmp_path.iterdir())


def test_all_stages_from_the_command_line(tmp_path, specnb):
    """On the embedded hybrid, whose heads are as good as any, from a file of texts to a folder that opens."""
    from specnb.lm.load import load, parse
    from specnb.medusa import checkpoint
    from specnb.medusa.stages import TARGET

    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 40}) + "\n" for i in range(14))
    )
    places = {"--work": tmp_path / "work", "--out": tmp_path / "out", "--texts": texts}
    common = [str(word) for pair in places.items() for word in pair]
    shape = {"--target": "tiny-hybrid", "--preset": "minute", "--steps": 4, "--batch-size": 16, "--draft-vocab": 16}
    common += [str(word) for pair in shape.items() for word in pair]
    code, shown, error = specnb("heads", "train", *common)
    assert code == 0 and "export: " in shown, error
    facts = json.loads((tmp_path / "out" / "training.json").read_text())
    assert facts["log"][-1]["step"] == 4 and "--draft-vocab 16 --steps 4" in facts["command"]
    assert parse(TARGET).options.keys() == {"dtype", "exact"}
    assert facts["text"]["coverage"] > 0.5
    model = load("tiny-hybrid")
    heads, report = checkpoint.load_trained_heads(tmp_path / "out", model.network)
    assert not report.findings and heads.config.draft_vocab == 16
    model.close()
