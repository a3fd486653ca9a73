"""The explorer as one `file://` page: predictions of the replay, keyboard, other traces."""

import io
import json
import re
import shlex
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer

from specnb.book.explorer import page as explorer
from specnb.book.explorer.tables import ALL, CUSTOM, SHIPPED, THIS_MACHINE, Setting, Tables, stored
from specnb.book.notebook import find_notebook, parse_parameters, read_notebook, resolve_params
from specnb.cli.app import app
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.machines import machines
from specnb.measure.policies import FIXED
from specnb.measure.replay import split
from tests.book.test_explorer import PROMPTS, recorded

pytestmark = [pytest.mark.browser, pytest.mark.slow]
SHOWN = re.compile(
    r"predicted (.+) times plain decoding in .+, "
    r"prompts: (\d+) \((?:no|95 % interval (.+) to ([\d.]+))"
)
COUNTED = re.compile(r"(\d+) of (\d+) draft tokens accepted.* tau ([\d.]+): (\d+) tokens")
MOVE = """([id, value]) => {
  const moved = new Event("input", { bubbles: true });
  Object.assign(document.getElementById(id), { value }).dispatchEvent(moved);
}"""
COSTS = {"machine": THIS_MACHINE}, {"machine": "laptop, compute-bound"}, {"at8": 3, "c": 0.2}
TEXT = "id => document.getElementById(id).textContent"
NUMBERS = ["drafted", "accepted", "tau", "speedup", "low", "high"]


def move(frame, **values) -> None:
    """Set controls as a reader does."""
    for name, value in values.items():
        frame.evaluate(MOVE, [name, str(value)])


def position(frame, temperature: float, top_p: float = 1.0) -> int:
    """Return the position of the temperature slider for a sampling."""
    found = (
        "([t, p]) => trace.samplings.findIndex("
        "(each) => each.temperature === t && each.top_p === p)"
    )
    return frame.evaluate(found, [temperature, top_p])


def text(frame, name: str) -> str:
    return frame.evaluate(TEXT, name)


def bent(base: Cost, at8: float, c: float) -> Cost:
    """Return a curve stretched to `at8` at width 8."""
    slope = (at8 - 1) / (base.curve.ratio(8) - 1)
    stretched = tuple((1 + (base.curve.ratio(n) - 1) * slope,) for n in base.curve.widths)
    return Cost(CostCurve(**base.curve.model_dump() | {"samples_s": stretched}), c, name=CUSTOM)


