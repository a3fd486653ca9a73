"""The cells of notebook 05, run on a backbone with periodic text."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from specnb.book import claims
from specnb.chapters import trained_heads
from specnb.chapters.trained_heads import (
    DRAWN,
    FEW,
    POINTS,
    RATIOS,
    VARIANTS,
    choose_prompts,
    load_kind,
    place_nodes,
    tabulate_by_category,
)
from specnb.errors import InputError
from specnb.io import project_dir
from specnb.lm.tree import COMMITTED
from specnb.measure.bench import Timed
from specnb.medusa import checkpoint
from specnb.medusa.faults import ALIVE_ALL, LR_ZERO
from specnb.prompts import CATEGORIES, Prompt
from tests.medusa import periodic
from tests.tiny_models import VOCAB

MAP = torch.arange(periodic.FIRST, VOCAB)
PARAMETERS = 2  # the cell


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of trained heads of both kinds."""
    root = tmp_path_factory.mktemp("heads")
    target = periodic.backbone_model()
    for kind in ("medusa", "hydra"):
        heads, log = periodic.trained(target, MAP, kind=kind)
        checkpoint.save_heads(heads, root / kind, dtype="float32", facts={"log": log})
    return root


@pytest.fixture(scope="module")
def notebook(folders, tmp_path_factory):
    """The namespace of the notebook after its cells have run, and its figures as `pictures`."""
    cells = json.loads((project_dir() / "notebooks" / "05_medusa.ipynb").read_text())["cells"]
    ids = {f"p{i}": prompt for i, prompt in enumerate(periodic.prompts())}
    found = [
        Prompt(id=name, category=("code", "prose")[i % 2], text="x") for i, name in enumerate(ids)
    ]
    names = {
        "target": "periodic",
        "dtype": "float32",
        "medusa": str(folders / "medusa"),
        "hydra": str(folders / "hydra"),
        "prompts": "",
        "categories": ["code", "prose"],
        "prompts_per_category": 5,
        "max_new_tokens": 12,
        "identity_prompts": 1,
        "rows": 48,
        "row_tokens": 64,
        "steps": 12,
        "ablation_steps": 4,
        "seed": 0,
    }
    names["display"] = lambda *_shown: None
    pictures = names["pictures"] = {}

    def write_text(_params, _target, folder, _progress):
        periodic.write_text(periodic.backbone_model(), folder, length=40)
        return pd.DataFrame([{"seconds": 0.1}])

    with pytest.MonkeyPatch.context() as patch:
        known = lambda _target, given: tuple(  # noqa: E731
            ids[given.id] if isinstance(given, Prompt) else given
        )
        patch.setattr("specnb.decode.generate.prompt_ids", known)
        patch.setattr(trained_heads, "load", lambda _name, **_options: periodic.backbone_model())
        patch.setattr(trained_heads, "write_study_text", write_text)
        patch.setattr(trained_heads, "choose_prompts", lambda *_: (found[:6], found[-6:]))
        patch.setattr(
            "specnb.publish",
            lambda figure, name, _record, table: pictures.update({name: (figure, table)}),
        )
        patch.setenv("SPECNB_RESULTS", str(tmp_path_factory.mktemp("results")))
        for cell in cells[PARAMETERS + 1 :]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    return SimpleNamespace(**names)


def test_sound_heads_pass_and_every_fault_is_named(notebook):
    rows = notebook.fault_table.set_index("planted")
    sound = rows.loc["none"]
    assert rows["agree"].all() and len(rows) == 7 and sound["failed"] == ""
    assert sound["right"] == sound["right_normed_once"] > 0.9 < sound["alpha_1"]
    for fault in ("norm left out", "norm applied twice"):
        assert rows.loc[fault, "right_normed_once"] == sound["right"] > rows.loc[fault, "right"]
    assert (
        rows.loc["never loaded", "alpha_1"] < 0.2 and rows.loc[ALIVE_ALL, "failed"] == "acceptance"
    )
    assert (
        notebook.checked.failed == ["loader", "acceptance"] and notebook.gate_table["passed"].all()
    )
    assert (notebook.drafts[:-1] == notebook.along.ids[1:]).float().mean() > 0.9, (
        "the head by hand is the head"
    )
    assert (
        notebook.planted[LR_ZERO][1].log[-1]["lr"]
        == 0
        < notebook.planted[ALIVE_ALL][1].log[-1]["lr"]
    )
    values = claims.values_of(notebook.record)
    assert values["lost"].value == pytest.approx(values["alive"].value - values["died"].value)
    schedules = trained_heads.compare_schedules()
    assert schedules.loc["steps with LR near zero"].tolist() == ["2.0%", "0.0%"]
    assert notebook.record.measurements["last_hidden_state"][1]["largest_difference"] < 1e-5


def test_a_short_training_starts_from_its_heads_and_does_not_change_them(notebook):
    resumed, scratch = notebook.resumed, notebook.scratch
    assert (
        (resumed["steps"] == 12).all()
        and resumed["top1_before"].min() > 0.9
        and scratch["top1_before"].max() == 0
    )
    again, _ = load_kind(notebook.params.medusa, "medusa", notebook.backbone)
    assert all(
        torch.equal(a, b)
        for a, b in zip(notebook.heads.parameters(), again.parameters(), strict=True)
    )
    assert len(notebook.view.history) == 2 * (12 + 1 + POINTS)


