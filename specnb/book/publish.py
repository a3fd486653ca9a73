"""A figure leaves its notebook as files that say where they come from: `NAME.svg`, `.png`, `.html` and `.json`.

The json beside them (the sidecar) holds the run, its parameters and provenance, the digests of the table, of the
figure and of each file, and the caption. It is written last. The gallery, `figures/README.md`, comes from the sidecars.
"""

import asyncio
import contextlib
import html
import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from specnb.errors import InputError
from specnb.io import digest, plain, project_dir, write_atomic
from specnb.records import RunRecord

SCHEMA_VERSION = 1  # of the sidecar
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
WIDTH, HEIGHT, PNG_SCALE = 960, 480, 2
MAX_ROWS = 2000  # of a table that the sidecar holds
EXPORT_S, RENDER_S = 120.0, 60.0  # limits: both images with the browser's start and end, one image
NO_BROWSER = "no Chrome or Chromium was found: `apt-get install chromium`, or `kaleido_get_chrome`, or set BROWSER_PATH"
EXPORT_FAILED = "the export failed, see `specnb check`, or set BROWSER_PATH to another browser"
GALLERY = """# Figures

Made by `specnb publish` from the json file beside each figure. That file holds the run, its parameters, its machine
and its data. Results that are not figures are in [`tests/benchmarks`](../tests/benchmarks/README.md).
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body style="font-family: DejaVu Sans, Arial, sans-serif; max-width: {width}px">
<img id="still" src="{name}.svg" alt="{caption}">
{plot}
<script>if (window.Plotly) document.getElementById("still").hidden = true;</script>
<p>{caption} <a href="{name}.json">Provenance</a></p>
</body>
</html>
"""


def figures_dir() -> Path:
    """Folder of published figures: `$SPECNB_FIGURES` (made absolute), else `figures/` of the checkout."""
    folder = os.environ.get("SPECNB_FIGURES")
    return Path(folder).expanduser().absolute() if folder else project_dir() / "figures"


def publish(
    figure: go.Figure,
    name: str,
    record: RunRecord,
    *,
    table: pd.DataFrame | None = None,
    folder: Path | None = None,
) -> go.Figure:
    """Write `figure` as `folder/NAME.{svg,png,html,json}` and return it; `folder` is `figures_dir()` unless given.

    The images have the size of the figure's layout, else WIDTH x HEIGHT pixels, the png PNG_SCALE times as many.
    `table` is the data that the figure shows, without its index: the sidecar holds its digest and, up to MAX_ROWS rows,
    the rows. Equal figures of one run give equal bytes.

    Images need Chrome or Chromium. Where the export fails, html and json are written all the same, the sidecar says
    why under `skipped`, and an older image of that name is removed. The page opens from `file://` without a network: it
    loads `plotly.min.js` (4.5 MB, not in the repository) from its own folder, and shows the svg where that is absent.

    Raises InputError: before anything is written for what cannot be used, and for a folder that cannot be written.

    >>> publish(go.Figure(), "Best K", record=None)  # a figure's name is that of its files
    Traceback (most recent call last):
    specnb.errors.InputError: figure name 'Best K': use 1 to 64 of a-z 0-9 _ -, the first a letter or digit
    """
    if not NAME.fullmatch(name):
        raise InputError(f"figure name {name!r}: use 1 to 64 of a-z 0-9 _ -, the first a letter or digit")
    folder = figures_dir() if folder is None else Path(folder)
    title = plain_text(figure.layout.title.text) or name
    caption = caption_of(title, record)
    document = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "experiment": record.experiment,
        "run_id": record.run_id,
        "figure_sha256": digest(json.loads(figure.to_json(engine="json"))),  # keys sorted: plotly changes their order
        "title": title,
        "caption": caption,
        "status": record.status,
        "params": record.params,
        "provenance": record.provenance,
        "table": None if table is None else _table_facts(table),
    }
    document = plain(document, "record")
    sized = go.Figure(figure.to_dict())
    sized.update_layout(width=figure.layout.width or WIDTH, height=figure.layout.height or HEIGHT)
    contents, skipped = render(sized)
    texts = {
        "plot": sized.to_html(full_html=False, include_plotlyjs="directory", div_id=name),
        "title": html.escape(title),
        "caption": html.escape(caption),
    }
    page = PAGE.format(name=name, width=sized.layout.width, **texts)
    contents["html"] = page.encode("utf-8", "xmlcharrefreplace")
    script, source = folder / "plotly.min.js", get_plotlyjs().encode()
    if not script.is_file() or script.read_bytes() != source:
        write_atomic(script, source)
    for suffix in skipped:
        (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    files = {f"{name}.{suffix}": digest(content) for suffix, content in contents.items()}
    contents["json"] = f"{json.dumps(document | {'files': files, 'skipped': skipped}, indent=1)}\n".encode()
    for suffix, content in contents.items():
        write_atomic(folder / f"{name}.{suffix}", content)
    return figure


def plain_text(title: str | None) -> str:
    """A plotly title without its tags, on one line."""
    return " ".join(html.unescape(re.sub(r"</?[A-Za-z][^<>]*>", " ", title or "")).split())


def caption_of(title: str, record: RunRecord) -> str:
    """One sentence: title, run, models, machine, and what a reader must not overlook (lossy, fallback, failed)."""
    notes = ["decoding is lossy"] if any(not g.lossless for g in record.generations) else []
    if dropped := sum(g.fallback is not None for g in record.generations):
        notes.append(f"{dropped} of {len(record.generations)} generations ran without the drafter asked for")
    notes += ["the run failed"] if record.status == "failed" else []
    # ids of the provenance have no folders of this machine; of several drafters the first
    names = record.params | {m["role"]: m["id"] for m in reversed(record.provenance.get("models") or ())}
    models = " with ".join(str(names[role]) for role in ("target", "drafter") if names.get(role))
    cpu, extra = record.provenance.get("cpu") or {}, record.provenance.get("extra") or {}
    machine = [f"{cpu['model']} ({cpu.get('usable_cores', '?')} cores)"] if cpu.get("model") else []
    if not str(extra.get("device", "")).startswith("cpu"):
        machine += [gpu["name"] for gpu in record.provenance.get("gpu") or ()]
    where = f"{models or 'model not recorded'}, on {' and '.join(machine) or 'a machine that was not recorded'}"
    return ", ".join([f"{title}: run {record.run_id} of {record.experiment}", where, *notes]) + "."


def render(figure: go.Figure) -> tuple[dict[str, bytes], dict[str, str]]:
    """The images that could be made, and for each other suffix the reason.

    One browser makes both, started and ended in a thread of its own: this one may have a running event loop, as in a
    kernel.
    """
    spec = figure.to_dict()
    for index, trace in enumerate(spec["data"]):
        trace["uid"] = f"trace{index}"  # plotly.js draws a random one, and builds ids of it
    images: dict[str, bytes] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="specnb-images") as thread:
        error = thread.submit(lambda: asyncio.run(_draw(spec, images))).exception()
    reason = str(error) if isinstance(error, InputError) else f"{EXPORT_FAILED} ({type(error).__name__})"
    return images, {suffix: reason for suffix in ("svg", "png") if suffix not in images}


