"""The explorer without a browser: the replay's numbers, every control, live runs, and a trace that is taken again."""

import html
import io
import json
import re
import shlex
import threading
import time
from urllib.parse import unquote

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import typer

from specnb.book import publish
from specnb.book.explorer import figures as show
from specnb.book.explorer import live as live_module
from specnb.book.explorer import tables as explorer_tables
from specnb.book.explorer import widgets
from specnb.book.explorer.live import Workbench
from specnb.book.explorer.tables import ALL, CUSTOM, THIS_MACHINE, Setting, Tables, bend, stored
from specnb.book.explorer.widgets import Explorer
from specnb.book.notebook import find_notebook, parse_parameters, read_notebook, resolve
from specnb.book.plot import Plot
from specnb.book.tables import BUSY, best_k
from specnb.cli.app import app
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure import ksweep
from specnb.measure.cost import NAMED, Cost, CostCurve
from specnb.measure.follow import record
from specnb.measure.policies import CONTROLLERS, FIXED, POLICIES
from specnb.measure.recording import Trace
from specnb.measure.replay import counts_of, fixed_k, split, walk
from specnb.params import ExplorerParams
from specnb.prompts import Prompt
from specnb.store import folder_of, load, run_id
from tests.book.hygiene import WIDGET_VIEW
from tests.measure.test_ksweep import SMALL
from tests.measure.test_ksweep import opened as opened_target

CURVE = CostCurve(model="line", context=0, widths=(1, 9, 25), samples_s=((0.02,), (0.03,), (0.06,)))
PRESET = Cost(CURVE, 0.3, name=THIS_MACHINE)
LOOKUP = "lookup(n=1..6,x4)"
MODEL = "blurred"
PROMPTS = [
    Prompt(id=f"{kind}-{n}", category=kind, text=text * (n + 1) + "abcdef"[n])
    for kind, text in {"code": "abc", "prose": "fed"}.items()
    for n in range(5)
]


def target():
    return toy.markov(6, order=2, seed=4, sharpness=3.0)


def recorded(drafters, prompts, temperature=0.0, **options) -> list:
    recordings = record(target(), drafters, prompts, temperature=temperature, **options)
    return [recording for _, of_prompt in recordings for recording in of_prompt]


@pytest.fixture(scope="module")
def trace():
    true, noise = target(), toy.markov(6, order=2, seed=5, sharpness=3.0)
    blurred = toy.ToyLM(lambda ids: true._logits_of(ids) + noise._logits_of(ids), true.vocab, name=MODEL)
    drafters = [LookupDrafter(), ModelDrafter(blurred)]  # the model is right now and then
    runs = (recorded(drafters, PROMPTS, t, top_p=p, max_new_tokens=40) for t, p in ((0.7, 0.9), (0.0, 1.0), (0.7, 1.0)))
    return Trace(tuple(r for run in runs for r in run))


@pytest.fixture(scope="module")
def tables(trace):
    return Tables(trace)


@pytest.fixture
def explorer(trace, tables, monkeypatch):
    monkeypatch.setattr(widgets, "Tables", lambda _trace: tables)
    return Explorer(trace, CURVE, {LOOKUP: 0.0, MODEL: 0.3})


@pytest.fixture
def redraws(explorer, monkeypatch):
    """One entry for each redraw."""
    entries, redraw = [], explorer.redraw
    monkeypatch.setattr(explorer, "redraw", lambda: entries.append(redraw()))
    return entries


def settings(tables, **fixed):
    """Every policy of every drafter at every temperature on every content, or with some fields fixed."""
    rows = (
        Setting(drafter, temperature, content, policy, 5, PRESET, top_p)._replace(**fixed)
        for drafter in tables.drafters
        for policy in tables.policies(drafter)
        for temperature, top_p in tables.samplings
        for content in (ALL, *tables.contents)
    )
    return list(dict.fromkeys(rows))


def lookup_setting(k=4):
    return Setting(LOOKUP, 0.0, "code", FIXED, k, Cost.straight(CUSTOM, 1.5, 0.0))


