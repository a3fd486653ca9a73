"""All of it as pages that any file server shows: executed notebooks, figures, the explorer, a table of the results.

Nothing on a page is fetched from elsewhere. A notebook is shown as its latest completed run left it, else as stored.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter

from specnb import store
from specnb.batch.results import overview
from specnb.book.notebook import notebooks, read_notebook
from specnb.book.publish import plotly_script, sidecars
from specnb.io import read_json, reading, write_atomic, writing
from specnb.measure.probe import HEAD, machine_rows

CODE_STYLE = "xcode"
"""A style of pygments whose colours all have enough contrast on a light ground."""
LINK = re.compile(r'<a href="(?![a-z]+:|#)([^"#]*)(#[^"]*)?"[^>]*>(.*?)</a>', re.DOTALL)


def write_site(site: Path, figures: Path, results: Path) -> list[Path]:
    """Write the site into the folder `site` and return its pages; `figures` is copied into it.

    Raises InputError for a folder that cannot be written.
    """
    books = list(_latest(results))
    with writing(site):
        shutil.copytree(figures, site / "figures", dirs_exist_ok=True, ignore=shutil.ignore_patterns("README.md"))
    plotly_script(site / "figures")
    runs = overview(results) if any(results.rglob(store.RUN)) else pd.DataFrame(columns=["run_id", "started"])
    runs["started"] = pd.to_datetime(runs["started"]).dt.strftime("%Y-%m-%d %H:%M")
    machines = pd.DataFrame([row.cells() for row in machine_rows().values()], columns=HEAD)
    look = {"index": False, "border": 0, "justify": "left"}
    pages = {
        "index.html": {"kind": "start", "title": "Notebooks", "notebooks": books, "machines": machines.to_html(**look)},
        "figures.html": {"kind": "figures", "title": "Figures", "figures": sidecars(figures)},
        "results.html": {"kind": "results", "title": "Results", "table": runs.to_html(na_rep="", **look)},
    }
    exporter = HTMLExporter(template_name="basic", exclude_anchor_links=True, exclude_input_prompt=True)
    for book in books:
        content = _content(exporter.from_filename(str(book["path"]))[0], {other["name"] for other in books})
        pages[f"notebooks/{book['name']}.html"] = {"kind": "notebook", "title": book["title"], "content": content}
    template = Environment(autoescape=True).from_string(Path(__file__).with_suffix(".html").read_text("utf-8"))
    style = HtmlFormatter(style=CODE_STYLE).get_style_defs(".highlight")
    for name, values in pages.items():
        shared = {"root": "../" * name.count("/"), "here": name, "code_style": style}
        write_atomic(site / name, template.render(values | shared).encode())
    return [site / name for name in pages]


def _latest(results: Path) -> Iterator[dict[str, Any]]:
    """Yield name, title, origin of the outputs and path of each notebook: as its latest run left it, else as stored."""
    latest = {}
    for file in results.rglob(store.OUTCOME):
        outcome = read_json(file)
        with reading(file):
            if outcome["status"] == "completed":
                name = Path(outcome["notebook"]).stem
                ran = outcome["ended"], outcome["run_id"], file.with_name("notebook.ipynb")
                latest[name] = max(latest.get(name, ran), ran)
    for path in notebooks():
        heading = read_notebook(path).nb.cells[0].source.partition("\n")[0]
        ended, run_id, executed = latest.get(path.stem, ("", "", path))
        origin = f"run {run_id}, {ended[:10]}" if ended else "as stored in the checkout"
        yield {"name": path.stem, "title": heading.lstrip("# "), "origin": origin, "path": executed}


def _content(html: str, names: set[str]) -> str:
    """Return a notebook's HTML whose links lead to pages of the site or are plain text; empty headings are cells."""

    def on_site(match: re.Match[str]) -> str:
        link, anchor, text = match[1], match[2] or "", match[3]
        if link.startswith("../figures/") and not link.endswith(".md"):
            return match[0]
        name = Path(link).stem
        return f'<a href="{name}.html{anchor}">{text}</a>' if link == f"{name}.ipynb" and name in names else text

    return re.sub(r"<th>\s*</th>", "<td></td>", LINK.sub(on_site, html))
