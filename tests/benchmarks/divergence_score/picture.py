"""Draw the published score: `python -m tests.benchmarks.divergence_score.picture; specnb publish divergence_score`."""

import html
from datetime import datetime

import pandas as pd
import plotly.graph_objects as go

from specnb.book.publish import publish
from specnb.book.style import COLOURS, spread, template
from specnb.io import project_dir, read_json
from specnb.records import RunRecord
from specnb.store import save
from tests.benchmarks.divergence_score.tools import LAB

NAME, SCORE = "divergence_score", project_dir() / "data" / "divergence" / "score.json"


def score_figure(document: dict) -> go.Figure:
    """Draw how often each tool names the right module, with its interval, and how often it or a part of it.

    Of a tool with thresholds the best is drawn.
    """
    table = pd.DataFrame(document["by_tool"])
    kinds = table["tool"].str.replace(r" x?[\d.]+%?$", "", regex=True)
    table = table.loc[table.groupby([kinds, "against"], sort=False)["module"].idxmax()]
    names = [html.escape(f"{row.tool}, {row.against}" if row.tool != LAB else LAB) for row in table.itertuples()]
    colours = [COLOURS[0] if name == LAB else COLOURS[6] for name in names]
    columns = ("module", "module_low", "module_high", "near")
    value, low, high, near = (100 * table[name].astype(float) for name in columns)
    hover = ": %{x:.1f} %<extra></extra>"
    itself = go.Bar(x=value.tolist(), y=names, orientation="h", marker_color=colours, name="the module itself",
                    error_x=spread(value, low, high) | {"color": "#111"}, hovertemplate="%{y}" + hover)  # fmt: skip
    part = go.Bar(x=near.tolist(), y=names, orientation="h", marker={"color": colours, "opacity": 0.45},
                  name="or a part that it holds", hovertemplate="%{y} with parts" + hover)  # fmt: skip
    figure = go.Figure([itself, part])
    for tool, share, end in zip(names, value, high, strict=True):
        at = {"x": max(share, end), "y": tool, "xanchor": "left", "xshift": 6, "yshift": 5}
        figure.add_annotation(text=f"{share:.0f} %", showarrow=False, **at)
    title, ticks = "cases with the right module named first (%)", [*range(0, 101, 20)]
    figure.update_xaxes(title_text=title, range=[0, 112], tickvals=ticks)
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure.update_layout(
        template=template(),
        title_text="How often each tool, with its best threshold, names the right module",
        height=190 + 40 * len(table), margin={"l": 60, "t": 80}, legend={"traceorder": "normal"},
    )  # fmt: skip


if __name__ == "__main__":
    document = read_json(SCORE)
    ran, provenance = document["facts"]["ran"], document["facts"]["provenance"]
    when = datetime.fromisoformat(provenance["utc"])
    record = RunRecord(run_id="score", experiment=NAME, params=ran, provenance=provenance, started=when, ended=when)
    save(record)
    publish(score_figure(document), NAME, record, table=pd.DataFrame(document["by_tool"]))
