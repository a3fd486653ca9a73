"""`specnb bench medusa`: no speed without sound heads, and with them a table whose numbers are the runs'."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from specnb import cli
from specnb.errors import InputError
from specnb.measure.bench import Timed
from specnb.medusa import bench as heads_bench
from specnb.medusa import checkpoint
from specnb.medusa.bench import ALL, PARTS, HeadsBenchParams, checked_params, chosen_prompts, shown_rows, speed_table
from specnb.medusa.tree import TreePlan, grow
from specnb.prompts import Prompt
from specnb.records import Generation, Round
from tests.medusa import periodic

CATEGORY_OF = ("code", "json", "code", "json", "code", "json", "code", "json", "code", "json")


@pytest.fixture(scope="module")
def target():
    return periodic.backbone_model()


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """Checkpoints in it: `sound` and `zero`."""
    root = tmp_path_factory.mktemp("heads")
    for name, shift, steps in (("sound", 0, 400), ("zero", 0, 0)):
        heads = periodic.new_heads(target)
        log = periodic.fit(heads, target, shift=shift, steps=steps)
        checkpoint.save(heads, root / name, dtype="float32", facts={"log": log})
    return root


@pytest.fixture
def stage(monkeypatch, target, folder):
    """The backbone of circles behind the name of a target, and two categories of prompts; the folder of heads."""
    ids = periodic.prompts()
    made = [Prompt(id=f"p{i}", category=kind, text=str(i)) for i, kind in enumerate(CATEGORY_OF)]
    monkeypatch.setattr(target, "encode", lambda text, special=True: ids[int(text)])
    monkeypatch.setattr(target, "close", lambda: None)
    monkeypatch.setattr(heads_bench, "load", lambda name, **options: target)
    monkeypatch.setattr(heads_bench, "prompts", lambda category: [p for p in made if p.category == category])
    return folder


def params(folder, **changed):
    usual = {"num_trials": 1, "warmup_steps": 1, "max_new_tokens": 14, "tree": "chain"}
    return HeadsBenchParams(heads_checkpoint=str(folder), categories=("code", "json"), **(usual | changed))


@pytest.mark.parametrize("tree", ["auto", "3"])
def test_sound_heads_are_timed_against_plain_decoding(stage, tree):
    steps = []
    found = heads_bench.run(params(stage / "sound", tree=tree), progress=lambda *step: steps.append(step))
    assert found.checked.passed
    rows = found.speeds.set_index("category")
    assert list(rows.index) == ["code", "json", ALL] and rows.loc[ALL, "n_prompts"] == 4
    assert (rows["share_identical"] == 1).all() and (rows["alpha_1"] > 0.9).all() and (rows["tau"] > 1.5).all()
    assert rows[[f"{part}_share" for part in PARTS]].sum(axis=1).to_numpy() == pytest.approx(1)
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    assert document["passed"] and len(document["speeds"]) == 3 and len(document["gates"]) == 6
    if tree == "3":  # heads that are right are right about their first choices
        assert found.drafting.plan == TreePlan((-1, 0, 1), (0, 0, 0)) and document["drafting"]["k"] == 3
        assert found.drafting.says.endswith("by accuracies measured here on 6 prompts")
    assert bool(document["drafting"]["candidates"]) is (tree == "auto")
    assert steps[-1][0] == steps[-1][1] == 8


def test_the_command_says_what_is_wrong_and_exits_with_1(stage):
    words = ["bench", "medusa", "--categories", "code,json", "--num-trials", "1", "--warmup-steps", "1",
             "--max-new-tokens", "14", "--tree", "chain", "--heads-checkpoint"]  # fmt: skip
    bad = CliRunner().invoke(cli.app, [*words, str(stage / "zero"), "--k", "1"])
    assert bad.exit_code == 1 and "never loaded" in bad.stdout and "speed-up" not in bad.stdout
    failed = CliRunner().invoke(cli.app, [*words, str(stage / "zero"), "--json"])
    document = json.loads(failed.stdout)
    assert failed.exit_code == 1 and not document["passed"] and "speeds" not in document and document["diagnoses"]
    shown = CliRunner().invoke(cli.app, [*words, str(stage / "sound")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "speed-up" in shown.stdout and "passed" in shown.stdout


# --- parameters -----------------------------------------------------------------------------------------------------


def test_wrong_parameters_are_one_error_that_names_them_all():
    with pytest.raises(InputError, match=r"categories\.0 is 'cod'.*num_trials is 0"):
        checked_params(categories="cod", num_trials=0)
    assert checked_params(categories="code,edit").categories == ("code", "edit")
    assert checked_params().target.startswith("smollm2-135m?backend=hf")
    with pytest.raises(InputError, match="number of nodes"):
        heads_bench.run(HeadsBenchParams(tree="bush"))


def test_prompts_that_are_timed_and_judged_never_overlap():
    """A category has 14: one alone is judged on 5 of them, each of six on 1."""
    for categories, most in ((("code",), 9), (("code", "prose"), 11), (heads_bench.CATEGORIES, 13)):
        timed, judged = chosen_prompts(HeadsBenchParams(categories=categories, prompts_per_category=most))
        assert len(timed) == most * len(categories) and not {p.id for p in timed} & {p.id for p in judged}
        with pytest.raises(InputError, match=f"code has 14 prompts.*at most {most} a category"):
            chosen_prompts(HeadsBenchParams(categories=categories, prompts_per_category=most + 1))


# --- tables ---------------------------------------------------------------------------------------------------------


def made(n_rounds, accepted, k, *, second):
    """A generation whose every round accepts the same, each taking `second` for draft and three times it to verify."""
    rounds, n = [], accepted + 1
    for i in range(n_rounds):
        ids = tuple(range(i * n, (i + 1) * n))
        rounds.append(Round(i, k, accepted, (0,) * k, ids, (), second, 3 * second, 0.0, 0.0, 0.0, k + 1))
    tokens = tuple(range(n_rounds * n))
    return Generation(prompt_ids=(1,), token_ids=tokens, rounds=tuple(rounds), wall_s=1.0, stop_reason="length")


def runs(accepted_by_prompt, heads_s=1.0):
    for prompt, accepted in enumerate(accepted_by_prompt):
        ours = made(5, accepted, 2 if accepted else 1, second=0.1)
        alone = made(len(ours.token_ids), 0, 0, second=0.0)
        yield Timed("plain", prompt, 0, len(ours.token_ids), 2.0, ours.token_ids, alone)
        yield Timed("medusa", prompt, 0, len(ours.token_ids), heads_s, ours.token_ids, ours)


def test_speeds_by_hand():
    frame = speed_table(list(runs([1, 0, 1])), ["code", "json", "code"], "medusa").set_index("category")
    assert frame.loc["code", ["tau", "alpha_1", "accepted_1", "tested_1"]].tolist() == [2, 1, 10, 10]
    assert frame.loc["json", ["tau", "alpha_1", "accepted_1", "tested_1"]].tolist() == [1, 0, 0, 5]
    assert frame.loc[ALL, ["tau", "accepted_1", "tested_1"]].tolist() == [25 / 15, 10, 15]
    assert (frame["speedup"] == 2).all() and np.isnan(frame["low"]).all()
    assert frame["draft_share"].tolist() == pytest.approx([0.25] * 3)
    shown = shown_rows(frame.reset_index())
    assert shown[0][1:4] == ["2.00", "10/10", "2.00"] and "25% 75% 0% 0%" in shown[0]


def test_repeats_of_a_prompt_are_no_more_evidence_of_alpha():
    once = list(runs([1, 0, 1]))
    again = [r._replace(repeat=repeat) for repeat in range(5) for r in once]
    columns = ["category", "alpha_1", "accepted_1", "tested_1", "tau"]
    one, five = (speed_table(found, ["code", "json", "code"], "medusa")[columns] for found in (once, again))
    assert one.equals(five) and one["tested_1"].tolist() == [10, 5, 15]


@pytest.mark.parametrize("tree", ["3"])
def test_accuracies_that_came_with_the_heads_go_before_those_of_the_gates(stage, tree, tmp_path):
    """As for `specnb generate`: trees of the same heads are then the same."""
    shutil.copytree(stage / "sound", tmp_path / "heads")
    card = tmp_path / "heads" / "training.json"
    table = [[0.2, 0.7], [0.1, 0.0], [0.1, 0.0], [0.1, 0.0]]  # one row more than there are heads
    card.write_text(json.dumps(json.loads(card.read_text()) | {"accuracy": table}))
    drafting = heads_bench.run(params(tmp_path / "heads", tree=tree)).drafting
    assert drafting.plan.ranks[0] == 1 and drafting.says.endswith("by accuracies that came with the heads")
    assert tree == "auto" or drafting.plan == grow(np.array(table[:3]), 3)[0]
