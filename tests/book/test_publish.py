"""Published figures: files with provenance, with and without a browser, and their gallery."""

import asyncio
import json
import os
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import psutil
import pytest
from choreographer.browsers.chromium import Chromium

from specnb.book import picture
from specnb.book import publish as module
from specnb.book.explorer import page
from specnb.book.explorer.tables import SHIPPED
from specnb.book.picture import PLOTLY
from specnb.book.publish import caption_of, gallery, publish, publish_runs, sidecars
from specnb.errors import InputError
from specnb.io import digest, project_dir, read_json, write_atomic
from specnb.records import RunRecord
from specnb.store import figures_dir, save
from tests.book.test_tables import generation

WHEN = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HERE = {
    "cpu": {"model": "Some CPU", "usable_cores": 2},
    "gpu": None,
    "extra": {"target": {"device": "cpu"}},
}
IMAGES = {"svg", "png", "pdf"}
RUN_FACTS = ("experiment", "run_id", "params", "status")
FIND = "choreographer.browsers.chromium.Chromium.find_browser"


needs_browser = pytest.mark.skipif(
    not Chromium.find_browser(skip_local=False), reason="no Chrome or Chromium"
)


def record_of(**fields) -> RunRecord:
    params = {"target": "smollm2-135m?backend=hf", "drafter": "lookup", "ks": [1, 2]}
    known = {"run_id": "abc123", "experiment": "01_k_sweep", "params": params, "provenance": HERE}
    return RunRecord(**(known | {"started": WHEN, "ended": WHEN} | fields))


def figure_of(title: str = "Speed-up <b>over</b> K", last: float = 3.0) -> go.Figure:
    return go.Figure(go.Bar(y=[2.0, last]), layout_title_text=title)


def published(
    figure: go.Figure | None = None, record: RunRecord | None = None, **options
) -> tuple[Path, dict]:
    """Publish a figure; return its folder and sidecar."""
    record = record or record_of()
    publish(figure or figure_of(), "speed", record, **options)
    folder = figures_dir(record)
    return folder, json.loads((folder / "speed.json").read_text(), parse_constant=pytest.fail)


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path) -> Iterator[Path]:
    """Write to an own folder; afterwards, close the browser, which is shared between figures."""
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path / "results"))
    yield tmp_path / "results"
    picture.browser().close()


@pytest.fixture
def no_browser(monkeypatch):
    monkeypatch.setattr(FIND, lambda **_: None)


@pytest.fixture
def nothing_left(results):
    """Require that no new child process is left, zombies included."""
    children = set(psutil.Process().children(recursive=True))
    yield
    picture.browser().close()
    end = time.monotonic() + 10
    more = children
    while more and time.monotonic() < end:
        time.sleep(0.05)
        more = set(psutil.Process().children(recursive=True)) - children
    assert not more


# without a browser


def test_without_a_browser_page_and_sidecar_are_written_with_the_reason(no_browser, capsys):
    folder = figures_dir(record_of())
    write_atomic(folder / "speed.svg", b"the image of an older figure")
    figure = figure_of()
    before = figure.to_json()
    shown = publish(figure, "speed", record_of())
    assert isinstance(shown, go.Figure) and figure.to_json() == before
    assert capsys.readouterr().err.count("\n") == 1 and set(shown._repr_mimebundle_()[0]) == {
        PLOTLY,
        "text/plain",
    }
    skipped = read_json(folder / "speed.json")["skipped"]
    assert set(skipped) == IMAGES and all("BROWSER_PATH" in reason for reason in skipped.values())
    assert {file.name for file in folder.iterdir()} == {"speed.html", "speed.json", "records"}


