import asyncio
import dataclasses
import hashlib
import html
import json
import math
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
from specnb.paths import project_dir
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


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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
    done = publish(figure_of(), "speed", record_of(), folder=tmp_path)
    assert [file.name for file in done.files] == ["speed.html", "speed.json"]
    assert set(done.skipped) == {"svg", "png"}
    assert all("apt-get install chromium" in reason and "BROWSER_PATH" in reason for reason in done.skipped.values())
    assert sidecar(tmp_path)["skipped"] == done.skipped
    assert {file.name for file in tmp_path.iterdir()} == {"speed.html", "speed.json", "plotly.min.js"}


def test_an_image_of_an_older_figure_does_not_stay_beside_a_new_page(no_browser, tmp_path):
    (tmp_path / "speed.svg").write_text("old")
    (tmp_path / "other.svg").write_text("another figure")
    done = publish(figure_of(), "speed", record_of(), folder=tmp_path)
    assert not (tmp_path / "speed.svg").exists() and (tmp_path / "other.svg").exists()
    assert "removed" in done.skipped["svg"] and "removed" not in done.skipped["png"]
    assert sidecar(tmp_path)["skipped"] == done.skipped


def test_the_sidecar_holds_run_provenance_digests_and_caption(no_browser, tmp_path):
    figure, table = figure_of(), pd.DataFrame({"k": [1, 2], "speedup": [1.0, 0.1 + 0.2]})
    done = publish(figure, "speed", record_of(), table=table, folder=tmp_path)
    found = sidecar(tmp_path)
    assert found["schema_version"] == 1 and found["name"] == "speed" and found["status"] == "completed"
    assert (found["experiment"], found["run_id"]) == ("01_k_sweep", "abc123")
    assert found["params"] == record_of().params and found["provenance"] == HERE
    assert found["title"] == "Speed-up over K" and found["caption"] == done.caption
    content = json.dumps(json.loads(figure.to_json()), sort_keys=True, separators=(",", ":"))
    assert found["figure_sha256"] == sha256(content.encode())
    assert found["table"]["sha256"] == sha256(b"k,speedup\n1,1.0\n2,0.30000000000000004\n")
    assert found["table"]["records"] == [{"k": 1, "speedup": 1.0}, {"k": 2, "speedup": 0.1 + 0.2}]
    assert found["files"] == {"speed.html": sha256((tmp_path / "speed.html").read_bytes())}


