"""The K sweep on toy models: runs and their order, other measurements, and errors."""

from dataclasses import replace
from datetime import timedelta
from itertools import product
from unittest.mock import Mock

import pytest

from specnb import store
from specnb.book import tables
from specnb.chapters import ksweep
from specnb.draft.load import LoadedDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import CapacityError, InputError, LoadError
from specnb.lm import toy
from specnb.measure import baseline, experiment, sweep
from specnb.measure.baseline import Baseline, BaselineTimer
from specnb.params import KSweepParams
from specnb.prompts import prompts
from tests.chapters.test_adaptive_k import reading

SMALL = KSweepParams(
    ks=[1, 3],
    temperatures=[0.0, 0.7],
    categories=["code", "prose"],
    prompts_per_category=2,
    pack_prompts=0,
    max_new_tokens=6,
    live_prompts=2,
    replayed=[],
)
REPLAYS = "greedy replays have the rounds of their live runs"


def opened(patch):
    """Return the target that the sweep opens."""
    model = reading(name="smollm2-135m?backend=hf")
    patch.setattr(experiment, "load", lambda name, **_: model)
    patch.setattr(baseline, "load", Mock(return_value=reading()))
    return model


@pytest.fixture
def target(monkeypatch):
    return opened(monkeypatch)


def run(**changes):
    return ksweep.run(SMALL.model_copy(update=changes))


@pytest.fixture(scope="module")
def record():
    with pytest.MonkeyPatch.context() as patch:
        opened(patch)
        return run(k_max=5)


def test_every_prompt_runs_with_every_k_and_temperature_and_checks_pass(record):
    runs = [(g.prompt_id, g.temperature, g.k) for g in record.generations]
    texts = [*product(("code-01", "code-02", "prose-01", "prose-02"), (0.0, 0.7))]
    assert sorted(runs) == sorted((*text, k) for text, k in product(texts, (0, 0, 1, 3)))
    order = [k for *_, k in runs[len(texts) :]]
    assert [order[i : i + 3] for i in (0, 3, 6)] == [[0, 1, 3], [1, 3, 0], [3, 0, 1]]
    assert all((g.drafter == "") == (g.k == 0) for g in record.generations)
    extra = record.provenance["extra"]
    n_forwards = sum(len(g.rounds) for g in record.generations)
    assert extra["contention"]["n_forwards"] == n_forwards
    assert extra["target"]["certificate"].startswith("forward passes over 2 or more tokens")
    assert "q4_1" in extra["target"]["weights"]
    assert tables.checks(record)["ok"].all() and record.measurements["forks"] == []
    live = tables.k_sweep(record)
    assert len(live) == (2 + 1) * 2 * 3 and set(live.query("category == 'all'")["n_prompts"]) == {4}
    assert tables.verify_cost(record)["width"].tolist() == [1, 2, 3, 5, 6]


def test_the_baseline_is_timed_before_the_live_runs_of_each_text(target, monkeypatch):
    """The record has the baseline of all timings, and its rivals are closed."""
    order = []
    for owner, name in ((BaselineTimer, "time"), (sweep.Sweep, "decode")):
        wrapped = getattr(owner, name)

        def noted(*args, _name=name, _wrapped=wrapped, **settings):
            order.append(_name[0])
            return _wrapped(*args, **settings)

        monkeypatch.setattr(owner, name, noted)
    monkeypatch.setattr(
        BaselineTimer, "baseline", lambda timer: Baseline(plain_tokens_per_s=len(timer._counts))
    )
    record = run()
    plain, warm_up = 8, 2
    assert "".join(order) == "t" * 4 + "d" * (plain + warm_up) + "tddd" * 8
    assert record.measurements["baseline"]["plain_tokens_per_s"] == 4 + 8
    baseline.load.return_value.close.assert_called()


def test_a_clock_that_is_set_back_during_a_run_gives_no_negative_duration(target):
    running = experiment.Experiment("01_k_sweep", SMALL, [], target)
    running._started.utc += timedelta(days=1)
    record = running.record()
    assert timedelta() <= record.ended - record.started < timedelta(minutes=1)


def test_the_replay_covers_every_k_and_agrees_with_the_live_runs(record):
    replayed = tables.replayed(record)
    assert set(replayed["drafter"]) == {"lookup(n=1..6,x4)"}
    assert set(replayed["k"]) == {1, 2, 3, 4, 5} and len(replayed) == (2 + 1) * 2 * 5
    greedy = tables.replay_check(record).query("temperature == 0")
    assert greedy["k"].tolist() == [1, 3]
    assert greedy["tau_ratio"].tolist() == pytest.approx([1.0, 1.0])
    assert tables.checks(record).set_index("check").loc[REPLAYS, "of"] == 8
    wrong = record.model_copy(deep=True)
    for row in wrong.measurements["replay"]["rows"]:
        row["rounds"] += (row["prompt_id"], row["k"], row["temperature"]) == ("code-01", 3, 0)
    failed = tables.checks(wrong).query("not ok")
    assert failed["check"].tolist() == [REPLAYS] and (failed["of"] - failed["hold"]).tolist() == [1]