def test_a_fixed_k_is_predicted_as_the_replay_counts_it(trace, tables):
    """Seconds of plain decoding over seconds with drafts, by the replay's own arithmetic."""
    for setting in settings(tables, content="code", policy=FIXED):
        wanted = {"temperature": setting.temperature, "top_p": setting.top_p, "category": "code"}
        chosen = trace.select(drafter=setting.drafter, **wanted).recordings
        plain = sum(fixed_k(r, 0).seconds(PRESET) for r in chosen)
        speedups = [plain / sum(fixed_k(r, k).seconds(PRESET) for r in chosen) for k in range(25)]
        assert tables.sweep(setting).speedup == pytest.approx(speedups)
        assert [tables.predict(setting._replace(k=k)).speedup for k in range(25)] == pytest.approx(speedups)


def test_a_policy_is_predicted_as_its_walk_counts_it_whatever_was_asked_before(tables):
    steep = Cost.straight(CUSTOM, 6.0, 1.2)
    for first in settings(tables, content="code", temperature=0.0, top_p=1.0):
        for setting in (first, first._replace(k=2), first._replace(machine=steep), first._replace(k=3, machine=steep)):
            controller, cost = setting.controller(tables.k_max), setting.machine
            recordings = [tables.recordings[i] for i in tables.chosen(setting)]
            walks = [walk(recording, controller) for recording in recordings]
            counts = [counts_of(recording, steps) for recording, steps in zip(recordings, walks, strict=True)]
            p, plain = tables.predict(setting), sum(r.n_tokens - 1 for r in recordings) * cost.curve.seconds(1)
            totals = [sum(getattr(c, name) for c in counts) for name in ("rounds", "drafted", "accepted")]
            assert [p.rounds, p.drafted, p.accepted] == totals, setting
            assert p.speedup == pytest.approx(plain / sum(c.seconds(cost) for c in counts))
            assert walks == [tables.steps(setting, i) for i in tables.chosen(setting)]


def test_an_interval_needs_five_prompts_a_custom_curve_keeps_its_shape_and_a_short_trace_has_few_policies(tables):
    p, few = tables.predict(lookup_setting()), tables.predict(lookup_setting(), ["code-0", "code-1"])
    v = show.view(tables, lookup_setting(), 0, 10_000)
    assert v.round == len(v.steps) and show.strip(v).count("outline:") == 1
    assert p.low < p.speedup < p.high and np.isnan(few.low) and few.n_prompts == 2
    assert bend(PRESET, PRESET.at8, 0.3).ratios(24) == pytest.approx(PRESET.ratios(24))
    assert bend(PRESET, 3.0, 0.1).at8 == pytest.approx(3.0)
    assert bend(Cost.straight("flat", 1.0, 0.0), 2.0, 0.0).at8 == pytest.approx(2.0)
    short = Tables(Trace(tuple(recorded([LookupDrafter()], PROMPTS[:2], k_max=4))))
    assert short.policies(LOOKUP) == (FIXED, "cost-aware") and short.k_max == 4
    with pytest.raises(InputError, match="two tokens"):
        Tables(Trace(tuple(recorded([LookupDrafter()], PROMPTS[:1], max_new_tokens=1))))


def test_checks_hold_and_a_wrong_count_is_seen(trace, tables):
    assert explorer_tables.checks(tables)["ok"].all()
    broken = Tables(trace)
    split(broken.exact)[1][0, 5, 2] += 2  # accepted drafts that no round made room for
    assert not explorer_tables.checks(broken)["ok"].all()