def test_the_costs_of_an_ablation_match_a_count_by_hand(notebook):
    table = notebook.ablation.set_index("variant")
    assert list(table.index) == [*VARIANTS] and list(table.index[table["top1"].isna()]) == [
        trained_heads.NOT_TRAINED
    ]
    d = periodic.HIDDEN
    v = len(MAP)
    n = 3
    block = d * d + d
    hydra = sum(d * d * (2 + i) + d for i in range(n))
    # Hydra heads run one after the other and read the lm_head once each.
    for name, parameters, read in (
        ("shared lm_head", n * block, n * block + v * d),
        ("Hydra", hydra, hydra + n * v * d),
        ("private lm_heads", n * (block + v * d), n * (block + v * d)),
        ("shared, all tokens", n * block, n * block + VOCAB * d),
    ):
        assert table.loc[name, ["parameters", "read_mb"]].tolist() == pytest.approx(
            [parameters, 4 * read / 1e6]
        )


def test_drafted_texts_equal_plain_ones_and_speeds_add_up(notebook):
    speeds = notebook.speeds
    assert (speeds["identical"] == speeds["n_prompts"]).all() and (speeds["tau"] > 1.5).all()
    share = notebook.study.reference.baseline.share
    assert speeds["over_fastest"].tolist() == pytest.approx((share * speeds["speedup"]).tolist())
    assert speeds.groupby("category")["plain_tokens_per_s"].nunique().max() == 1  # both in one run
    assert len(notebook.identity) == 4 and (notebook.identity["differ"] == 0).all()


def test_the_record_has_every_section(notebook):
    record = notebook.study.record()
    assert set(record.measurements) == {
        "text",
        "faults",
        "died",
        "last_hidden_state",
        "ablation",
        "gates",
        "accuracy",
        "served",
        "trees",
        "practice",
        "speeds",
        "identity",
        "baseline",
    }
    heads = [model["sha256"] for model in record.provenance["models"] if model["role"] == "drafter"]
    assert len({*heads}) == 2 and len(record.generations) == 3 * 6 and record.status == "completed"
    tables = record.measurements
    assert (
        all(row["accuracy"] > 0.9 for row in tables["accuracy"])
        and len(tables["accuracy"]) == 2 * 3
    )
    assert min(row["alpha"] for row in tables["served"] if row["tested"]) > 0.8


def test_heads_of_the_other_kind_and_heads_that_failed_a_gate_are_refused(
    notebook, folders, monkeypatch
):
    with pytest.raises(InputError, match="got hydra heads"):
        load_kind(str(folders / "hydra"), "medusa", notebook.backbone)
    monkeypatch.setitem(notebook.study.checked, "medusa", notebook.checked)
    with pytest.raises(InputError, match="never loaded"):
        notebook.study.compare_trees("medusa")


def test_prompts_that_are_timed_and_judged_never_overlap():
    """Of 14 prompts, 5 or more are judged in a single category, 1 or more in each of six."""
    for categories, most in ((("code",), 9), (("code", "prose"), 11), (CATEGORIES, 13)):
        timed, judged = choose_prompts(categories, most)
        assert len(timed) == most * len(categories) and not {p.id for p in timed} & {
            p.id for p in judged
        }
        with pytest.raises(InputError, match=f"code has 14 prompts.*at most {most}"):
            choose_prompts(categories, most + 1)


def test_speeds_by_category_by_hand():
    runs = []
    for prompt, accepted in enumerate([1, 0, 1]):
        drafted = periodic.text_of([(2 if accepted else 1, accepted, accepted + 1)] * 5, second=0.1)
        tokens = drafted.token_ids
        alone = periodic.text_of([(0, 0, 1)] * len(tokens))
        runs.append(Timed("plain", prompt, 0, len(tokens), 2.0, tokens, alone))
        runs.append(Timed("medusa", prompt, 0, len(tokens), 1.0, tokens, drafted))
    table = tabulate_by_category(runs, ["code", "json", "code"], "medusa").set_index("category")
    assert table["tau"].to_dict() == {"code": 2, "json": 1, "all": 25 / 15}
    assert (table["speedup"] == 2).all() and table["low"].isna().all()


def test_figures_show_the_numbers_of_their_tables(notebook):
    assert set(notebook.pictures) == {
        f"05_{name}" for name in ("faults", "training", "trees", "alpha", "speed")
    }
    assert all(
        figure.layout.title.text and len(table) for figure, table in notebook.pictures.values()
    )
    first = notebook.pictures["05_faults"][0].data[0]
    assert (
        first.y[1] == "<b>never loaded</b><br>failed gates: loader, acceptance" and first.x[0] > 90
    )
    marks, served = notebook.pictures["05_alpha"]
    assert sum(len(trace.x) for trace in marks.data) == (served["tested"] >= FEW).sum() > 0
    sizes = notebook.pictures["05_trees"][0].data[:2]
    drawn = notebook.pictures["05_trees"][0].data[2:]
    assert all(trace.y[0] == 1 for trace in sizes)  # no nodes: plain decoding
    n_nodes = [
        sorted({len(tree.plan) for tree in trees} & {*DRAWN})
        for trees in notebook.study.trees.values()
    ]
    assert [len(tree.x) / 3 for tree in drawn] in n_nodes  # a line per node
    marks = notebook.pictures["05_speed"][0].data
    table = notebook.speeds.set_index(["kind", "category"])
    assert [dict(zip(m.y, m.x, strict=True))["all"] for m in marks[2:]] == [
        table.loc[("hydra", "all"), ratio] for ratio in RATIOS
    ]


def test_the_places_of_a_tree_by_hand():
    """The root has two children; the first has two, the second none."""
    assert place_nodes([COMMITTED, COMMITTED, 0, 0]) == [0.5, 2, 0, 1, 1.25]
