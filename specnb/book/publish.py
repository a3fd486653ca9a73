"""A figure leaves its notebook as files that say where they come from: `NAME.svg`, `.png`, `.pdf`, `.html`, `.json`.

The json beside them (the sidecar) holds the run, its parameters and provenance, the digests of the table, of the
figure and of each file, and the caption. It is written last. `publish` writes into the folder of the run;
`publish_runs` alone copies figures into `figures/`, beside their records. The gallery comes from the sidecars there.
"""

import asyncio
import atexit
import html
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from specnb import store
from specnb.book.style import CONFIG
from specnb.errors import InputError, did_you_mean, require_known
from specnb.io import digest, plain, project_dir, read_json, write_atomic
from specnb.params import PublishParams
from specnb.provenance import git_state
from specnb.records import RunRecord

SCHEMA_VERSION = 1  # of the sidecar
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
WIDTH, HEIGHT, PNG_SCALE = 960, 480, 2
PAPER = {"column": (340, 230), "page": (700, 330)}  # in pixels of 1/96 inch: one column of two, a whole page
PLOTLY = "application/vnd.plotly.v1+json"
MODEL = re.compile(r"[\w./\\:-]+\?[\w=&.%-]+|[\w./\\-]+\.gguf\b|\bsmollm2-[\d.]+[mb](:\w+)?\b(?!-)")
DRAFTER = re.compile(r"(\bdrafter )?\blookup\([^)]*\)|\bdrafter lookup\b")
EXPORT_S, RENDER_S, CLOSE_S = 120.0, 60.0, 5.0  # limits: start of the browser or all images, one image, its end
IDLE_S = 60.0  # an unused browser is ended after
NO_BROWSER = "no Chrome or Chromium was found: `apt-get install chromium`, or `kaleido_get_chrome`, or set BROWSER_PATH"
EXPORT_FAILED = "the export failed, see `specnb check`, or set BROWSER_PATH to another browser"
GALLERY = """# Figures

Made by `specnb publish` from the json file beside each figure. That file holds the run, its parameters, its machine
and its data; [`records`](records) holds the runs without their rounds. Results that are not figures are in
[`tests/benchmarks`](../tests/benchmarks/README.md). [`explorer.html`](explorer.html) is the explorer of notebook 09 as
one file that needs no kernel. What published notes claim, and what was found, stands at the end.
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body style="font-family: DejaVu Sans, Arial, sans-serif; max-width: {width}px">
<main>
<h1 style="position: absolute; left: -99rem">{title}</h1>
<img id="still" src="{name}.svg" alt="{caption}">
{plot}
<script>if (window.Plotly) document.getElementById("still").hidden = true;</script>
<p>{caption} <a href="{name}.json">Provenance</a></p>
</main>
</body>
</html>
"""


class PicturedFigure(go.Figure):
    """A figure that notebooks show as plotly's, and as a picture where no plotly runs (GitHub, nbviewer, nbconvert)."""

    _title, _picture = "", b""
    _ipython_display_ = _repr_html_ = None  # plotly's own: they leave the picture out, and ask a server for plotly.js

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **_: Any) -> tuple[dict, dict]:
        bundle = {PLOTLY: json.loads(self.to_json()) | {"config": CONFIG}, "text/plain": self._title}
        look = {"width": self.layout.width, "height": self.layout.height, "alt": self._title}
        return (bundle | {"image/png": self._picture}, {"image/png": look}) if self._picture else (bundle, {})


