"""The explorer as one HTML file, which replays a reduced trace without a kernel."""

import json
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from specnb.book.explorer.tables import ALL, FREE, Setting, Tables, TracedRun, stored
from specnb.book.style import readable
from specnb.book.tables import baseline
from specnb.book.tokens import FATES, shown_text
from specnb.io import JsonObject, plain, write_atomic
from specnb.measure.cost import NAMED
from specnb.measure.intervals import FEWEST
from specnb.measure.machines import machine_rows
from specnb.measure.policies import AUTO, FIXED, POLICIES
from specnb.measure.recording import Recording
from specnb.measure.replay import split
from specnb.registry import DRAFTERS

CONSTANTS = {
    "fewest": FEWEST,
    "fates": FATES,
    "fixed": FIXED,
    "policies": {
        name: {"option": policy.option, "depends": policy.depends}
        for name, policy in POLICIES.items()
    }
    | {AUTO: {"option": "", "depends": ["machine"]}},
}
TAIL = 400  # characters at the end of a prompt that are shown
STEP = 0.05  # of the temperature slider
DIGITS = 5  # of probabilities and counts; the page shows two


def reduced(run: TracedRun, tables: Tables) -> JsonObject:
    """Return the data of the page as JSON; `tables` are those of the run's trace."""
    record = run.record
    curve = run.curve
    target = tables.recordings[0].target
    facts = record.provenance
    caps = facts["extra"]["target"]
    engine = f"{caps['engine']} {caps['dtype']}"
    place = (
        f"{facts['cpu']['model']}, {facts['cpu']['usable_cores']} cores (device: {caps['device']})"
    )
    fastest = baseline(record)
    contents = [_content(recording) for recording in tables.recordings]
    texts = [content for at, content in enumerate(contents) if content not in contents[:at]]
    return {
        "source": f"run {record.run_id} of {record.experiment}, {record.ended:%Y-%m-%d}",
        "subject": f"{readable(target.partition('?')[0])} in {engine} on {place}. {fastest}",
        "target": target,
        "engine": engine,
        "baseline": fastest.model_dump(),
        "k_max": tables.k_max,
        "curve": {"widths": curve.widths, "median_s": curve.median_s, "busy": bool(curve.busy)},
        "drafters": [
            {
                "name": name,
                "readable": readable(name),
                "registered": name.partition("(")[0] in DRAFTERS,
                "c": run.c[name],
                "is_model": name in tables.models,
                "policies": tables.policies(name),
            }
            for name in tables.drafters
        ],
        "samplings": list(_positions(tables)),
        "texts": texts,
        "recordings": [
            {"text": texts.index(content), **_recording(recording)}
            for recording, content in zip(tables.recordings, contents, strict=True)
        ],
        "played": list(_played(tables)),
    }


def _positions(tables: Tables) -> Iterator[JsonObject]:
    """Yield the positions of the temperature slider: STEP apart, then the recordings with top-p.

    Each lies between the recorded temperatures `from` and `to`.
    """
    full = [temperature for temperature, top_p in tables.samplings if top_p == 1]
    for low, high in pairwise(full):
        for temperature in np.arange(low, high - 1e-6, STEP):
            yield {"temperature": round(temperature, 3), "top_p": 1, "from": low, "to": high}
    for t, top_p in tables.samplings:
        if top_p < 1 or t in full[-1:]:
            yield {"temperature": t, "top_p": top_p, "from": t, "to": t}


def _content(recording: Recording) -> JsonObject:
    """Return the fields that the recordings of all drafters share for one text."""
    names = ("prompt_id", "category", "temperature", "top_p", "target", "max_new_tokens", "seed")
    return {name: getattr(recording, name) for name in names} | {
        "pieces": [shown_text(piece, " ") for piece in recording.pieces],
        "prompt": recording.prompt.decode("utf-8", "replace")[-TAIL:],
    }


def _recording(recording: Recording) -> JsonObject:
    keep = []
    for row in recording.keep:
        chances = [round(chance, DIGITS) for chance in row]
        # rounds end at a 0
        keep.append(chances[: chances.index(0) + 1] if 0 in chances else chances)
    rows = {"p": recording.p_target, "q": recording.q_draft}
    return {
        "drafter": recording.drafter,
        "round_steps": recording.round_steps,
        "offered": recording.offered,
        # for a draft model the probability depends on the token only, not on the start of the round
        **(
            {"kept": [row[0] if row else 0 for row in keep]}
            if recording.beliefs
            else {"keep": keep}
        ),
        "drafts": [[shown_text(piece, " ") for piece in pieces] for pieces in recording.drafts],
        **{name: [round(chance, 2) for chance in row] for name, row in rows.items() if row},
    }


def _played(tables: Tables) -> Iterator[JsonObject]:
    """Simulate the policies that depend on no slider, for each choice of recordings."""
    places = product(tables.drafters, tables.samplings, (ALL, *tables.contents))
    for drafter, (temperature, top_p), content in places:
        for policy in tables.policies(drafter):
            if not CONSTANTS["policies"][policy]["depends"]:
                yield play(tables, Setting(drafter, temperature, content, policy, 1, FREE, top_p))


def play(tables: Tables, setting: Setting) -> JsonObject:
    """Return counts (as `replay.split`) and rounds of a policy on each recording of a setting."""
    _, counts, walks = zip(*tables.walks(setting), strict=True)
    return setting.place | {
        "counts": [
            [np.trim_zeros(part.round(DIGITS), "b").tolist() for part in split(row)]
            for row in counts
        ],
        "drafted": [[step.drafted for step in steps] for steps in walks],
        "kept": [[step.n_accepted for step in steps] for steps in walks],
    }


def page(trace: JsonObject, above: str = "") -> str:
    """Return the page for a trace that `reduced` returned, with the HTML `above` at its top."""
    text = Path(__file__).with_suffix(".html").read_text("utf-8").replace("@ABOVE@", above)
    constants = CONSTANTS | {"machines": plain(NAMED | machine_rows())}
    for mark, value in (("@CONSTANTS@", constants), ("@TRACE@", trace)):
        text = text.replace(mark, json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
    return text


def write_page(trace: str, out: Path) -> None:
    """Write a run of notebook 09, or a shipped trace, as a page."""
    run = stored(trace)
    write_atomic(out, page(reduced(run, Tables(run.trace))).encode())
