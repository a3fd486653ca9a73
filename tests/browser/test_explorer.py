"""The explorer in a real JupyterLab and a real browser: controls change it, and live runs work."""

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

from specnb.book.explorer.tables import ALL, SHIPPED, THIS_MACHINE, Setting, Tables, stored
from specnb.measure.cost import Cost
from tests.browser.test_page import move, position, require_shown, text

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TOKEN = "explorer-test"
SOURCE = """
from specnb.book.explorer.tables import stored
from specnb.book.explorer.widgets import Explorer
from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.lm import toy
from specnb.prompts import Prompt

target = toy.markov(6, order=2, seed=4)
prompt = Prompt(id="code-01", category="code", text="abcabca")

def run_live(setting, progress, typed):
    return [generate(target, prompt, max_new_tokens=40, **drafting) for drafting in
            ({}, {"drafter": LookupDrafter(), "k": setting.k})], False

Explorer(stored("smollm2-135m"), run_live=run_live)
"""
COLD_MS = 120_000
"""Long, because in a fresh environment the kernel's first imports read from a cold disk."""


@contextmanager
def jupyterlab(home: Path) -> Iterator[str]:
    """Serve `home/shelf` on a free port, with its own settings; yield the URL."""
    quiet = home / "app" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTER_DATA_DIR")
    own = {name: str(home / name.lower()) for name in names}
    own["JUPYTERLAB_SETTINGS_DIR"] = str(home / "app")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--no-browser --port={port} --ServerApp.port_retries=0 --allow-root --ip=127.0.0.1"
    options += f" --IdentityProvider.token={TOKEN} --LabApp.news_url=None"
    command = [sys.executable, "-m", "jupyterlab", *options.split()]
    with (home / "jupyterlab.txt").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=home / "shelf", env=os.environ | own, stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def until(page, read, wanted, limit_s: float = 15):
    """Return the first value of `read()` that `wanted` accepts."""
    end = time.monotonic() + limit_s
    while not wanted(value := read()):
        assert time.monotonic() < end, f"still {value!r}"
        page.wait_for_timeout(50)
    return value


def test_the_explorer_works_in_jupyterlab(tmp_path, page):
    nb = new_notebook(cells=[new_code_cell(SOURCE.strip())])
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    (tmp_path / "shelf").mkdir()
    nbformat.write(nb, tmp_path / "shelf" / "small.ipynb")
    with jupyterlab(tmp_path) as address:
        page.goto(f"{address}/lab/workspaces/explorer/tree/small.ipynb?reset&token={TOKEN}")
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=COLD_MS)

        def prompt_after_run_all() -> str:
            """Run all cells; return the first prompt, "[ ]:" until a kernel is connected."""
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            page.wait_for_timeout(2000)
            return page.locator(".jp-InputArea-prompt").first.inner_text()

        until(page, prompt_after_run_all, lambda prompt: prompt != "[ ]:", limit_s=60)
        page.wait_for_selector("iframe[title=explorer]", timeout=COLD_MS)
        (frame,) = (each for each in page.frames if each.parent_frame == page.main_frame)
        use(page, frame)


def use(page, frame) -> None:
    """Use the keyboard, a policy that the kernel simulates and a live run, as a reader does."""
    until(page, lambda: frame.evaluate("document.body.className"), lambda name: name == "attached")
    heights = "() => [innerHeight, document.body.offsetHeight]"
    until(page, lambda: frame.evaluate(heights), lambda pair: pair[0] >= pair[1] > 1000)
    frame.get_by_label("K (tokens)").press("ArrowRight")
    until(page, lambda: text(frame, "result"), lambda shown: shown.startswith("K = 9:"))

    _, trace, curve, c, _ = stored(SHIPPED)
    tables = Tables(trace)
    policy = "cost-aware"
    drafter = next(name for name in tables.drafters if policy in tables.policies(name))
    machine = Cost(curve, c[drafter], drafter not in tables.models, THIS_MACHINE)
    place = {"drafter": drafter, "content": ALL, "machine": machine.name, "k": 5, "policy": policy}
    for t, top_p in tables.samplings[:2]:
        move(frame, **place, sampling=position(frame, t, top_p))
        until(page, lambda: text(frame, "result"), lambda shown: shown.startswith(policy))
        require_shown(frame, tables, Setting(drafter, t, ALL, policy, 5, machine, top_p))

    frame.get_by_role("button", name="Reset", exact=True).click()
    run = frame.get_by_role("button", name="Run live", exact=True)
    run.click()
    until(page, lambda: text(frame, "outcome"), lambda line: line.startswith("Live, fixed K"))
    assert "on this machine; predicted for the same prompts: " in text(frame, "outcome")
    until(page, run.is_enabled, bool)
    assert frame.locator("#star").count() == 1
