"""A published figure: four files that say where they come from, with and without a browser."""

import asyncio
import html
import json
import os
import re
import signal
import struct
import subprocess
import threading
import time
import xml.etree.ElementTree as ET
import zlib
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import psutil
import pytest
from plotly.subplots import make_subplots

from specnb.book import publish as module
from specnb.book.publish import caption_of, figures_dir, finish_png, finish_svg, plain_text, publish
from specnb.errors import InputError
from specnb.io import digest, project_dir
from specnb.records import Generation, Round, RunRecord

WHEN = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HERE = {"cpu": {"model": "Some CPU", "usable_cores": 2}, "gpu": None, "extra": {"device": "cpu"}}


def browser() -> str | None:
    from choreographer.browsers.chromium import Chromium

    path = Chromium.find_browser(skip_local=False)
    return path if path and Path(path).is_file() else None


needs_browser = pytest.mark.skipif(browser() is None, reason="no Chrome or Chromium to export images with")
needs_posix = pytest.mark.skipif(os.name != "posix", reason="the false browsers are shell scripts")


def record_of(**fields) -> RunRecord:
    params = {"target": "smollm2-135m?backend=hf", "drafter": "lookup", "ks": [1, 2]}
    known = {"run_id": "abc123", "experiment": "01_k_sweep", "params": params, "provenance": HERE}
    return RunRecord(**(known | {"started": WHEN, "ended": WHEN} | fields))


def generation_of(**fields) -> Generation:
    one = Round(0, 0, 0, (), (5,), (), 0.0, 0.1, 0.0, 0.0, 0.1, 1)
    return Generation(prompt_ids=(1,), token_ids=(5,), rounds=(one,), wall_s=0.1, stop_reason="length", **fields)


def figure_of(title: str = "Speed-up <b>over</b> K", last: float = 3.0) -> go.Figure:
    """Traces whose svg ids are of different kinds: clips, patterns, gradients, colour bars, legends."""
    figure = make_subplots(cols=2)
    figure.add_trace(go.Scatter(x=[1, 2], y=[1.0, last], name="code"), row=1, col=1)
    figure.add_trace(go.Bar(x=[1, 2], y=[2.0, last], name="prose", marker_pattern_shape="/"), row=1, col=1)
    figure.add_trace(go.Heatmap(z=[[1, 2], [3, 4]]), row=1, col=2)
    return figure.update_layout(title=title)


def sidecar(folder: Path, name: str = "speed") -> dict:
    return json.loads((folder / f"{name}.json").read_text(), parse_constant=pytest.fail)


def png_chunks(png: bytes) -> list[tuple[bytes, bytes]]:
    chunks, at = [], 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        chunks.append((kind, body))
        at += 12 + length
    return chunks


def small_png() -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.fixture
def no_browser(monkeypatch):
    monkeypatch.setattr("choreographer.browsers.chromium.Chromium.find_browser", lambda **_: None)


@pytest.fixture
def false_browser(monkeypatch, tmp_path):
    def use(script: str) -> None:
        path = tmp_path / "browser.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr("choreographer.browsers.chromium.Chromium.find_browser", lambda **_: str(path))

    return use


@pytest.fixture
def nothing_left():
    """No thread and no child process more than before, zombies included."""
    threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    yield
    end = time.monotonic() + 10
    while time.monotonic() < end:
        more = set(threading.enumerate()) - threads, set(psutil.Process().children(recursive=True)) - children
        if more == (set(), set()):
            return
        time.sleep(0.05)
    assert more == (set(), set())


# without a browser


def test_without_a_browser_page_and_sidecar_are_written_and_say_why(no_browser, nothing_left, tmp_path):
    (tmp_path / "speed.svg").write_text("the image of an older figure")
    (tmp_path / "other.svg").write_text("another figure")
    figure = figure_of()
    before = figure.to_json()
    assert publish(figure, "speed", record_of(), folder=tmp_path) is figure and figure.to_json() == before
    skipped = sidecar(tmp_path)["skipped"]
    assert set(skipped) == {"svg", "png"} and all("BROWSER_PATH" in reason for reason in skipped.values())
    assert "removed" in skipped["svg"] and "removed" not in skipped["png"]
    assert {file.name for file in tmp_path.iterdir()} == {"other.svg", "speed.html", "speed.json", "plotly.min.js"}