def test_a_sidecar_has_provenance_and_digests_and_is_reproducible(no_browser):
    table = pd.DataFrame({"k": [1, 2], "speedup": [1.0, 0.1 + 0.2]}, index=[7, 9])
    folder, sidecar = published(table=table)
    page = (folder / "speed.html").read_bytes()
    facts = record_of().model_dump(include={"experiment", "run_id", "params", "provenance"})
    facts |= {
        "caption": caption_of("Speed-up over K", record_of()),
        "files": {"speed.html": digest(page)},
    }
    assert {key: sidecar[key] for key in facts} == facts
    assert sidecar["table"]["sha256"] == digest(b"k,speedup\n1,1.0\n2,0.30000000000000004\n")
    assert sidecar["table"]["records"] == table.to_dict("records")
    assert (
        published(table=table) == (folder, sidecar) and (folder / "speed.html").read_bytes() == page
    )
    assert published(figure_of(last=4))[1]["figure_sha256"] != sidecar["figure_sha256"]


def test_the_page_needs_no_network_and_its_title_is_text(no_browser):
    title = '</script><script>alert("1")</script> K < 4 & "T" > 0'
    target = {"params": {"target": '"><i>'}}
    folder, sidecar = published(figure_of(title), record_of(**target))
    page = (folder / "speed.html").read_text()
    assert re.findall(r'src="([^"]+)"', page) == ["speed.svg", "../../../plotly.min.js"]
    assert not re.search(r"<script>alert|<i>|(src|href)\s*=\s*.?(https?:)?//", page)
    assert sidecar["caption"].startswith(
        'alert("1") K < 4 & "T" > 0: run abc123 of 01_k_sweep, "><i>,'
    )


def test_the_caption_names_run_models_machine_and_warnings():
    sound = generation("p1", "code", 0.0, [(0, 0)], 0.1)
    generations = sound, sound.model_copy(update={"fallback": "no memory", "lossless": False})
    caption = caption_of("T", record_of(generations=generations, status="failed"))
    assert caption.startswith("T: run abc123 of 01_k_sweep, SmolLM2-135M, torch with prompt lookup")
    assert all(word in caption for word in ("1 of 2 generations", "lossy", "failed"))
    models = [{"role": "target", "id": "model.gguf"}, {"role": "drafter", "id": "small.gguf"}]
    here = HERE | {"models": models, "gpu": [{"name": "Some GPU"}], "extra": {}}
    caption = caption_of("T", record_of(provenance=here, params={"target": "model.gguf"}))
    assert caption.endswith(", model.gguf with small.gguf, on Some CPU (2 cores) and Some GPU.")


def test_the_stored_gallery_is_current_and_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(InputError, match=tmp_path.name):
        gallery(tmp_path)
    folder = project_dir() / "figures"
    assert (folder / "README.md").read_text(encoding="utf-8") == gallery(folder), (
        "run `specnb publish`"
    )
    page.write_page(SHIPPED, tmp_path / "explorer.html")
    assert (folder / "explorer.html").read_bytes() == (tmp_path / "explorer.html").read_bytes(), (
        "run `specnb publish`"
    )
    assert "| published claim |" in gallery(folder)


@pytest.mark.parametrize("sidecar", sidecars(project_dir() / "figures"), ids=itemgetter("name"))
def test_every_published_figure_has_the_record_of_its_run_and_unchanged_files(sidecar):
    folder = project_dir() / "figures"
    record = read_json(folder / sidecar["record"])
    assert {key: sidecar[key] for key in RUN_FACTS} == {key: record[key] for key in RUN_FACTS}
    assert sidecar["files"] == {file: digest(folder / file) for file in sidecar["files"]}


# copies from a run to figures/


def run_of(end: int, dirty: bool = False, **fields) -> RunRecord:
    """Save a record and publish one of its figures, as a notebook does; return the record."""
    origin = HERE | {
        "git": {"commit": "f" * 40, "dirty": dirty},
        "utc": "2026-11-21T08:39:54+00:00",
    }
    record = record_of(**({"provenance": origin, "ended": WHEN.replace(minute=end)} | fields))
    save(record)
    publish(figure_of(last=end), "speed", record)
    return record


@pytest.fixture
def figures(monkeypatch, no_browser, tmp_path) -> Path:
    monkeypatch.setattr(module, "git_state", lambda _: {"commit": "e" * 40, "dirty": False})
    monkeypatch.setattr(
        page,
        "write_page",
        lambda _trace, out: write_atomic(out, b"the explorer, which takes seconds"),
    )
    return tmp_path / "figures"


