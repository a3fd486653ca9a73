"""Draw the published score: `python -m tests.benchmarks.divergence_score.picture`.

Then `specnb publish divergence_score`.
"""

from datetime import datetime

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.publish import publish
from specnb.book.style import template
from specnb.io import project_dir, read_json
from specnb.records import RunRecord
from specnb.store import save
from tests.benchmarks.divergence_score.tools import LAB

NAME = "divergence_score"
SCORE = project_dir() / "data" / "divergence" / "score.json"


def score_figure(document: dict) -> go.Figure:
    """Draw how often each tool names the right module, and how often that or a part of it.

    The former has intervals. A tool is drawn with its best threshold.
    """
    table = pd.DataFrame(document["by_tool"])
    kinds = table["tool"].str.replace(r" x?[\d.]+%?$", "", regex=True)
    table = table.loc[table.groupby([kinds, "against"], sort=False)["module"].idxmax()]
    names = table["tool"].where(table["tool"] == LAB, table["tool"] + ", " + table["against"])
    shares = {"module": "the module itself", "near": "or a part that it holds"}
    figure = px.bar(
        table.assign(tool=names).rename(columns=shares),
        x=[*shares.values()],
        y="tool",
        orientation="h",
        barmode="group",
        template=template(),
        title="How often each tool, at its best, names the right module",
    )
    above = table["module_high"] - table["module"]
    below = table["module"] - table["module_low"]
    figure.data[0].update(
        error_x_array=above,
        error_x_arrayminus=below,
        texttemplate="%{x:.0%}",
        insidetextanchor="start",
        textangle=0,
    )
    figure.update_xaxes(
        title_text="cases with the right module named first", range=[0, 1.02], tickformat=".0%"
    )
    figure.update_yaxes(autorange="reversed", automargin=True, title_text="")
    return figure.update_layout(height=190 + 40 * len(table), legend_title_text="")


if __name__ == "__main__":
    document = read_json(SCORE)
    ran = document["facts"]["ran"]
    provenance = document["facts"]["provenance"]
    when = datetime.fromisoformat(provenance["utc"])
    record = RunRecord(
        run_id="score", experiment=NAME, params=ran, provenance=provenance, started=when, ended=when
    )
    save(record)
    publish(score_figure(document), NAME, record, table=pd.DataFrame(document["by_tool"]))
