"""The explorer as one file, opened from `file://`: the numbers of the replay, the keyboard, another trace."""

import io
import json
import re
import shlex
from itertools import product
from xml.etree import ElementTree

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
SHOWN = re.compile(r"predicted (.+) times plain decoding in .+, prompts: (\d+) \((?:no|95 % interval (.+) to ([\d.]+))")
COUNTED = re.compile(r"(\d+) of (\d+) draft tokens accepted.* tau ([\d.]+): (\d+) tokens")
MOVE = """([id, value]) => {
  const began = performance.now(), moved = new Event("input", { bubbles: true });
  Object.assign(document.getElementById(id), { value }).dispatchEvent(moved);
  return document.body.offsetHeight && performance.now() - began; }"""
COSTS = {"machine": THIS_MACHINE}, {"machine": "laptop, compute-bound"}, {"at8": 3, "c": 0.2}
TEXT = "id => document.getElementById(id).textContent"
NUMBERS = ["k", "drafted", "accepted", "tau", "speedup", "low", "high"]


def move(frame, **values) -> list[float]:
    """Move controls as a reader does; milliseconds of each move."""
    return [frame.evaluate(MOVE, [name, str(value)]) for name, value in values.items()]


def position(frame, temperature: float, top_p: float = 1.0) -> int:
    """Where the temperature slider stands for a sampling."""
    found = "([t, p]) => trace.samplings.findIndex((each) => each.temperature === t && each.top_p === p)"
    return frame.evaluate(found, [temperature, top_p])


def text(frame, name: str) -> str:
    return frame.evaluate(TEXT, name)


def bent(base: Cost, at8: float, c: float) -> Cost:
    """The shape of a curve, stretched to pass through `at8` at width 8; a flat curve becomes a straight one."""
    ratios, base_at8 = [base.curve.ratio(n) for n in base.curve.widths], base.curve.ratio(8)
    if base_at8 < 1.05 or min(ratios) < 1:
        return Cost.straight(CUSTOM, at8, c)
    stretched = tuple((1 + (ratio - 1) * (at8 - 1) / (base_at8 - 1),) for ratio in ratios)
    return Cost(CostCurve(**base.curve.model_dump() | {"samples_s": stretched}), c, name=CUSTOM)