def test_the_sweep_is_what_is_predicted_and_the_best_k_its_largest(tables):
    frame = explorer_tables.sweep(tables, CURVE, {LOOKUP: 0.0, MODEL: 0.3})
    assert len(frame) == (1 + len(NAMED)) * 2 * 2 * 3 * 25
    row = frame.query("machine == @THIS_MACHINE and drafter == @MODEL and category == 'code' and k == 7").iloc[0]
    p = tables.predict(Setting(MODEL, 0.0, "code", FIXED, 7, PRESET))
    assert row[["speedup", "low", "high", "tau", "accepted"]].tolist() == pytest.approx([*p[:3], p.tau, p.accepted])
    assert row["tokens_per_s"] == pytest.approx(p.speedup / 0.02)
    best, key = best_k(frame), ["machine", "drafter", "category", "temperature"]
    speeds = frame.query("k > 0").groupby(key)["speedup"].max()
    assert best.set_index(key)["speedup"].to_dict() == speeds.to_dict() and len(best) == 12 * (1 + len(NAMED))


# --- the widget


def drawn(explorer):
    """What each part shows."""
    shown = {part: [(t.x, t.y, t.name) for t in getattr(explorer, part).figure.data] for part in ("speedup", "alpha")}
    shown |= {"strip": explorer.strip.value, "summary": explorer.summary.lines}
    return {part: repr(data) for part, data in shown.items()}


MOVES = {  # control: (new value, the parts that must change beside the summary, those that must not)
    "k": (3, "speedup alpha", ""),
    "temperature": ((0.7, 0.9), "speedup alpha", ""),
    "drafter": (LOOKUP, "speedup alpha", ""),
    "content": ("prose", "speedup alpha strip", ""),
    "policy": ("cost-aware", "speedup alpha", ""),
    "curve": ("laptop, compute-bound", "speedup", "alpha strip"),
    "at8": (5.0, "speedup", "alpha strip"),
    "c": (0.9, "speedup", "alpha strip"),
    "prompt": (None, "strip", "speedup alpha"),
    "round": (5, "strip", "speedup alpha"),
}


def test_each_control_changes_what_it_should(explorer, redraws):
    for name, (value, must, must_not) in MOVES.items():
        explorer.drafter.value, explorer.content.value = MODEL, ALL
        explorer.round.value, explorer.k.value = 3, 8
        control = explorer.controls[name]
        value = next(v for _, v in control.options if v != control.value) if value is None else value
        before, original = drawn(explorer), control.value
        redraws.clear()
        control.value = value
        changed = {part for part, shown in drawn(explorer).items() if shown != before[part]}
        assert explorer.k.disabled == (name == "policy"), "no policy but these two reads K"
        assert {"summary", *must.split()} <= changed and not changed & set(must_not.split()), name
        assert len(redraws) == 1, "one move, one redraw"
        control.value = original


def test_what_is_drawn_is_what_is_computed_and_what_cannot_be_is_said(explorer, monkeypatch):
    explorer.content.value, explorer.k.value = "prose", 7
    p = explorer._tables.predict(explorer.setting())
    point = explorer.speedup.figure.data[2]
    assert (point.x[0], point.y[0]) == (7, pytest.approx(p.speedup)) and f"{p.speedup:.2f}" in explorer.summary.lines[0]
    assert list(explorer.alpha.figure.data[0].y) == pytest.approx((p.kept[:7] / p.tested[:7]).tolist())
    with monkeypatch.context() as patch:
        patch.setattr(explorer._tables, "predict", lambda setting: 1 / 0)
        explorer.k.value = 3
        assert "ZeroDivisionError" in explorer.summary.lines[0]
    explorer.drafter.value, explorer.policy.value = MODEL, "confidence"
    assert explorer.c.value == 0.3 and "confidence, K up to 3" in explorer.summary.lines[0]
    explorer.drafter.value = LOOKUP
    assert explorer.c.value == 0 and explorer.policy.value == FIXED and "entropy" not in explorer.policy.options


def test_dragging_a_cost_makes_a_custom_curve_and_a_named_one_moves_the_sliders(explorer, redraws):
    for slider in (explorer.at8, explorer.c):  # what the browser only rounds was not moved
        slider.value += 1e-15 + 0.4 * slider.step
    assert explorer.curve.value == THIS_MACHINE and not redraws
    explorer.at8.value = 3.0
    assert explorer.curve.value == CUSTOM and explorer.setting().machine.at8 == pytest.approx(3.0)
    explorer.curve.value = "memory-bound server"
    assert explorer.at8.value == NAMED["memory-bound server"][0]
    assert explorer.setting().machine.name == "memory-bound server"


