"""Publish figures with their provenance: `NAME.svg`, `.png`, `.pdf`, `.html` and a `.json` sidecar.

The sidecar contains the run, its parameters and provenance, the figure, the caption, and digests of
the table, the figure and each file. It is written last. `publish` writes into the folder of the
run. Only `publish_runs` writes into `figures/`: it copies figures with their records, and generates
the gallery from the sidecars there.
"""

import html
import json
import os
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from specnb import store
from specnb.book import claims
from specnb.book.explorer import page
from specnb.book.explorer.tables import SHIPPED
from specnb.book.picture import PicturedFigure, draw, plain_text
from specnb.book.style import CONFIG, QUICK, STYLE, readable
from specnb.errors import InputError, require_known
from specnb.io import (
    JsonObject,
    digest,
    plain,
    project_dir,
    read_bytes,
    read_json,
    write_atomic,
    write_json,
)
from specnb.provenance import git_state
from specnb.records import RunRecord

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
SUFFIXES = ("svg", "png", "pdf", "html")
GALLERY = """# Figures

`specnb publish` makes each figure from the JSON file of the same name, which has the run, its
parameters, its machine and its data. [`records`](records) has the runs without their rounds. Other
results are in [`tests/benchmarks`](../tests/benchmarks/README.md). [`explorer.html`](explorer.html)
is the explorer of notebook 09 as one file that needs no kernel. The claims of published notes, and
what was found, are at the end.
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


def publish(
    figure: go.Figure,
    name: str,
    record: RunRecord,
    *,
    table: pd.DataFrame | None = None,
) -> PicturedFigure:
    """Write `figure` as `NAME.{svg,png,pdf,html,json}`; return it with its image for the notebook.

    The files go into `store.figures_dir`, next to `records/RUN_ID.json`, the record of the run
    without its rounds. The images have the size in the figure's layout, or else
    in the style. `table` is the data of the figure; its index is ignored.

    Images need Chrome or Chromium. If the export fails, html and json are still written, stderr and
    the sidecar give the reason, and older images of that name are removed. The HTML page needs no
    network.

    Raises InputError for an invalid name, before anything is written, and if the folder cannot be
    written.

    >>> publish(go.Figure(), "Best K", record=None)  # the name is also that of the files
    Traceback (most recent call last):
    specnb.errors.InputError: figure name 'Best K': use 1 to 64 of a-z 0-9 _ -, the first a letter or digit
    """  # noqa: E501
    title = plain_text(figure.layout.title.text) or name
    document = _facts(name, title, record)
    if is_quick(record):
        figure = go.Figure(figure).add_annotation(STYLE["corner"], text=f"<b>{QUICK}</b>")
    # keys sorted: plotly changes their order
    document["figure_sha256"] = digest(json.loads(figure.to_json(engine="json")))
    document["table"] = None if table is None else _table_facts(table)
    drawn, contents, skipped = draw(figure)
    script = Path(os.path.relpath(plotly_script(store.results_dir()), store.figures_dir(record)))
    plot = drawn.to_html(
        full_html=False, include_plotlyjs=script.as_posix(), div_id=name, config=CONFIG
    )
    contents["html"] = _page(document, drawn.layout.width, plot)
    _write_of_run(record, document | {"figure": drawn.to_json(), "skipped": skipped}, contents)
    return drawn


def publish_svg(svg: str, name: str, title: str, record: RunRecord) -> None:
    """Write an SVG that is not a plotly figure as `NAME.{svg,html,json}`, as `publish` does."""
    document = _facts(name, title, record) | {"table": None, "skipped": {}}
    _write_of_run(record, document, {"svg": svg.encode(), "html": _page(document, 960)})


def _facts(name: str, title: str, record: RunRecord) -> JsonObject:
    """Return a sidecar's facts about figure and run. Raises InputError for an invalid name."""
    _require_name(name)
    run = record.model_dump(include={"experiment", "run_id", "status", "params", "provenance"})
    return plain(
        run
        | {
            "schema_version": 1,
            "name": name,
            "title": title,
            "caption": caption_of(title, record),
            "record": f"records/{record.run_id}.json",
        },
        "record",
    )


def _require_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InputError(
            f"figure name {name!r}: use 1 to 64 of a-z 0-9 _ -, the first a letter or digit"
        )


