"""The explorer without a browser: the replay's numbers, every control, live runs, and a trace that is taken again."""

import re
import shlex
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specnb.book import picture
from specnb.book.explorer import tables as explorer_tables
from specnb.book.explorer.live import Workbench
from specnb.book.explorer.page import play
from specnb.book.explorer.pair import examine, flags_of
from specnb.book.explorer.tables import ALL, CUSTOM, THIS_MACHINE, Setting, Tables, stored
from specnb.book.explorer.widgets import Explorer
from specnb.book.tables import BUSY, best_k
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure import ksweep
from specnb.measure.bench import pays
from specnb.measure.cost import NAMED, Cost, CostCurve
from specnb.measure.follow import record
from specnb.measure.policies import AUTO, CONTROLLERS, FIXED, MOST, POLICIES
from specnb.measure.recording import Trace
from specnb.measure.replay import counts_of, fixed_k, route, split, walk_recording
from specnb.params import ExplorerParams
from specnb.prompts import Prompt
from specnb.store import folder_of, load_record, run_id
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


class Frame:
    """What the page in a notebook sends to the kernel, and what it gets."""

    def __init__(self, explorer, monkeypatch):
        self.explorer, self.received = explorer, []
        monkeypatch.setattr(explorer, "send", self.received.append)

    def send(self, setting, **message):
        """A setting as the page has it, through JSON."""
        m, curve = setting.machine, setting.machine.curve
        machine = {"name": m.name, "ratios": m.ratios(24), "at8": curve.ratio(8), "c": m.c, "busy": bool(curve.busy)}
        self.explorer._answer(self.explorer, message | {"setting": setting._asdict() | {"machine": machine}}, [])

    def run(self, setting) -> dict:
        """A live run to its end: the last message."""
        self.send(setting, run=True)
        end = time.monotonic() + 10
        while not (self.received and self.received[-1].get("done")):
            assert time.monotonic() < end, "the live run does not end"
            time.sleep(0.01)
        return self.received.pop()


@pytest.fixture
def frame(trace, monkeypatch):
    run = stored(explorer_tables.SHIPPED)._replace(trace=trace, curve=CURVE, c={LOOKUP: 0.0, MODEL: 0.3})
    return Frame(Explorer(run, run_live=lambda *_: None), monkeypatch)


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
        assert tables.sweep(setting).speedup.tolist() == pytest.approx(speedups)
        assert [tables.predict(setting._replace(k=k)).speedup for k in range(25)] == pytest.approx(speedups)


def test_a_policy_is_predicted_as_its_walk_counts_it_whatever_was_asked_before(tables):
    steep = Cost.straight(CUSTOM, 6.0, 1.2)
    for first in settings(tables, content="code", temperature=0.0, top_p=1.0):
        for setting in (first, first._replace(k=2), first._replace(machine=steep), first._replace(k=3, machine=steep)):
            recordings, cost = [tables.recordings[i] for i in tables.chosen(setting)], setting.machine
            if setting.policy == AUTO:
                walks = [
                    text.steps for text in route(recordings, {setting.drafter: cost}, k_max=min(MOST, tables.k_max))
                ]
            else:
                controller = setting.controller(tables.k_max)
                walks = [walk_recording(recording, controller) for recording in recordings]
            counts = [counts_of(recording, steps) for recording, steps in zip(recordings, walks, strict=True)]
            p, plain = tables.predict(setting), sum(r.n_tokens - 1 for r in recordings) * cost.curve.seconds(1)
            totals = [sum(getattr(c, name) for c in counts) for name in ("rounds", "drafted", "accepted")]
            assert [p.rounds, p.drafted, p.accepted] == totals, setting
            assert p.speedup == pytest.approx(plain / sum(c.seconds(cost) for c in counts))
            assert walks == [steps for _, _, steps in tables.walks(setting)]


def test_auto_loses_next_to_nothing_where_drafts_cannot_pay(tables):
    """A draft as dear as the target, and forwards that cost their share: every K is slower than plain decoding."""
    setting = Setting(MODEL, 0.0, ALL, AUTO, 4, Cost.straight(CUSTOM, 8.0, 1.0))
    assert tables.predict(setting._replace(policy=FIXED)).speedup < 0.6 < 0.9 < tables.predict(setting).speedup


