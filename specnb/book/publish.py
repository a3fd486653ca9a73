"""A figure leaves its notebook as files that say where they come from: `NAME.svg`, `.png`, `.html` and `.json`.

The json beside them (the sidecar) holds the run, its parameters and provenance, the digests of the table, of the
figure and of each file, and the caption. It is written last, so a set that does not belong together is noticed.
"""

import asyncio
import contextlib
import html
import json
import math
import os
import re
import signal
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from specnb.errors import InputError
from specnb.io import canonical_json, digest, plain, project_dir, write_atomic
from specnb.records import RunRecord

SCHEMA_VERSION = 1  # of the sidecar
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
WIDTH, HEIGHT, PNG_SCALE = 960, 480, 2
MAX_ROWS = 2000  # of a table that the sidecar holds
EXPORT_S, RENDER_S, CLOSE_S = 120.0, 60.0, 5.0  # limits: both images with the browser's start, one image, its end
NO_BROWSER = "no Chrome or Chromium was found: `apt-get install chromium`, or `kaleido_get_chrome`, or set BROWSER_PATH"
BROWSER_ENDED = "the browser did not start, stopped or took too long: start it by hand, or set BROWSER_PATH to another"

PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><meta name="specnb" content="{mark}"></head>
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
    `table` is the data that the figure shows: the sidecar holds its digest and, up to MAX_ROWS rows, the rows. Equal
    figures of one run give equal bytes.

    Images need Chrome or Chromium. Without one, or if the export fails, html and json are written all the same, the
    sidecar says why under `skipped`, and an image of an older figure of that name is removed. Formulas in dollar
    signs are not typeset: MathJax would need a network.

    The page opens from `file://` without a network: it loads `plotly.min.js` from its own folder. That script (about
    4.5 MB) serves all figures, is written when absent or of another version, and does not belong in the repository;
    a page without it shows the svg.

    Raises InputError: before anything is written for what cannot be used, and for a folder that cannot be written.
    """
    if not NAME.fullmatch(name):
        raise InputError(f"figure name {name!r}: use 1 to 64 of a-z 0-9 _ -, the first a letter or digit")
    folder = figures_dir() if folder is None else Path(folder)
    title = plain_text(figure.layout.title.text) or name
    caption = caption_of(title, record)
    figure_digest = digest(json.loads(figure.to_json(engine="json")))  # keys sorted: plotly changes their order
    keys = {"name": name, "experiment": record.experiment, "run_id": record.run_id, "figure_sha256": figure_digest}
    mark = canonical_json(keys)
    document = {"schema_version": SCHEMA_VERSION, **keys, "title": title, "caption": caption, "status": record.status}
    document |= {"params": record.params, "provenance": record.provenance}
    document["table"] = None if table is None else _table_facts(table)
    document = plain(document, "record")
    layout = figure.layout
    sized = go.Figure(figure.to_dict()).update_layout(width=layout.width or WIDTH, height=layout.height or HEIGHT)
    contents, skipped = render(sized, mark)
    contents["html"] = _page(sized, name, title, caption, mark)
    script, source = folder / "plotly.min.js", get_plotlyjs().encode()
    if not script.is_file() or script.read_bytes() != source:
        write_atomic(script, source)
    for suffix in skipped:
        if (old := folder / f"{name}.{suffix}").exists():
            old.unlink()
            skipped[suffix] += "; the image of an older figure was removed"
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
    models = " with ".join(filter(None, (_model(record, role) for role in ("target", "drafter"))))
    where = f"{models or 'model not recorded'}, on {_machine(record.provenance)}"
    return ", ".join([f"{title}: run {record.run_id} of {record.experiment}", where, *notes]) + "."


def render(figure: go.Figure, mark: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """The images that could be made, and for each other suffix the reason. `mark` is ASCII text put into both.

    One browser makes both, started and ended in a thread of its own: this one may have a running event loop, as in a
    kernel. kaleido's shared sync server is not used: it waits for ever for a browser that does not start.
    """
    spec = figure.to_dict()
    for index, trace in enumerate(spec["data"]):
        trace["uid"] = f"trace{index}"  # plotly.js draws a random one, and builds ids of it
    size = {"width": figure.layout.width, "height": figure.layout.height}
    options = {"svg": size | {"scale": 1}, "png": size | {"scale": PNG_SCALE}}
    shots: dict[str, bytes | str] = {}
    failure = BROWSER_ENDED
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="specnb-images") as thread:
            thread.submit(lambda: asyncio.run(_shoot(spec, options, mark, shots))).result()
    except Exception as error:  # whatever it is, html and json are still to be written
        failure = _reason(error)
    shots = {suffix: shots.get(suffix, failure) for suffix in options}
    images = {suffix: image for suffix, image in shots.items() if isinstance(image, bytes)}
    return images, {suffix: reason for suffix, reason in shots.items() if isinstance(reason, str)}


def finish_svg(svg: bytes, mark: str) -> bytes:
    """`svg` of plotly.js with `mark` in a `<metadata>` element, and without what differs from export to export:
    the uid of the layout, six random hexadecimal digits in the ids and in references to them (text is left alone),
    and the order of the root's attributes. Raises ValueError for what is no svg of plotly.js.
    """
    text = svg.decode()
    root, uid = re.match(r"<svg\b([^>]*)>", text), re.search(r'<defs id="defs-([0-9a-f]{6})">', text)
    if not root or not uid:
        raise ValueError("the browser gave no svg of plotly.js")
    attributes = " ".join(sorted(re.findall(r'[\w:-]+="[^"]*"', root[1])))
    body = re.sub(rf'(\bid="[\w-]*?|#[\w-]*?){uid[1]}', r"\g<1>000000", text[root.end() :])
    return f'<svg {attributes}><metadata id="specnb">{html.escape(mark, quote=False)}</metadata>{body}'.encode()


def finish_png(png: bytes, mark: str) -> bytes:
    """`png` with `mark` in a tEXt chunk before its end. Raises ValueError for what is no complete png."""
    if not png.startswith(b"\x89PNG\r\n\x1a\n") or png[-8:-4] != b"IEND":
        raise ValueError("the browser gave no complete png")
    body = b"tEXtspecnb\0" + mark.encode("ascii")
    return png[:-12] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + png[-12:]


async def _shoot(spec: dict, options: dict[str, dict], mark: str, shots: dict[str, bytes | str]) -> None:
    """Put an image, or the reason why not, into `shots` for each suffix of `options`. Leaves no process behind."""
    import kaleido
    from choreographer.browsers.chromium import Chromium

    path = Chromium.find_browser(skip_local=False)
    if not path or not Path(path).is_file():  # asked here: a Kaleido that finds none leaves five threads behind
        shots |= dict.fromkeys(options, NO_BROWSER)
        return
    browser = kaleido.Kaleido(n=1, timeout=RENDER_S, mathjax=False, path=path)
    # Not wait_for: kaleido awaits the browser while it cleans up too, so a hung one has to be ended first.
    for step, limit_s in (
        (_draw(browser, spec, options, mark, shots), EXPORT_S),
        (browser.close(), CLOSE_S),
    ):
        done, _ = await asyncio.wait({asyncio.gather(step, return_exceptions=True)}, timeout=limit_s)
        if not done:
            _kill(browser)
    _kill(browser)


async def _draw(browser: Any, spec: dict, options: dict[str, dict], mark: str, shots: dict[str, bytes | str]) -> None:
    finish = {"svg": finish_svg, "png": finish_png}
    try:
        await browser.open()
    except Exception:  # whatever it says: no image is made
        return
    for suffix, option in options.items():
        try:
            shots[suffix] = finish[suffix](await browser.calc_fig(spec, {"format": suffix, **option}), mark)
        except Exception as error:
            shots[suffix] = _reason(error)


def _kill(browser: Any) -> None:
    """End the browser of a Kaleido, if it still runs, and its helpers: it leads a process group of its own."""
    process = getattr(browser, "subprocess", None)
    if process is not None and process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


def _reason(error: Exception) -> str:
    """One line for the sidecar; paths of this machine stay out of it."""
    if type(error).__name__ in ("BrowserClosedError", "ChannelClosedError", "ProcessLookupError"):
        return BROWSER_ENDED
    detail = getattr(error, "strerror", str(error)) or f"no answer within {RENDER_S:g} s"  # a TimeoutError has no text
    return f"the export failed ({type(error).__name__}: {' '.join(detail.split())[:200]}): see `specnb check`"


def _table_facts(table: pd.DataFrame) -> dict[str, Any]:
    """Digest of the table's canonical CSV (UTF-8, "\\n", shortest floats, NaN empty), and its rows if not too many.

    An index that has a name, or that holds no integers, belongs to the table; one that only counts rows does not.
    """
    if any(label is not None for label in table.index.names) or not pd.api.types.is_integer_dtype(table.index.dtype):
        table = table.reset_index(allow_duplicates=True)
    columns = [str(column) for column in table.columns]
    if len(set(columns)) < len(columns):
        raise InputError(f"the table has two columns of one name: {columns}; rename one")
    csv = table.set_axis(columns, axis=1).to_csv(index=False, lineterminator="\n").encode("utf-8", "surrogatepass")
    facts = {"sha256": digest(csv), "rows": len(table), "columns": columns}
    if len(table) > MAX_ROWS:
        return facts | {"records": None, "left_out": f"more than {MAX_ROWS} rows: the run record holds the data"}
    rows = table.itertuples(index=False, name=None)
    return facts | {"records": [dict(zip(columns, map(_cell, row), strict=True)) for row in rows]}


def _cell(value: Any) -> Any:
    """A table cell for JSON: what is missing is None, an infinity is its text, an array is a list."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return [_cell(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return None if pd.api.types.is_scalar(value) and pd.isna(value) else value


