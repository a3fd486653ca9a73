"""The explorer without a browser: its numbers are the replay's, every control changes what it should, live runs end."""

import json
import threading
import time

import numpy as np
import pytest

from specnb.book.explorer import figures as show
from specnb.book.explorer import tables as explorer_tables
from specnb.book.explorer import widgets
from specnb.book.explorer.live import Workbench, live_speedup
from specnb.book.explorer.tables import ALL, CUSTOM, FIXED, THIS_MACHINE, Machine, Setting, Tables
from specnb.book.explorer.widgets import Explorer
from specnb.book.plot import Plot
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure.cost import NAMED, CostCurve
from specnb.measure.recording import Trace, record
from specnb.measure.replay import Cost, fixed_k
from specnb.params import ExplorerParams
from specnb.prompts import Prompt

CURVE = CostCurve(model="line", context=0, widths=(1, 9, 25), samples_s=((0.02,), (0.03,), (0.06,)))
LOOKUP = "lookup(n=1..6,x4)"


def target():
    return toy.markov(6, order=2, seed=4, sharpness=3.0)


def some_prompts():
    kinds = {"code": "abc", "prose": "fed"}
    return [
        Prompt(id=f"{k}-{n}", category=k, text=t * (n + 1) + "abcdef"[n]) for k, t in kinds.items() for n in range(5)
    ]


@pytest.fixture(scope="module")
def trace():
    true, noise = (toy.markov(6, order=2, seed=seed, sharpness=3.0) for seed in (4, 5))
    blurred = toy.ToyLM(lambda ids: true._logits_of(ids) + noise._logits_of(ids), true.vocab, name="blurred")
    other = ModelDrafter(blurred)  # right now and then
    return Trace(
        tuple(
            recording
            for temperature in (0.0, 0.7)
            for _, recordings in record(
                target(), [LookupDrafter(), other], some_prompts(), temperature=temperature, max_new_tokens=40
            )
            for recording in recordings
        )
    )


@pytest.fixture(scope="module")
def tables(trace):
    return Tables(trace)


@pytest.fixture(autouse=True)
def prepared_once(tables, monkeypatch):
    monkeypatch.setattr(widgets, "Tables", lambda _trace: tables)


@pytest.fixture
def explorer(trace):
    explorer = Explorer(trace, CURVE, 0.3)
    yield explorer
    explorer.close()


def model_of(tables):
    return next(d for d in tables.drafters if tables.is_model(d))


def settings(tables):
    machine = Machine.measured(CURVE, 0.3, tables.k_max)
    for drafter in tables.drafters:
        for policy in tables.policies(drafter):
            for temperature in tables.temperatures:
                for content in (ALL, *tables.contents):
                    yield Setting(drafter, temperature, content, policy, 5, machine)


def test_a_fixed_k_is_predicted_as_the_replay_counts_it(trace, tables):
    """Seconds of plain decoding over seconds with drafts, by the replay's own arithmetic."""
    for drafter, temperature in ((d, t) for d in tables.drafters for t in tables.temperatures):
        chosen = trace.select(drafter=drafter, temperature=temperature, category="code").recordings
        cost = Cost(CURVE, 0.3)
        plain = sum(fixed_k(r, 0).seconds(cost) for r in chosen)
        setting = Setting(drafter, temperature, "code", FIXED, 1, Machine.measured(CURVE, 0.3, tables.k_max))
        swept = tables.sweep(setting)
        for k in range(25):
            wanted = plain / sum(fixed_k(r, k).seconds(cost) for r in chosen)
            assert tables.predict(setting._replace(k=k)).speedup == pytest.approx(wanted)
            assert swept.value[k] == pytest.approx(wanted)


def test_without_drafts_nothing_is_won(tables):
    for setting in settings(tables):
        assert tables.sweep(setting).value[0] == pytest.approx(1)
        assert tables.predict(setting._replace(policy=FIXED, k=0)).speedup == pytest.approx(1)


def test_the_interval_holds_the_value_and_needs_five_prompts(tables):
    setting = Setting(LOOKUP, 0.0, "code", FIXED, 4, Machine.straight(CUSTOM, 1.5, 0.0, 24))
    found = tables.predict(setting)
    assert found.low < found.speedup < found.high
    few = tables.predict(setting, ["code-0", "code-1"])
    assert np.isnan(few.low) and few.n_prompts == 2


def test_a_steeper_curve_is_never_faster(tables):
    for setting in settings(tables):
        fixed = setting._replace(policy=FIXED)
        flat, steep = (
            tables.sweep(fixed._replace(machine=Machine.straight(CUSTOM, at8, 0.1, tables.k_max))).value
            for at8 in (1.1, 4.0)
        )
        assert (steep <= flat + 1e-12).all()


