"""The explorer without a browser: predictions, every control, live runs, reopened traces."""

import re
import shlex
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specnb.book.explorer import tables as explorer_tables
from specnb.book.explorer.examine import examine, flags_of
from specnb.book.explorer.live import Workbench
from specnb.book.explorer.page import play
from specnb.book.explorer.tables import ALL, CUSTOM, Setting, Tables, stored
from specnb.book.explorer.widgets import Explorer
from specnb.book.tables import BUSY
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.experiment import silent
from specnb.measure.policies import AUTO, FIXED, MOST
from specnb.measure.recording import Trace
from specnb.measure.replay import counts_of, route, split, walk_recording
from specnb.params import ExplorerParams
from specnb.prompts import Prompt
from specnb.store import folder_of, load_record, results_dir
from tests.measure.recorded import record
from tests.tiny_models import llama_gguf

CURVE = CostCurve(model="line", context=0, widths=(1, 9, 25), samples_s=((0.02,), (0.03,), (0.06,)))
LOOKUP = "lookup(n=1..6,x4)"
MODEL = "blurred"
PROMPTS = [
    Prompt(id=f"{kind}-{n}", category=kind, text=text * (n + 1) + "abcdef"[n])
    for kind, text in {"code": "abc", "prose": "fed"}.items()
    for n in range(5)
]


def target():
    return toy.markov(6, order=2, seed=4)


def recorded(drafters, prompts, temperature=0.0, **options) -> list:
    recordings = record(target(), drafters, prompts, temperature=temperature, **options)
    return [recording for _, of_prompt in recordings for recording in of_prompt]


@pytest.fixture(scope="module", autouse=True)
def few_walks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explorer_tables, "WALKS", 4)
        yield


@pytest.fixture(scope="module")
def trace():
    true = target()
    noise = toy.markov(6, order=2, seed=5)
    blurred = toy.ToyLM(
        lambda ids: true._logits_of(ids) + noise._logits_of(ids), true.vocab, name=MODEL
    )
    drafters = [LookupDrafter(), ModelDrafter(blurred)]  # the model is sometimes right
    runs = (
        recorded(drafters, PROMPTS, t, top_p=p, max_new_tokens=24)
        for t, p in ((0.7, 0.9), (0.0, 1.0), (0.7, 1.0))
    )
    return Trace(tuple(r for run in runs for r in run))


@pytest.fixture(scope="module")
def tables(trace):
    return Tables(trace)


class Frame:
    """The page in a notebook: it sends messages to the kernel and stores the answers."""

    def __init__(self, explorer, monkeypatch):
        self.explorer, self.received = explorer, []
        monkeypatch.setattr(explorer, "send", self.received.append)

    def send(self, setting, **message):
        """Send a setting in the form in which the page sends it."""
        machine = {"ratios": setting.machine.ratios(24), "c": setting.machine.c}
        self.explorer._answer(
            self.explorer, message | {"setting": setting._asdict() | {"machine": machine}}, []
        )

    def run(self, setting, **message) -> dict:
        """Start a live run, wait for its end, and return the last message."""
        self.send(setting, run=True, **message)
        end = time.monotonic() + 10
        while not (self.received and self.received[-1].get("done")):
            assert time.monotonic() < end, "the live run does not end"
            time.sleep(0.01)
        return self.received.pop()


@pytest.fixture
def frame(trace, monkeypatch):
    run = stored(explorer_tables.SHIPPED)._replace(
        trace=trace, curve=CURVE, c={LOOKUP: 0.0, MODEL: 0.3}
    )
    return Frame(Explorer(run, run_live=lambda *_: None), monkeypatch)


def settings(tables, machine, samplings):
    """Return all combinations of drafter, policy and sampling."""
    return [
        Setting(drafter, temperature, "code", policy, 5, machine, top_p)
        for drafter in tables.drafters
        for policy in tables.policies(drafter)
        for temperature, top_p in samplings
    ]


def lookup_setting(k=4, **changed):
    return Setting(LOOKUP, 0.0, "code", FIXED, k, Cost.straight(CUSTOM, 1.5, 0.0))._replace(
        **changed
    )


