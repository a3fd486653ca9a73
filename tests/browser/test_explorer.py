"""The explorer in a real JupyterLab, under Voila, and a real browser: drag, see it change, run live."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from specnb.book.explorer.tables import ALL, THIS_MACHINE, Setting, Tables
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.measure.cost import Cost
from specnb.measure.recording import Trace
from tests.book.test_explorer import PROMPTS, recorded
from tests.browser.test_page import move, position, require_shown, text

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TOKEN = "explorer-test"
SOURCE = """
from pathlib import Path
from specnb.book.explorer.tables import stored
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
c = {r.drafter: 0.2 for r in trace.recordings}
Explorer(stored("smollm2-135m")._replace(trace=trace, curve=Cost.straight("line", 1.4).curve, c=c), run_live=run_live)
"""
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


def until(page, read, wanted, limit_s: float = 15):
    """The first value of `read()` that `wanted` takes."""
    end = time.monotonic() + limit_s
    while not wanted(value := read()):
        assert time.monotonic() < end, f"still {value!r}"
        page.wait_for_timeout(50)
    return value


def use(page, home) -> None:
    """What a reader does: arrow keys, mouse, the numbers of the replay, policies of the kernel, a live run."""
    page.wait_for_selector("iframe[title=explorer]", timeout=COLD_MS)
    (frame,) = (each for each in page.frames if each.parent_frame == page.main_frame)
    until(page, lambda: frame.evaluate("document.body.className"), lambda name: name == "attached")
    heights = "() => [innerHeight, document.body.offsetHeight]"
    until(page, lambda: frame.evaluate(heights), lambda pair: pair[0] >= pair[1] > 1000)
    k = frame.get_by_label("K (tokens)")

    def shows(value: str) -> None:
        """Slider and sentence show one K."""
        until(page, lambda: text(frame, "k-shown"), lambda shown: shown == value)
        assert text(frame, "result").startswith(f"K = {value}:")

    shows("8")
    k.focus()
    page.keyboard.press("ArrowRight")
    shows("9")

    trace, curve = Trace.load(home / "shelf" / "trace.parquet"), Cost.straight("line", 1.4).curve
    tables = Tables(trace)
    machine, drafter = Cost(curve, 0.2, name=THIS_MACHINE), tables.drafters[-1]
    for t, top_p in tables.samplings:
        place = position(frame, t, top_p)
        move(frame, drafter=drafter, sampling=place, content=ALL, machine=machine.name, k=5, policy="cost-aware")
        until(page, lambda: text(frame, "result"), lambda shown: shown.startswith("cost-aware"))
        require_shown(frame, tables, Setting(drafter, t, ALL, "cost-aware", 5, machine, top_p))

    frame.get_by_role("button", name="Reset", exact=True).click()
    shows("8")
    run = frame.get_by_role("button", name="Run live", exact=True)
    run.click()
    line = until(page, lambda: text(frame, "outcome"), lambda shown: shown.startswith("Live, fixed K"))
    assert "on this machine; predicted for the same prompts: " in line
    until(page, run.is_enabled, bool)
    assert frame.locator("#star").count() == 1