def test_an_interval_needs_five_prompts_and_a_short_trace_has_few_policies(tables):
    p, few = tables.predict(lookup_setting()), tables.predict(lookup_setting(), ["code-0", "code-1"])
    assert p.low < p.speedup < p.high and np.isnan(few.low) and few.n_prompts == 2
    short = Tables(Trace(tuple(recorded([LookupDrafter()], PROMPTS[:2], k_max=4))))
    assert short.policies(LOOKUP) == [FIXED, "cost-aware", AUTO] and short.k_max == 4
    with pytest.raises(InputError, match="two tokens"):
        Tables(Trace(tuple(recorded([LookupDrafter()], PROMPTS[:1], max_new_tokens=1))))


def test_checks_hold_and_a_wrong_count_is_seen(trace, tables):
    assert explorer_tables.check_explorer(tables)["ok"].all()
    broken = Tables(trace)
    split(broken.exact)[1][0, 5, 2] += 2  # accepted drafts that no round made room for
    assert not explorer_tables.check_explorer(broken)["ok"].all()


def test_the_sweep_is_what_is_predicted_and_the_best_k_its_largest(tables):
    frame = explorer_tables.sweep_k(tables, CURVE, {LOOKUP: 0.0, MODEL: 0.3})
    assert len(frame) == (1 + len(NAMED)) * 2 * 2 * 3 * 25
    best, key = best_k(frame), ["machine", "drafter", "category", "temperature"]
    speeds = frame.query("k > 0").groupby(key)["speedup"].max()
    assert best.set_index(key)["speedup"].to_dict() == speeds.to_dict() and len(best) == 12 * (1 + len(NAMED))


# --- the page's kernel


def test_a_policy_that_a_slider_changes_is_walked_for_the_page_and_an_error_is_an_answer(frame, tables, monkeypatch):
    bent = Cost.straight(CUSTOM, 3.0, 0.2)
    for setting in settings(tables, content=ALL, machine=bent):
        frame.send(setting, key="[8]")
        (answer,) = (message["answer"] for message in frame.received)
        assert answer == play(tables, setting) | {"key": "[8]"}
        rounds = sum(totals[0] for _, totals, _, _ in answer["counts"])
        assert rounds == pytest.approx(tables.predict(setting).rounds, abs=1e-3)
        frame.received.clear()
    monkeypatch.setattr(frame.explorer, "_tables", None)
    frame.send(lookup_setting(), key="[4]")
    (message,) = frame.received
    assert "AttributeError" in message["answer"]["error"] and message["answer"]["drafter"] == LOOKUP
    assert {policy.option for policy in POLICIES.values()} - {""} == set(CONTROLLERS)


def test_the_sweep_of_notebook_01_is_explored_with_a_picture_for_those_without_a_kernel(monkeypatch):
    opened_target(monkeypatch)
    recordings = []
    record = ksweep.run(SMALL, recordings=recordings)
    explorer = Explorer.of(record, recordings)
    wanted = {"temperature": 0.0, "category": "code", "k": 3}
    rows = [row for row in record.measurements["replay"]["rows"] if wanted.items() <= row.items()]
    rows = pd.DataFrame(rows).sum(numeric_only=True)
    (drafter,) = explorer._tables.drafters
    machine = Cost(explorer._run.curve, explorer._run.c[drafter])
    p = explorer._tables.predict(Setting(drafter, 0.0, "code", FIXED, 3, machine))
    assert (p.rounds, p.accepted) == (rows["rounds"], rows["accepted"]) and p.n_prompts == 2
    assert p.speedup == pytest.approx(rows["plain_s"] / rows["seconds"])
    monkeypatch.setattr(picture, "render_figure", lambda figure: ({"still": b"png"}, {}))
    assert {"image/png", picture.PLOTLY, WIDGET_VIEW} <= set(explorer._repr_mimebundle_()[0])


# --- live runs


