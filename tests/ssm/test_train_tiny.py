"""The embedded pair in data/models: what ships is what its card says, and what trained it still trains."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.models.train_tiny import recipe, shapes
from data.models.train_tiny.card import card
from specnb.lm import zoo
from specnb.medusa import corpus

MODELS = zoo.embedded_root()
SHORT = recipe.Recipe(shapes.DRAFT, 6, batch_size=2, length=24, warmup=2, bf16=False)


def test_the_card_says_what_the_facts_say_and_its_commands_give_the_recipes():
    facts = json.loads((MODELS / "training.json").read_text())
    assert (MODELS / "README.md").read_text(encoding="utf-8") == card(facts)
    for stage, training in facts["stages"].items():
        made = recipe.Recipe(**training["recipe"])
        assert recipe.recipe("cpu", stage, steps=made.steps, seed=made.seed, bf16=made.bf16) == made
    passages = [json.loads(line) for line in (MODELS / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(corpus.is_held_out(passage["name"]) for passage in passages)


@pytest.fixture(scope="module")
def data():
    from data.models.train_tiny.data import Data

    ids = np.random.default_rng(0).integers(0, 64, 3000).astype(np.uint16)
    return Data(Path("nowhere"), ids[:2500], ids[2500:], {"digest": "0" * 64})


def same(a, b) -> bool:
    """Bit-equality of nested checkpoints; seconds are of the clock."""
    import torch

    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a if key != "seconds")
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_equal(data, tmp_path):
    from data.models.train_tiny.loop import read_checkpoint, train

    class Stopped(Exception):
        pass

    def stop(step, _loss):
        if step == 3:
            raise Stopped

    train(SHORT, data, tmp_path / "straight", save_every=2)
    with pytest.raises(Stopped):
        train(SHORT, data, tmp_path / "stopped", save_every=2, on_step=stop)  # one step is lost
    train(SHORT, data, tmp_path / "stopped", save_every=2)
    assert same(read_checkpoint(tmp_path / "stopped"), read_checkpoint(tmp_path / "straight"))


@pytest.mark.slow
def test_distillation_moves_the_draft_to_the_target_and_leaves_the_target(data, tmp_path):
    from data.models.train_tiny.loop import new_model, train

    target = new_model(shapes.DRAFT, 1).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    losses = []
    distilled = replace(SHORT, steps=12, distilled=True)
    train(distilled, data, tmp_path, teacher=target, on_step=lambda step, loss: losses.append(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert same(target.state_dict(), before)


@pytest.mark.slow
def test_the_draft_that_ships_says_what_the_target_says_more_often_than_not():
    from data.models.train_tiny.export import accepted, greedy, prompts, read_model

    target, draft = (read_model(MODELS / name) for name in shapes.SHAPES)
    continued = [greedy(target, prompt, 32) for kind in ("code", "prose") for prompt in prompts(MODELS, kind)[:4]]
    assert sum(accepted(draft, ids, 32) for ids in continued) >= 16 * len(continued)
