"""Notebook 05 as a whole on a backbone that walks in circles, and what its tables and figures show of it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specnb import store
from specnb.book import medusa as figures
from specnb.book.medusa_live import TrainingView
from specnb.errors import InputError
from specnb.medusa import checkpoint, data
from specnb.medusa import study as head_study
from specnb.medusa.loop import Measured, Report
from specnb.medusa.nets import Backbone
from specnb.medusa.study import FRESH, RESUMED, Study, loaded_heads
from specnb.medusa.tree import PUBLISHED
from specnb.params import MedusaParams
from specnb.prompts import Prompt
from tests.medusa import periodic
from tests.medusa.test_ablation import walks


@pytest.fixture(scope="module")
def target():
    return periodic.backbone_model()


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    """Both kinds of heads that know the circles, as checkpoints."""
    root = tmp_path_factory.mktemp("heads")
    for kind in ("medusa", "hydra"):
        heads = periodic.new_heads(target, kind=kind)
        log = periodic.fit(heads, target, steps=400)
        checkpoint.save(heads, root / kind, dtype="float32", facts={"log": log})
    return root


@pytest.fixture(scope="module")
def prompts():
    found = [Prompt(id=f"p{i}", category=("code", "prose")[i % 2], text="x") for i in range(len(periodic.prompts()))]
    return found, dict(zip((p.id for p in found), periodic.prompts(), strict=True))


@pytest.fixture(scope="module")
def study(target, folders, prompts, tmp_path_factory):
    """A study of the circles: every section was run, in the notebook's order."""
    params = MedusaParams.checked(
        target="periodic", dtype="float32", medusa=str(folders / "medusa"), hydra=str(folders / "hydra"),
        categories=["code", "prose"], max_new_tokens=12, steps=12, ablation_steps=4,
    )  # fmt: skip
    work = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("specnb.decode.generate", "specnb.medusa.study"):
            patch.setattr(f"{module}.prompt_ids", lambda _target, prompt: tuple(prompts[1][prompt.id]))
        patch.setattr(head_study, "load", lambda _name, **_options: periodic.backbone_model())
        patch.setattr(head_study, "write_text", lambda _name, folder, **_options: write_circles(target, folder))
        loaded = {kind: loaded_heads(str(folders / kind), kind, target) for kind in ("medusa", "hydra")}
        made = Study(params, target, loaded, work)
        made.prompts = (prompts[0][:6], prompts[0][-6:])
        made.view = TrainingView([RESUMED, FRESH], 3)
        for name in ("write", "plant", "last_hidden_state", "kill", "ablate", "gate", "accuracy", "served", "choose"):
            setattr(made, f"{name}_found", getattr(made, name)())
        made.practise_found = made.practise(made.view)
        for name in ("time", "compare_texts"):
            setattr(made, f"{name}_found", getattr(made, name)())
    return made


def write_circles(target, folder):
    folder.mkdir()
    digest = Backbone.of(target.network).digest
    (folder / "facts.json").write_text(json.dumps({"backbone": digest}))
    rows = walks(40)
    for split in ("train", "held_out"):
        np.savez_compressed(folder / f"{split}-00000.npz", tokens=rows, own=np.ones(rows.shape, bool))
    data.compute_states(target.network, folder, backbone=digest)
    return {"train_tokens": rows.size, "seconds": 0.1}


# --- the study ------------------------------------------------------------------------------------------------------


def test_sound_heads_pass_and_every_fault_is_named(study):
    rows = study.plant_found.set_index("fault")
    assert rows["named"].all() and len(rows) == 5 and rows.loc["none", "failed"] == ""
    right = rows.loc["none", "right"]
    assert right == rows.loc["none", "right_normed_once"] > 0.9 < rows.loc["none", "alpha_1"]
    for fault in ("norm left out", "norm applied twice"):
        assert rows.loc[fault, "right_normed_once"] == right > rows.loc[fault, "right"]
    assert rows.loc["never loaded", "alpha_1"] < 0.2 and rows["repeats"].max() == 0  # no circle repeats a token
    assert study.gate_found["passed"].all() and set(study.gate_found["kind"]) == {"medusa", "hydra"}
    assert (study.died["lr"] == 0).any() and study.died["step"].iloc[-1] == 18
    assert study.last_hidden_state_found["largest_difference"].tolist()[1] == 0


def test_training_is_told_of_and_goes_on_to_the_bit(study):
    assert (study.kill_found["differing"] == 0).all() and study.kill_found["trained"].all()
    assert set(study.practise_found["run"]) == {RESUMED, FRESH} and (study.practise_found["steps"] == 12).all()
    before = study.practise_found.groupby("run")["top1_before"].min()
    assert before[RESUMED] > 0.9 and before[FRESH] == 0
    heads = study.heads["medusa"]
    again, _ = loaded_heads(study.params.medusa, "medusa", study.target)
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), again.parameters(), strict=True))  # not trained


def test_perfect_heads_are_always_right_and_always_kept(study):
    assert (study.accuracy_found["accuracy"] > 0.9).all() and len(study.accuracy_found) == 2 * 3 * 2
    assert (study.served_found.loc[study.served_found["tested"] > 0, "alpha"] > 0.9).all()