def _page(document: JsonObject, width: int, plot: str = "") -> bytes:
    """Return the HTML page of a figure; without a `plot` it shows the SVG."""
    texts = {key: html.escape(document[key]) for key in ("name", "title", "caption")}
    return PAGE.format(width=width, plot=plot, **texts).encode()


def plotly_script(folder: Path) -> Path:
    """Return the `plotly.min.js` in `folder`; write it if it is missing or of another version."""
    script = folder / "plotly.min.js"
    source = get_plotlyjs().encode()
    if not script.is_file() or script.read_bytes() != source:
        write_atomic(script, source)
    return script


def _write_of_run(record: RunRecord, document: JsonObject, contents: dict[str, bytes]) -> None:
    folder = store.figures_dir(record)
    store.save_beside_figures(record, folder)
    _write(folder, document, contents)


def _write(folder: Path, document: JsonObject, contents: dict[str, bytes]) -> None:
    """Write a figure's files, then its sidecar. Remove older images of suffixes that failed now."""
    file = folder / document["name"]
    for suffix in document["skipped"]:
        file.with_suffix(f".{suffix}").unlink(missing_ok=True)
    for suffix, data in contents.items():
        write_atomic(file.with_suffix(f".{suffix}"), data)
    digests = {f"{file.name}.{suffix}": digest(data) for suffix, data in contents.items()}
    write_json(file.with_suffix(".json"), document | {"files": digests})


def is_quick(record: RunRecord) -> bool:
    """Return whether a record's numbers come from a quick run, not from an earlier run it shows."""
    return record.params.get("budget") == "quick" and "source" not in record.provenance


def caption_of(title: str, record: RunRecord) -> str:
    """Return a caption: title, run, models, machine, warnings (lossy, fallback, failed, quick)."""
    dropped = sum(g.fallback is not None for g in record.generations)
    n = len(record.generations)
    notes = {
        "decoding is lossy": not all(g.lossless for g in record.generations),
        f"{dropped} of {n} generations ran without the requested drafter": dropped,
        "the run failed": record.status == "failed",
        QUICK: is_quick(record),
    }
    # ids in the provenance contain no local folders; of several drafters, the first is named
    facts = record.provenance
    names = record.params | {m["role"]: m["id"] for m in reversed(facts.get("models", ()))}
    models = " with ".join(
        readable(names[role]) for role in ("target", "drafter") if names.get(role)
    )
    machine = [f"on {facts['cpu']['model']} ({facts['cpu']['usable_cores']} cores)"]
    if "server" in record.measurements:  # on a machine that is not known
        machine = [f"on a server of {record.measurements['engine']}"]
    elif facts.get("extra", {}).get("target", {}).get("device") != "cpu":
        machine += [gpu["name"] for gpu in facts.get("gpu") or ()]
    source = vars(record) | facts.get("source", {})
    run = f"{title}: run {source['run_id']} of {source['experiment']}"
    parts = run, models, " and ".join(machine), *(note for note in notes if notes[note])
    return f"{', '.join(filter(None, parts))}."


def _table_facts(table: pd.DataFrame) -> JsonObject:
    """Return rows and CSV digest of a table ("\\n", shortest floats, NaN as "", no index)."""
    table = table.rename(columns=str)
    csv = table.to_csv(index=False, lineterminator="\n").encode("utf-8", "surrogatepass")
    rows = plain(table.to_dict("records"), "table", nan=None)
    return {"sha256": digest(csv), "rows": len(table), "columns": [*table], "records": rows}


