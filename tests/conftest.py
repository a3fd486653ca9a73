"""Fixtures for all tests: results go to a temporary folder, and opened models are shared."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from specnb.lm.base import LanguageModel

# Waiting threads must sleep: if they spin, llama.cpp is ten times slower next to another process.
# The OpenMP library reads the variable when loaded, so it is set before any engine is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

hypothesis.settings.register_profile("default", max_examples=25, deadline=None)
hypothesis.settings.register_profile("nightly", max_examples=300, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Pin each pytest-xdist worker to one core: engines use as many threads as they have cores."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Redirect results to a temporary folder. Kernels of notebook tests inherit the variable."""
    base = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECNB_RESULTS", str(base / "results"))
        yield


@pytest.fixture(scope="session")
def opened() -> Iterator["Callable[[str], LanguageModel]"]:
    """Open real models by name, once each; the last three stay open (each takes up to 0.6 GB)."""
    from specnb import load

    models: dict[str, LanguageModel] = {}

    def open_once(name: str) -> "LanguageModel":
        while name not in models and len(models) >= 3:
            models.pop(next(iter(models))).close()
        models[name] = models.pop(name) if name in models else load(name)
        return models[name]

    yield open_once
    for model in models.values():
        model.close()


@pytest.fixture(scope="session")
def divergence_lab():
    """The lab shared by all tests of divergence."""
    from tests.divergence.lab import shared_lab

    return shared_lab()


@pytest.fixture
def open_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], None]:
    """Replace `load` by a function, wherever targets and drafters are opened by name."""

    def replace(load: Callable) -> None:
        monkeypatch.setattr("specnb.draft.load.checked_name", lambda name: None)
        for module in ("load", "model"):
            monkeypatch.setattr(f"specnb.draft.{module}.load", load)

    return replace


def errors(err: str) -> list[str]:
    """Return the lines of stderr with a message of specnb, without progress bars."""
    return [line for line in err.replace("\r", "\n").splitlines() if line.startswith("specnb: ")]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny torch model."""
    from tests.tiny_models import torch_folder

    return str(torch_folder(tmp_path_factory.mktemp("models") / "hf"))


@pytest.fixture
def specnb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; returns (exit code, stdout, stderr)."""

    from specnb import cli

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["specnb", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def page() -> Iterator[object]:
    """An empty page of Chromium."""
    sync = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: `pip install -e .[dev]`"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, [os.environ.get("BROWSER_PATH"), *map(shutil.which, names)]), None)
    if path is None:
        pytest.skip("no Chromium: `apt-get install chromium`, or set BROWSER_PATH")
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1700})
        page.set_default_timeout(25_000)
        yield page
        browser.close()