def test_the_sidecar_holds_run_provenance_digests_and_caption(no_browser, tmp_path):
    figure, table = figure_of(), pd.DataFrame({"k": [1, 2], "speedup": [1.0, 0.1 + 0.2]})
    publish(figure, "speed", record_of(), table=table, folder=tmp_path)
    found = sidecar(tmp_path)
    assert found["schema_version"] == 1 and found["name"] == "speed" and found["status"] == "completed"
    assert (found["experiment"], found["run_id"]) == ("01_k_sweep", "abc123")
    assert found["params"] == record_of().params and found["provenance"] == HERE
    assert found["title"] == "Speed-up over K" and found["caption"] == caption_of(found["title"], record_of())
    content = json.dumps(json.loads(figure.to_json()), sort_keys=True, separators=(",", ":"))
    assert found["figure_sha256"] == digest(content.encode())
    assert found["table"]["sha256"] == digest(b"k,speedup\n1,1.0\n2,0.30000000000000004\n")
    assert found["table"]["records"] == [{"k": 1, "speedup": 1.0}, {"k": 2, "speedup": 0.1 + 0.2}]
    assert found["files"] == {"speed.html": digest(tmp_path / "speed.html")}


def test_equal_figures_of_one_run_give_equal_bytes_and_other_figures_other_digests(no_browser, tmp_path):
    for folder, last in (("a", 3.0), ("b", 3.0), ("c", 4.0)):
        publish(figure_of(last=last), "speed", record_of(), folder=tmp_path / folder)
    for file in ("speed.html", "speed.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sidecar(tmp_path / "a")["figure_sha256"] != sidecar(tmp_path / "c")["figure_sha256"]


def test_the_page_needs_no_network_and_its_title_is_text(no_browser, tmp_path):
    title = '</script><script>alert("1")</script> K < 4 & "T" > 0'
    publish(figure_of(title), "speed", record_of(run_id='"><i>'), folder=tmp_path)
    page = (tmp_path / "speed.html").read_text()
    assert re.findall(r'src="([^"]+)"', page) == ["speed.svg", "plotly.min.js"]
    assert not re.search(r"(src|href)\s*=\s*.?(https?:)?//", page)
    assert "<script>alert" not in page and "<i>" not in page
    assert sidecar(tmp_path)["caption"].startswith('alert("1") K < 4 & "T" > 0: run "><i> of 01_k_sweep')
    mark = html.unescape(re.search(r'name="specnb" content="([^"]*)"', page)[1])
    assert json.loads(mark)["run_id"] == '"><i>'


def test_plotlyjs_is_written_once_and_replaced_when_it_is_another(no_browser, tmp_path):
    script = tmp_path / "plotly.min.js"
    publish(figure_of(), "speed", record_of(), folder=tmp_path)
    source, stamp = script.read_bytes(), script.stat().st_mtime_ns
    publish(figure_of(), "other", record_of(), folder=tmp_path)
    assert script.stat().st_mtime_ns == stamp and b"plotly.js v" in source[:200]
    script.write_text("an older one")
    publish(figure_of(), "speed", record_of(), folder=tmp_path)
    assert script.read_bytes() == source


@pytest.mark.parametrize("name", ["", "Speed", "../a", "a.b", "a\n", "a" * 65])
def test_a_name_that_cannot_be_a_file_is_refused(name, tmp_path):
    with pytest.raises(InputError, match="figure name"):
        publish(figure_of(), name, record_of(), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_json_or_no_folder_is_refused(no_browser, tmp_path):
    with pytest.raises(InputError, match="nan"):
        publish(figure_of(), "speed", record_of(params={"t": float("nan")}), folder=tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        publish(figure_of(), "speed", record_of(), folder=tmp_path / "file")


def test_the_folder_is_the_variable_read_at_each_call_else_the_checkouts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECNB_FIGURES", "here")
    assert figures_dir() == tmp_path / "here"
    monkeypatch.delenv("SPECNB_FIGURES")
    assert figures_dir() == project_dir() / "figures"


# the table


def table_facts(table: pd.DataFrame, folder: Path) -> dict:
    publish(figure_of(), "speed", record_of(), table=table, folder=folder)
    return sidecar(folder)["table"]


def test_cells_of_every_kind_come_through_json(no_browser, tmp_path):
    table = pd.DataFrame({"f": [1.5, np.nan, -np.inf], "o": [None, (1, 2), np.array([1.0, np.nan])]})
    table["when"] = [pd.Timestamp("2026-11-21"), pd.NaT, pd.NaT]
    table["n"] = np.array([1, 2, 3], dtype=np.int32)
    rows = table_facts(table, tmp_path)["records"]
    assert [row["f"] for row in rows] == [1.5, None, "-inf"]
    assert [row["o"] for row in rows] == [None, [1, 2], [1.0, None]]
    assert [row["when"] for row in rows] == ["2026-11-21T00:00:00", None, None]
    assert [row["n"] for row in rows] == [1, 2, 3]


def test_a_named_index_belongs_to_the_table_and_a_counting_one_does_not(no_browser, tmp_path):
    plain = pd.DataFrame({"k": [1, 2, 3], "v": [4, 5, 6]})
    named = table_facts(plain.groupby("k").sum(), tmp_path)
    assert named == table_facts(plain, tmp_path) and named["columns"] == ["k", "v"]
    assert table_facts(plain[plain["k"] > 1], tmp_path)["columns"] == ["k", "v"]
    assert table_facts(plain.set_axis(["a", "b", "c"]), tmp_path)["columns"] == ["index", "k", "v"]


def test_a_long_table_is_digested_and_its_rows_left_out_with_the_reason(no_browser, tmp_path):
    facts = table_facts(pd.DataFrame({"k": range(2001)}), tmp_path)
    assert facts["records"] is None and "2000" in facts["left_out"] and facts["rows"] == 2001
    assert facts["sha256"] == digest(("k\n" + "".join(f"{k}\n" for k in range(2001))).encode())


@pytest.mark.parametrize(
    "table",
    [pd.DataFrame([[1, 2]], columns=[1, "1"]), pd.DataFrame({"k": [1]}, index=pd.Index([1], name="k"))],
    ids=["columns", "index"],
)
def test_two_columns_of_one_name_are_refused(table, no_browser, tmp_path):
    with pytest.raises(InputError, match=r"one name"):
        publish(figure_of(), "speed", record_of(), table=table, folder=tmp_path)


# the caption


def test_the_caption_names_run_models_and_machine_in_one_sentence():
    assert caption_of("Speed-up", record_of()) == (
        "Speed-up: run abc123 of 01_k_sweep, smollm2-135m?backend=hf with lookup, on Some CPU (2 cores)."
    )
    assert "model not recorded, on a machine" in caption_of("T", record_of(provenance={}, params={}))


def test_the_caption_takes_model_ids_of_the_provenance_and_the_gpu_that_was_used():
    models = [{"role": "target", "id": "model.gguf"}, {"role": "drafter", "id": "small.gguf"}]
    here = HERE | {"models": models, "gpu": [{"name": "Some GPU"}], "extra": {"device": "cuda:0"}}
    caption = caption_of("T", record_of(provenance=here, params={"target": "/home/me/model.gguf"}))
    assert "model.gguf with small.gguf, on Some CPU (2 cores) and Some GPU." in caption and "/home" not in caption
    assert "GPU" not in caption_of("T", record_of(provenance=here | {"extra": {"device": "cpu"}}))


def test_the_caption_says_lossy_fallback_and_failed():
    assert "lossy" not in caption_of("T", record_of(generations=(generation_of(),)))
    assert "lossy" in caption_of("T", record_of(generations=(generation_of(), generation_of(lossless=False))))
    fallen = record_of(generations=(generation_of(), generation_of(fallback="no memory")), status="failed")
    assert "1 of 2 generations ran without the drafter" in caption_of("T", fallen)
    assert "failed" in caption_of("T", fallen)


def test_a_title_becomes_one_line_without_tags():
    assert plain_text("<b>A</b> &lt;b&gt;<br>K < 4 and T > 2") == "A <b> K < 4 and T > 2"
    assert plain_text(None) == ""


# the images: pure parts


def svg_of(uid: str, root: str = 'class="main-svg" width="9"') -> bytes:
    return (
        f'<svg {root}><defs id="defs-{uid}"><clipPath id="clip{uid}xyplot"/><pattern id="p{uid}-trace1"/></defs>'
        f'<g clip-path="url(#clip{uid}xyplot)" style="fill: url(\'#p{uid}-trace1\'); stroke: rgb(1, 2, 3);">'
        f'<path d="M0,{uid}"/><text data-unformatted="{uid}">{uid} tokens</text></g></svg>'
    ).encode()


def test_svg_ids_become_equal_and_references_still_meet_them():
    one, other = finish_svg(svg_of("123456"), "{}").decode(), finish_svg(svg_of("cb0fde"), "{}").decode()
    ids, used = (set(re.findall(pattern, one)) for pattern in (r'\bid="([^"]+)"', r"url\('?#([^')]+)'?\)"))
    assert used < ids and ids == set(re.findall(r'\bid="([^"]+)"', other))
    assert finish_svg(svg_of("cb0fde").replace(b"cb0fde", b"0a1b2c"), "{}").decode() == other.replace(
        "cb0fde", "0a1b2c"
    )


def test_svg_text_and_numbers_that_look_like_the_id_stay():
    text = finish_svg(svg_of("123456"), "{}").decode()
    assert 'd="M0,123456"' in text and ">123456 tokens<" in text and 'data-unformatted="123456"' in text


def test_svg_root_attributes_come_in_one_order():
    assert finish_svg(svg_of("123456", 'style="" width="9"'), "{}") == finish_svg(
        svg_of("123456", 'width="9" style=""'), "{}"
    )


def test_the_mark_in_an_svg_is_escaped():
    mark = '{"run_id":"</metadata><script>&"}'
    assert ET.fromstring(finish_svg(svg_of("123456"), mark)).find("metadata").text == mark


def test_a_png_gets_its_text_before_its_end():
    chunks = png_chunks(finish_png(small_png(), '{"name":"speed"}'))
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"tEXt", b"IEND"]
    assert chunks[2][1] == b'specnb\0{"name":"speed"}'


def test_bytes_that_are_no_image_are_refused():
    for data in (b"", b"<html>", small_png()[:-1], b"x" + small_png()):
        with pytest.raises(ValueError, match="png"):
            finish_png(data, "{}")
    for data in (b"", b"<html></html>", b"<svg></svg>"):
        with pytest.raises(ValueError, match="svg"):
            finish_svg(data, "{}")


# browsers that do not work


@needs_posix
@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("exec cat", "trap '' TERM; while :; do sleep 1; done")),
    ],
)
def test_a_browser_that_ends_or_hangs_is_a_reason_and_leaves_nothing(
    script, false_browser, monkeypatch, nothing_left, tmp_path
):
    false_browser(script)
    monkeypatch.setattr(module, "EXPORT_S", 3.0)
    monkeypatch.setattr(module, "CLOSE_S", 1.0)
    start = time.monotonic()
    publish(figure_of(), "speed", record_of(), folder=tmp_path / "out")
    assert time.monotonic() - start < 30  # 4 s, and room for a busy machine
    skipped = sidecar(tmp_path / "out")["skipped"]
    assert set(skipped) == {"svg", "png"} and all("BROWSER_PATH" in reason for reason in skipped.values())
    assert str(tmp_path) not in (tmp_path / "out" / "speed.json").read_text()


