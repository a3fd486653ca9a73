"""The explorer in a real JupyterLab, under Voila, and a real browser: drag, see it change, run live."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from specnb.book.explorer.tables import ALL, Setting, Tables, sampling_label
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.measure.cost import Cost
from specnb.measure.policies import FIXED
from specnb.measure.recording import Trace
from tests.book.test_explorer import PROMPTS, recorded

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TOKEN = "explorer-test"
SOURCE = """
from pathlib import Path
from specnb.book.explorer.widgets import Explorer
from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.lm import toy
from specnb.measure.cost import Cost
from specnb.measure.recording import Trace
from specnb.prompts import Prompt

target = toy.markov(6, order=2, seed=4, sharpness=3.0)
prompt = Prompt(id="code-0", category="code", text="abcabca")

def run_live(setting, progress):
    return [generate(target, prompt, max_new_tokens=40, **drafting) for drafting in
            ({}, {"drafter": LookupDrafter(), "k": setting.k})], False

trace = Trace.load(Path("trace.parquet"))
Explorer(trace, Cost.straight("line", 1.4).curve, {r.drafter: 0.2 for r in trace.recordings}, run_live=run_live)
"""
COLOUR = "text => getComputedStyle(text).fill"
CHOSEN_K = """() => Number(document.querySelector(".specnb-explorer .js-plotly-plot").data
  .find(trace => (trace.name || "").startsWith("chosen")).x[0])"""
COLD_MS = 120_000
"""A kernel in an environment that was just installed imports everything for the first time, from a cold disk."""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a trace and one small notebook in `shelf/`, and room for Jupyter's own files."""
    home = tmp_path_factory.mktemp("lab")
    (home / "shelf").mkdir()
    drafters = [LookupDrafter(), ModelDrafter(toy.markov(6, order=2, seed=4, sharpness=1.5))]
    samplings = ((0.0, 1.0), (0.7, 1.0), (0.7, 0.9))
    runs = [recorded(drafters, PROMPTS, t, top_p=p, max_new_tokens=40) for t, p in samplings]
    Trace(tuple(recording for run in runs for recording in run)).save(home / "shelf" / "trace.parquet")
    nb = new_notebook(cells=[new_code_cell(SOURCE.strip())])
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nb, home / "shelf" / "small.ipynb")
    quiet = home / "app" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    return home