def test_a_plot_starts_at_once_and_sends_what_json_can_hold_and_plotly():
    plot = Plot(go.Figure(go.Scatter(x=[1, 2], y=[1.0, float("nan")])))
    assert len(plot._esm) < 5_000, "anywidget drops, for good, the changes of a program that needs over two seconds"
    assert json.loads(plot._traces)[0]["y"] == [1.0, None] and "plotly.js v" in plot._plotly[:200]
    plot.update(go.Figure(go.Scatter(x=[1, 2], y=[3, 4])))
    assert json.loads(plot._traces)[0]["y"] == [3, 4] == list(plot.figure.data[0].y)


def test_costs_that_a_busy_machine_measured_are_marked_and_give_no_verdict(tables, trace, monkeypatch):
    monkeypatch.setattr(widgets, "Tables", lambda _trace: tables)
    disturbed, c = CURVE.model_copy(update={"busy": True}), {LOOKUP: 0.0, MODEL: 0.3}
    explorer = Explorer(trace, disturbed, c)
    for curve, marked in ((THIS_MACHINE, True), ("memory-bound server", False), (CUSTOM, False), (THIS_MACHINE, True)):
        explorer.curve.value = curve
        first, _, costs, _ = explorer.summary.lines
        assert [BUSY in text for text in (costs, explorer.speedup.figure.layout.title.text)] == [marked] * 2
        assert ("no verdict" in first) == marked and ("pay" in first) != marked
    explorer.at8.value = 3.0
    assert "no verdict" in explorer.summary.lines[0], "a custom curve that was bent from the measured one"
    best = best_k(explorer_tables.sweep(tables, disturbed, c)).set_index("machine")["verdict"]
    assert set(best[THIS_MACHINE]) == {BUSY} and BUSY not in set(best.drop(THIS_MACHINE))


def test_a_pinned_setting_stays_to_compare_with_until_the_reset_puts_all_back(explorer):
    first, start = drawn(explorer), {name: control.value for name, control in explorer.controls.items()}
    explorer.pin.click()
    ghost = explorer.speedup.figure.data[3]
    assert ghost.y == explorer.speedup.figure.data[1].y and len(explorer.alpha.figure.data) == 2
    explorer.drafter.value, explorer.content.value, explorer.policy.value = MODEL, "prose", "confidence"
    explorer.temperature.value, explorer.at8.value, explorer.round.value = (0.7, 0.9), 3.0, 2
    assert explorer.speedup.figure.data[3].y == ghost.y != explorer.speedup.figure.data[1].y
    assert explorer.summary.lines[-1].startswith("Pinned: fixed K = 8, drafter lookup")
    explorer.reset.click()
    assert drawn(explorer) == first and start == {name: control.value for name, control in explorer.controls.items()}


def taken(explorer) -> tuple[pd.DataFrame, list[str]]:
    """The table of the link, and the words of the command."""
    link, command = re.search(r'text/csv,([^"]*).*<code[^>]*>(.*)</code>', explorer.takeaway.value, re.DOTALL).groups()
    return pd.read_csv(io.StringIO(unquote(link))), shlex.split(html.unescape(command))


