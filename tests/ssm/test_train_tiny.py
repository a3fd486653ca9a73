"""The embedded pair in data/models: what ships is what its card says, and what trained it still trains."""

import json
from pathlib import Path

import numpy as np
import pytest

from data.models.train_tiny import corpus, recipe, shapes
from data.models.train_tiny.card import card
from specnb.lm import zoo

MODELS = zoo.embedded_root()


def test_the_card_says_what_the_facts_say_and_its_commands_give_the_recipes():
    facts = json.loads((MODELS / "training.json").read_text())
    assert (MODELS / "README.md").read_text(encoding="utf-8") == card(facts)
    for stage, training in facts["stages"].items():
        known = recipe.Recipe(**training["recipe"])
        assert recipe.recipe("cpu", stage, steps=known.steps, seed=known.seed, bf16=known.bf16) == known
    passages = [json.loads(line) for line in (MODELS / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(corpus.is_held_out(passage["name"]) for passage in passages)


@pytest.mark.slow
def test_a_distillation_that_was_stopped_goes_on_bit_equal_and_learns(tmp_path):
    import torch

    from data.models.train_tiny.data import Data
    from data.models.train_tiny.loop import new_model, read_checkpoint, train

    ids = np.random.default_rng(0).integers(0, 64, 3000).astype(np.uint16)
    data = Data(Path("nowhere"), ids[:2500], ids[2500:], {"digest": "0" * 64})
    short = recipe.Recipe(shapes.DRAFT, 12, batch_size=2, length=24, warmup=2, bf16=False, distilled=True)
    teacher, losses = new_model(shapes.DRAFT, 1).requires_grad_(False), []

    def stop(step, _loss):
        if step == 3:
            raise KeyboardInterrupt

    train(short, data, tmp_path / "straight", teacher=teacher, on_step=lambda step, loss: losses.append(loss))
    with pytest.raises(KeyboardInterrupt):
        train(short, data, tmp_path / "stopped", teacher=teacher, save_every=2, on_step=stop)  # one step is lost
    train(short, data, tmp_path / "stopped", teacher=teacher, save_every=2)
    straight, stopped = (read_checkpoint(tmp_path / name)["model"] for name in ("straight", "stopped"))
    assert all(torch.equal(straight[name], tensor) for name, tensor in stopped.items())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_the_draft_that_ships_says_what_the_target_says_more_often_than_not():
    from data.models.train_tiny.export import accepted, greedy, prompts, read_model

    target, draft = (read_model(MODELS / name) for name in shapes.SHAPES)
    continued = [greedy(target, prompt, 32) for kind in ("code", "prose") for prompt in prompts(MODELS, kind)[:4]]
    assert sum(accepted(draft, ids, 32) for ids in continued) >= 16 * len(continued)