def test_a_size_costs_time_and_none_is_plain_decoding(study):
    sizes = study.choose_found
    assert (sizes.groupby("kind")["nodes"].min() == 0).all() and (sizes["seconds"] > 0).all()


def test_speeds_are_there_for_every_category_and_texts_are_plain(study):
    speeds = study.time_found
    assert set(speeds["category"]) == {"code", "prose", "all"} and (speeds["speedup"] > 0).all()
    assert (speeds["identical"] == speeds["n_prompts"]).all() and (speeds["alpha_1"] > 0.9).all()
    assert (study.compare_texts_found["differ"] == 0).all()
    assert set(study.compare_texts_found["kind"]) == {"medusa", "hydra"}
    assert set(study.compare_texts_found["shape"]) == {"chain", "tree"}


def test_the_record_holds_every_section_and_can_be_saved(study, tmp_path):
    record = study.record()
    assert set(record.measurements) == {
        "text", "faults", "died", "last_hidden_state", "killed", "ablation", "gates", "accuracy", "served", "trees",
        "practice", "speeds", "identity",
    }  # fmt: skip
    heads = [model for model in record.provenance["models"] if model["role"] == "drafter"]
    assert len({model["sha256"] for model in heads}) == 2 and all(len(model["sha256"]) == 64 for model in heads)
    assert record.run_id == study.record().run_id and record.status == "completed"
    read = store.load(store.save(record, tmp_path))
    assert read.measurements["speeds"][0]["kind"] == "medusa" and len(read.generations) == 3 * 6


def test_sections_say_which_one_comes_before(target, folders, tmp_path):
    params = MedusaParams.checked(medusa=str(folders / "medusa"), hydra=str(folders / "hydra"))
    loaded = {kind: loaded_heads(str(folders / kind), kind, target) for kind in ("medusa", "hydra")}
    new = Study(params, target, loaded, tmp_path)
    for section, first in (("accuracy", "gates"), ("time", "trees"), ("kill", "text")):
        with pytest.raises(InputError, match=f"needs the section {first}"):
            getattr(new, section)()
    with pytest.raises(InputError, match="are hydra heads, given as medusa"):
        loaded_heads(str(folders / "hydra"), "medusa", target)


def test_heads_that_failed_a_gate_have_no_speed(study, monkeypatch):
    why = SimpleNamespace(name="double norm", evidence="seen", remedy="mend")
    monkeypatch.setitem(study.checked, "medusa", SimpleNamespace(passed=False, diagnoses=[why], plain=(), chains=()))
    with pytest.raises(InputError, match=r"no speed of medusa heads that failed a gate: double norm \(seen\): mend"):
        study.time()


# --- tables and figures ---------------------------------------------------------------------------------------------


def test_a_chain_of_published_heads_keeps_a_fifth_of_its_drafts():
    found = figures.chains(PUBLISHED[:4])
    assert found["tau"].tolist() == [1.56, 1.74, 1.77, 1.78] and found["acceptance_rate"].iloc[-1] == 0.19


def all_figures(study):
    return {
        "faults": figures.faults(study.plant_found, study.died),
        "training": study.view.figure(),
        "speed": figures.speed(study.time_found),
    }


def test_every_figure_has_a_title_and_units_on_its_axes(study):
    for name, figure in all_figures(study).items():
        assert figure.layout.title.text, name
        axes = [axis for axis in figure.select_xaxes() if axis.visible is not False]
        assert any(axis.title.text for axis in axes), name
        assert figure.to_json()


def test_figures_show_the_numbers_of_their_tables(study):
    made = all_figures(study)
    first = made["faults"].data[0]
    assert list(first.y) == study.plant_found["fault"].tolist() and first.x[0] > 90
    speeds = {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in made["speed"].data[:2]}
    table = study.time_found.set_index(["kind", "category"])["speedup"]
    assert speeds["hydra"]["all"] == table["hydra", "all"]
    shares = [bar.x[0] for bar in made["speed"].data[2:]]
    assert sum(shares) == pytest.approx(100)
    costs = figures.ablation_table(study.ablate_found)
    assert len(costs) == 5 and costs["top1 head 0"].notna().all()  # the heads have no draft vocabulary to leave


# --- the live figure ------------------------------------------------------------------------------------------------


def report(step, share):
    three = torch.full((3,), share)
    return Report(step, 3.0 - share, Measured(3 * three, three, three))


def test_the_live_figure_grows_and_tells_the_time_before_the_first_step():
    told = []
    view = TrainingView(["a", "b"], 3, progress=lambda *said: told.append(said))
    view.starts("a", 4, 0.5)
    assert told == [(0, 4, "a: 4 steps of 0.50 s, about 2 s")] and "about 2 s" in view.figure().layout.title.text
    drawn = view.plot._traces
    view.step("a", report(1, 0.1))
    assert told[-1] == (1, 4, "a: about 2 s left") and view.plot._traces == drawn
    view.step("a", report(2, 0.25))
    assert view.plot._traces != drawn
    still = view.figure()
    assert list(still.data[0].y) == pytest.approx([2.9, 2.75]) and list(still.data[1].y) == pytest.approx([10, 25])
    live = list(view.plot.figure.data)
    assert [list(one.x or ()) for one in live] == [list(one.x or ()) for one in still.data]
    assert len(view.history) == 6 and set(view.history["run"]) == {"a"}