def require_accepted(command: str) -> None:
    """Require that the options are those of `specnb generate`, or parameters of notebook 01."""
    words = shlex.split(command)
    if "run" in words:
        given = parse_parameters(words[words.index("-p") + 1 :: 2])
        resolve_params(read_notebook(find_notebook("01_k_sweep")), given)
        return
    options = typer.main.get_command(app).commands["generate"].params
    known = {name for option in options for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known


def require_shown(frame, tables: Tables, setting: Setting) -> None:
    """Require that sentence, counts, table, shares by position, command and text are correct."""
    p = tables.predict(setting)
    walks = tables.walks(setting)
    fixed = setting.policy == FIXED
    shown = [float(x) for x in SHOWN.search(text(frame, "result")).groups() if x]
    wanted = [float(x) for x in (p.speedup, p.n_prompts, p.low, p.high) if x == x]
    assert shown == pytest.approx(wanted, abs=0.0051), setting
    counted = [float(x) for x in COUNTED.search(text(frame, "facts")).groups()]
    assert counted == pytest.approx([p.accepted, p.drafted, p.tau, p.n_tokens], abs=0.51), setting
    require_accepted(text(frame, "command"))
    table = pd.read_csv(io.StringIO(frame.evaluate("table()")))
    sweep = tables.sweep(setting)[NUMBERS]
    close = {"rtol": 2e-4, "atol": 1e-3, "check_dtype": False}
    pd.testing.assert_frame_equal(table[:25][NUMBERS], sweep, **close)
    assert table["policy"].iloc[-1] == setting.policy and (len(table) == 25) == fixed
    row = setting.k if fixed else 25
    assert table["speedup"][row] == pytest.approx(p.speedup, rel=2e-4)
    by_position = frame.evaluate("[...look().p.tested, ...look().p.kept]")
    _, _, *expected = split(sum(counts for _, counts, _ in walks))
    assert by_position == pytest.approx(np.concatenate(expected), rel=1e-3, abs=2e-3)
    frame.locator("#prompt").select_option(index=0)
    if not setting.temperature or not fixed:  # otherwise a different random draw
        steps = walks[0][2]
        assert frame.locator("#strip ins").count() == sum(step.n_accepted for step in steps)
        assert frame.locator("#strip > span").count() == len(steps)


def compare(frame, trace, curve, c) -> None:
    tables = Tables(trace)
    chosen = ((3, "prose", FIXED), (8, ALL, "rolling acceptance"), (24, ALL, FIXED))
    for drafter, (t, top_p), ((k, content, policy), costs) in product(
        tables.drafters, tables.samplings, zip(chosen, COSTS, strict=True)
    ):
        here = Cost(curve, c[drafter], drafter not in tables.models, THIS_MACHINE)
        machine = machines(here)[costs["machine"]] if "machine" in costs else bent(here, **costs)
        place = {"drafter": drafter, "sampling": position(frame, t, top_p), "content": content}
        move(frame, **place, policy=policy, k=k, **{"machine": THIS_MACHINE} | costs)
        require_shown(frame, tables, Setting(drafter, t, content, policy, k, machine, top_p))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Path:
    """The page of the shipped trace, which takes seconds to write."""
    file = tmp_path_factory.mktemp("pages") / "page.html"
    explorer.write_page(SHIPPED, file)
    return file


def test_the_page_shows_the_predictions_of_the_replay(page, shipped, tmp_path):
    run = stored(SHIPPED)
    assert shipped.stat().st_size <= 3_000_000
    page.goto(shipped.as_uri())
    page.locator("#k").press("ArrowRight")
    assert text(page, "result").startswith("K = 9:")
    compare(page, *run[1:4])
    drafters = [LookupDrafter(), ModelDrafter(toy.markov(6, order=2, seed=4))]
    runs = [recorded(drafters, PROMPTS, t) for t in (0.0, 0.7)]
    trace = run.trace._replace(recordings=tuple(recording for run in runs for recording in run))
    other = run._replace(trace=trace, c={recording.drafter: 0.1 for recording in trace.recordings})
    (tmp_path / "toy.html").write_text(explorer.page(explorer.reduced(other, Tables(trace))))
    page.goto((tmp_path / "toy.html").as_uri())
    compare(page, *other[1:4])


def test_a_kernel_moves_the_controls_and_is_told_their_positions(page, shipped):
    page.goto(shipped.as_uri())
    page.evaluate("attach(() => {}, true, (place) => { globalThis.place = place; })")
    first, *_, last = (recording.drafter for recording in stored(SHIPPED).trace.recordings)
    wanted = {"k": 5, "round": 3, "drafter": last, "content": "edit", "policy": FIXED}
    wanted |= {"temperature": 0.4, "top_p": 1}
    page.evaluate("place => move(place)", wanted)
    place = page.evaluate("place")
    assert wanted.items() <= place.items() and place["_machine"]["drafter"] == last
    assert page.evaluate("look().setting.k") == 5 and text(page, "line").startswith("Round 3 of ")
    page.evaluate("place => move(place)", wanted | {"drafter": "none"})
    assert page.evaluate("place.drafter") == first


def test_a_reader_can_interpolate_temperatures_pin_and_load_a_machine(page, shipped, tmp_path):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(shipped.as_uri())
    tables = Tables(stored(SHIPPED).trace)
    (low, _), (high, _) = tables.samplings[:2]
    between = round(low + 0.05, 2)
    speeds = {}
    for t in (low, between, high):
        move(page, drafter=tables.drafters[-1], sampling=position(page, t), k=4)
        speeds[t] = page.evaluate("look().p.speedup")
    share = (between - low) / (high - low)
    assert speeds[between] == pytest.approx(speeds[low] ** (1 - share) * speeds[high] ** share)
    move(page, sampling=position(page, between), k=5)
    assert f"temperature {between}" in page.evaluate("look().words")
    page.get_by_role("button", name="Pin", exact=True).click()
    assert page.locator("#pinned li").count() == 1
    use_machine(page, tmp_path, "mine.json", target="smollm2-135m:f16", tokens_per_s=40.0)
    page.get_by_role("button", name="Go to the best K").click()
    assert page.evaluate("look().p.speedup === Math.max(...look().sweep.map((p) => p.speedup))")
    assert [url for url in asked if not url.startswith(("file:", "about:", "blob:"))] == []


def test_a_drafter_pays_only_if_faster_than_the_fastest_plain_decoding(page, shipped, tmp_path):
    page.goto(shipped.as_uri())
    assert page.evaluate("look().p.low") > 1, "it is faster than plain decoding in its own engine"
    assert text(page, "result").endswith("(llama.cpp q4_1): does not pay.")
    rate = {"tokens_per_s": 40.0, "plain_tokens_per_s": 40.0, "baseline_engine": "torch float32"}
    for fastest, target, verdict in (
        (40.0, "smollm2-135m?backend=hf", ": pays."),
        (400.0, "smollm2-135m?backend=hf", ": does not pay."),
        (40.0, "smollm2-135m:q8_0", "was not measured: no verdict."),
    ):
        fields = {"target": target, "baseline_tokens_per_s": fastest}
        use_machine(page, tmp_path, f"{fastest}{target[-2:]}.json", **rate | fields)
        assert text(page, "result").endswith(verdict)


def use_machine(page, folder, name, **fields) -> None:
    """Load a row of `specnb bench` into the page."""
    row = {
        "machine": "mine",
        "engine": "torch",
        "dtype": "float32",
        "at8": 1.5,
        "c": 0.1,
        "busy": False,
    }
    (folder / name).write_text(json.dumps(row | fields))
    page.locator("#file").set_input_files(folder / name)
    page.wait_for_function("name => document.querySelector('#machine').value === name", arg=name)
