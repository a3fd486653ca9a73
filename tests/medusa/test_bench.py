"""`specnb bench medusa`: no speed without sound heads, and with them a table whose numbers are the runs'."""

import json

import numpy as np
import pytest

from specnb.errors import InputError
from specnb.measure.bench import Timed
from specnb.medusa import bench, checkpoint
from specnb.medusa.bench import ALL, CATEGORIES, PARTS, SHOWN, HeadsBenchParams, chosen_prompts, speed_table
from specnb.medusa.tree import TreePlan
from specnb.prompts import Prompt
from tests.medusa import periodic

BAD = [[0.2, 0.7], [0.1, 0.0], [0.1, 0.0]]
"""Accuracies that come with heads, and are not those of the text at hand, which go before."""


@pytest.fixture(scope="module")
def folder(circles, fitted, tmp_path_factory):
    """Checkpoints in it: `sound` and `zero`."""
    root = tmp_path_factory.mktemp("heads")
    for name, heads in (("sound", fitted["medusa"]), ("zero", periodic.new_heads(circles))):
        checkpoint.save_heads(heads, root / name, dtype="float32", facts={"log": [], "accuracy": BAD})
    return root


@pytest.fixture
def stage(monkeypatch, circles, folder):
    """The backbone of circles behind the name of a target, and two categories of prompts; the folder of heads."""
    ids = periodic.prompts()
    texts = [Prompt(id=f"p{i}", category=("code", "json")[i % 2], text=str(i)) for i in range(len(ids))]
    monkeypatch.setattr(circles, "encode", lambda text, special=True: ids[int(text)] if text else [])
    monkeypatch.setattr(circles, "close", lambda: None)
    monkeypatch.setattr(bench, "load", lambda name, **options: circles)
    monkeypatch.setattr(bench, "prompts", lambda category, **_: [p for p in texts if p.category == category])
    return folder


def params(folder, **changed):
    usual = {"num_trials": 1, "max_new_tokens": 14, "tree": "chain", "categories": "code,json"}
    return HeadsBenchParams.checked(heads_checkpoint=str(folder), **(usual | changed))


@pytest.mark.parametrize("tree", ["auto", "3"])
def test_sound_heads_are_timed_against_plain_decoding(stage, tree):
    steps = []
    result = bench.run_bench(params(stage / "sound", tree=tree), progress=lambda *step: steps.append(step))
    assert result.checked.passed
    rows = result.speeds.set_index("category")
    assert list(rows.index) == ["code", "json", ALL] and rows.loc[ALL, "n_prompts"] == 4
    assert (rows["share_identical"] == 1).all() and (rows["alpha_1"] > 0.9).all() and (rows["tau"] > 1.5).all()
    assert rows[[f"{part}_share" for part in PARTS]].sum(axis=1).to_numpy() == pytest.approx(1)
    document = json.loads(json.dumps(result.document(), allow_nan=False))
    baseline = document["baseline"]
    share = baseline["plain_tokens_per_s"] / baseline["baseline_tokens_per_s"]
    assert rows["speedup"].tolist() == pytest.approx(share * rows["speedup_same_engine"]) and set(SHOWN) <= {
        *result.speeds
    }
    assert document["passed"] and len(document["speeds"]) == 3 and len(document["gates"]) == 6
    assert bool(document["drafting"]["candidates"]) is (tree == "auto")
    assert (rows["expected_tau"] > rows["tau"]).all() if tree == "auto" else rows["expected_tau"].isna().all()
    if tree == "3":  # heads that are right are right about their first choices
        assert result.drafting.plan == TreePlan((-1, 0, 1), (0, 0, 0)) and document["drafting"]["k"] == 3
        assert result.drafting.says.endswith("measured here on 6 prompts")
    assert steps[-1][0] == steps[-1][1] == 8


def test_the_command_says_what_is_wrong_and_exits_with_1(stage, specnb):
    words = ["bench", "medusa", "--categories", "code,json", "--num-trials", "1",
             "--max-new-tokens", "14", "--tree", "chain", "--heads-checkpoint"]  # fmt: skip
    code, shown, _ = specnb(*words, str(stage / "zero"), "--json")
    document = json.loads(shown)
    assert code == 1 and not document["passed"] and "speeds" not in document
    assert document["diagnoses"][0]["name"] == "never loaded"
    code, shown, _ = specnb(*words, str(stage / "sound"))
    assert code == 0 and "tau" in shown and "passed" in shown


def test_prompts_that_are_timed_and_judged_never_overlap():
    """A category has 14: one alone is judged on 5 of them, each of six on 1."""
    for categories, most in ((("code",), 9), (("code", "prose"), 11), (CATEGORIES, 13)):
        timed, judged = chosen_prompts(categories, most)
        assert len(timed) == most * len(categories) and not {p.id for p in timed} & {p.id for p in judged}
        with pytest.raises(InputError, match=f"code has 14 prompts.*at most {most}"):
            chosen_prompts(categories, most + 1)


def runs(accepted_by_prompt):
    for prompt, accepted in enumerate(accepted_by_prompt):
        drafted = periodic.text_of([(2 if accepted else 1, accepted, accepted + 1)] * 5, second=0.1)
        tokens = drafted.token_ids
        alone = periodic.text_of([(0, 0, 1)] * len(tokens))
        yield Timed("plain", prompt, 0, len(tokens), 2.0, tokens, alone)
        yield Timed("medusa", prompt, 0, len(tokens), 1.0, tokens, drafted)


def test_speeds_by_hand():
    once, categories = list(runs([1, 0, 1])), ["code", "json", "code"]
    frame = speed_table(once, categories, "medusa").set_index("category")
    columns = ["tau", "alpha_1", "accepted_1", "tested_1"]
    assert frame.loc["code", columns].tolist() == [2, 1, 10, 10] and frame.loc["json", columns].tolist() == [1, 0, 0, 5]
    assert frame.loc[ALL, columns].tolist() == [25 / 15, 10 / 15, 10, 15]
    assert (frame["speedup"] == 2).all() and np.isnan(frame["low"]).all()
    assert frame["draft_share"].tolist() == pytest.approx([0.25] * 3)
    # repeats of a prompt are no more evidence of alpha
    again = [r._replace(repeat=repeat) for repeat in range(5) for r in once]
    assert speed_table(again, categories, "medusa").set_index("category")[columns].equals(frame[columns])
