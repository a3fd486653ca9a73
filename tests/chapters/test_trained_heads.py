"""The cells of notebook 05, run on a backbone with periodic text."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from specnb.book import claims
from specnb.chapters import trained_heads
from specnb.chapters.trained_heads import POINTS, VARIANTS, choose_prompts, load_kind
from specnb.errors import InputError
from specnb.io import project_dir
from specnb.measure.baseline import Baseline
from specnb.medusa import checkpoint
from specnb.medusa.drafter import KINDS
from specnb.medusa.faults import ALIVE_ALL, LR_ZERO
from specnb.medusa.gates import Checked, Gate
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
    """The namespace of the notebook after its cells have run."""
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
        patch.setattr("specnb.publish", lambda *_figure, **_table: None)
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
    assert rows.loc["never loaded", "alpha_1"] < 0.2
    assert rows.loc[ALIVE_ALL, "failed"] == "acceptance"
    assert rows.loc["never loaded", "failed"] == "loader, acceptance"
    assert (trained_heads.tabulate_gates(notebook.gate_table)[[*KINDS]] == "yes").all(axis=None)
    died, alive = (notebook.planted[fault][1].log[-1]["lr"] for fault in (LR_ZERO, ALIVE_ALL))
    assert died == 0 < alive
    values = claims.values_of(notebook.record)
    assert values["lost"].value == pytest.approx(values["alive"].value - values["died"].value)
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
    assert speeds["identical"].tolist() == speeds["n_prompts"].tolist() == [3, 3, 6] * 2
    assert (speeds["tau"] > 1.5).all()
    share = Baseline.model_validate(notebook.study.measured["baseline"]).share
    assert speeds["over_fastest"].tolist() == pytest.approx((share * speeds["speedup"]).tolist())
    assert speeds.groupby("category")["plain_tokens_per_s"].nunique().max() == 1  # both in one run
    assert len(notebook.identity) == 4 and (notebook.identity["differ"] == 0).all()


def test_heads_of_the_other_kind_and_heads_that_failed_a_gate_are_refused(
    notebook, folders, monkeypatch
):
    with pytest.raises(InputError, match="got hydra heads"):
        load_kind(str(folders / "hydra"), "medusa", notebook.backbone)
    unloaded = Checked((Gate("loader", False, "", "never loaded"),), None)
    monkeypatch.setitem(notebook.study.checked, "medusa", unloaded)
    with pytest.raises(InputError, match="never loaded"):
        notebook.study.compare_trees("medusa")


def test_prompts_that_are_timed_and_judged_never_overlap():
    """Of 20 prompts, 5 or more are judged in a single category, 1 or more in each of six."""
    for categories, most in ((("code",), 15), (("code", "prose"), 17), (CATEGORIES, 19)):
        timed, judged = choose_prompts(categories, most)
        assert len(timed) == most * len(categories) and not {p.id for p in timed} & {
            p.id for p in judged
        }
        with pytest.raises(InputError, match=f"code has 20 prompts.*at most {most}"):
            choose_prompts(categories, most + 1)
