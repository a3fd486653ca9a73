"""What notebook 05 measures, on tiny models: the ablation, short trainings, planted faults, texts compared."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from specnb.medusa.loop import Recipe
from specnb.medusa.practice import VARIANTS, Variant, variant_heads

from specnb.errors import InputError
from specnb.medusa import data, faults, practice
from specnb.medusa.nets import Backbone
from specnb.medusa.study import identity
from specnb.medusa.tree import TreePlan
from specnb.prompts import Prompt
from tests.medusa import periodic
from tests.tiny_models import VOCAB

RECIPE = Recipe(6, batch_size=16, peak_lr=1e-2, warmup=1)
MAP = torch.arange(4, VOCAB)


@pytest.fixture(scope="module")
def target(circles):
    return circles


@pytest.fixture(scope="module")
def backbone(target):
    return Backbone.of(target.network)


def walks(length):
    """Rows of tokens `(rows, length)`: along every circle from every place."""
    starts = torch.arange(periodic.FIRST, periodic.FIRST + periodic.PERIOD * periodic.CIRCLES)
    return torch.stack([periodic.after(starts, n) for n in range(length)], dim=1).numpy().astype(np.int32)


@pytest.fixture(scope="module")
def text(target, tmp_path_factory):
    """Rows along the circles, the backbone's own choice from the third token on; and their states."""
    folder = tmp_path_factory.mktemp("text")
    digest = Backbone.of(target.network).digest
    (folder / "facts.json").write_text(json.dumps({"backbone": digest}))
    rows = walks(32)
    own = np.ones(rows.shape, bool)
    own[:, :2] = False
    for split in ("train", "held_out"):
        np.savez_compressed(folder / f"{split}-00000.npz", tokens=rows, own=own)
    data.compute_states(target.network, folder, backbone=digest)
    return folder


@pytest.fixture(scope="module")
def sound(fitted):
    return fitted["medusa"]


# --- ablation -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(target, text):
    config = periodic.config(draft_vocab=len(MAP))
    told = []
    found = practice.ablate(target, config, MAP, RECIPE, text, progress=lambda *said: told.append(said))
    assert [done for done, *_ in told] == list(range(len(VARIANTS)))
    return found.set_index("variant")


def test_every_variant_is_costed_and_all_but_one_are_trained(table):
    assert list(table.index) == [variant.name for variant in VARIANTS] and (table["draft_ms"] > 0).all()
    trained = table["top1"].notna()
    assert list(table.index[~trained]) == ["private, all tokens"] and table.loc["private, all tokens", "steps"] == 0
    assert all(len(shares) == 3 and all(0 <= s <= 1 for s in shares) for shares in table.loc[trained, "top1"])


def test_costs_equal_a_count_by_hand(table):
    d, v, n, a = periodic.HIDDEN, len(MAP), 3, 4  # a: bytes of a float32
    block = d * d + d
    assert table.loc["shared lm_head", "parameters"] == n * block
    assert table.loc["shared lm_head", "read_mb"] == pytest.approx(a * (n * block + v * d) / 1e6)
    hydra = sum(d * d * (2 + i) + d for i in range(n))
    assert table.loc["Hydra", "parameters"] == hydra
    # head after head, each with a product of its own
    assert table.loc["Hydra", "read_mb"] == pytest.approx(a * (hydra + n * v * d) / 1e6)
    assert table.loc["low rank", "parameters"] == n * (block + 32 * (d + v))
    assert table.loc["private lm_heads", "parameters"] == n * (block + v * d)
    assert table.loc["private lm_heads", "shared_mb"] == 0
    assert table.loc["shared, all tokens", "shared_mb"] == pytest.approx(a * VOCAB * d / 1e6)
    assert table.loc["private, all tokens", "parameters"] == n * (block + VOCAB * d)


