"""The score of the lab: cases really act, other tools see what they would see, and a worse lab scores worse."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from specnb.divergence import score as score_module
from specnb.divergence.align import Key
from specnb.divergence.along import Along
from specnb.divergence.faults import FAULTS
from specnb.divergence.grading import cases as grid_cases
from specnb.divergence.grading import grid
from specnb.divergence.grading import rows as score_rows
from specnb.divergence.grading.baselines import RULES, differences, pointed
from specnb.divergence.grading.cases import GridCase, cases, script_of, starts, within
from specnb.divergence.grading.controls import CONTROLS, controlled
from specnb.divergence.grading.grid import Subject, examined
from specnb.divergence.grading.rows import LAB, alarms, near, right, shares, table
from specnb.divergence.grading.smallest import scaled, smallest
from specnb.divergence.investigate import judge
from specnb.divergence.pair import copy_of, pair
from specnb.divergence.planted.fault import Fault
from specnb.divergence.score import Score, score
from specnb.divergence.script import run
from specnb.errors import InputError
from tests.divergence.lab import short_texts

FEEDS = np.array([0, 0, 0, 0, 1, 2])
"""Two single steps behind a prompt of four tokens."""


@pytest.fixture(scope="module", autouse=True)
def short():
    """What a run costs is its number of feeds."""
    with short_texts():
        yield


@pytest.fixture(scope="module")
def subject():
    return Subject("float32", 0)


@pytest.fixture(scope="module")
def small(divergence_score):
    return divergence_score


def along(**outputs):
    values = {Key(name, 0, "out", "out"): np.asarray(value, np.float32) for name, value in outputs.items()}
    return Along((0,) * len(FEEDS), values, dict.fromkeys(values, 0), ())


def named(tool, sound, run, dtype="float32"):
    found = pointed(tool, differences(along(**run), along(**sound), FEEDS, dtype))
    return found and found.module


def rows_of(*values, **shared):
    empty = Subject("float32", 0).row("fault", "f") | {"expected": "layers.0.mlp", "structural": True}
    return table([empty | shared | one for one in values])


NOISE = np.random.default_rng(0).normal(size=(6, 50))
A, B = NOISE, NOISE + 1


def test_rows_in_another_order_have_the_same_statistics_and_are_no_match():
    swapped = A[:, ::-1]
    for share in ("0.1%", "1.0%", "10.0%"):
        assert named(f"mean/std {share}", {"one": A}, {"one": swapped}) is None
    assert named("cosine 0.99", {"one": A}, {"one": swapped}) == "one"
    assert named("allclose", {"one": A}, {"one": swapped}) == "one"


def test_a_scale_has_the_same_cosine_and_another_spread():
    assert named("cosine 0.999", {"one": A}, {"one": 1.05 * A}) is None
    assert named("mean/std 3.0%", {"one": A}, {"one": 1.05 * A}) == "one"
    assert named("mean/std 10.0%", {"one": A}, {"one": 1.05 * A}) is None


def test_tolerance_is_that_of_the_dtype():
    assert named("allclose", {"one": B}, {"one": B * (1 + 1e-2)}, "bfloat16") is None
    assert named("allclose", {"one": B}, {"one": B * (1 + 1e-2)}, "float32") == "one"


def test_the_first_in_time_is_named_and_where_it_begins():
    """A module that runs later is first where it is wrong in an earlier forward."""
    late, early = A.copy(), B.copy()
    late[5] += 1
    early[3] += 1
    found = pointed("allclose", differences(along(a=late, b=early), along(a=A, b=B), FEEDS, "float32"))
    assert found == ("b", 3)
    assert named("allclose", {"a": A, "b": B}, {"a": late, "b": B}) == "a"


@pytest.mark.parametrize("tool", RULES)
def test_equal_runs_agree_and_what_is_no_number_does_not(tool):
    assert named(tool, {"one": A}, {"one": A}) is None
    broken = A.copy()
    broken[2, 3] = np.nan
    assert named(tool, {"one": A}, {"one": broken}) == "one"
    assert named(tool, {"one": 0 * A}, {"one": 0 * A}) is None


def test_every_fault_is_put_on_every_layer_that_can_have_it():
    made, script = pair(), script_of(0, 256)
    chosen = cases(made.draft, script)
    by_fault = pd.Series([case.fault for case in chosen]).value_counts()
    assert {*by_fault.index} == {*FAULTS}
    assert by_fault["kv_slot_swap"] == 4 and by_fault["positional_registry"] == 5 and by_fault["random_head"] == 1
    assert len({(case.fault, case.layer) for case in chosen}) == len(chosen)
    some = cases(made.draft, script, faults=["stale_row"], layers=[2])
    assert some == [case for case in chosen if (case.fault, case.layer) == ("stale_row", 2)]


def test_seeds_draw_other_texts_and_options():
    scripts = [script_of(seed, 256) for seed in range(4)]
    assert len({script.text for script in scripts}) == 4
    assert len({len(script.feeds[0].ids) for script in scripts}) > 1
    assert script_of(3, 256) == scripts[3] and all(any(feed.forget for feed in one.feeds) for one in scripts)


@pytest.mark.parametrize("options", [{"faults": ["no_such"]}, {"layers": [4]}])
def test_cases_that_cannot_be_are_refused(options):
    with pytest.raises(InputError, match=r"no (fault 'no_such'|layer 4)"):
        cases(pair().draft, script_of(0, 256), **options)


def test_tokens_of_a_fault_that_waits_begin_when_it_acts():
    fault = Fault("KV_SLOT", "m", ((0, None),), "", struck=[9, 7])
    assert starts(fault) == 7 and within(fault, 7) and not within(fault, 6)
    ranges = replace(fault, tokens=((5, 9), (21, 25)), struck=[9])
    assert starts(ranges) == 5 and [within(ranges, at) for at in (4, 5, 9, 21, 25)] == [False, True, False, True, False]


def test_a_fault_that_did_not_act_is_no_case(subject, monkeypatch):
    monkeypatch.setattr(grid, "judge", partial(judge, setups=("S3",)))
    with pytest.raises(InputError, match="never acted"):
        examined(subject, GridCase("foreign_writer", 0, {"position": 2, "after": 999}))
    with pytest.raises(InputError, match="changed no bit"):
        examined(subject, GridCase("expert_scale_in_op", 0, {"eps": 0.0}))


def test_the_lab_names_attention_where_others_name_what_it_gives(small):
    scored, _, _ = small
    rows = scored.rows[scored.rows["kind"] == "fault"].set_index(["tool", "against"])
    own = rows.loc[(LAB, "")]
    assert own["module"] == own["expected"] == "layers.0.self_attn" and own["exact"]
    assert own["rank"] == 1 and own["cause"] == "KV_SLOT" and own["seconds"] > 0
    assert rows.loc[("allclose", "same shapes"), "module"] == "layers.0.self_attn.o_proj"
    assert set(rows["expected_cause"]) == {"KV_SLOT"} and len(rows) == 1 + 2 * len(RULES)


def test_a_control_names_no_module_and_is_counted_as_such(small):
    scored, _, _ = small
    own = scored.by_tool().set_index(["tool", "against"]).loc[(LAB, "")]
    assert own["n"] == 1 and own["module"] == 1 and own["controls"] == 1 and own["alarms"] == 0
    assert scored.misses().empty and scored.false_alarms().empty


def test_a_score_is_what_it_was_after_saving(small, tmp_path):
    scored, _, _ = small
    loaded = Score.load(scored.save(tmp_path / "score.parquet"))
    pd.testing.assert_frame_equal(loaded.rows, scored.rows)
    assert loaded.facts == scored.facts and "packages" in loaded.facts["provenance"]
    assert loaded.document()["by_tool"] == scored.document()["by_tool"]


def test_what_was_done_is_not_done_again(small, monkeypatch):
    scored, keep, options = small
    monkeypatch.setattr(score_module, "measured", lambda *_: pytest.fail("run again"))
    again = score(**options, controls=False, keep=keep)
    pd.testing.assert_frame_equal(again.rows, scored.rows)


@pytest.mark.parametrize("damage", ["cut", "garbage", "column", "kind", "format"])
def test_a_file_that_is_no_score_is_refused(small, tmp_path, damage):
    scored, path = small[0], tmp_path / "score.parquet"
    data = scored.save(path).read_bytes()
    if damage in ("cut", "garbage"):
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"PAR1" + bytes(64) + b"PAR1")
    elif damage == "kind":
        score_rows.write(path, scored.rows.assign(kind="rumour"), {})
    else:
        whole = pq.read_table(path)
        pq.write_table(whole.drop(["rank"]) if damage == "column" else whole.replace_schema_metadata(None), path)
    with pytest.raises(InputError, match=r"score\.parquet"):
        Score.load(path)


def test_shares_count_what_was_named():
    rows = rows_of(
        {"module": "layers.0.mlp", "rank": 1, "token": True, "exact": True},
        {"module": "layers.0.mlp.router", "rank": 2, "token": True},
        {"module": "layers.0.mlp.router.deeper", "rank": 1},
        {"module": "-", "structural": False},
        tool=LAB,
    )
    assert [*right(rows)] == [True, False, False, False] and [*near(rows)] == [True, True, False, False]
    found = shares(rows, ["tool"]).iloc[0]
    assert (found["n"], found["module"], found["near"], found["token"], found["exact"]) == (4, 0.25, 0.5, 0.5, 0.25)
    assert found["cause"] == 0.5 and 0.04 < found["module_low"] < 0.05 and 0.69 < found["module_high"] < 0.71


def test_near_of_the_whole_model_is_what_it_holds_and_never_nothing():
    rows = rows_of({"module": "-", "structural": False}, {"module": "-"}, {"module": "embed_tokens"}, expected="")
    assert [*near(rows)] == [False, False, True]


def test_alarms_count_controls_only():
    rows = rows_of({"kind": "control"}, {"kind": "control", "structural": False}, {"kind": "fault"}, tool=LAB)
    found = alarms(rows, ["tool"]).iloc[0]
    assert (found["controls"], found["alarms"], found["alarm"]) == (2, 1, 0.5)


def test_the_smallest_scale_is_one_that_all_seeds_and_layers_find():
    scales = [{"size": size, "layer": layer, "module": "layers.0.mlp" if seen else "-"} for size, layer, seen in (
        (0.1, 0, True), (0.01, 0, True), (0.001, 0, False), (0.1, 1, True), (0.01, 1, False))]  # fmt: skip
    assert smallest(rows_of(*scales))["eps"].tolist() == [0.1]
    assert smallest(rows_of(*scales, {"size": 0.1, "layer": 2, "module": "-"}))["eps"].tolist() == [float("inf")]


def test_a_lab_with_too_high_a_floor_scores_worse():
    """A planted bug in the tool itself: what is measured is the lab, not the fault."""
    good = Subject("bfloat16", 0)
    assert smallest(table(scaled(good, 3, (0.1, 0.02))))["eps"].item() == 0.02
    good.lab.floor = good.lab.floor * 100
    rows = table(scaled(good, 3, (0.1, 0.02)))
    assert np.isinf(smallest(rows)["eps"].item()) and not right(rows).any()


@pytest.mark.parametrize("name", ["batch of 3", "experts in grouped products"])
def test_the_lab_names_nothing_where_nothing_is_wrong(subject, name):
    assert name in CONTROLS
    own = controlled(subject, name)[0]
    assert own["tool"] == LAB and not own["structural"] and own["verdict"] in ("SOUND", "PRECISION_ONLY")


@pytest.mark.parametrize(
    "options",
    [{"seeds": 0}, {"workers": 0}, {"dtypes": ()}, {"dtypes": ("int8",)}, {"layers": (9,)}, {"faults": ("x",)}],
)
def test_a_score_that_cannot_be_made_is_refused(options):
    with pytest.raises(InputError):
        score(**options)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_wait_are_those_that_say_when_they_acted(divergence_lab, name):
    """A name that is missing there would let a fault that never acted count as a case."""
    lab, neighbour = divergence_lab, copy_of(divergence_lab.target)
    with FAULTS[name](lab.draft, neighbour) as fault:
        run(lab.draft, lab.script, before=lambda feed: neighbour(torch.tensor([lab.script.text]), use_cache=False))
    assert bool(fault.struck) == (name in grid_cases.WAITING)