def publish_runs(
    words: Sequence[str], figures: Path, results: Path, *, allow_dirty: bool = False
) -> list[Path]:
    """Copy figures and records of runs into `figures/`, and write the gallery and the explorer.

    `words` are run ids, or names of notebooks, which stand for their latest run. Without words, the
    latest completed run of each notebook is published. `figures/records/RUN_ID.json` is the record
    without its rounds; records without a figure are removed. Returns the folders of the runs.

    Raises InputError for an unknown run, and for uncommitted changes in the checkout, now or when
    the run was recorded. With `allow_dirty`, it publishes anyway and the sidecars record this.
    """
    files = results.rglob(store.RUN)
    runs = [
        (store.load_record(file.parent), file.parent)
        for file in files
        if sidecars(file.parent / "figures")
    ]
    runs.sort(key=lambda each: each[0].ended)
    named = {name: folder for run, folder in runs for name in (run.experiment, run.run_id)}
    latest = {run.experiment: folder for run, folder in runs if run.status == "completed"}
    for word in words:
        require_known(f"run with figures in {results}", word, named)
    chosen = [named[word] for word in words] or list(latest.values())
    figures_of = [
        (each, folder / "figures") for folder in chosen for each in sidecars(folder / "figures")
    ]
    changed = bool(figures_of) and (git_state(project_dir()) or {"dirty": True})["dirty"]
    if not allow_dirty and (changed or any(_commit_of(each)[1] for each, _ in figures_of)):
        raise InputError(
            "the checkout has, or had when this ran, uncommitted changes: "
            "commit them and run again, or publish with --allow-dirty"
        )
    for sidecar, source in figures_of:
        _copy_figure(sidecar | {"published_with_changes": changed}, source, figures)
    plotly_script(figures)
    page.write_page(SHIPPED, figures / "explorer.html")
    for orphan in {*figures.glob("records/*.json")} - {
        figures / sidecar["record"] for sidecar in sidecars(figures)
    }:
        orphan.unlink()
    write_atomic(figures / "README.md", gallery(figures).encode())
    return chosen


def _copy_figure(sidecar: JsonObject, source: Path, figures: Path) -> None:
    """Copy the files of a figure and its record. Reads and writes no files with other names."""
    name = sidecar["name"]
    _require_name(name)
    files = {suffix: source / f"{name}.{suffix}" for suffix in SUFFIXES}
    contents = {suffix: read_bytes(file) for suffix, file in files.items() if file.is_file()}
    # the page loads the script of its new folder
    contents["html"] = re.sub(
        rb'src="[./]*plotly\.min\.js"', b'src="plotly.min.js"', contents["html"]
    )
    old, new = (
        store.record_beside_figures(folder, sidecar["run_id"]) for folder in (source, figures)
    )
    write_atomic(new, read_bytes(old))
    _write(figures, sidecar, contents)


def _commit_of(sidecar: JsonObject) -> tuple[str, bool]:
    """Return the commit of a run, and whether its checkout was dirty (assumed without git)."""
    git = sidecar["provenance"].get("git") or {"commit": "unknown", "dirty": True}
    return git["commit"][:10], git["dirty"]


def sidecars(folder: Path) -> list[JsonObject]:
    """Return the sidecars of the figures in `folder`."""
    return [read_json(path) for path in sorted(folder.glob("*.json"))]


def gallery(folder: Path) -> str:
    """Return the gallery as Markdown: figures by notebook with provenance, then the claims."""
    if not (published := sidecars(folder)):
        raise InputError(
            f"no published figures in {folder}: run a notebook first, as in `specnb run 01_k_sweep`"
        )
    parts = [GALLERY]
    for experiment, (*entries,) in groupby(published, key=itemgetter("experiment")):
        budget = entries[0]["params"].get("budget")
        command = (
            f"specnb run {experiment} --budget {budget}"
            if budget
            else f"python -m tests.benchmarks.{experiment}"
        )
        parts += [f"## {experiment}\n\n`.venv/bin/{command}`\n", *map(_entry, entries)]
    parts.append("## Published claims\n")
    for record in sorted(
        sidecars(folder / "records"), key=lambda record: str(record["experiment"])
    ):
        if judged := record["measurements"].get("claims"):
            name = record["experiment"]
            table = claims.tabulate_claims(judged["rows"])
            parts.append(
                f"### [{name}](../notebooks/{name}.ipynb), run {record['run_id']}\n\n{table}\n"
            )
    return "\n".join(parts)


def _entry(sidecar: JsonObject) -> str:
    name = sidecar["name"]
    commit, dirty = _commit_of(sidecar)
    changes = ", with changes" if dirty or sidecar.get("published_with_changes") else ""
    return (
        f"### {name}\n\n![{sidecar['title']}]({name}.{'png' if 'figure' in sidecar else 'svg'})\n\n"
        f"{sidecar['caption']}\n"
        f"{sidecar['provenance']['utc'][:10]}, commit {commit}{changes}. "
        f"[Interactive]({name}.html) · [provenance and data]({name}.json) · "
        f"[record]({sidecar['record']})\n"
    )
