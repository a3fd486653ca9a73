"""The explorer as one HTML file: a trace reduced to what fixed K needs, in a page that replays it without a kernel.

`python -m specnb.book.explorer.page TRACE OUT` writes OUT: a page, or the trace alone where OUT ends in `.json`, to
be dropped on a page. TRACE is the name of a shipped trace or the folder of a run of notebook 09.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from specnb.book.explorer.tables import Tables, stored
from specnb.book.tokens import FATES, shown_text
from specnb.io import write_atomic
from specnb.measure.bench import FEWEST
from specnb.measure.cost import NAMED, CostCurve
from specnb.measure.recording import Recording, Trace
from specnb.records import RunRecord
from specnb.registry import DRAFTERS

FORMAT = 1
CONSTANTS = {"format": FORMAT, "fewest": FEWEST, "machines": NAMED, "fates": FATES}
TAIL = 400  # characters of a prompt that are shown before its text
DIGITS = 6  # of chances: the page shows three


def reduced(record: RunRecord, trace: Trace, curve: CostCurve, c: Mapping[str, float]) -> dict[str, Any]:
    """Return what the page replays, in JSON's types; the arguments are what `stored` returns.

    Raises InputError for a trace that no fixed K can be replayed on (`Tables`).
    """
    tables, asked = Tables(trace), dict(zip(c, record.params["drafters"], strict=True))
    cpu = (record.provenance.get("cpu") or {}).get("model", "a machine that was not recorded")
    options = f"--target {quote(record.params['target'])} --max-new-tokens {record.params['max_new_tokens']}"
    drafters = [
        {
            "name": name,
            "c": c[name],
            "is_model": tables.is_model(name),
            "option": f"{'--drafter' if asked[name] in DRAFTERS else '--draft'} {quote(asked[name])}",
        }
        for name in tables.drafters
    ]
    return {
        "format": FORMAT,
        "source": f"run {record.run_id} of {record.experiment}, {record.ended:%Y-%m-%d}, on {cpu}",
        "options": f"{options} --seed {record.params['seed']}",
        "k_max": tables.k_max,
        "curve": {"widths": curve.widths, "median_s": curve.median_s, "busy": bool(curve.busy)},
        "drafters": drafters,
        "recordings": [_recording(recording) for recording in tables.recordings],
    }


def _recording(recording: Recording) -> dict[str, Any]:
    names = ("prompt_id", "category", "drafter", "temperature", "round_steps", "offered")
    return {name: getattr(recording, name) for name in names} | {
        "keep": [[round(chance, DIGITS) for chance in chances] for chances in recording.keep],
        "pieces": [shown_text(piece, " ") for piece in recording.pieces],
        "drafts": [[shown_text(piece, " ") for piece in pieces] for pieces in recording.drafts],
        "prompt": recording.prompt.decode("utf-8", "replace")[-TAIL:],
    }


def page(trace: dict[str, Any]) -> str:
    """Return the page that opens on a trace that `reduced` returned."""
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    for mark, value in (("@CONSTANTS@", CONSTANTS), ("@TRACE@", trace)):
        text = text.replace(mark, json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
    return text


def write(trace: str, out: Path) -> None:
    """Write OUT, a page (.html) or what is dropped on one (.json), from a run of notebook 09 or a shipped trace."""
    contents = reduced(*stored(trace))
    write_atomic(out, (json.dumps(contents) if out.suffix == ".json" else page(contents)).encode())


if __name__ == "__main__":
    import typer

    typer.run(write)
