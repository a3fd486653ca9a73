"""The embedded pair in data/models equals its card."""

import json

from data.models.train_tiny import corpus, recipe
from data.models.train_tiny.card import card
from specnb.lm.files import embedded_root

MODELS = embedded_root()


def test_the_card_equals_the_facts_and_its_commands_reproduce_the_recipes():
    facts = json.loads((MODELS / "training.json").read_text())
    assert (MODELS / "README.md").read_text(encoding="utf-8") == card(facts)
    for stage, training in facts["stages"].items():
        known = recipe.Recipe(**training["recipe"])
        assert (
            recipe.recipe("cpu", stage, steps=known.steps, seed=known.seed, bf16=known.bf16)
            == known
        )
    passages = [
        json.loads(line)
        for line in (MODELS / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert all(corpus.is_held_out(passage["name"]) for passage in passages)