def test_every_view_is_that_of_tables_made_anew(trace, tables):
    """What is kept of walks must not outlive what it depends on: drafter, content, policy, K, costs."""
    assert stale_settings(trace, tables) == []


def stale_settings(trace, tables):
    """Settings, asked for one after another, whose prediction differs from that of tables that know nothing yet."""
    wrong = []
    for first in settings(tables):
        if first.content != "code" or (first.temperature and first.policy != "rolling acceptance"):
            continue
        others = [first._replace(k=2), first._replace(machine=Machine.straight(CUSTOM, 6.0, 1.2, tables.k_max))]
        for setting in (first, *others):
            kept, anew = tables.predict(setting), Tables.__new__(Tables)
            anew.__dict__ = tables.__dict__ | {"_walks": {}}
            fresh = anew.predict(setting)
            same = all(np.array_equal(a, b) for a, b in zip(kept, fresh, strict=True))
            wrong += [] if same else [setting]
    return wrong


@pytest.mark.parametrize("dropped", ["_USES_K", "_USES_MACHINE"])
def test_a_stale_cache_would_be_seen(trace, monkeypatch, dropped):
    monkeypatch.setattr(explorer_tables, dropped, frozenset())
    assert stale_settings(trace, Tables(trace))


def test_a_custom_curve_keeps_the_shape_of_the_last_one(tables):
    base = Machine.measured(CURVE, 0.3, tables.k_max)
    same = base.bent(base.at(), 0.3)
    assert same.ratios == pytest.approx(base.ratios)
    bent = base.bent(3.0, 0.1)
    assert bent.at() == pytest.approx(3.0) and bent.ratios[1] == 1 and bent.c == 0.1
    assert Machine.straight("flat", 1.0, 0.0, 24).bent(2.0, 0.0).at() == pytest.approx(2.0)


def test_a_short_trace_offers_only_policies_it_can_replay(trace):
    short = Trace(tuple(r for _, rs in record(target(), [LookupDrafter()], some_prompts()[:2], k_max=4) for r in rs))
    offered = Tables(short).policies(LOOKUP)
    assert "rolling acceptance" not in offered and "content K" not in offered and "cost-aware" in offered
    assert Tables(short).k_max == 4 and Machine.straight(CUSTOM, 2.0, 0.0, 4).at() == pytest.approx(2.0)


def test_a_trace_without_decoding_is_refused(trace):
    lone = [r for _, rs in record(target(), [LookupDrafter()], some_prompts()[:1], max_new_tokens=1) for r in rs]
    with pytest.raises(InputError, match="two tokens"):
        Tables(Trace(tuple(lone)))


def test_the_strip_accounts_for_every_token(tables):
    for setting in list(settings(tables))[1::3]:  # one content
        for index in tables.chosen(setting):
            v = show.view(tables, setting, index, 1)
            of = show.kinds(v)
            assert len(of) == v.recording.n_tokens
            assert sum(kind == "accepted draft" for _, kind in of) == sum(s.n_accepted for s in v.steps)
            assert {n for n, _ in of} == set(range(1, len(v.steps) + 1))


def test_strip_shows_rounds_up_to_the_chosen_one(tables):
    setting = Setting(LOOKUP, 0.0, "code", FIXED, 4, Machine.straight(CUSTOM, 1.5, 0.0, 24))
    index = tables.chosen(setting)[0]
    for number in (1, 3, 10_000):
        v = show.view(tables, setting, index, number)
        *kinds, later, this = show.strip_data(v)
        rounds = [row[1] for group in kinds for row in group["customdata"] if row[0]]
        assert max(rounds) == v.round == min(number, len(v.steps))
        assert {row[1] for row in this["customdata"]} == {v.round}
        assert all(row[1] > v.round for row in later["customdata"] if row[0])


def test_tokens_of_any_bytes_can_be_shown():
    assert show.shown_text(b"a b\n") == "a·b⏎"
    assert show.shown_text(b"\xff\x00<b>") == "��<b>"
    assert len(show.shown_text(b"x" * 50)) == 8


def test_checks_hold_and_a_wrong_count_is_seen(trace, tables):
    assert explorer_tables.checks(tables)["ok"].all()
    broken = Tables(trace)
    broken.exact.totals[0, 5, 2] += 2  # accepted drafts that no round made room for
    assert not explorer_tables.checks(broken)["ok"].all()