def publish(
    figure: go.Figure, name: str, record: RunRecord, *, table: pd.DataFrame | None = None,
    size: Literal["column", "page"] | None = None, folder: Path | None = None,
) -> PicturedFigure:  # fmt: skip
    """Write `figure` as `NAME.{svg,png,pdf,html,json}` and return it, with its picture for a notebook's output.

    They lie in `folder`, else in `figures/` beside the record of the run, and in `records/RUN_ID.json` there the record
    of the figure without its rounds. Images have the size of the layout, else WIDTH x HEIGHT pixels; with `size` they
    are for print (PAPER), without a title. `table` is the data that the figure shows, without its index. Equal figures
    of one run give equal bytes.

    Images need Chrome or Chromium. Where the export fails, html and json are written all the same, a line on stderr
    and the sidecar say why, and an older image of that name is removed. The page needs no network.

    Raises InputError: before anything is written for what cannot be used, and for a folder that cannot be written.

    >>> publish(go.Figure(), "Best K", record=None)  # a figure's name is that of its files
    Traceback (most recent call last):
    specnb.errors.InputError: figure name 'Best K': use 1 to 64 of a-z 0-9 _ -, the first a letter or digit
    """
    if not NAME.fullmatch(name):
        raise InputError(f"figure name {name!r}: use 1 to 64 of a-z 0-9 _ -, the first a letter or digit")
    title = readable(plain_text(figure.layout.title.text)) or name
    caption = caption_of(title, record)
    document = {
        "schema_version": SCHEMA_VERSION, "name": name, "experiment": record.experiment, "run_id": record.run_id,
        "figure_sha256": digest(json.loads(figure.to_json(engine="json"))),  # keys sorted: plotly changes their order
        "title": title, "caption": caption, "status": record.status, "params": record.params,
        "provenance": record.provenance, "table": None if table is None else _table_facts(table),
        "record": f"records/{record.run_id}.json",
    }  # fmt: skip
    document = plain(document, "record")
    script = plotly_script(store.results_dir() if folder is None else Path(folder))
    folder = store.folder_of(record) / "figures" if folder is None else Path(folder)
    drawn, contents, skipped = _drawn(figure, title, size)
    source = Path(os.path.relpath(script, folder)).as_posix()
    plot = drawn.to_html(full_html=False, include_plotlyjs=source, div_id=name, config=CONFIG)
    texts = {"title": html.escape(title), "caption": html.escape(caption), "plot": plot}
    contents["html"] = PAGE.format(name=name, width=drawn.layout.width, **texts).encode("utf-8", "xmlcharrefreplace")
    write_atomic(folder / document["record"], f"{json.dumps(store.without_rounds(record), indent=1)}\n".encode())
    _write(folder, document | {"skipped": skipped}, contents)
    return drawn


def with_picture(figure: go.Figure) -> PicturedFigure:
    """Return `figure` with its picture for a notebook's output, and write nothing."""
    return _drawn(figure, readable(plain_text(figure.layout.title.text)))[0]


def _drawn(figure: go.Figure, title: str, size: str | None = None) -> tuple[PicturedFigure, dict[str, bytes], dict]:
    """Return a copy of `figure` as it is shown, its images by suffix, and why others are missing."""
    drawn = PicturedFigure(figure.to_dict())
    if shown := figure.layout.title.text:
        drawn.update_layout(title_text=readable(shown))
    width, height = PAPER[size] if size else (figure.layout.width or WIDTH, figure.layout.height or HEIGHT)
    drawn.update_layout(width=width, height=height)
    if size:  # no title: the paper has a caption
        small, axes = {"size": 10}, {"title": {"standoff": 4, "font": {"size": 10}}, "ticklen": 3}
        legend = {"font": small, "y": -36 / (height - 90), "tracegroupgap": 0}  # below an axis with its title
        margin = {"l": 45, "r": 8, "t": 22 if figure.layout.annotations else 8, "b": 36}
        drawn.update_layout(title=None, font=small, legend=legend, margin=margin)
        drawn.update_annotations(font=small).update_xaxes(axes).update_yaxes(axes)
        drawn.update_traces(line_width=1.5, marker_size=5, selector={"type": "scatter"})
    images, skipped = render(drawn)
    drawn._title, drawn._picture = title, images.pop("still", b"")
    if "png" in skipped:
        sys.stderr.write(f"plotly only, no picture: {skipped['png']}\n")
    return drawn, images, skipped


def plotly_script(folder: Path) -> Path:
    """Return the `plotly.min.js` in `folder`, written if it is absent or of another version."""
    script, source = folder / "plotly.min.js", get_plotlyjs().encode()
    if not script.is_file() or script.read_bytes() != source:
        write_atomic(script, source)
    return script