def test_predictions_equal_the_replay_whatever_was_predicted_before(tables):
    steep = Cost.straight(CUSTOM, 6.0, 1.2)
    for first in settings(tables, Cost(CURVE, 0.3), [(0.0, 1.0)]):
        for setting in (first, first._replace(k=3, machine=steep)):
            recordings = [tables.recordings[i] for i in tables.chosen(setting)]
            walks = walked(recordings, setting, tables.k_max)
            assert walks == [steps for _, _, steps in tables.walks(setting)]
            counts = [*map(counts_of, recordings, walks)]
            p = tables.predict(setting)
            for name in ("rounds", "drafted", "accepted"):
                assert p[name] == sum(getattr(c, name) for c in counts), setting
            plain = sum(r.n_tokens - 1 for r in recordings) * setting.machine.curve.seconds(1)
            seconds = sum(c.seconds(setting.machine) for c in counts)
            assert p.speedup == pytest.approx(plain / seconds)
            if setting.policy == FIXED:
                swept = tables.sweep(setting).loc[setting.k]
                pd.testing.assert_series_equal(swept, p, check_names=False)


def walked(recordings, setting, k_max) -> list:
    """Return the rounds of each recording, computed by the replay itself."""
    if setting.policy == AUTO:
        routed = route(recordings, {setting.drafter: setting.machine}, k_max=min(MOST, k_max))
        return [text.steps for text in routed]
    controller = setting.controller(k_max)
    return [walk_recording(recording, controller) for recording in recordings]


def test_checks_hold_and_detect_a_wrong_count(trace, tables):
    assert explorer_tables.check_explorer(tables)["ok"].all()
    broken = Tables(trace)
    split(broken.exact)[1][0, 5, 2] += 2  # two accepted draft tokens too many
    assert not explorer_tables.check_explorer(broken)["ok"].all()


# --- the kernel behind the page


def test_the_kernel_replays_policies_for_the_page_and_reports_errors(frame, tables, monkeypatch):
    for setting in settings(tables, Cost.straight(CUSTOM, 3.0, 0.2), tables.samplings):
        frame.send(setting, key="[8]")
        answer = frame.received.pop()["answer"]
        assert answer == play(tables, setting) | {"key": "[8]"}
        rounds = sum(totals[0] for _, totals, _, _ in answer["counts"])
        assert rounds == pytest.approx(tables.predict(setting).rounds, abs=1e-3)
    monkeypatch.setattr(frame.explorer, "_tables", None)
    frame.send(lookup_setting(), key="[4]")
    answer = frame.received.pop()["answer"]
    assert "AttributeError" in answer["error"] and answer["drafter"] == LOOKUP


# --- live runs


def workbench(**params):
    small = {"max_new_tokens": 40, "drafters": ["lookup"], "temperatures": [0.0, 0.7]}
    bench = Workbench(ExplorerParams(**small | params))
    bench.target = target()
    bench.drafters = [LookupDrafter()]
    bench.chosen = PROMPTS
    return bench


@pytest.fixture(scope="module")
def bench():
    return workbench()


def test_a_live_run_has_a_prediction_also_between_recorded_temperatures(frame, tables, bench):
    measured, _ = bench.run_live(lookup_setting(), lambda *_: None)
    ids = [g.prompt_id for g in measured[1::2]]
    cold = lookup_setting(machine=Cost(CURVE))
    ends = [tables.predict(cold._replace(temperature=t), ids).speedup for t in (0.0, 0.7)]
    for temperature, busy in ((0.0, False), (0.35, True)):
        frame.explorer._run_live = lambda *_, busy=busy: (measured, busy)
        last = frame.run(lookup_setting(temperature=temperature))
        shown = re.search(r"predicted for the same prompts: ([\d.]+)\.", last["outcome"])
        mixed = np.exp(np.interp(temperature, [0.0, 0.7], np.log(ends)))
        assert float(shown[1]) == pytest.approx(mixed, abs=0.0051)
        point = last["point"]
        assert point["k"] == 4 and point["speedup"] > 0
        assert point["low"] is None, "three prompts have no interval"
        assert (BUSY in last["outcome"]) == point["busy"] == busy


def test_an_error_of_a_live_run_is_shown_and_the_next_run_works(frame, bench):
    def failing(setting, progress, prompt):
        progress(0, 4, "code-0")
        raise RuntimeError("the engine is gone")

    frame.explorer._run_live = failing
    assert "RuntimeError: the engine is gone" in frame.run(lookup_setting(2))["outcome"]
    assert "0 of 4: code-0" in frame.received[0]["outcome"]
    frame.explorer._run_live = bench.run_live
    assert "for the same prompts" in frame.run(lookup_setting(3))["outcome"]
    assert "for the recorded prompts" in frame.run(lookup_setting(3), prompt="abcabca")["outcome"]