def test_best_is_the_largest_of_the_sweep(tables):
    c = {d: 0.3 * tables.is_model(d) for d in tables.drafters}
    for row in explorer_tables.best(tables, CURVE, c).itertuples():
        machine = next(
            m for m in explorer_tables.machines(tables, row.drafter, CURVE, c[row.drafter]) if m.name == row.machine
        )
        value = tables.sweep(Setting(row.drafter, 0.0, row.content, FIXED, 1, machine)).value
        assert row.speedup == pytest.approx(value.max()) and value[row.k] == pytest.approx(value.max())


# --- the widget


PARTS = ("speedup", "alpha", "strip", "summary")


def drawn(explorer):
    """What each part shows."""
    told = {
        name: repr([(t.x, t.y, t.name, t.text) for t in getattr(explorer, name).figure.data])
        for name in PARTS
        if name != "summary"
    }
    return told | {"summary": repr(explorer.summary.lines)}


MOVES = {  # control: (new value, the parts that must change, those that must not)
    "k": (3, "speedup alpha summary", ""),
    "temperature": (0.7, "speedup alpha summary", ""),
    "drafter": (None, "speedup alpha summary", ""),
    "content": ("prose", "speedup alpha strip summary", ""),
    "policy": ("cost-aware", "speedup alpha summary", ""),
    "curve": ("laptop, compute-bound", "speedup summary", "alpha strip"),
    "at8": (5.0, "speedup summary", "alpha strip"),
    "c": (0.9, "speedup summary", "alpha strip"),
    "prompt": (None, "strip summary", "speedup alpha"),
    "round": (5, "strip summary", "speedup alpha"),
}


@pytest.mark.parametrize("name", MOVES)
def test_each_control_changes_what_it_should(explorer, name):
    explorer.drafter.value = model_of(explorer._tables)
    explorer.round.value = 3
    value, must, must_not = MOVES[name]
    if value is None:  # another one than is chosen
        control = explorer.controls[name]
        value = next(v for _, v in control._options_full if v != control.value)
    before, redraws = drawn(explorer), len(explorer.redraw_ms)
    explorer.controls[name].value = value
    after = drawn(explorer)
    changed = {part for part in PARTS if before[part] != after[part]}
    assert set(must.split()) <= changed and not changed & set(must_not.split())
    assert len(explorer.redraw_ms) == redraws + 1, "one move, one redraw"


def test_what_is_drawn_is_what_is_computed(explorer):
    explorer.content.value, explorer.k.value = "prose", 7
    p = explorer._tables.predict(explorer.setting())
    point = explorer.speedup.figure.data[3]
    assert (point.x[0], point.y[0]) == (7, pytest.approx(p.speedup))
    assert list(explorer.alpha.figure.data[0].y) == pytest.approx((p.kept[:7] / p.tested[:7]).tolist())
    assert f"predicted speed-up {p.speedup:.2f} over 5 prompts" in explorer.summary.lines[0]


def test_dragging_a_cost_makes_a_custom_curve_and_a_named_one_moves_the_sliders(explorer):
    assert explorer.curve.value == THIS_MACHINE
    explorer.at8.value = 3.0
    assert explorer.curve.value == CUSTOM and explorer.setting().machine.at() == pytest.approx(3.0)
    name = "memory-bound server"
    explorer.curve.value = name
    assert explorer.at8.value == NAMED[name][0] and explorer.setting().machine.name == name


def test_what_the_browser_only_rounds_was_not_moved(explorer):
    before, redraws = explorer.curve.value, len(explorer.redraw_ms)
    for slider in (explorer.at8, explorer.c):
        slider.value += 1e-15 + 0.4 * slider.step
    assert explorer.curve.value == before != CUSTOM and len(explorer.redraw_ms) == redraws


def test_a_lookup_costs_nothing_and_offers_no_policy_that_reads_beliefs(explorer):
    explorer.drafter.value = model_of(explorer._tables)
    assert explorer.c.value == 0.3
    explorer.policy.value = "confidence"
    explorer.drafter.value = LOOKUP
    assert explorer.c.value == 0 and explorer.policy.value == FIXED and "entropy" not in explorer.policy.options


def test_what_cannot_be_shown_is_said(explorer, monkeypatch):
    monkeypatch.setattr(explorer._tables, "predict", lambda setting: 1 / 0)
    explorer.k.value = 3
    assert "ZeroDivisionError" in explorer.summary.lines[0]
    monkeypatch.undo()
    explorer.k.value = 4
    assert "fixed K = 4" in explorer.summary.lines[0]


# --- live runs


@pytest.fixture(scope="module")
def bench():
    return Workbench(target(), [LookupDrafter()], some_prompts(), ExplorerParams(max_new_tokens=40))


def finished(explorer, limit_s=10):
    end = time.monotonic() + limit_s
    while explorer.run.disabled:
        assert time.monotonic() < end, "the live run does not end"
        time.sleep(0.01)
    return explorer.outcome.lines[0]


