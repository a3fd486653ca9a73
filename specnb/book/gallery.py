"""The gallery of published figures, `figures/README.md`: made from the sidecars alone."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from specnb.errors import InputError
from specnb.io import write_atomic

MOST_ROWS = 24  # of a table that the gallery shows; the sidecar holds up to publish.MAX_ROWS
HEAD = """# Figures

Made by `specnb publish` from the json file beside each figure. That file holds the run, its parameters, its machine
and its data. Results that are not figures are in [`tests/benchmarks`](../tests/benchmarks/README.md).
"""


def write_gallery(folder: Path) -> Path:
    """Write `folder/README.md` and return its path. Raises InputError where no figure is published."""
    path = folder / "README.md"
    write_atomic(path, gallery(folder).encode())
    return path


def gallery(folder: Path) -> str:
    """Return the page as Markdown: figures by notebook, each with its picture, caption, origin and data."""
    sidecars = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not sidecars:
        raise InputError(f"no published figures in {folder}: run a notebook first, as in `specnb run 01_k_sweep`")
    parts = [HEAD]
    for experiment, figures in groupby(sidecars, key=lambda sidecar: sidecar["experiment"]):
        parts.append(f"## {experiment}\n\n`.venv/bin/specnb run {experiment}`\n")
        parts += [_entry(sidecar) for sidecar in figures]
    return "\n".join(parts)


def _entry(sidecar: dict[str, Any]) -> str:
    name, git = sidecar["name"], sidecar["provenance"].get("git") or {}
    picture = f"![{sidecar['title']}]({name}.png)" if f"{name}.png" in sidecar["files"] else "(no picture)"
    commit = (git.get("commit") or "unknown")[:10] + (", with changes" if git.get("dirty") else "")
    origin = f"{sidecar['provenance'].get('utc', '')[:10]}, commit {commit}"
    return (
        f"### {name}\n\n{picture}\n\n{sidecar['caption']}\n"
        f"{origin}. [Interactive]({name}.html) · [provenance]({name}.json)\n{_table(sidecar['table'])}"
    )


def _table(table: dict[str, Any] | None) -> str:
    rows = (table or {}).get("records") or []
    if not rows or len(rows) > MOST_ROWS:
        return ""
    lines = [table["columns"], ["---"] * len(table["columns"])]
    lines += [[_cell(row[column]) for column in table["columns"]] for row in rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"\n<details><summary>Data: {len(rows)} rows</summary>\n\n{body}\n\n</details>\n"


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