def test_any_failure_of_the_export_is_a_reason_not_an_error(monkeypatch, tmp_path):
    def broken(**_):
        raise OSError(13, "Denied", "/home/me/x")

    monkeypatch.setattr("choreographer.browsers.chromium.Chromium.find_browser", broken)
    publish(figure_of(), "speed", record_of(), folder=tmp_path)
    reason = sidecar(tmp_path)["skipped"]["svg"]
    assert "Denied" in reason and "\n" not in reason and "/home/me" not in reason


# with a browser


async def published(folder: Path) -> None:
    """As in a cell: inside a running event loop."""
    publish(figure_of().update_layout(width=700, height=300), "speed", record_of(), folder=folder)


@needs_browser
def test_all_four_files_carry_the_run(nothing_left, tmp_path):
    asyncio.run(published(tmp_path))
    found = sidecar(tmp_path)
    assert found["skipped"] == {}
    assert found["files"] == {
        f"speed.{suffix}": digest(tmp_path / f"speed.{suffix}") for suffix in ("svg", "png", "html")
    }
    mark = {key: found[key] for key in ("name", "experiment", "run_id", "figure_sha256")}
    chunks = dict(png_chunks((tmp_path / "speed.png").read_bytes()))
    assert json.loads(chunks[b"tEXt"].removeprefix(b"specnb\0")) == mark
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (1400, 600)
    svg = ET.parse(tmp_path / "speed.svg").getroot()
    assert json.loads(svg.find("{*}metadata").text) == mark
    assert (svg.get("width"), svg.get("height")) == ("700", "300")
    text = (tmp_path / "speed.svg").read_text()
    assert set(re.findall(r"url\('?#([^')]+)'?\)", text)) <= set(re.findall(r'\bid="([^"]+)"', text))