def live_explorer(trace, run_live):
    made = Explorer(trace, CURVE, 0.3, run_live=run_live)
    made.drafter.value = LOOKUP
    return made


def test_a_live_run_is_shown_beside_its_prediction_and_can_be_repeated(trace, bench):
    explorer = live_explorer(trace, bench.run_live)
    for k in (4, 6):
        explorer.k.value = k
        explorer.start()
        told = finished(explorer)
        assert told.startswith(f"Live, fixed K = {k}, 3 prompts: speed-up") and "predicted" in told
        star = explorer.speedup.figure.data[4]
        assert star.visible and star.x[0] == k and star.y[0] > 0
    explorer.temperature.value = 0.7
    assert not explorer.speedup.figure.data[4].visible, "a live run of another temperature"


def test_live_speedup_is_the_ratio_of_decoding_rates(bench, tables):
    setting = Setting(LOOKUP, 0.0, "code", FIXED, 4, Machine.straight(CUSTOM, 1.5, 0.0, 24))
    made = bench.run_live(setting)
    assert [bool(g.drafter) for g in made] == [False, True] * 3 and {g.category for g in made} == {"code"}
    plain, drafted = ([g for g in made if bool(g.drafter) == kind] for kind in (False, True))
    rate = [sum(g.n_decoded for g in some) / sum(g.decode_s for g in some) for some in (plain, drafted)]
    assert live_speedup(made).value == pytest.approx(rate[1] / rate[0])
    for g in drafted:  # greedy: the rounds are those that were predicted
        assert len(g.rounds) == tables.predict(setting, [g.prompt_id]).rounds
    with pytest.raises(InputError):
        live_speedup([])


def test_an_error_of_a_live_run_is_shown_and_the_next_run_works(trace, bench):
    def failing(setting, progress, cancelled):
        if setting.k == 2:
            raise RuntimeError("the engine is gone")
        return bench.run_live(setting, progress, cancelled)

    explorer = live_explorer(trace, failing)
    explorer.k.value = 2
    explorer.start()
    assert finished(explorer) == "The live run failed: RuntimeError: the engine is gone"
    explorer.k.value = 3
    explorer.start()
    assert finished(explorer).startswith("Live,")


def test_cancel_ends_a_live_run_and_one_runs_at_a_time(trace, bench):
    begun, starts = threading.Event(), []

    def slow(setting, progress, cancelled):
        starts.append(setting)
        begun.set()
        while not cancelled():
            time.sleep(0.005)
        return bench.run_live(setting, progress, cancelled)

    explorer = live_explorer(trace, slow)
    explorer.start()
    assert begun.wait(5) and explorer.run.disabled and not explorer.cancel.disabled
    explorer.start()
    explorer.stop()
    assert finished(explorer).startswith("Cancelled after 0 generations")
    assert len(starts) == 1 and explorer.cancel.disabled and not explorer.speedup.figure.data[4].visible


def test_a_workbench_records_what_the_explorer_needs(bench):
    recorded = bench.record()
    assert recorded.record.status == "completed" and len(recorded.trace.recordings) == 20
    assert recorded.c == {LOOKUP: 0.0} and recorded.curve.widths[-1] == 25
    assert Tables(recorded.trace).contents == ("code", "prose")


@pytest.mark.parametrize(
    "wrong", [{"drafters": []}, {"contents": ["code", "code"]}, {"temperatures": [-1.0]}, {"k_max": 0}, {"nope": 1}]
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(InputError):
        ExplorerParams.checked(**wrong)


def test_no_widget_is_slow_to_start(explorer):
    """anywidget drops, for good, the changes of a widget whose program needs over two seconds."""
    programs = {type(w).__name__: len(w._esm) for w in everything(explorer) if hasattr(w, "_esm")}
    assert set(programs) == {"Plot", "Status"} and max(programs.values()) < 5_000


def everything(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from everything(child)


def test_a_plot_sends_what_json_can_hold_and_gives_plotly_when_asked():
    import plotly.graph_objects as go

    plot, sent = Plot(go.Figure(go.Scatter(x=[1, 2], y=[1.0, float("nan")]))), []
    assert json.loads(plot._traces)[0]["y"] == [1.0, None]
    plot.update([{"y": [3, 4]}])
    assert json.loads(plot._traces)[0]["y"] == [3, 4] == list(plot.figure.data[0].y)
    with pytest.raises(ValueError):
        plot.update([])
    plot.send = lambda content, buffers: sent.append((content, buffers))
    plot._handle_custom_msg("something else", [])
    assert not sent
    plot._handle_custom_msg("plotly.js", [])
    assert b"plotly.js v" in sent[0][1][0][:200]