@contextmanager
def serving(home: Path, module: str, options: list[str]) -> Iterator[str]:
    """Start a server of Jupyter's on a free port, with settings of its own; its address."""
    own = {name: str(home / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    own |= {"JUPYTER_DATA_DIR": str(home / "data"), "JUPYTERLAB_SETTINGS_DIR": str(home / "app")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, "--no-browser", f"--port={port}", *options]
    log = home / f"{module}.txt"
    with log.open("wb") as file:
        env = os.environ | own
        server = subprocess.Popen(command, cwd=home / "shelf", env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 30
        while server.poll() is None and time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            time.sleep(0.2)
        else:
            pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_the_explorer_in_jupyterlab(home, page):
    options = ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}", "--LabApp.news_url=None"]
    options += ["--allow-root", "--ip=127.0.0.1", f"--ServerApp.root_dir={home / 'shelf'}"]
    with serving(home, "jupyterlab", options) as address:
        page.goto(f"{address}/lab/workspaces/explorer/tree/small.ipynb?reset&token={TOKEN}")
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=COLD_MS)

        def prompt_after_run_all() -> str:
            """Before the kernel is connected, "run" goes nowhere."""
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            page.wait_for_timeout(2000)
            return page.locator(".jp-InputArea-prompt").first.inner_text()

        until(page, prompt_after_run_all, lambda text: text != "[ ]:", limit_s=60)
        use(page, home)
        title = page.locator(".specnb-explorer .xtitle").first
        light = title.evaluate(COLOUR)
        page.get_by_role("menuitem", name="Settings", exact=True).click()
        for item in ("Theme", "JupyterLab Dark"):
            page.locator(".lm-Menu-itemLabel").get_by_text(item, exact=True).click()
        until(page, lambda: title.evaluate(COLOUR), lambda colour: colour != light)


def test_the_explorer_under_voila(home, page):
    pytest.importorskip("voila", reason="no Voila: `pip install -e .[app]`")
    options = [f"--Voila.token={TOKEN}", "--Voila.ip=127.0.0.1", str(home / "shelf" / "small.ipynb")]
    with serving(home, "voila", options) as address:
        page.goto(f"{address}/?token={TOKEN}")
        use(page, home)
        for width in (480, 1200, 1920):
            page.set_viewport_size({"width": width, "height": 1200})
            page.wait_for_timeout(1500)
            sizes = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert sizes[0] <= sizes[1], f"wider than a page of {width}"


def summary(page, nth: int = 0) -> str:
    return page.locator(".specnb-explorer [role=status]").nth(nth).inner_text()


def drawn(page) -> list[str]:
    """The traces of the two figures, as drawn, and the strip."""
    plots = page.locator(".specnb-explorer .js-plotly-plot .scatterlayer").all()
    return [each.inner_html() for each in (*plots, page.locator(".specnb-explorer .widget-html-content").last)]


def until(page, read, wanted, limit_s: float = 15):
    """The first value of `read()` that `wanted` takes."""
    end = time.monotonic() + limit_s
    while not wanted(value := read()):
        assert time.monotonic() < end, f"still {value!r}"
        page.wait_for_timeout(50)
    return value


def compare(page, home) -> None:
    """Twelve settings by the keyboard: the sentence has the numbers of the replay."""
    trace = Trace.load(home / "shelf" / "trace.parquet")
    tables, curve = Tables(trace), Cost.straight("line", 1.4).curve

    def move(label: str, steps: int) -> None:
        handle = page.locator(".specnb-explorer .widget-slider", has_text=label).first.locator(".noUi-handle")
        handle.press("Home")
        for _ in range(steps):
            handle.press("ArrowRight")

    for drafter in tables.drafters:
        page.get_by_label("drafter").select_option(drafter)
        machine = Cost(curve, 0.2)
        for (nth, (t, top_p)), k in product(enumerate(tables.samplings), (3, 6)):
            move("temperature", nth)
            move("K (tokens)", k - 1)
            p = tables.predict(Setting(drafter, t, ALL, FIXED, k, machine, top_p))
            numbers = f"speed-up {p.speedup:.2f}, prompts: {p.n_prompts} (95 % interval {p.low:.2f} to {p.high:.2f})"
            where = f"fixed K = {k}, drafter {drafter}, content all, temperature {sampling_label(t, top_p)}: predicted "
            until(page, lambda: summary(page), lambda text, wanted=where + numbers: text.startswith(wanted))
            assert f"tau {p.tau:.2f}, " in summary(page)


def use(page, home) -> None:
    """What a reader does: arrow keys, mouse, rounds, a pin, a reset, a live run."""
    page.wait_for_selector(".specnb-explorer .js-plotly-plot >> nth=1", timeout=COLD_MS)
    k = page.locator(".specnb-explorer .widget-slider", has_text="K (tokens)").first
    handle, number = k.locator(".noUi-handle"), k.locator(".widget-readout")

    def shows(value: str) -> None:
        """Slider, sentence and figure show one K."""
        until(page, number.inner_text, lambda text: text == value)
        until(page, lambda: summary(page), lambda text: f"fixed K = {value}" in text)
        until(page, lambda: page.evaluate(CHOSEN_K), lambda k: k == int(value))

    shows("8")
    until(page, lambda: handle.get_attribute("aria-label"), lambda name: name == "K (tokens)")

    # by the keyboard
    before = drawn(page)
    handle.focus()
    page.keyboard.press("ArrowRight")
    shows("9")
    until(page, lambda: [a != b for a, b in zip(before, drawn(page), strict=True)][:2], all)

    # by the mouse
    box, bar = handle.bounding_box(), k.locator(".noUi-target").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(bar["x"] + 4, bar["y"] + bar["height"] / 2, steps=6)
    page.mouse.up()
    shows(until(page, number.inner_text, lambda text: int(text) <= 2))

    # the strip steps through rounds
    before = drawn(page)[2]
    page.locator(".specnb-explorer .widget-slider", has_text="round").first.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    until(page, lambda: summary(page), lambda text: "Round 2 of" in text)
    until(page, lambda: drawn(page)[2], lambda strip: strip != before)

    # pinned, compared, and all back as it was
    page.get_by_role("button", name="Pin", exact=True).click()
    compare(page, home)
    until(page, lambda: summary(page), lambda text: "Pinned: fixed K" in text)
    page.get_by_role("button", name="Reset", exact=True).click()
    shows("8")
    until(page, lambda: summary(page), lambda text: "Pinned" not in text)

    # live, to the end, twice
    run = page.locator(".specnb-explorer button", has_text="Run live")
    for _ in range(2):
        run.click()
        line = until(page, lambda: summary(page, 1), lambda text: text.startswith("Live,"))
        speeds = re.search(r"speed-up ([\d.]+) on this machine; predicted for the same prompts: ([\d.]+)\.", line)
        assert speeds and float(speeds[1]) > 0
        until(page, run.is_enabled, bool)