def test_a_draft_model_has_a_cost_and_unsuitable_drafters_are_left_out(target, monkeypatch):
    draft = toy.markov(7, seed=2)
    load_drafter = experiment.load_drafter
    draft.caps = replace(draft.caps, n_ctx=64)
    draft.name = "smollm2-135m:q4_0"
    draft.close = Mock()
    given = {"model": LoadedDrafter(ModelDrafter(draft))}
    opening = lambda name, *a, **o: given.get(name) or load_drafter(name, *a, **o)  # noqa: E731
    monkeypatch.setattr(experiment, "load_drafter", opening)
    record = run(
        drafter="model", replayed=["lookup", "model", "medusa"], live_prompts=1, max_new_tokens=12
    )
    measured = record.measurements
    assert measured["c"] > 0 and draft.close.called and target.close.called
    assert [m["role"] for m in record.provenance["models"]] == ["target", "drafter"]
    assert measured["verify_curve"]["context"] == 32  # half of the smaller context
    assert set(measured["left_out"]) == {"medusa"}
    names = {"lookup(n=1..6,x4)", draft.name}
    assert set(tables.best_range(record)["drafter"]) == names
    assert len({g.prompt_id for g in record.generations if g.k}) == 2  # one of each category
    assert tables.checks(record)["ok"].all()
    assert tables.side_by_side(record)["sequences"].tolist() == 2 * [1, 2, 4, 8]


def test_the_fork_of_a_greedy_run_that_differs_is_recorded(target):
    """With a target whose wide passes are wrong, outputs differ by more than rounding."""
    forward = target.forward

    def wrong_when_wide(ids, n_logits=None):
        logits = forward(ids, n_logits)
        return -logits if len(ids) == 2 and len(logits) == 2 else logits

    target.forward = wrong_when_wide
    record = run(temperatures=[0.0])
    forks = record.measurements["forks"]
    assert forks and {"position", "margin", "noise"} <= set(forks[0])
    drafted = [g for g in record.generations if g.k]
    same = sum(g.token_ids == sweep.plain_text_of(record.generations, g).token_ids for g in drafted)
    assert tables.checks(record).loc[0, "hold"] == same + sum(f["near_tie"] for f in forks)


def test_invalid_drafters_and_prompts_raise_errors_before_timing(target, monkeypatch):
    monkeypatch.setattr(sweep, "verify_costs", lambda *_, **__: pytest.fail("timed"))
    monkeypatch.setattr("specnb.draft.model.load", Mock(side_effect=LoadError("damaged")))
    with pytest.raises(LoadError, match="damaged"):
        run(drafter="small.gguf")
    target.close.assert_called_once()
    with pytest.raises(InputError, match="auto"):
        run(drafter="auto")
    n = len(target.encode(prompts("code")[0].text))
    target.caps = replace(target.caps, n_ctx=n + SMALL.max_new_tokens - 1)
    with pytest.raises(CapacityError, match=f"prompt code-01 has {n} tokens"):
        run()
    target.encode = Mock(side_effect=InputError("no token for it"))
    with pytest.raises(InputError, match=r"prompt code-\S+ .*no token for it"):
        run()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("the kernel is full")], ids=repr
)
def test_an_error_saves_earlier_generations_and_is_never_hidden(
    target, monkeypatch, tmp_path, error
):
    def broken(done, total, what):
        if done == 3:
            raise error

    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    with pytest.raises(type(error)):
        ksweep.run(SMALL, progress=broken)
    (folder,) = (tmp_path / "01_k_sweep").iterdir()
    saved = store.load_record(folder)
    assert saved.status == "failed" and len(saved.generations) == 3
    assert saved.error == f"{type(error).__name__}: {error}"
    monkeypatch.setattr(experiment, "save", Mock(side_effect=InputError("the disk is full")))
    with pytest.raises(type(error)) as caught:
        ksweep.run(SMALL, progress=broken)
    assert "the disk is full" in caught.value.__notes__[-1]


def test_a_lossy_rule_is_not_replayed(target):
    record = run(rule="typical", temperatures=[0.7])
    assert "replay" not in record.measurements and set(tables.replayed(record)["k"]) == {0, 1, 3}