async def _draw(spec: dict, images: dict[str, bytes]) -> None:
    """Put images into `images`. Raises what goes wrong, and leaves no process behind."""
    import kaleido
    from choreographer.browsers.chromium import Chromium

    path = Chromium.find_browser(skip_local=False)
    if not path or not Path(path).is_file():  # asked here: a Kaleido that finds none leaves five threads behind
        raise InputError(NO_BROWSER)
    browser = kaleido.Kaleido(n=1, timeout=RENDER_S, mathjax=False, path=path)
    size = {"width": spec["layout"]["width"], "height": spec["layout"]["height"]}
    # a browser that hangs is ended from outside: kaleido awaits it even while it is cancelled
    watchdog = threading.Timer(EXPORT_S, _kill, [browser])
    watchdog.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(_kill, browser)
        stack.callback(watchdog.cancel)
        stack.push_async_callback(browser.close)
        await browser.open()
        svg = await browser.calc_fig(spec, {"format": "svg", "scale": 1, **size})
        images["svg"] = stable_svg(svg)
        images["png"] = await browser.calc_fig(spec, {"format": "png", "scale": PNG_SCALE, **size})


def _kill(browser: Any) -> None:
    """End the browser of a Kaleido, if it still runs, and its helpers: it leads a process group of its own."""
    process = getattr(browser, "subprocess", None)
    if process is not None and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


def stable_svg(svg: bytes) -> bytes:
    """`svg` of plotly.js without what differs from export to export.

    These are the uid of the layout, six random hexadecimal digits in the ids and in references to them (text is left
    alone), and the order of the root's attributes.
    """
    root, _, body = svg.decode().partition(">")
    (uid,) = re.findall(r'<defs id="defs-([0-9a-f]{6})">', body)
    attributes = " ".join(sorted(re.findall(r'[\w:-]+="[^"]*"', root)))
    body = re.sub(rf'(\bid="[\w-]*?|#[\w-]*?){uid}', r"\g<1>000000", body)
    return f"<svg {attributes}>{body}".encode()


def _table_facts(table: pd.DataFrame) -> dict[str, Any]:
    """Digest of the table's CSV without its index ("\\n", shortest floats, NaN empty), and its rows if not too many."""
    table = table.rename(columns=str)
    csv = table.to_csv(index=False, lineterminator="\n").encode("utf-8", "surrogatepass")
    facts = {"sha256": digest(csv), "rows": len(table), "columns": list(table.columns)}
    if len(table) > MAX_ROWS:
        return facts | {"records": None, "left_out": f"more than {MAX_ROWS} rows: the run record holds the data"}
    return facts | {"records": plain(table.to_dict("records"), "table", nan=None)}


def write_gallery(folder: Path) -> Path:
    """Write `folder/README.md` and return its path. Raises InputError where no figure is published."""
    write_atomic(folder / "README.md", gallery(folder).encode())
    return folder / "README.md"


def gallery(folder: Path) -> str:
    """Return the page as Markdown: figures by notebook, each with its picture, caption, origin and data."""
    sidecars = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not sidecars:
        raise InputError(f"no published figures in {folder}: run a notebook first, as in `specnb run 01_k_sweep`")
    parts = [GALLERY]
    for experiment, figures in groupby(sidecars, key=lambda sidecar: sidecar["experiment"]):
        parts += [f"## {experiment}\n\n`.venv/bin/specnb run {experiment}`\n", *map(_entry, figures)]
    return "\n".join(parts)


def _entry(sidecar: dict[str, Any]) -> str:
    name, git = sidecar["name"], sidecar["provenance"].get("git") or {}
    picture = f"![{sidecar['title']}]({name}.png)" if f"{name}.png" in sidecar["files"] else "(no picture)"
    commit = (git.get("commit") or "unknown")[:10] + (", with changes" if git.get("dirty") else "")
    origin = f"{sidecar['provenance'].get('utc', '')[:10]}, commit {commit}"
    return (
        f"### {name}\n\n{picture}\n\n{sidecar['caption']}\n"
        f"{origin}. [Interactive]({name}.html) · [provenance and data]({name}.json)\n"
    )