def test_without_the_norm_the_blocks_are_fed_the_bare_state(backbone):
    state = torch.randn(2, periodic.HIDDEN, generator=torch.Generator().manual_seed(0))
    bare = variant_heads(Variant("x", norm=False), periodic.config(), None, backbone, 0)
    assert torch.equal(bare.normed(state), state) and torch.equal(bare.as_input(state), state)
    # also where the heads to compare with take what is behind the norm
    other = variant_heads(Variant("x", norm=False), periodic.config(input="post_norm"), None, backbone, 0)
    assert torch.equal(other.normed(other.as_input(state)), state) and other.config.input == "pre_norm"
    sound = variant_heads(Variant("x"), periodic.config(), None, backbone, 0)
    assert torch.equal(sound.normed(state), backbone.norm(state))


# --- short trainings ------------------------------------------------------------------------------------------------


class Noting(practice.Watch):
    def __init__(self):
        self.told = []

    def starts(self, run, steps, seconds_a_step):
        self.told.append((run, steps, seconds_a_step > 0))

    def step(self, run, report):
        self.told.append((run, report.step))


def test_the_time_is_told_before_the_first_step_and_heads_get_better(target, text, tmp_path):
    watch = Noting()
    heads = periodic.new_heads(target)
    recipe = replace(RECIPE, steps=40, peak_lr=2e-2)
    found = practice.practise("once", heads, recipe, text, tmp_path, watch=watch)
    assert watch.told == [("once", 40, True), *(("once", step) for step in range(1, 41))]
    rows = found.rows()
    assert [row["head"] for row in rows] == [0, 1, 2] and {row["steps"] for row in rows} == {40}
    assert rows[0]["told_s"] > 0 and rows[0]["took_s"] > 0
    # untrained heads say the next token, which is never the one behind it in a circle of six
    assert max(row["top1_before"] for row in rows) == 0 < min(row["top1"] for row in rows)


# --- planted faults -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    class Clean:
        clean, findings = True, ()

    return Clean()


def test_a_dying_schedule_has_a_rate_and_then_none_and_a_recipe_refuses_it():
    dying = faults.DyingRecipe(18, warmup=1, peak_lr=1e-3)
    rates = [dying.lr(step) for step in range(18)]
    assert min(rates[:12]) > 0 and rates[12:] == [0.0] * 6 and max(rates) == 1e-3
    with pytest.raises(InputError, match="eta_min"):
        Recipe(30, eta_min=0.0)


def test_planting_a_norm_does_not_disturb_who_listens_to_the_backbones(target, backbone, sound, report):
    heard = []
    hook = backbone.norm.register_forward_hook(lambda *_: heard.append(1))
    state = torch.randn(1, periodic.HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = backbone.norm(backbone.norm(state))
    heard.clear()
    planted = faults.other_norm(sound, backbone, report, twice=True)
    assert torch.equal(planted.heads.normed(state), expected) and not heard
    hook.remove()


def test_a_fault_that_was_not_planted_is_not_named(target, sound, report):
    cases = [
        faults.Planted("claimed", "double norm", sound, report),
        faults.Planted("none", "", periodic.new_heads(target), None),  # said to be sound, and never loaded
    ]
    found = faults.judge(target, cases, periodic.prompts(6), max_new_tokens=12)
    assert not found["named"].any()


def test_transformers_last_hidden_state_is_behind_the_norm(target):
    found = faults.last_hidden_state(target, periodic.prompts()[0]).set_index("state")["largest_difference"]
    assert found["behind it"] == 0 and found["before the final norm"] > 0.1


# --- texts ----------------------------------------------------------------------------------------------------------


def named_prompts():
    return [Prompt(id=f"p{i}", category="code", text="x") for i in range(2)]


def test_chains_and_trees_give_the_plain_text(target, sound, monkeypatch):
    ids = dict(zip(("p0", "p1"), periodic.prompts(), strict=False))
    monkeypatch.setattr("specnb.decode.generate.prompt_ids", lambda _target, prompt: tuple(ids[prompt.id]))
    plan = TreePlan((-1, -1, 0, 2), (0, 1, 0, 0))
    found = identity(target, {"medusa": (sound, plan)}, named_prompts(), max_new_tokens=20)
    assert list(found["shape"]) == ["chain", "tree"] and list(found["drafts"]) == [3, 4]
    assert (found["differ"] == 0).all() and (found["tokens"] == 40).all() and (found["tau"] > 3).all()
