"""The explorer in a real JupyterLab and a real browser: drag, see it change, run live, run again and cancel."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TOKEN = "explorer-test"
SOURCE = '''
import time
from pathlib import Path
from specnb.book.explorer.widgets import Explorer
from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.lm import toy
from specnb.measure.cost import CostCurve
from specnb.measure.recording import Trace
from specnb.prompts import Prompt

target = toy.markov(6, order=2, seed=4, sharpness=3.0)
runs = []

def run_live(setting, progress, cancelled):
    """The first run takes a moment, each later one until it is cancelled."""
    runs.append(setting)
    made, slow = [], len(runs) > 1
    while slow and not cancelled():
        progress(1, 4, "waiting")
        time.sleep(0.05)
    for at, prompt in enumerate((Prompt(id="code-0", category="code", text="abcabc"),)):
        for drafting in ({}, {"drafter": LookupDrafter(), "k": setting.k}):
            progress(at, 2, prompt.id)
            made.append(generate(target, prompt, max_new_tokens=40, **drafting))
    return made

curve = CostCurve(model="line", context=0, widths=(1, 9, 25), samples_s=((0.02,), (0.03,), (0.05,)))
Explorer(Trace.load(Path("trace.parquet")), curve, c=0.2, run_live=run_live)
'''


def make_trace(path: Path) -> None:
    from specnb.draft.lookup import LookupDrafter
    from specnb.draft.model import ModelDrafter
    from specnb.lm import toy
    from specnb.measure.recording import Trace, record
    from specnb.prompts import Prompt

    target = toy.markov(6, order=2, seed=4, sharpness=3.0)
    other = toy.markov(6, order=2, seed=4, sharpness=1.5)
    prompts = [
        Prompt(id=f"{kind}-{n}", category=kind, text="abcabc" + "abcdef"[n])
        for kind in ("code", "prose")
        for n in range(5)
    ]
    prompts[0] = Prompt(id="code-0", category="code", text="abcabc")
    found = [
        recording
        for temperature in (0.0, 0.7)
        for _, recordings in record(
            target, [LookupDrafter(), ModelDrafter(other)], prompts, temperature=temperature, max_new_tokens=40
        )
        for recording in recordings
    ]
    Trace(tuple(found)).save(path)


def chromium() -> str:
    found = os.environ.get("BROWSER_PATH") or shutil.which("chromium") or shutil.which("chromium-browser")
    found = found or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium: `apt-get install chromium`, or set BROWSER_PATH")
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with one small notebook in `shelf/`, and room for Jupyter's own files."""
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    home = tmp_path_factory.mktemp("lab")
    (home / "shelf").mkdir()
    make_trace(home / "shelf" / "trace.parquet")
    nb = new_notebook(cells=[new_code_cell(SOURCE.strip())])
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nb, home / "shelf" / "small.ipynb")
    quiet = home / "app" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    return home


@pytest.fixture(scope="module")
def lab(home) -> Iterator[str]:
    """Address of a JupyterLab over the shelf, with settings of its own."""
    options = ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}", "--LabApp.news_url=None"]
    options += ["--allow-root", "--ip=127.0.0.1", f"--ServerApp.root_dir={home / 'shelf'}"]
    with serving(home, "jupyterlab", options, f"/api?token={TOKEN}") as address:
        yield address


@pytest.fixture(scope="module")
def voila(home) -> Iterator[str]:
    """Address of the small notebook as a web page."""
    pytest.importorskip("voila", reason="no Voila: `pip install -e .[app]`")
    options = [f"--Voila.token={TOKEN}", "--Voila.ip=127.0.0.1", str(home / "shelf" / "small.ipynb")]
    with serving(home, "voila", options, f"/static/voila.js?token={TOKEN}") as address:
        yield address