def _model(record: RunRecord, role: str) -> str:
    """Return the model's id in the provenance, which has no folders of this machine, else its name in `params`."""
    ids = [model.get("id") for model in record.provenance.get("models") or () if model.get("role") == role]
    return str(next(filter(None, [*ids, record.params.get(role)]), ""))


def _machine(provenance: Mapping[str, Any]) -> str:
    """Return CPU with its usable cores and, unless the run says that it stayed on the CPU, the GPUs."""
    cpu, extra = provenance.get("cpu") or {}, provenance.get("extra") or {}
    words = [f"{cpu['model']} ({cpu.get('usable_cores', '?')} cores)"] if cpu.get("model") else []
    if not str(extra.get("device", "")).startswith("cpu"):
        words += [gpu["name"] for gpu in provenance.get("gpu") or ()]
    return " and ".join(words) or "a machine that was not recorded"


def _page(figure: go.Figure, name: str, title: str, caption: str, mark: str) -> bytes:
    plot = figure.to_html(full_html=False, include_plotlyjs="directory", div_id=name)
    texts = {key: html.escape(text) for key, text in (("title", title), ("caption", caption), ("mark", mark))}
    return PAGE.format(name=name, plot=plot, width=figure.layout.width, **texts).encode("utf-8", "xmlcharrefreplace")