@needs_browser
@pytest.mark.slow
def test_two_browsers_give_equal_bytes(tmp_path):
    for folder in ("a", "b"):
        asyncio.run(published(tmp_path / folder))
    for file in ("speed.svg", "speed.png", "speed.html", "speed.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


@needs_browser
@needs_posix
@pytest.mark.slow
@pytest.mark.parametrize(("end", "at", "limit_s"), [(signal.SIGSTOP, "svg", 3.0), (signal.SIGKILL, "png", 60.0)])
def test_a_browser_that_hangs_or_dies_at_work_is_a_reason_and_leaves_nothing(
    end, at, limit_s, monkeypatch, nothing_left, tmp_path
):
    from kaleido import Kaleido

    draw = Kaleido.calc_fig

    async def stopped(self, fig, opts):
        if opts["format"] == at:
            os.killpg(self.subprocess.pid, end)
        return await draw(self, fig, opts)

    monkeypatch.setattr(Kaleido, "calc_fig", stopped)
    monkeypatch.setattr(module, "EXPORT_S", limit_s)
    monkeypatch.setattr(module, "CLOSE_S", 1.0)
    publish(figure_of(), "speed", record_of(), folder=tmp_path)
    skipped = sidecar(tmp_path)["skipped"]
    assert set(skipped) == ({"png"} if at == "png" else {"svg", "png"}) and "BROWSER_PATH" in skipped[at]
    assert (tmp_path / "speed.svg").is_file() == (at == "png")


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("with_script", [True, False])
def test_the_page_opens_from_a_file_without_a_network(with_script, tmp_path):
    publish(figure_of(), "speed", record_of(), folder=tmp_path)
    if not with_script:
        (tmp_path / "plotly.min.js").unlink()
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--virtual-time-budget=5000", "--dump-dom", (tmp_path / "speed.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    still = re.search(r'<img id="still"[^>]*>', dom)[0]
    assert ("main-svg" in dom) == with_script
    assert ("hidden" in still) == with_script