@contextmanager
def serving(home: Path, module: str, options: list[str], alive: str) -> Iterator[str]:
    """A server of Jupyter's on a free port; its address."""
    own = {name: str(home / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    own |= {"JUPYTER_DATA_DIR": str(home / "data"), "JUPYTERLAB_SETTINGS_DIR": str(home / "app")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, "--no-browser", f"--port={port}", *options]
    log = home / f"{module}.txt"
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, cwd=home / "shelf", env=os.environ | own, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_for(f"http://127.0.0.1:{port}{alive}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_for(url: str, server: subprocess.Popen, log: Path, limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                reply.read()
                return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    sync = pytest.importorskip("playwright.sync_api", reason="no playwright: `pip install -e .[dev]`")
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser, address: str, name: str) -> Iterator[object]:
    """A page; its picture is kept in $SPECNB_SCREENSHOTS, where that is set."""
    page = browser.new_page(viewport={"width": 1500, "height": 1700})
    page.set_default_timeout(25_000)
    page.goto(address)
    try:
        yield page
    finally:
        if shots := os.environ.get("SPECNB_SCREENSHOTS"):
            page.screenshot(path=str(Path(shots) / f"{name}.png"))
        page.close()


def summary(page, nth: int = 0) -> str:
    return page.locator(".specnb-explorer [role=status]").nth(nth).inner_text()


def chosen_point(page) -> list:
    """x and y of the mark for the chosen setting, as the drawn figure has them."""
    return page.evaluate(
        """() => {
          const figure = document.querySelectorAll('.specnb-explorer .js-plotly-plot')[0];
          const mark = figure.data.find(d => (d.name || '').startsWith('chosen'));
          return [Number(mark.x[0]), Number(mark.y[0])];
        }"""
    )


def drawn(page, nth: int) -> str:
    """A digest of the svg of a figure's traces."""
    svg = page.locator(".specnb-explorer .js-plotly-plot").nth(nth).locator(".scatterlayer").first.inner_html()
    return hashlib.sha256(svg.encode()).hexdigest()[:8]


def until(page, what, wanted, limit_s: float = 15):
    """The first value of `what()` that `wanted` takes."""
    end = time.monotonic() + limit_s
    while not wanted(value := what()):
        assert time.monotonic() < end, f"still {value!r}"
        page.wait_for_timeout(50)
    return value


COLD_MS = 120_000
"""A kernel in an environment that was just installed imports everything for the first time, from a cold disk."""


def test_the_explorer_in_jupyterlab(lab, browser):
    with opened(browser, f"{lab}/lab/workspaces/explorer/tree/small.ipynb?reset&token={TOKEN}", "lab") as page:
        # sooner, "run" goes nowhere
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=COLD_MS)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_selector(".specnb-explorer .js-plotly-plot >> nth=2", timeout=COLD_MS)
        use(page)


def test_the_explorer_under_voila(voila, browser):
    with opened(browser, f"{voila}/?token={TOKEN}", "voila") as page:
        page.wait_for_selector(".specnb-explorer .js-plotly-plot >> nth=2", timeout=COLD_MS)
        use(page)


def use(page) -> None:
    """What a reader does: arrow keys, mouse, rounds, a live run, a second one that is cancelled."""
    k = page.locator(".specnb-explorer .widget-slider", has_text="K (tokens)").first
    handle, number = k.locator(".noUi-handle"), k.locator(".widget-readout")
    until(page, lambda: (number.inner_text(), "fixed K = 8" in summary(page)), lambda seen: seen == ("8", True))
    until(page, lambda: chosen_point(page)[0], lambda x: x == 8)
    assert handle.get_attribute("aria-label") == "K (tokens)" or until(
        page, lambda: handle.get_attribute("aria-label"), lambda name: name == "K (tokens)"
    )

    # by the keyboard
    before = [drawn(page, nth) for nth in range(2)]
    handle.focus()
    page.keyboard.press("ArrowRight")
    until(page, lambda: number.inner_text(), lambda text: text == "9")
    until(page, lambda: summary(page), lambda text: "fixed K = 9" in text)
    until(page, lambda: chosen_point(page)[0], lambda x: x == 9)
    until(page, lambda: [a != b for a, b in zip(before, [drawn(page, n) for n in range(2)], strict=True)], all)

    # by the mouse
    at_nine = chosen_point(page)
    box, bar = handle.bounding_box(), k.locator(".noUi-target").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(bar["x"] + 4, bar["y"] + bar["height"] / 2, steps=6)
    page.mouse.up()
    until(page, lambda: number.inner_text(), lambda text: int(text) <= 2)
    until(page, lambda: chosen_point(page), lambda point: point[0] == int(number.inner_text()) and point != at_nine)
    until(page, lambda: summary(page), lambda text: f"fixed K = {number.inner_text()}" in text)

    # the strip steps through rounds
    steps = page.locator(".specnb-explorer .widget-slider", has_text="round").first
    before = drawn(page, 2)
    steps.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    until(page, lambda: summary(page), lambda text: "Round 2 of" in text)
    until(page, lambda: drawn(page, 2), lambda svg: svg != before)

    # live, to the end
    run, cancel = (page.locator(".specnb-explorer button", has_text=name) for name in ("Run live", "Cancel"))
    assert cancel.is_disabled()
    run.click()
    told = until(page, lambda: summary(page, 1), lambda text: text.startswith("Live,"))
    speeds = re.search(r"speed-up ([\d.]+) on this machine; predicted for the same prompts: ([\d.]+)\.", told)
    assert speeds and float(speeds[1]) > 0
    until(page, run.is_enabled, bool)

    # again, and cancelled
    run.click()
    until(page, cancel.is_enabled, bool)
    cancel.click()
    until(page, lambda: summary(page, 1), lambda text: text.startswith("Cancelled"))
    until(page, run.is_enabled, bool)
    until(page, cancel.is_disabled, bool)
