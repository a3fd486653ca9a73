"""The embedded pair in data/models: what ships is what its card says."""

import json

import pytest

from data.models.train_tiny import recipe, shapes
from data.models.train_tiny.card import card
from specnb.lm import zoo
from specnb.medusa import corpus

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
def test_the_draft_that_ships_says_what_the_target_says_more_often_than_not():
    from data.models.train_tiny.export import accepted, greedy, prompts, read_model

    target, draft = (read_model(MODELS / name) for name in shapes.SHAPES)
    continued = [greedy(target, prompt, 32) for kind in ("code", "prose") for prompt in prompts(MODELS, kind)[:4]]
    assert sum(accepted(draft, ids, 32) for ids in continued) >= 16 * len(continued)