def test_equal_figures_of_one_run_give_equal_bytes_and_other_figures_other_digests(no_browser, tmp_path):
    for folder, last in (("a", 3.0), ("b", 3.0), ("c", 4.0)):
        publish(figure_of(last=last), "speed", record_of(), folder=tmp_path / folder)
    for file in ("speed.html", "speed.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sidecar(tmp_path / "a")["figure_sha256"] != sidecar(tmp_path / "c")["figure_sha256"]


def test_publishing_leaves_the_callers_figure_alone(no_browser, tmp_path):
    figure = figure_of()
    before = figure.to_json()
    publish(figure, "speed", record_of(), folder=tmp_path, width=700, height=300)
    assert figure.to_json() == before


def test_the_page_needs_no_network_and_its_title_is_text(no_browser, tmp_path):
    title = '</script><script>alert("1")</script> K < 4 & "T" > 0'
    done = publish(figure_of(title), "speed", record_of(run_id='"><i>'), folder=tmp_path)
    page = (tmp_path / "speed.html").read_text()
    assert re.findall(r'src="([^"]+)"', page) == ["speed.svg", "plotly.min.js"]
    assert not re.search(r"(src|href)\s*=\s*.?(https?:)?//", page)
    assert "<script>alert" not in page and "<i>" not in page
    assert done.caption.startswith('alert("1") K < 4 & "T" > 0: run "><i> of 01_k_sweep')
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


@pytest.mark.parametrize("name", ["", "Speed", "a/b", "../a", "a.b", "-a", "a\n", "é", "a" * 65, None, 3])
def test_a_name_that_cannot_be_a_file_is_refused(name, tmp_path):
    with pytest.raises(InputError, match="figure name"):
        publish(figure_of(), name, record_of(), folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fields", [{"width": 0}, {"width": 9}, {"height": 10**6}, {"height": "480"}, {"scale": 0}, {"scale": math.nan}]
)
def test_a_size_that_cannot_be_drawn_is_refused(fields, tmp_path):
    with pytest.raises(InputError, match=next(iter(fields))):
        publish(figure_of(), "speed", record_of(), folder=tmp_path, **fields)
    assert not list(tmp_path.iterdir())


def test_what_is_no_figure_or_no_json_is_refused_before_anything_is_written(no_browser, tmp_path):
    with pytest.raises(InputError, match="dict"):
        publish({"data": []}, "speed", record_of(), folder=tmp_path)
    with pytest.raises(InputError, match="nan"):
        publish(figure_of(), "speed", record_of(params={"t": math.nan}), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(no_browser, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file.*SPECNB_FIGURES"):
        publish(figure_of(), "speed", record_of(), folder=tmp_path / "file")


def test_a_failed_write_leaves_the_older_file_whole(no_browser, monkeypatch, tmp_path):
    publish(figure_of(), "speed", record_of(), folder=tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InputError, match="No space left"):
        publish(figure_of(last=9.0), "speed", record_of(), folder=tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_folder_is_the_variable_read_at_each_call_else_the_checkouts(no_browser, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_FIGURES", str(tmp_path / "mine"))
    assert publish(figure_of(), "speed", record_of()).files[0] == tmp_path / "mine" / "speed.html"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECNB_FIGURES", "here")
    assert figures_dir() == tmp_path / "here"
    monkeypatch.delenv("SPECNB_FIGURES")
    assert figures_dir() == project_dir() / "figures"


def test_published_cannot_be_changed(no_browser, tmp_path):
    done = publish(figure_of(), "speed", record_of(), folder=tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        done.caption = "better"


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
    assert len(table_facts(pd.DataFrame({"k": range(2000)}), tmp_path)["records"]) == 2000
    facts = table_facts(pd.DataFrame({"k": range(2001)}), tmp_path)
    assert facts["records"] is None and "2000" in facts["left_out"] and facts["rows"] == 2001
    csv = "k\n" + "".join(f"{k}\n" for k in range(2001))
    assert facts["sha256"] == sha256(csv.encode())


def test_two_columns_of_one_name_are_refused(no_browser, tmp_path):
    for table in (pd.DataFrame([[1, 2]], columns=["a", "a"]), pd.DataFrame([[1, 2]], columns=[1, "1"])):
        with pytest.raises(InputError, match="one name"):
            publish(figure_of(), "speed", record_of(), table=table, folder=tmp_path)
    clash = pd.DataFrame({"k": [1]}, index=pd.Index([1], name="k"))
    with pytest.raises(InputError, match="one name"):
        publish(figure_of(), "speed", record_of(), table=clash, folder=tmp_path)


# the caption


def test_the_caption_names_run_models_and_machine_in_one_sentence():
    assert caption_of("Speed-up", record_of()) == (
        "Speed-up: run abc123 of 01_k_sweep, smollm2-135m?backend=hf with lookup, on Some CPU (2 cores)."
    )


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


@pytest.mark.parametrize("bad", [{}, {"cpu": 3, "gpu": 3, "extra": 3, "models": 3}, {"models": [3], "gpu": [3]}])
def test_a_strange_provenance_still_gets_a_caption(bad):
    assert caption_of("T", record_of(provenance=bad, params={})).startswith(
        "T: run abc123 of 01_k_sweep, model not rec"
    )


def test_a_title_becomes_one_line_without_tags():
    assert plain_text("<b>A</b> &lt;b&gt;<br>K < 4 and T > 2") == "A <b> K < 4 and T > 2"
    assert plain_text(None) == ""


def test_text_that_no_file_can_hold_does_not_stop_the_page(no_browser, tmp_path):
    table = pd.DataFrame({"a": ["\ud800"]}, dtype=object)
    publish(figure_of(), "speed", record_of(run_id="\ud800\0"), table=table, folder=tmp_path)
    assert sidecar(tmp_path)["run_id"] == "\ud800\0"


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
@pytest.mark.parametrize("script", ["exit 1", "exec cat", "trap '' TERM; echo nonsense; while :; do sleep 1; done"])
def test_a_browser_that_ends_or_hangs_is_a_reason_and_leaves_nothing(
    script, false_browser, monkeypatch, nothing_left, tmp_path
):
    false_browser(script)
    monkeypatch.setattr(module, "EXPORT_S", 3.0)
    monkeypatch.setattr(module, "CLOSE_S", 1.0)
    start = time.monotonic()
    done = publish(figure_of(), "speed", record_of(), folder=tmp_path / "out")
    assert time.monotonic() - start < 12  # 4 s, and room for a busy machine; kaleido alone takes more
    assert [file.name for file in done.files] == ["speed.html", "speed.json"]
    assert set(done.skipped) == {"svg", "png"} and all("BROWSER_PATH" in reason for reason in done.skipped.values())
    assert str(tmp_path) not in (tmp_path / "out" / "speed.json").read_text()


@pytest.mark.parametrize(
    "error", [ImportError("no kaleido"), OSError(13, "Denied", "/home/me/x"), RuntimeError("a\nb")]
)
def test_any_failure_of_the_export_is_a_reason_not_an_error(error, monkeypatch, tmp_path):
    def broken(**_):
        raise error

    monkeypatch.setattr("choreographer.browsers.chromium.Chromium.find_browser", broken)
    done = publish(figure_of(), "speed", record_of(), folder=tmp_path)
    assert set(done.skipped) == {"svg", "png"}
    assert type(error).__name__ in done.skipped["svg"] and "\n" not in done.skipped["svg"]
    assert "/home/me" not in done.skipped["svg"]


# with a browser


@needs_browser
def test_all_four_files_carry_the_run(nothing_left, tmp_path):
    done = publish(figure_of(), "speed", record_of(), folder=tmp_path, width=700, height=300, scale=2)
    assert [file.name for file in done.files] == ["speed.svg", "speed.png", "speed.html", "speed.json"]
    assert done.skipped == {} and all(file.is_file() for file in done.files)
    found = sidecar(tmp_path)
    assert found["files"] == {file.name: sha256(file.read_bytes()) for file in done.files[:3]}
    mark = {key: found[key] for key in ("name", "experiment", "run_id", "figure_sha256")}
    chunks = dict(png_chunks((tmp_path / "speed.png").read_bytes()))
    assert json.loads(chunks[b"tEXt"].removeprefix(b"specnb\0")) == mark
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (1400, 600)
    svg = ET.parse(tmp_path / "speed.svg").getroot()
    assert json.loads(svg.find("{*}metadata").text) == mark
    assert (svg.get("width"), svg.get("height")) == ("700", "300")


@needs_browser
def test_two_browsers_give_equal_bytes(tmp_path):
    for folder in ("a", "b"):
        assert publish(figure_of(), "speed", record_of(), folder=tmp_path / folder).skipped == {}
    for file in ("speed.svg", "speed.png", "speed.html", "speed.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    svg = (tmp_path / "a" / "speed.svg").read_text()
    assert set(re.findall(r"url\('?#([^')]+)'?\)", svg)) <= set(re.findall(r'\bid="([^"]+)"', svg))


@needs_browser
def test_publishing_works_inside_a_running_event_loop_and_leaves_nothing(nothing_left, tmp_path):
    async def cell():
        return publish(figure_of(), "speed", record_of(), folder=tmp_path)

    assert asyncio.run(cell()).skipped == {}


@needs_browser
@needs_posix
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
    done = publish(figure_of(), "speed", record_of(), folder=tmp_path)
    assert set(done.skipped) == ({"png"} if at == "png" else {"svg", "png"})
    assert sidecar(tmp_path)["skipped"] == done.skipped and "BROWSER_PATH" in done.skipped[at]
    assert (tmp_path / "speed.svg").is_file() == (at == "png")


@needs_browser
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