def test_figures_stay_with_their_run_until_it_is_published_with_its_record(results, figures):
    run_of(1, run_id="old")
    run_of(3, run_id="failed", status="failed")
    folder = figures_dir(run_of(2, run_id="new"))
    assert {path.name for path in folder.iterdir()} == {"speed.html", "speed.json", "records"}
    assert publish_runs([], figures, results) == [folder.parent], "the latest completed run"
    sidecar = read_json(figures / "speed.json")
    assert sidecar["files"] == {"speed.html": digest(figures / "speed.html")}
    assert sidecar["run_id"] == read_json(figures / sidecar["record"])["run_id"] == "new"
    assert (
        'src="plotly.min.js"' in (figures / "speed.html").read_text()
        and (figures / "plotly.min.js").is_file()
    )
    publish_runs(["old"], figures, results)
    assert {path.name for path in (figures / "records").iterdir()} == {"old.json"}
    with pytest.raises(InputError, match="'newer'"):
        publish_runs(["newer"], figures, results)


@pytest.mark.parametrize("changes", [{"name": "../speed"}, {"run_id": "../errors"}])
def test_a_sidecar_that_names_files_elsewhere_is_refused_and_nothing_is_written(
    changes, results, figures
):
    sidecar = figures_dir(run_of(1)) / "speed.json"
    sidecar.write_text(json.dumps(read_json(sidecar) | changes))
    with pytest.raises(InputError, match=re.escape(next(iter(changes.values())))):
        publish_runs([], figures, results)
    assert not figures.exists()


@pytest.mark.parametrize("then", [True, False], ids=["at the run", "at publishing"])
def test_figures_from_uncommitted_changes_are_refused_or_marked(
    then, results, figures, monkeypatch
):
    run_of(1, dirty=then)
    monkeypatch.setattr(module, "git_state", lambda _: {"commit": "e" * 40, "dirty": not then})
    with pytest.raises(InputError, match="allow-dirty"):
        publish_runs([], figures, results)
    assert not figures.exists()
    publish_runs([], figures, results, allow_dirty=True)
    sidecar = read_json(figures / "speed.json")
    assert (sidecar["provenance"]["git"]["dirty"], sidecar["published_with_changes"]) == (
        then,
        not then,
    )
    assert "with changes" in gallery(figures)


# with a broken browser, and with a working one


@pytest.mark.skipif(os.name != "posix", reason="the false browser is a shell script")
@pytest.mark.parametrize("script", ["exit 1", pytest.param("exec cat", marks=pytest.mark.slow)])
def test_a_browser_that_exits_or_hangs_is_reported_and_leaves_no_process(
    script, monkeypatch, nothing_left, tmp_path
):
    monkeypatch.setattr(picture, "EXPORT_S", 3.0)
    path = tmp_path / "browser.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(FIND, lambda **_: str(path))
    _, sidecar = published()
    reasons = sidecar["skipped"].values()
    assert len(reasons) == 3 and all(
        "BROWSER_PATH" in text and str(tmp_path) not in text for text in reasons
    )


@needs_browser
def test_with_a_browser_every_file_is_written_in_the_size_of_the_layout(nothing_left):
    async def in_a_cell() -> tuple[Path, dict]:
        return published(figure_of().update_layout(width=700, height=300))

    folder, sidecar = asyncio.run(in_a_cell())
    images = ("speed.svg", "speed.png", "speed.pdf", "speed.html")
    assert sidecar["skipped"] == {} and sidecar["files"] == {
        file: digest(folder / file) for file in images
    }
    # 1400 x 600
    assert (folder / "speed.png").read_bytes()[16:24] == bytes([0, 0, 5, 120, 0, 0, 2, 88])
    svg = ET.parse(folder / "speed.svg").getroot()
    assert (svg.get("width"), svg.get("height")) == ("700", "300")