def require_accepted(command: str) -> None:
    """Each option of the command is one of `specnb generate`, or a parameter of notebook 01."""
    words = shlex.split(command)
    if "run" in words:
        resolve_params(read_notebook(find_notebook("01_k_sweep")), parse_parameters(words[words.index("-p") + 1 :: 2]))
        return
    known = {name for option in typer.main.get_command(app).commands["generate"].params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known


def require_shown(frame, tables: Tables, setting: Setting) -> None:
    """Sentence, counts, table, shares by position, command and text are those of a setting."""
    p, (_, _, steps) = tables.predict(setting), tables.walks(setting)[0]
    shown = [float(x) for x in SHOWN.search(text(frame, "result")).groups() if x]
    wanted = [float(x) for x in (p.speedup, p.n_prompts, p.low, p.high) if x == x]
    assert shown == pytest.approx(wanted, abs=0.0051), setting
    counted = [float(x) for x in COUNTED.search(text(frame, "facts")).groups()]
    assert counted == pytest.approx([p.accepted, p.drafted, p.tau, p.n_tokens], abs=0.51), setting
    require_accepted(text(frame, "command"))
    table, sweep = pd.read_csv(io.StringIO(frame.evaluate("table()"))), tables.sweep(setting)
    rows = {name: getattr(sweep, name) for name in NUMBERS[1:]}
    pd.testing.assert_frame_equal(table[:25][NUMBERS[1:]], pd.DataFrame(rows), rtol=2e-4, atol=1e-3, check_dtype=False)
    assert table["policy"].iloc[-1] == setting.policy and (len(table) == 25) == (setting.policy == FIXED)
    assert table["speedup"][setting.k if setting.policy == FIXED else 25] == pytest.approx(p.speedup, rel=2e-4)
    reached, kept = frame.evaluate("look().p.tested"), frame.evaluate("look().p.kept")
    _, _, *by_position = split(sum(counts for _, counts, _ in tables.walks(setting)))
    assert [*reached, *kept] == pytest.approx(np.concatenate(by_position), rel=1e-3, abs=2e-3)
    frame.locator("#prompt").select_option(index=0)
    if not setting.temperature or setting.policy != FIXED:  # else another draw
        assert frame.locator("#strip ins").count() == sum(step.n_accepted for step in steps)
        assert frame.locator("#strip > span").count() == len(steps)


def compare(frame, trace, curve, c) -> None:
    tables, times = Tables(trace), []
    policies = (FIXED, "rolling acceptance", FIXED)
    chosen = product(tables.drafters, tables.samplings, zip((3, 8, 24), COSTS, policies, strict=True))
    for drafter, (t, top_p), (k, costs, policy) in chosen:
        known = machines(Cost(curve, c[drafter], drafter not in tables.models, THIS_MACHINE))
        content = "prose" if k == 3 else ALL
        machine = known[costs["machine"]] if "machine" in costs else bent(known[THIS_MACHINE], **costs)
        policy = policy if policy in tables.policies(drafter) else FIXED
        place = position(frame, t, top_p)
        moves = {"drafter": drafter, "sampling": place, "content": content, "policy": policy, "k": k}
        times += move(frame, **moves, **{"machine": THIS_MACHINE} | costs)
        require_shown(frame, tables, Setting(drafter, t, content, policy, k, machine, top_p))
    print(f"a move: median {sorted(times)[len(times) // 2]:.1f} ms, longest {max(times):.1f} ms")


def test_the_page_shows_what_the_replay_predicts_and_takes_another_trace(page, tmp_path):
    run = stored(SHIPPED)
    explorer.write_page(SHIPPED, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size <= 3_000_000
    page.goto((tmp_path / "page.html").as_uri())
    page.locator("#k").press("ArrowRight")
    assert text(page, "result").startswith("K = 9:")
    compare(page, *run[1:4])
    drafters = [LookupDrafter(), ModelDrafter(toy.markov(6, order=2, seed=4, sharpness=1.5))]
    runs = [recorded(drafters, PROMPTS, t) for t in (0.0, 0.7)]
    trace = run.trace._replace(recordings=tuple(recording for run in runs for recording in run))
    other = run._replace(trace=trace, c={recording.drafter: 0.1 for recording in trace.recordings})
    for name, contents in (("toy", explorer.reduced(other, Tables(trace))), ("bad", {"format": 0})):
        (tmp_path / f"{name}.json").write_text(json.dumps(contents))
        page.locator("#file").set_input_files(tmp_path / f"{name}.json")
        page.wait_for_function("name => document.querySelector('#message').textContent.startsWith(name)", arg=name)
        compare(page, *other[1:4])


def test_the_temperature_glides_and_a_view_can_be_shared_pinned_saved_and_set_on_a_machine(page, tmp_path):
    explorer.write_page(SHIPPED, tmp_path / "page.html")
    page.goto((tmp_path / "page.html").as_uri())
    tables = Tables(stored(SHIPPED).trace)
    (low, _), (high, _) = tables.samplings[:2]
    between = round(low + 0.05, 2)
    speeds = {}
    for t in (low, between, high):
        times = move(page, drafter=tables.drafters[-1], sampling=position(page, t), k=4)
        speeds[t] = page.evaluate("look().p.speedup")
    share = (between - low) / (high - low)
    assert 0 < share < 1 and max(times) < 100
    assert speeds[between] == pytest.approx(speeds[low] ** (1 - share) * speeds[high] ** share)
    move(page, sampling=position(page, between), k=5)
    words = page.evaluate("look().words")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    assert page.evaluate("look().words") == words and f"temperature {between}" in words
    for k in (2, 6):
        move(page, k=k)
        page.get_by_role("button", name="Pin", exact=True).click()
    assert page.locator("#pinned li").count() == 2
    use_machine(page, tmp_path, "mine.json", target="smollm2-135m:f16", tokens_per_s=40.0)
    page.locator("#axis").select_option("rate")
    assert "plain decoding: 40.0 tokens/s" in page.locator("#chart").inner_html()
    page.get_by_role("button", name="Go to the best K").click()
    assert page.evaluate("look().p.speedup === Math.max(...look().sweep.map((p) => p.speedup))")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save picture (SVG)").click()
    drawn = saved.value.path().read_text()
    assert "var(" not in drawn and "plain decoding: 40.0 tokens/s" in drawn
    ElementTree.fromstring(drawn)


def use_machine(page, folder, name, **fields) -> None:
    """Drop a row of `specnb bench` on the page."""
    row = {"machine": "mine", "engine": "torch", "dtype": "float32", "at8": 1.5, "c": 0.1, "busy": False}
    (folder / name).write_text(json.dumps(row | fields))
    page.locator("#file").set_input_files(folder / name)
    page.wait_for_function("name => document.querySelector('#machine').value === name", arg=name)


def opened(page, folder, view=""):
    """The page on the shipped trace, at a view of its address."""
    if not (folder / "page.html").exists():
        explorer.write_page(SHIPPED, folder / "page.html")
    page.goto("about:blank")
    page.goto((folder / "page.html").as_uri() + view)
    return page


def test_the_page_names_model_engine_and_machine_and_pays_only_over_the_fastest(page, tmp_path):
    opened(page, tmp_path)
    assert text(page, "subject").startswith("SmolLM2-135M in torch float32 on AMD EPYC, 2 cores")
    run = stored(SHIPPED)
    rates = run.record.measurements["baseline"]
    share = rates["plain_tokens_per_s"] / rates["baseline_tokens_per_s"]
    assert f"{rates['baseline_tokens_per_s']:.1f}" in text(page, "subject") and rates["baseline_note"] in text(
        page, "subject"
    )

    def over_fastest(share: float, engine: str, verdict: str) -> None:
        p = page.evaluate("look().p")
        wanted = f"times plain decoding in torch float32, prompts: {len(page.evaluate('look().recordings'))}"
        assert wanted in text(page, "result")
        over = f"{p['speedup'] * share:.2f} times the fastest plain decoding ({engine}): {verdict}."
        assert text(page, "result").endswith(f"; {over}")

    over_fastest(share, "llama.cpp q4_1", "does not pay")
    assert page.evaluate("look().p.low") > 1, "it is faster than plain decoding in its own engine"
    rate = {"tokens_per_s": 40.0, "plain_tokens_per_s": 40.0, "baseline_engine": "torch float32"}
    for fastest, busy, verdict in (
        (40.0, False, "pays"),
        (72.0, False, "undecided"),
        (400.0, False, "does not pay"),
        (40.0, True, "no verdict, the machine was busy"),
    ):
        fields = {"target": "smollm2-135m?backend=hf", "baseline_tokens_per_s": fastest, "busy": busy}
        use_machine(page, tmp_path, f"{fastest}-{busy}.json", **rate | fields)
        over_fastest(40 / fastest, "torch float32", verdict)
    unknown = "the fastest plain decoding of this file was not measured: no verdict."
    other_file = rate | {"target": "smollm2-135m:q8_0", "baseline_tokens_per_s": 40.0}
    for name, fields in (("other", other_file), ("older", {"target": "smollm2-135m", "tokens_per_s": 40.0})):
        use_machine(page, tmp_path, name, **fields)
        assert text(page, "result").endswith(unknown) and "pays" not in text(page, "result")
    move(page, machine="memory-bound server")
    assert text(page, "result").endswith(unknown) and "memory-bound server (simulated)" in text(page, "facts")
    move(page, c=0.2)
    assert "custom (simulated)" in text(page, "facts")
    run.record.measurements.pop("baseline")
    (tmp_path / "trace.json").write_text(json.dumps(explorer.reduced(run, Tables(run.trace))))
    page.locator("#file").set_input_files(tmp_path / "trace.json")
    page.wait_for_function("() => document.querySelector('#message').textContent.startsWith('trace')")
    assert text(page, "result").endswith(unknown) and text(page, "subject").endswith("was not measured.")


def test_the_page_begins_with_k_on_a_text_worth_seeing_and_nothing_jumps_while_k_is_dragged(page, tmp_path):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    opened(page, tmp_path)
    assert page.locator("h1").inner_text().startswith("Drag K")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "k"
    assert page.locator("#prompt").input_value() == "edit-02"
    names = page.locator("#drafter option").all_inner_texts()
    assert names == ["prompt lookup", "Medusa heads", "jump drafter", "SmolLM2-135M, llama.cpp q4_0"]
    assert "epyc-zen1-llama: AMD EPYC, 2 cores, llama.cpp f16" in page.locator("#machine option").all_inner_texts()
    place = "Object.values(byId('chart').getBoundingClientRect().toJSON())"
    for width in (420, 900, 1200, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        places = set()
        for k in range(25):
            (took,) = move(page, k=k)
            assert took < 100
            places.add(tuple(page.evaluate(place)))
        assert len(places) == 1, width
    assert [url for url in asked if not url.startswith(("file:", "about:"))] == []


def test_what_a_link_asks_for_and_the_page_lacks_is_said(page, tmp_path):
    kept = {"drafter": "lookup(n=1..6,x4)", "k": "8", "machine": THIS_MACHINE, "content": "all", "policy": FIXED}
    for name, value in {
        "drafter": "magic",
        "k": "99",
        "machine": "moon",
        "content": "poetry",
        "policy": "luck",
        "t": "7",
    }.items():
        opened(page, tmp_path, f"#{name}={value}")
        assert f"{name} = {value}" in text(page, "message")
        assert {each: page.locator(f"#{each}").input_value() for each in kept} == kept
    page.evaluate("location.hash = 'k=3&drafter=medusa&t=0.4'")  # a link pasted into the open page
    page.wait_for_function("() => byId('k-shown').value === '3'")
    assert page.locator("#drafter").input_value() == "medusa" and text(page, "message") == ""
    assert page.evaluate("samplingNow().temperature") == 0.4
    page.get_by_role("button", name="Reset", exact=True).click()
    assert {each: page.locator(f"#{each}").input_value() for each in kept} == kept