def _write(folder: Path, document: dict[str, Any], contents: dict[str, bytes]) -> None:
    """Write the files of a figure and, last, its sidecar; older images that are now missing are removed."""
    name = document["name"]
    for suffix in document["skipped"]:
        (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    document = document | {"files": {f"{name}.{suffix}": digest(content) for suffix, content in contents.items()}}
    for suffix, content in (contents | {"json": f"{json.dumps(document, indent=1)}\n".encode()}).items():
        write_atomic(folder / f"{name}.{suffix}", content)


def readable(text: str) -> str:
    """Return `text` with the names of models and drafters as people write them.

    >>> readable("smollm2-135m?backend=hf&dtype=bfloat16, drafter lookup(n=1..6,x4)")
    'SmolLM2-135M, torch bfloat16, prompt lookup'
    >>> readable("smollm2-135m:q4_0"), readable("self")
    ('SmolLM2-135M q4_0', 'a smaller copy of itself')
    """
    text = DRAFTER.sub("prompt lookup", MODEL.sub(_model_name, text))
    return {"lookup": "prompt lookup", "self": "a smaller copy of itself", "medusa": "Medusa heads"}.get(text, text)


def _model_name(match: re.Match[str]) -> str:
    source, _, query = match[0].partition("?")
    source, _, kind = re.split(r"[/\\]", source)[-1].partition(":")
    options = dict(parse_qsl(query))
    engine = {"hf": ", torch", "llama": ", llama.cpp"}.get(options.get("backend"), "")
    source = re.sub(r"(?<=-)[\d.]+[mb]\b", lambda size: size[0].upper(), source.replace("smollm2", "SmolLM2"))
    return f"{source}{engine} {options.get('dtype') or options.get('weights') or kind}".rstrip()


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
    models = " with ".join(readable(str(names[role])) for role in ("target", "drafter") if names.get(role))
    cpu, extra = record.provenance.get("cpu") or {}, record.provenance.get("extra") or {}
    machine = [f"{cpu['model']} ({cpu.get('usable_cores', '?')} cores)"] if cpu.get("model") else []
    if not str(extra.get("device", "")).startswith("cpu"):
        machine += [gpu["name"] for gpu in record.provenance.get("gpu") or ()]
    where = f"{models or 'model not recorded'}, on {' and '.join(machine) or 'a machine that was not recorded'}"
    source = {"run_id": record.run_id, "experiment": record.experiment} | record.provenance.get("source", {})
    return ", ".join([f"{title}: run {source['run_id']} of {source['experiment']}", where, *notes]) + "."


def render(figure: go.Figure) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the images (`still` is the png of scale 1) and, for each suffix that could not be drawn, the reason."""
    spec = figure.to_dict()
    for index, trace in enumerate(spec["data"]):
        trace["uid"] = f"trace{index}"  # plotly.js draws a random one, and builds ids of it
    try:
        return _browser().images(spec), {}
    except InputError as error:
        reason = str(error)
    except Exception as error:
        _browser().close()
        reason = f"{EXPORT_FAILED} ({type(error).__name__})"
    return {}, dict.fromkeys(("svg", "png", "pdf"), reason)


@cache
def _browser() -> "_Browser":
    browser = _Browser()
    atexit.register(browser.close)
    return browser


class _Browser:
    """A browser in a thread with an event loop of its own, for the caller may be in a running one, as in a kernel.

    It starts with the first figure, which takes seconds, and ends when IDLE_S go by without another.
    """

    def __init__(self) -> None:
        self._lock, self._thread, self._timer = threading.Lock(), None, None

    def images(self, spec: dict) -> dict[str, bytes]:
        """Draw one figure. Raises what goes wrong, TimeoutError after EXPORT_S."""
        with self._lock:
            if self._timer:
                self._timer.cancel()
            if self._thread is None:
                self._start()
            images = asyncio.run_coroutine_threadsafe(self._draw(spec), self._loop).result(EXPORT_S)
            self._timer = threading.Timer(IDLE_S, self.close)
            self._timer.daemon = True
            self._timer.start()
            return images

    def _start(self) -> None:
        import kaleido
        from choreographer.browsers.chromium import Chromium

        path = Chromium.find_browser(skip_local=False)
        if not path or not Path(path).is_file():  # asked here: a Kaleido that finds none leaves five threads behind
            raise InputError(NO_BROWSER)
        self._kaleido = kaleido.Kaleido(n=1, timeout=RENDER_S, mathjax=False, path=path)
        opened = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(opened)), daemon=True)
        self._thread.start()
        opened.result(EXPORT_S)

    async def _live(self, opened: Future) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self._kaleido.open()
            opened.set_result(None)
            await self._end.wait()
        except Exception as error:
            opened.set_exception(error)
        finally:
            await self._kaleido.close()

    async def _draw(self, spec: dict) -> dict[str, bytes]:
        async def drawn(kind: str, scale: int = 1) -> bytes:
            size = {"width": spec["layout"]["width"], "height": spec["layout"]["height"], "scale": scale}
            return await self._kaleido.calc_fig(spec, {"format": kind, **size})

        pdf = re.sub(rb"(?<=Date \(D:)\d{14}", b"20000101000000", await drawn("pdf"))
        still, png = await drawn("png"), await drawn("png", PNG_SCALE)
        return {"svg": stable_svg(await drawn("svg")), "still": still, "png": png, "pdf": pdf}

    def close(self) -> None:
        """End browser and thread; one that hangs is killed: kaleido awaits it even while it is cancelled."""
        with self._lock:
            if self._thread is None:
                return
            if self._timer:
                self._timer.cancel()
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._kaleido.subprocess.kill()
                self._thread.join(CLOSE_S)
            self._thread = None


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
    """Digest of the table's CSV without its index ("\\n", shortest floats, NaN empty), and its rows."""
    table = table.rename(columns=str)
    csv = table.to_csv(index=False, lineterminator="\n").encode("utf-8", "surrogatepass")
    rows = plain(table.to_dict("records"), "table", nan=None)
    return {"sha256": digest(csv), "rows": len(table), "columns": list(table.columns), "records": rows}


def publish_runs(words: Sequence[str], figures: Path, results: Path, *, allow_dirty: bool = False) -> list[Path]:
    """Copy the figures of runs and their records into `figures/`, with gallery and explorer; return the runs' folders.

    `words` are run ids, and names of notebooks for their latest run; without words it is the latest completed run of
    each notebook. `figures/records/RUN_ID.json` is the record without its rounds; records of no figure are removed.
    Raises InputError for an unknown run, while the checkout has changes, and for a run that was recorded with changes;
    `allow_dirty` copies all the same, and the sidecars say so.
    """
    from specnb.book.explorer import page  # here alone: every notebook imports this module
    from specnb.book.explorer.tables import SHIPPED

    files = [file for file in sorted(results.rglob(store.RUN)) if sidecars(file.parent / "figures")]
    runs = [(store.load(file.parent), file.parent) for file in files]
    named, latest = {}, {}
    for run, folder in sorted(runs, key=lambda each: each[0].ended):
        named |= {run.experiment: folder, run.run_id: folder}
        latest |= {run.experiment: folder} if run.status == "completed" else {}
    for word in words:
        if word not in named:
            raise InputError(f"no figures of run {word!r} in {results}: {did_you_mean(word, [*named])}run it first")
    chosen = [named[word] for word in words] or list(latest.values())
    figures_of = [(each, folder / "figures") for folder in chosen for each in sidecars(folder / "figures")]
    changed = bool(figures_of) and (git_state(project_dir()) or {}).get("dirty") is not False
    of_changed = {s["run_id"] for s, _ in figures_of if (s["provenance"].get("git") or {}).get("dirty") is not False}
    if (changed or of_changed) and not allow_dirty:
        where = f"the checkout of run {min(of_changed)} had" if of_changed else "the checkout has"
        raise InputError(f"{where} uncommitted changes: commit them and run again, or publish with --allow-dirty")
    for sidecar, source in figures_of:
        contents = {Path(file).suffix[1:]: (source / file).read_bytes() for file in sidecar["files"]}
        # the page loads the script of the folder that it comes into
        contents["html"] = re.sub(rb'src="[./]*plotly\.min\.js"', b'src="plotly.min.js"', contents["html"])
        write_atomic(figures / sidecar["record"], (source / sidecar["record"]).read_bytes())
        _write(figures, sidecar | {"published_with_changes": changed}, contents)
    plotly_script(figures)
    page.write(SHIPPED, figures / "explorer.html")
    write_atomic(figures / "README.md", gallery(figures).encode())
    kept = {f"{sidecar['run_id']}.json" for sidecar in sidecars(figures)}
    for orphan in {path.name for path in (figures / "records").glob("*.json")} - kept:
        (figures / "records" / orphan).unlink()
    return chosen


def sidecars(folder: Path) -> list[dict[str, Any]]:
    """What the json files beside the figures in `folder` hold."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def gallery(folder: Path) -> str:
    """Return the page as Markdown: by notebook figures, each with picture, caption, origin and data; then claims."""
    if not (published := sidecars(folder)):
        raise InputError(f"no published figures in {folder}: run a notebook first, as in `specnb run 01_k_sweep`")
    parts = [GALLERY]
    for experiment, group in groupby(published, key=lambda sidecar: sidecar["experiment"]):
        figures = list(group)
        command = f"specnb run {experiment} --budget {figures[0]['params'].get('budget', 'normal')}"
        if not experiment[0].isdigit():
            command = f"python -m tests.benchmarks.{experiment}"
        parts += [f"## {experiment}\n\n`.venv/bin/{command}`\n", *map(_entry, figures)]
    return "\n".join([*parts, "## Published claims\n", *_claims(project_dir() / "notebooks")])


def traced(folder: Path) -> pd.DataFrame:
    """Each figure in `folder` with its origin: figure, notebook, run_id, date, commit, machine.

    `record` says that the record of its run is kept and agrees, `files` that every file has the digest noted for it.
    """
    rows = []
    for sidecar in sidecars(folder):
        kept, facts = folder / sidecar["record"], sidecar["provenance"]
        record = read_json(kept, store.MAX_BYTES) if kept.is_file() else {}
        paths = {folder / file: sha256 for file, sha256 in sidecar["files"].items()}
        files = all(path.is_file() and digest(path) == sha256 for path, sha256 in paths.items())
        rows.append({
            "figure": sidecar["name"], "notebook": sidecar["experiment"], "run_id": sidecar["run_id"],
            "date": facts["utc"][:10], "commit": ((facts.get("git") or {}).get("commit") or "")[:10],
            "machine": facts["cpu"]["model"],
            "record": all(sidecar[key] == record.get(key) for key in ("experiment", "run_id", "params", "status")),
            "files": files,
        })  # fmt: skip
    return pd.DataFrame(rows)


def redrawn(params: PublishParams, folder: Path) -> tuple[go.Figure, RunRecord]:
    """A figure of `folder` as its page holds it, and a record that says which run its numbers come from.

    Raises InputError for an unknown figure.
    """
    known = {sidecar["name"]: sidecar for sidecar in sidecars(folder)}
    require_known("figure", params.figure, known)
    sidecar, decode = known[params.figure], json.JSONDecoder().raw_decode
    rest, values = (folder / f"{params.figure}.html").read_text(encoding="utf-8").partition("Plotly.newPlot(")[2], []
    while len(values) < 3:  # id, data, layout
        value, end = decode(rest := rest.lstrip(" ,\n"))
        values, rest = [*values, value], rest[end:]
    now, dumped = datetime.now(UTC), params.model_dump(mode="json")
    source = {name: sidecar[name] for name in ("experiment", "run_id")}
    record = RunRecord(
        run_id=store.run_id("10_publish", dumped), experiment="10_publish", params=dumped, started=now, ended=now,
        provenance=sidecar["provenance"] | {"source": source},
    )  # fmt: skip
    return go.Figure(data=values[1], layout=values[2]), record


def _claims(notebooks: Path) -> Iterator[str]:
    """The tables of claims that the stored notebooks end with (`book.published`)."""
    for path in sorted(notebooks.glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", ()):
                text = "".join(output.get("data", {}).get("text/markdown", ""))
                if text.startswith("| published claim"):
                    yield f"### [{path.stem}](../notebooks/{path.name})\n\n{text}\n"


def _entry(sidecar: dict[str, Any]) -> str:
    name, git = sidecar["name"], sidecar["provenance"].get("git") or {}
    picture = f"![{sidecar['title']}]({name}.png)" if f"{name}.png" in sidecar["files"] else "(no picture)"
    changes = git.get("dirty") or sidecar.get("published_with_changes")
    commit = (git.get("commit") or "unknown")[:10] + (", with changes" if changes else "")
    origin = f"{sidecar['provenance'].get('utc', '')[:10]}, commit {commit}"
    return (
        f"### {name}\n\n{picture}\n\n{sidecar['caption']}\n"
        f"{origin}. [Interactive]({name}.html) · [provenance and data]({name}.json) · [record]({sidecar['record']})\n"
    )
