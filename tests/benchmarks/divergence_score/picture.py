"""Draw the published score: `python -m tests.benchmarks.divergence_score.picture`.

Then `specnb publish divergence_score`.
"""

from datetime import datetime

import pandas as pd
import plotly.graph_objects as go

from specnb.book.publish import publish
from specnb.book.style import dots, error_bars, template
from specnb.io import project_dir, read_json
from specnb.records import RunRecord
from specnb.store import save
from tests.benchmarks.divergence_score.tools import LAB

NAME = "divergence_score"
SCORE = project_dir() / "data" / "divergence" / "score.json"
METHODS = {
    LAB: "specnb divergence investigate",
    "first other bit": "bitwise comparison",
    "allclose": "torch.allclose",
    "mean/std 1.0%": "mean or std off by 1 %",
    "cosine 0.999": "cosine below 0.999",
}
REFERENCES = {
    "": "no reference: replays modules on their own inputs",
    "same shapes": "reference: a correct run in the same shapes",
    "other shapes": "reference: a correct run in blocks",
}


def score_figure(document: dict) -> go.Figure:
    """Draw, for each of METHODS, how often it names the right module, and its false alarms."""
    table = pd.DataFrame(document["by_tool"]).query("tool in @METHODS")
    table = table.assign(
        method=table["tool"].map(METHODS), reference=table["against"].map(REFERENCES)
    )
    shares = {
        "module": f"right module named ({table['n'].max()} faults)",
        "alarm": f"false alarms ({table['controls'].max()} harmless runs)",
    }
    keys = ["method", "reference"]
    rows = pd.concat(
        table[[*keys, *(f"{value}{end}" for end in ("", "_low", "_high"))]]
        .set_axis([*keys, "share", "low", "high"], axis=1)
        .assign(panel=panel)
        for value, panel in shares.items()
    )
    bars = error_bars(rows, "share", "x")
    panels = {"facet_col": "panel", "facet_col_spacing": 0.05}
    figure = dots(rows, x="share", y="method", by="reference", **panels, **bars)
    figure.update_xaxes(range=[-0.02, 1.02], tickformat=".0%", title_text="share of runs")
    found = table.set_index("tool").loc[LAB]
    title = (
        f"{METHODS[LAB]} names the right module for {found['module']:.0%} of the faults,"
        f"<br>with {found['alarms']} false alarms; methods that compare outputs raise many"
    )
    figure.update_layout(title_text=title, height=480, margin={"l": 230, "t": 110})
    return figure.update_layout(template=template(), legend_title_text="")


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