def workbench(**params):
    small = {"max_new_tokens": 40, "drafters": ["lookup"], "temperatures": [0.0, 0.7]}
    bench = Workbench(ExplorerParams(**small | params))
    bench.target, bench.drafters, bench.chosen = target(), [LookupDrafter()], PROMPTS
    return bench


@pytest.fixture(scope="module")
def bench():
    return workbench()


def test_a_live_run_is_shown_beside_its_prediction_and_can_be_repeated(frame, bench):
    for k, busy in ((4, False), (6, True)):
        frame.explorer._run_live = lambda *asked, busy=busy: (bench.run_live(*asked)[0], busy)
        last = frame.run(lookup_setting(k))
        assert re.match(r"Live, fixed K, prompts: 3: [\d.]+ times plain decoding", last["outcome"])
        assert "predicted" in last["outcome"]
        point = last["point"]
        assert point["k"] == k and point["speedup"] > 0 and point["low"] is None, "three prompts have no interval"
        assert (BUSY in last["outcome"]) == point["busy"] == busy
        assert point["setting"] == {"drafter": LOOKUP, "temperature": 0.0, "top_p": 1.0, "content": "code"}


def test_an_error_of_a_live_run_is_shown_one_runs_at_a_time_and_the_next_run_works(frame, bench):
    begun, go_on, starts = threading.Event(), threading.Event(), []

    def failing(setting, progress):
        starts.append(setting)
        progress(0, 4, "code-0")
        begun.set()
        go_on.wait(5)
        raise RuntimeError("the engine is gone")

    frame.explorer._run_live = failing
    frame.send(lookup_setting(2), run=True)
    assert begun.wait(5) and "0 of 4: code-0" in frame.received[0]["outcome"]
    frame.send(lookup_setting(2), run=True)
    go_on.set()
    deadline = time.monotonic() + 5
    while not frame.received[-1].get("done"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert frame.received.pop()["outcome"] == "The live run failed: RuntimeError: the engine is gone"
    frame.explorer._run_live = bench.run_live
    assert len(starts) == 1 and frame.run(lookup_setting(3))["outcome"].startswith("Live,")


def test_a_trace_is_recorded_and_taken_again_from_its_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    run = workbench().trace()
    kept, trace, curve, c, line = run
    assert "recorded now" in line and kept.status == "completed" and len(trace.recordings) == 30
    assert {(r.temperature, r.top_p) for r in trace.recordings} == {(0.0, 1.0), (0.7, 1.0), (0.7, 0.9)}
    baseline = kept.measurements["baseline"]
    assert baseline["baseline_tokens_per_s"] >= baseline["plain_tokens_per_s"] > 0
    assert c == {LOOKUP: 0.0} and curve.widths[-1] == 25 and Tables(trace).contents == ("code", "prose")
    again = workbench(trace=str(folder_of(kept)), k_max=20).trace()
    assert again.origin.startswith(f"run {kept.run_id}") and "taken again" in again.origin and again[1:4] == run[1:4]


def test_the_shipped_trace_opens_by_its_name_without_a_model_and_names_its_prompts():
    bench = Workbench(ExplorerParams(trace="smollm2-135m"))
    shipped = stored("data/traces/smollm2-135m")
    run = bench.trace()
    assert run[1:4] == shipped[1:4] and shipped.record.run_id in run.origin
    assert {p.id for p in bench.chosen} == {r.prompt_id for r in run.trace.recordings}
    assert bench.params.target == shipped.record.params["target"] and not {"target", "drafters"} & set(vars(bench))
    asked = ExplorerParams(budget="quick")
    run = Workbench(asked).trace()
    record = run.record
    assert run[1:4] == shipped[1:4] and shipped.record.run_id in run.origin, "what opens where nothing is asked"
    # the record is of this run, under its own name; it says whose trace it took, and can stand in that one's place
    assert (record.experiment, record.params) == ("09_explorer", asked.model_dump(mode="json"))
    assert record.run_id == run_id("09_explorer", record.params) and record.started > shipped.record.ended
    source = record.provenance["source"]
    assert source["run_id"] == shipped.record.run_id and load_record(folder_of(record)) == record
    with pytest.raises(InputError, match="nothing-there"):
        Workbench(ExplorerParams(trace="nothing-there")).trace()


def test_a_live_run_is_shown_at_every_position_of_the_temperature_slider(frame, tables, bench):
    """Between recorded temperatures the prediction mixes both neighbors; where there is none, the speed is shown."""
    measured, _ = bench.run_live(lookup_setting(), lambda *_: None)
    frame.explorer._run_live = lambda *_: (measured, False)
    temperatures = [*np.arange(0.0, 0.7, 0.05).round(3).tolist(), 0.7]
    positions = [(t, 1.0) for t in temperatures] + [(0.7, 0.9)]
    live, predicted = set(), []
    for temperature, top_p in positions:
        message = frame.run(lookup_setting()._replace(temperature=temperature, top_p=top_p))
        live.add(message["point"]["speedup"])
        predicted.append(float(re.search(r"predicted for the same prompts: ([\d.]+)\.$", message["outcome"])[1]))
    ids, here = [g.prompt_id for g in measured[1::2]], lookup_setting()._replace(machine=Cost(CURVE))
    ends = [tables.predict(here._replace(temperature=t), ids).speedup for t in (0.0, 0.7)]
    mixed = np.exp(np.interp(temperatures, [0.0, 0.7], np.log(ends)))
    assert len(live) == 1 and predicted[:-1] == pytest.approx(mixed, abs=0.0051)
    for unrecorded, said in (
        ({"temperature": 1.3}, "nan"),
        ({"content": "poetry"}, "no prediction: InputError"),
        ({"drafter": "nothing"}, "no prediction: KeyError"),
    ):
        message = frame.run(lookup_setting()._replace(**unrecorded))
        assert message["point"]["speedup"] in live and said in message["outcome"], unrecorded


def test_what_was_not_recorded_is_named(tables):
    for wrong in ({"temperature": 0.35}, {"content": "poetry"}, {"drafter": "nothing"}):
        with pytest.raises(InputError, match=str(next(iter(wrong.values())))):
            tables.predict(lookup_setting()._replace(**wrong))
    with pytest.raises(InputError, match="code-9"):
        tables.predict(lookup_setting(), ["code-9"])


# --- a pair in one page


def test_a_pair_is_examined_and_its_page_says_what_was_found():
    steps = []
    report = examine(
        "tiny-hybrid", "tiny-hybrid-draft", prompts_per_category=3, max_new_tokens=12,
        progress=lambda *step: steps.append(step),
    )  # fmt: skip
    document, k = report.document, report.document["k"]
    row = document["live"][1]
    busy = "busy" in document["conclusion"]
    assert "loading tiny-hybrid" in steps[0][2] and steps[-1][:2] == (17, 18), "3 methods on 6 prompts"
    assert document["conclusion"].startswith("Leave drafting off") == (row["speedup"] <= 1)
    assert ("To draft anyway" in report.page) == (row["speedup"] <= 1)
    assert document["verdict"] == ("undecided" if busy else pays(row["low"], row["high"]))
    assert row["method"] == f"K = {k}" and row["n_prompts"] == row["identical"] == 6
    assert {r["temperature"] for r in document["predicted"]} == {0.0, 0.7} and document["live"][0]["method"] == "plain"
    for line in document["flags"].values():
        assert re.search(rf"(?<![\d.]){k}(?![\d.])", line.replace("tiny-hybrid", ""))
    text = report.page
    assert document["conclusion"] in text and document["costs"] in text and "@ABOVE@" not in text
    assert load_record(folder_of(report.record)).run_id == document["run_id"]  # `specnb explore` opens it again


def test_names_are_single_words_of_the_shell_lines_on_the_pair_page(tmp_path):
    target, draft = str(tmp_path / "it's $(touch x) `y`.gguf"), "tiny-hybrid?backend=hf&dtype=float32"
    Path(target).touch()
    flags = flags_of(target, draft, 3)
    assert shlex.split(flags["specnb"])[3:] == ["--target", target, "--draft", draft, "--k", "3"]
    assert shlex.split(flags["llama.cpp"])[:5] == ["llama-server", "-m", target, "-md", draft]
