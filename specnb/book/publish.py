"""A figure leaves its notebook as files that say where they come from: `NAME.svg`, `.png`, `.html` and `.json`.

The json beside them (the sidecar) holds the run, its parameters and provenance, the digests of the table, of the
figure and of each file, and the caption. It is written last, so a set that does not belong together is noticed.
"""

import asyncio
import contextlib
import hashlib
import html
import json
import math
import os
import re
import signal
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go

from specnb.errors import InputError
from specnb.paths import project_dir
from specnb.provenance import canonical_json
from specnb.records import RunRecord
from specnb.store import write_atomic

if TYPE_CHECKING:
    import kaleido

SCHEMA_VERSION = 1  # of the sidecar
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
MAX_ROWS = 2000
MAX_PIXELS, MAX_SCALE = 8192, 8
EXPORT_S, RENDER_S, CLOSE_S = 120.0, 60.0, 5.0  # limits: both images with the browser's start, one image, its end
IMAGES = ("svg", "png")
PLOTLYJS = "plotly.min.js"
NO_BROWSER = (
    "no Chrome or Chromium was found: install one (`apt-get install chromium` or `kaleido_get_chrome`), "
    "or set BROWSER_PATH"
)
BROWSER_ENDED = (
    f"the browser did not start, ended too early or took longer than {EXPORT_S:g} s: start it by hand to see why, "
    "or set BROWSER_PATH to another one"
)

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<meta name="specnb" content="{mark}">
<style>body {{ font-family: "DejaVu Sans", Arial, sans-serif; color: #222 }} figcaption {{ max-width: {width}px }}</style>
</head>
<body>
<figure>
{still}{plot}
<figcaption>{caption} <a href="{name}.json">Provenance</a></figcaption>
</figure>
</body>
</html>
"""
# Shown until plotly.js has come: without it, or without scripts, the still image stays.
STILL = '<img id="still" src="{name}.svg" alt="{caption}">\n'
HIDE_STILL = '\n<script>if (window.Plotly) document.getElementById("still").hidden = true;</script>'


@dataclass(frozen=True)
class Published:
    """What `publish` wrote. `skipped` says for "svg" and "png" why that image is missing; empty when all is there."""

    name: str
    files: tuple[Path, ...]
    skipped: Mapping[str, str]
    caption: str


class _NoImage(Exception):
    """Why there is no image, in words for the sidecar."""


def figures_dir() -> Path:
    """Folder of published figures: `$SPECNB_FIGURES` (made absolute), else `figures/` of the checkout."""
    own = os.environ.get("SPECNB_FIGURES")
    return Path(own).expanduser().absolute() if own else project_dir() / "figures"


def publish(
    figure: go.Figure,
    name: str,
    record: RunRecord,
    *,
    table: pd.DataFrame | None = None,
    folder: Path | None = None,
    width: int = 960,
    height: int = 480,
    scale: float = 2,
) -> Published:
    """Write `figure` as `folder/NAME.{svg,png,html,json}`; `folder` is `figures_dir()` unless given.

    `width` and `height` are CSS pixels; the png has `scale` times as many. `table` is the data that the figure
    shows: the sidecar holds its digest and, up to MAX_ROWS rows, the rows themselves.

    The images need Chrome or Chromium. Where there is none, or the export fails, html and json are written all the
    same, `skipped` (and the sidecar) says why, and an image of an older figure of that name is removed. Equal
    figures of one run give equal bytes. Formulas between dollar signs are not typeset: MathJax would need a network.

    The page loads `plotly.min.js` from its own folder, so it opens from `file://` without a network and stays small.
    That script (4.5 MB) is shared by all figures, written when it is absent or of another version, and is not
    for the repository. A page without it shows the svg.

    Raises InputError, before anything is written, for a name, size, table or record that cannot be used; and for a
    folder that cannot be written.
    """
    _check(figure, name, {"width": width, "height": height}, scale)
    folder = figures_dir() if folder is None else Path(folder)
    title = plain_text(figure.layout.title.text) or name
    caption = caption_of(title, record)
    digest = hashlib.sha256(figure.to_json(engine="json").encode()).hexdigest()
    keys = {"name": name, "experiment": record.experiment, "run_id": record.run_id, "figure_sha256": digest}
    mark = canonical_json(keys)
    document = {
        "schema_version": SCHEMA_VERSION,
        **keys,
        "title": title,
        "caption": caption,
        "status": record.status,
        "size": {"width": width, "height": height, "scale": scale},
        "params": record.params,
        "provenance": record.provenance,
        "table": None if table is None else _table_facts(table),
    }
    document = {key: json.loads(canonical_json(value)) for key, value in document.items()}

    sized = go.Figure(figure).update_layout(width=width, height=height)
    images, skipped = render(sized, mark, scale)
    page = _page(sized, name, title, caption, mark, still="svg" in images)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_plotlyjs(folder)
        for suffix in skipped:
            if (old := folder / f"{name}.{suffix}").exists():
                old.unlink()
                skipped[suffix] += "; the image of an older figure was removed"
        data = {f"{name}.{suffix}": content for suffix, content in (images | {"html": page}).items()}
        document["files"] = {file: hashlib.sha256(content).hexdigest() for file, content in data.items()}
        document["skipped"] = skipped
        data[f"{name}.json"] = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
        for file, content in data.items():
            write_atomic(folder / file, content)
    return Published(name, tuple(folder / file for file in data), skipped, caption)


def caption_of(title: str, record: RunRecord) -> str:
    """One sentence: title, run, models, machine, and what a reader must not overlook (lossy, fallback, failed)."""
    notes = ["decoding is lossy"] if any(not g.lossless for g in record.generations) else []
    if dropped := sum(g.fallback is not None for g in record.generations):
        notes.append(f"{dropped} of {len(record.generations)} generations ran without the drafter asked for")
    notes += ["the run failed"] if record.status == "failed" else []
    models = " with ".join(filter(None, (_model(record, role) for role in ("target", "drafter"))))
    words = [f"{title}: run {record.run_id} of {record.experiment}", models or "no model recorded"]
    return ", ".join([*words, f"on {_machine(record.provenance)}", *notes]) + "."


def plain_text(title: str | None) -> str:
    """A plotly title without its tags, on one line."""
    return " ".join(html.unescape(re.sub(r"</?[A-Za-z][^<>]*>", " ", title or "")).split())


def render(figure: go.Figure, mark: str, scale: float) -> tuple[dict[str, bytes], dict[str, str]]:
    """The images that could be made, and for each other suffix the reason. `mark` is ASCII text put into both.

    One browser makes both, started and ended in a thread of its own: this one may have a running event loop, as in a
    kernel. kaleido's shared sync server is not used: it waits for ever for a browser that does not start.
    """
    spec = figure.to_dict()
    for index, trace in enumerate(spec.get("data", ())):
        trace["uid"] = f"trace{index}"  # plotly.js draws a random one, and builds ids of it
    shots: dict[str, bytes | Exception] = {}
    layout = {"width": figure.layout.width, "height": figure.layout.height}
    sizes = {"svg": layout | {"scale": 1}, "png": layout | {"scale": scale}}
    failure: Exception = RuntimeError("the browser gave no image")
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="specnb-images") as thread:
            thread.submit(lambda: asyncio.run(_shoot(spec, sizes, shots))).result()
    except Exception as error:  # whatever it is, html and json are still to be written
        failure = error
    finish: dict[str, Callable[[bytes], bytes]] = {
        "svg": lambda data: finish_svg(data.decode(), mark).encode(),
        "png": lambda data: add_png_text(data, "specnb", mark),
    }
    images, skipped = {}, {}
    for suffix in IMAGES:
        shot = shots.get(suffix, failure)
        try:
            if isinstance(shot, Exception):
                raise shot
            images[suffix] = finish[suffix](shot)
        except Exception as error:
            skipped[suffix] = _reason(error)
    return images, skipped


def finish_svg(svg: str, mark: str) -> str:
    """`svg` of plotly.js with `mark` in a `<metadata>` element, and without what differs from export to export.

    That is the uid of the layout, six random hexadecimal digits inside the ids and the references to them, and the
    order of the root's attributes. Text is left alone. Raises ValueError for what is no svg of plotly.js.
    """
    root, uid = re.match(r"<svg\b([^>]*)>", svg), re.search(r'<defs id="defs-([0-9a-f]{6})">', svg)
    if not root or not uid:
        raise ValueError("the browser gave no svg of plotly.js")
    attributes = " ".join(sorted(re.findall(r'[\w:-]+="[^"]*"', root[1])))
    body = re.sub(rf'(\bid="[\w-]*?|#[\w-]*?){uid[1]}', r"\g<1>000000", svg[root.end() :])
    return f'<svg {attributes}><metadata id="specnb">{html.escape(mark, quote=False)}</metadata>{body}'


def add_png_text(png: bytes, keyword: str, text: str) -> bytes:
    """`png` with a tEXt chunk before its end. Raises ValueError for what is no complete png."""
    if not png.startswith(b"\x89PNG\r\n\x1a\n") or png[-8:-4] != b"IEND":
        raise ValueError("the browser gave no complete png")
    body = b"tEXt" + keyword.encode("latin-1") + b"\0" + text.encode("latin-1")
    return png[:-12] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + png[-12:]


async def _shoot(spec: dict[str, Any], sizes: Mapping[str, dict], shots: dict[str, bytes | Exception]) -> None:
    """Fill `shots` with an image, or the error, for each suffix of `sizes`. Leaves no process behind."""
    import kaleido
    from choreographer.browsers.chromium import Chromium
    from kaleido.errors import BrowserClosedError, BrowserFailedError

    path = Chromium.find_browser(skip_local=False)
    if not path or not Path(path).is_file():
        raise _NoImage(NO_BROWSER)  # asked here: a Kaleido that finds none leaves five threads behind
    browser = kaleido.Kaleido(n=1, timeout=RENDER_S, mathjax=False, path=path)
    # Not wait_for: kaleido awaits the browser in its clean-up too, so only the end of a hung one ends the wait.
    timer = asyncio.get_running_loop().call_later(EXPORT_S, _kill, browser)
    try:
        await browser.open()
        for suffix, size in sizes.items():
            try:
                shots[suffix] = await browser.calc_fig(spec, {"format": suffix, **size})
            except (BrowserFailedError, BrowserClosedError):
                raise
            except Exception as error:
                shots[suffix] = error
    except (BrowserFailedError, BrowserClosedError, asyncio.CancelledError) as error:
        raise _NoImage(BROWSER_ENDED) from error
    finally:
        timer.cancel()
        timer = asyncio.get_running_loop().call_later(CLOSE_S, _kill, browser)
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await browser.close()
        timer.cancel()
        _kill(browser)


def _kill(browser: "kaleido.Kaleido") -> None:
    """End the browser, where it runs, and its helpers: it leads a process group of its own."""
    process = getattr(browser, "subprocess", None)
    if process is not None and process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


def _reason(error: Exception) -> str:
    """One line for the sidecar; paths of this machine stay out of it."""
    if isinstance(error, _NoImage):
        return str(error)
    if isinstance(error, ImportError):
        return f"kaleido cannot be imported ({error.name}): `pip install -r requirements.txt`"
    if isinstance(error, TimeoutError):
        return f"the browser made no image within {RENDER_S:g} s: free the machine, or draw fewer points"
    detail = error.strerror if isinstance(error, OSError) else str(error)
    return f"the export failed: {type(error).__name__}: {' '.join(str(detail).split())[:200]}"


def _check(figure: go.Figure, name: str, size: Mapping[str, int], scale: float) -> None:
    if not isinstance(figure, go.Figure):
        raise InputError(f"figure is a {type(figure).__name__}: pass a plotly Figure (go.Figure(widget) makes one)")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(f"figure name {name!r}: use 1 to 64 of a-z 0-9 _ -, the first a letter or digit")
    for what, pixels in size.items():
        if not isinstance(pixels, int) or not 1 <= pixels <= MAX_PIXELS:
            raise InputError(f"{what} = {pixels!r}: give whole pixels, 1 to {MAX_PIXELS}")
    if not isinstance(scale, int | float) or not 0 < scale <= MAX_SCALE:
        raise InputError(f"scale = {scale!r}: give a number above 0, up to {MAX_SCALE}")


def _table_facts(table: pd.DataFrame) -> dict[str, Any]:
    """Digest of the table's canonical CSV (UTF-8, "\\n", shortest floats, NaN empty), and its rows if not too many.

    An index that has a name, or that holds no integers, belongs to the table; one that only counts rows does not.
    """
    if any(label is not None for label in table.index.names) or not pd.api.types.is_integer_dtype(table.index.dtype):
        table = table.reset_index()
    columns = [str(column) for column in table.columns]
    if len(set(columns)) < len(columns):
        raise InputError(f"the table has two columns of one name: {columns}; rename one")
    csv = table.set_axis(columns, axis=1).to_csv(index=False, lineterminator="\n")
    facts = {"sha256": hashlib.sha256(csv.encode()).hexdigest(), "rows": len(table), "columns": columns}
    if len(table) > MAX_ROWS:
        return facts | {"records": None, "left_out": f"more than {MAX_ROWS} rows: the run record holds the data"}
    rows = table.itertuples(index=False, name=None)
    return facts | {"records": [dict(zip(columns, map(_cell, row), strict=True)) for row in rows]}


def _cell(value: Any) -> Any:
    """A table cell for JSON: what is missing is None, an infinity is its text, an array is a list."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # numpy: scalars and arrays
    if isinstance(value, list | tuple):
        return [_cell(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return None if pd.api.types.is_scalar(value) and pd.isna(value) else value


def _model(record: RunRecord, role: str) -> str:
    """The model's id in the provenance, which has no folders of this machine, else its name in the parameters."""
    models = record.provenance.get("models")
    entries = [m for m in models if isinstance(m, dict)] if isinstance(models, list) else []
    found = [m.get("id") for m in entries if m.get("role") == role]
    return str(next(filter(None, [*found, record.params.get(role)]), ""))


def _machine(provenance: Mapping[str, Any]) -> str:
    """CPU with its usable cores and, unless the run says that it stayed on the CPU, the GPUs."""
    cpu, gpus, extra = (provenance.get(key) for key in ("cpu", "gpu", "extra"))
    words = []
    if isinstance(cpu, Mapping) and cpu.get("model"):
        cores = cpu.get("usable_cores")
        words.append(f"{cpu['model']} ({cores} core{'' if cores == 1 else 's'})" if cores else str(cpu["model"]))
    device = str(extra.get("device", "")) if isinstance(extra, Mapping) else ""
    if isinstance(gpus, list) and not device.startswith("cpu"):
        words += [str(gpu["name"]) for gpu in gpus if isinstance(gpu, Mapping) and gpu.get("name")]
    return " and ".join(words) or "a machine that was not recorded"


def _page(figure: go.Figure, name: str, title: str, caption: str, mark: str, *, still: bool) -> bytes:
    plot = figure.to_html(full_html=False, include_plotlyjs="directory", div_id=name)
    texts = {key: html.escape(text) for key, text in (("title", title), ("caption", caption), ("mark", mark))}
    image = STILL.format(name=name, **texts) if still else ""
    plot += HIDE_STILL if still else ""
    return PAGE.format(name=name, still=image, plot=plot, width=figure.layout.width, **texts).encode()


def _write_plotlyjs(folder: Path) -> None:
    from plotly.offline import get_plotlyjs

    path, source = folder / PLOTLYJS, get_plotlyjs().encode()
    if not path.is_file() or path.read_bytes() != source:
        write_atomic(path, source)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"figures cannot be written to {folder} ({error.strerror}): pass another folder=, or set SPECNB_FIGURES"
        ) from error