def test_the_positions_of_the_controls_select_predictions(frame, tables):
    explorer = frame.explorer
    steep = Cost.straight(CUSTOM, 6.0, 1.2)
    for temperature, nearest, moved in ((0.4, 0.7, False), (0.3, 0.0, True)):
        explorer.drafter, explorer.temperature = MODEL, temperature
        explorer._machine = {
            "drafter": MODEL if moved else LOOKUP,
            "ratios": steep.ratios(24),
            "c": steep.c,
        }
        wanted = Setting(MODEL, nearest, ALL, FIXED, 8, steep if moved else Cost(CURVE, 0.3))
        pd.testing.assert_frame_equal(explorer.selection, tables.sweep(wanted))


def test_a_trace_is_recorded_and_reopened_from_its_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    run = workbench().open_trace()
    kept, trace, curve, c, line = run
    assert "recorded now" in line and kept.status == "completed" and len(trace.recordings) == 30
    assert Tables(trace).samplings == ((0.0, 1.0), (0.7, 1.0), (0.7, 0.9))
    assert c == {LOOKUP: 0.0} and curve.widths[-1] == 25
    again = workbench(trace=str(folder_of(kept)), k_max=20).open_trace()
    assert again.origin.startswith(f"run {kept.run_id}") and "reopened" in again.origin
    assert again[1:4] == run[1:4]


def test_the_shipped_trace_opens_without_a_model_and_the_record_names_its_source():
    shipped = stored("data/traces/smollm2-135m")
    asked = ExplorerParams(budget="quick")
    bench = Workbench(asked)
    run = bench.open_trace()
    assert run[1:4] == shipped[1:4] and not {"target", "drafters"} & set(vars(bench))
    assert run.record.provenance["source"]["run_id"] == shipped.record.run_id
    assert bench.params.target == shipped.record.params["target"]
    assert {p.id for p in bench.chosen} == {r.prompt_id for r in run.trace.recordings}
    assert run.record.params == asked.model_dump(mode="json")
    assert load_record(folder_of(run.record)) == run.record
    with pytest.raises(InputError, match="nothing-there"):
        Workbench(ExplorerParams(trace="nothing-there")).open_trace()


def test_an_unrecorded_value_is_named_in_the_error(tables):
    for wrong in ({"temperature": 0.35}, {"content": "poetry"}, {"drafter": "nothing"}):
        with pytest.raises(InputError, match=str(next(iter(wrong.values())))):
            tables.predict(lookup_setting(**wrong))
    with pytest.raises(InputError, match="code-9"):
        tables.predict(lookup_setting(), ["code-9"])


# --- the page of a pair


def test_a_pair_is_examined_and_its_page_reports_the_results(tmp_path, monkeypatch):
    # no other engine is timed
    monkeypatch.setattr("specnb.measure.baseline.find_rivals", lambda name: [])
    file = str(llama_gguf(tmp_path / "tiny.gguf", n_ctx=1024, all_bytes=True))
    sizes = {"prompts_per_category": 3, "max_new_tokens": 4}
    document, page = examine(file, file, source="", contents="", progress=silent, **sizes)
    row = document["live"][1]
    assert document["conclusion"].startswith("Leave drafting off") == (row["speedup"] <= 1)
    assert row["method"] == f"K = {document['k']}" and row["n_prompts"] == row["identical"] == 6
    assert {r["temperature"] for r in document["predicted"]} == {0.0, 0.7}
    assert document["conclusion"] in page and document["costs"] in page and "@ABOVE@" not in page
    # `specnb explore` can reopen it
    assert stored(results_dir() / "09_explorer" / document["run_id"])


def test_names_are_quoted_in_the_shell_commands_on_the_page_of_a_pair(tmp_path):
    target = str(tmp_path / "it's $(touch x) `y`.gguf")
    draft = "tiny-hybrid?backend=hf&dtype=float32"
    Path(target).touch()
    flags = flags_of(target, draft, 3)
    assert shlex.split(flags["specnb"])[3:] == ["--target", target, "--draft", draft, "--k", "3"]
    assert shlex.split(flags["llama.cpp"])[:5] == ["llama-server", "-m", target, "-md", draft]
