"""An investigation in words and tables: what a reader asks first, and all of it as plain text and JSON. No torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from specnb.divergence.tolerances import TIMES_FLOOR
from specnb.errors import InputError
from specnb.io import project_dir, read_json, write_atomic
from specnb.measure.triage import Share

if TYPE_CHECKING:
    from specnb.divergence.investigate import Investigation
    from specnb.divergence.setups import Outcome

SCORE_BYTES = 1 << 24
EARLIEST = 8
"""Wrong tensors that a report lists, the first in time first."""


def answers(investigation: "Investigation") -> dict[str, str]:
    """The questions that come first, and this investigation's answers."""
    facts, floor = investigation.facts, investigation.floor
    repeats, inert = investigation.repeats, investigation.inert
    other = ", ".join(name for name, item in investigation.case.outcomes.items() if not _as_fed(item))
    alarms, same = published_alarms(), "the same" if repeats else "other"
    hooks = "YES: what was seen is not what runs." if repeats else "Not known, for it does not repeat."
    hooks = "No: the logits with hooks are the bits of those without." if inert else hooks
    return {
        "Same inputs?": "Yes: each module is compared with what a pristine copy makes of the very inputs it was given.",
        "Same tokens in all runs?": (
            f"{f'NO, the model got others in {other}' if other else 'Yes'}: each set-up is fed {facts['tokens']} "
            f"tokens, a prompt of {facts['prompt']} and {facts['feeds'] - 1} feeds, {facts['taken_back']} taken back."
        ),
        "Does it repeat?": f"{'Yes' if repeats else 'NO'}: run again without hooks, it gives {same} bits.",
        "Do the hooks change anything?": hooks,
        "What was looked at?": f"{investigation.coverage}.",
        "What was not?": _not_seen(investigation),
        "What counts as wrong?": (
            f"More than {TIMES_FLOOR:g} times the floor, the largest error of that tensor between sound runs of other "
            f"shapes: median {floor.median():.2g}, largest {floor.max():.2g} (relative L2)."
        ),
        "How often is that a false alarm?": (
            f"{alarms} controls were called divergent (at most {alarms.high:.1%} at 95 %)."
            if alarms
            else "Not known here: `tests/benchmarks/divergence_score` measures it on controls."
        ),
    }


def _as_fed(outcome: "Outcome") -> bool:
    """Whether the model was given the tokens that the script has, as far as the trace has them."""
    steps = [step["token_ids"] for step in outcome.trace.facts["steps"]]
    feeds = [list(feed.ids) for feed in outcome.script.feeds]
    return all(ids and ids == fed[: len(ids)] for ids, fed in zip(steps, feeds, strict=True))


def _not_seen(investigation: "Investigation") -> str:
    coverage, facts = investigation.coverage, investigation.facts
    lists = {
        "never ran": coverage.never_called,
        "ran and not compared": coverage.uncompared,
        "compared with the module that holds them only": coverage.with_holder,
        "sound runs are too far apart to judge it": facts["unsteady"],
        "not readable": coverage.unread,
        "left out (other shapes)": coverage.left_out,
        "set-ups not run": investigation.setups().query("verdict == 'not run'")["setup"],
    }
    parts = [] if facts["in_service"] else ["any service: none was given, so the models ran by themselves"]
    parts += [f"{name}: {', '.join(names)}" for name, names in lists.items() if len(names)]
    if unseen := coverage.parameters - coverage.seen_at_use:
        parts.append(f"{unseen} parameters of the draft that no operation was seen to read")
    parts.append("whether the weights that were loaded are the checkpoint's (`specnb divergence preflight`)")
    return "; ".join(parts) + "."


def cells(investigation: "Investigation", setup: str) -> pd.DataFrame:
    """What is behind each place of the heat map: by module and position the tensor that is farthest over its floor.

    Columns: module, position, at, role, name, error, floor, gain. Raises InputError for a set-up that was not run.
    """
    rows = investigation.outcome(setup).errors
    worst = rows["ratio"].fillna(0).groupby([rows["module"], rows["position"]]).idxmax()
    columns = ["module", "position", "at", "role", "name", "error", "floor", "gain"]
    return rows.loc[worst, columns].reset_index(drop=True)


def text(investigation: "Investigation") -> str:
    """The report as plain text: the verdict line first, ready to be printed."""
    parts = [investigation.line, "", *(f"{question} {answer}" for question, answer in answers(investigation).items())]
    setups = investigation.setups().astype("string").fillna("")  # nothing is said of what was not counted
    parts += ["", "Set-ups", setups.to_string(index=False)]
    if investigation.case.bad is not None:
        nodes = investigation.nodes().head(EARLIEST).drop(columns=["at", "call"])
        parts += ["", "Earliest divergences", nodes.to_string(index=False, float_format=lambda value: f"{value:.4g}")]
        parts += ["", "Causes, likeliest first", *_causes(investigation)]
    return "\n".join(parts) + "\n"


def write(investigation: "Investigation", folder: Path) -> Path:
    """Write `report.json` and `report.txt` into `folder`, in place of an older report; the path of the text.

    Raises InputError where the folder cannot be written.
    """
    alarms = published_alarms()
    document = investigation.document() | ({} if alarms is None else {"false_alarms": alarms._asdict()})
    write_atomic(folder / "report.json", f"{json.dumps(document, indent=1, allow_nan=False)}\n".encode())
    write_atomic(folder / "report.txt", text(investigation).encode())
    return folder / "report.txt"


def _causes(investigation: "Investigation") -> Iterator[str]:
    for cause in investigation.causes:
        if cause.for_it:
            yield f"{cause.name} ({cause.score:+.1f}): {'; '.join(cause.for_it)}"
            if cause.against_it:
                yield f"  against it: {'; '.join(cause.against_it)}"
            yield f"  seen before: {', '.join(cause.issues)}; next: {cause.next_experiment}"


def published_score() -> dict[str, Any]:
    """The score that `tests/benchmarks/divergence_score` writes. Raises InputError outside a checkout."""
    return read_json(project_dir() / "data" / "divergence" / "score.json", SCORE_BYTES)


def published_alarms() -> Share | None:
    """Of the published score: false alarms of the lab among its controls; None where there is no score."""
    try:
        lab = next(row for row in published_score()["by_tool"] if row["tool"] == "lab")
    except InputError:
        return None
    return Share.of(int(lab["alarms"]), int(lab["controls"]))