def test_what_is_shown_can_be_taken_away_as_a_table_and_as_a_command_that_is_accepted(explorer, tables):
    explorer.drafter.value, explorer.k.value, explorer.content.value = LOOKUP, 5, "code"
    (frame, command), p = taken(explorer), tables.predict(explorer.setting())
    assert frame.query("k == 5")[["speedup", "low", "tau"]].iloc[0].tolist() == pytest.approx(
        [p.speedup, p.low, p.tau], 1e-4
    )
    head, *words = command[2:]
    given = resolve(read_notebook(find_notebook(head)), parse_parameters(words[1::2]))[0]
    assert (given["ks"], given["drafter"], given["categories"]) == ([5], "lookup", ["code"])
    explorer.drafter.value, explorer.policy.value, explorer.temperature.value = MODEL, "confidence", (0.7, 0.9)
    frame, words = taken(explorer)
    last = frame.iloc[-1]
    assert (last["policy"], last["top_p"]) == ("confidence", 0.9)
    assert last["speedup"] == pytest.approx(tables.predict(explorer.setting()).speedup, 1e-4)
    known = {name for option in typer.main.get_command(app).commands["generate"].params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known and words[1] == "generate"
    for option, value in {"--controller": "confidence", "--k": "5", "--top-p": "0.9", "--draft": MODEL}.items():
        assert words[words.index(option) + 1] == value
    assert {policy.option for policy in POLICIES.values()} - {""} == set(CONTROLLERS)


def test_the_sweep_of_notebook_01_moves_the_same_sliders(monkeypatch):
    opened_target(monkeypatch)
    recordings = []
    record = ksweep.run(SMALL, recordings=recordings)
    explorer = Explorer.of(record, recordings)
    explorer.content.value, explorer.k.value = "code", 3
    wanted = {"temperature": 0.0, "category": "code", "k": 3}
    rows = [row for row in record.measurements["replay"]["rows"] if wanted.items() <= row.items()]
    rows = pd.DataFrame(rows).sum(numeric_only=True)
    p = explorer._tables.predict(explorer.setting())
    assert (p.rounds, p.accepted) == (rows["rounds"], rows["accepted"]) and p.n_prompts == 2
    assert p.speedup == pytest.approx(rows["plain_s"] / rows["seconds"])
    monkeypatch.setattr(publish, "render", lambda figure: ({"still": b"png"}, {}))
    assert {"image/png", publish.PLOTLY, WIDGET_VIEW} <= set(explorer._repr_mimebundle_()[0])


# --- live runs


def workbench(**params):
    small = {"max_new_tokens": 40, "drafters": ["lookup"], "temperatures": [0.0, 0.7]}
    bench = Workbench(ExplorerParams(**small | params))
    bench.target, bench.drafters, bench.chosen = target(), [LookupDrafter()], PROMPTS
    return bench


@pytest.fixture(scope="module")
def bench():
    return workbench()


@pytest.fixture
def live(explorer):
    """Run a setting of the explorer with the given models to the end: the outcome in words."""
    explorer.drafter.value = LOOKUP

    def run(run_live, k: int, while_running=lambda: None) -> str:
        explorer._run_live, explorer.k.value = run_live, k
        explorer.start()
        while_running()
        end = time.monotonic() + 10
        while explorer.run.disabled:
            assert time.monotonic() < end, "the live run does not end"
            time.sleep(0.01)
        return explorer.outcome.lines[0]

    return run


def test_a_live_run_is_shown_beside_its_prediction_and_can_be_repeated(explorer, live, bench):
    for k, busy in ((4, False), (6, True)):
        line = live(lambda *asked, busy=busy: (bench.run_live(*asked)[0], busy), k)
        assert line.startswith(f"Live, fixed K = {k}, prompts: 3: speed-up") and "predicted" in line
        star = explorer.speedup.figure.data[3]
        assert star.name.startswith("live run") and star.x[0] == k and star.y[0] > 0
        assert (BUSY in line) == (BUSY in star.name) == busy
    explorer.temperature.value = (0.7, 1.0)
    assert len(explorer.speedup.figure.data) == 3, "a live run of another temperature"


def test_a_live_run_makes_the_rounds_that_were_predicted_and_samples_as_the_setting_says(bench, tables):
    generations, _ = bench.run_live(lookup_setting())
    assert [bool(g.drafter) for g in generations] == [False, True] * 3 and {g.category for g in generations} == {"code"}
    for g in generations[1::2]:
        assert len(g.rounds) == tables.predict(lookup_setting(), [g.prompt_id]).rounds
    generations, _ = bench.run_live(lookup_setting()._replace(temperature=0.7, top_p=0.9))
    assert {(g.temperature, g.top_p) for g in generations} == {(0.7, 0.9)}


def test_an_error_of_a_live_run_is_shown_one_runs_at_a_time_and_the_next_run_works(explorer, live, bench):
    begun, go_on, starts = threading.Event(), threading.Event(), []

    def failing(setting, progress):
        starts.append(setting)
        progress(0, 4, "code-0")
        begun.set()
        go_on.wait(5)
        raise RuntimeError("the engine is gone")

    def start_again():
        assert begun.wait(5) and "0 of 4: code-0" in explorer.outcome.lines[0]
        explorer.start()
        go_on.set()

    assert live(failing, 2, start_again) == "The live run failed: RuntimeError: the engine is gone"
    assert len(starts) == 1 and live(bench.run_live, 3).startswith("Live,")


def test_a_trace_is_recorded_once_and_taken_again_by_those_who_ask_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    monkeypatch.setattr(live_module, "local_file", lambda spec: "a file")
    monkeypatch.setattr(live_module, "file_digest", lambda file: None if file == "a file" else "other")
    kept, trace, curve, c, line = workbench().trace()
    assert "recorded now" in line and kept.status == "completed" and len(trace.recordings) == 30
    assert {(r.temperature, r.top_p) for r in trace.recordings} == {(0.0, 1.0), (0.7, 1.0), (0.7, 0.9)}
    assert c == {LOOKUP: 0.0} and curve.widths[-1] == 25 and Tables(trace).contents == ("code", "prose")
    folder = folder_of(kept)

    def recorded_by(**params):
        with monkeypatch.context() as patch:
            patch.setattr(Workbench, "record", lambda self, progress: (kept, trace, curve, c))
            bench = workbench(**params)
            *got, line = bench.trace()
        assert line.startswith(f"run {kept.run_id}") and got[1:] == [trace, curve, c]
        return "recorded now" in line

    monkeypatch.setattr("psutil.getloadavg", lambda: (9.0, 9.0, 9.0))  # a machine is the same under another load
    assert not recorded_by() and not recorded_by(budget="full", prompts_per_category=5)
    assert recorded_by(trace="new") and recorded_by(k_max=20) and not recorded_by(trace=str(folder), k_max=20)
    weights = tmp_path / "other.gguf"
    weights.write_text("another model behind the same name")
    others = {"local_file": lambda spec: weights, "provenance": lambda **_: kept.provenance | {"cpu": {}}}
    for name, value in others.items():
        with monkeypatch.context() as patch:
            patch.setattr(live_module, name, value)
            assert recorded_by()
    (folder / "run.json").write_text("{")
    assert recorded_by(), "a damaged run"


def test_the_shipped_trace_opens_by_its_name_without_a_model_and_names_its_prompts():
    bench = Workbench(ExplorerParams(trace="smollm2-135m"))
    shipped, *costs = stored("data/traces/smollm2-135m")
    _, *opened, line = bench.trace()
    assert opened == costs and shipped.run_id in line
    assert {p.id for p in bench.chosen} == {r.prompt_id for r in opened[0].recordings}
    assert bench.params.target == shipped.params["target"] and not {"target", "drafters"} & set(vars(bench))
    asked = ExplorerParams(budget="quick")
    record, *opened, line = Workbench(asked).trace()
    assert opened == costs and shipped.run_id in line, "what the notebook opens on where nothing is asked"
    # the record is of this run, under its own name; it says whose trace it took, and can stand in that one's place
    assert (record.experiment, record.params) == ("09_explorer", asked.model_dump(mode="json"))
    assert record.run_id == run_id("09_explorer", record.params) and record.started > shipped.ended
    assert record.provenance["source"]["run_id"] == shipped.run_id and load(folder_of(record)) == record
    bench = Workbench(ExplorerParams(trace=str(folder_of(record))))
    copy, *opened, again = bench.trace()
    assert copy.provenance["source"] == record.provenance["source"] and (opened, again) == (costs, line)
    assert bench.params.target == shipped.params["target"]
    with pytest.raises(InputError, match="nothing-there"):
        Workbench(ExplorerParams(trace="nothing-there")).trace()
