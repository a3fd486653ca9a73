"""An investigation as a folder that can be handed on: a page that needs no network, a JSON document, a reproduction.

Beside a verdict stands the acceptance: what a generation with the draft under suspicion kept of its drafts.
"""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from pydantic import ValidationError

from specnb.book import divergence_figures as figures
from specnb.divergence import report
from specnb.divergence.errors import named
from specnb.divergence.investigate import Investigation
from specnb.errors import InputError
from specnb.io import read_json, write_atomic
from specnb.measure.acceptance import Share
from specnb.measure.pair import Pair
from specnb.measure.triage import Triage, kind_of, triage

if TYPE_CHECKING:
    from specnb.divergence.repro import Repro

COLOURS = {"DIVERGENT": "#b2182b", "SOUND": "#1b7837", "PRECISION_ONLY": "#1b7837", "INCONCLUSIVE": "#8a6d00"}
NOTHING = "nothing"
GENERATION_BYTES = 1 << 26
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 "DejaVu Sans", "Liberation Sans", Arial, sans-serif; color: #222; max-width: 1000px;
       margin: 2em auto; padding: 0 1em }}
h1 {{ font-size: 1.25em; border-left: 10px solid {colour}; padding: .4em .7em; background: #f6f6f6;
     overflow-wrap: anywhere }}
h2 {{ font-size: 1.1em; margin-top: 2.2em; border-bottom: 1px solid #ccc }}
dt {{ font-weight: bold; margin-top: .5em }}
dd {{ margin-left: 1.5em; overflow-wrap: anywhere }}
table {{ border-collapse: collapse; font-size: 13px; margin: .8em 0 }}
th, td {{ border: 1px solid #ccc; padding: 3px 7px; text-align: left; vertical-align: top; overflow-wrap: break-word }}
th {{ background: #f0f0f0 }}
.wide {{ overflow-x: auto }}
</style>
<script>{plotly}</script></head>
<body>
{body}
</body>
</html>
"""


def read_acceptance(path: Path, *, vocab_size: int) -> Triage:
    """The triage of the generation in a file that `specnb generate --json` wrote.

    `vocab_size`: tokens that the models know. Raises InputError for another file, one in which nothing was drafted, and
    one of tokens that the models do not know.
    """
    again = "make it with `specnb generate --draft … --json`"
    try:
        pair = Pair.model_validate(read_json(path, GENERATION_BYTES) | {"vocab_size": vocab_size})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} holds no generation ({where}: {first['msg']}): {again}") from error
    generation, fork = pair.generation, pair.summary.fork
    if not generation.drafter:
        raise InputError(f"in the generation of {path} nothing was drafted: {again}")
    drafted = (token for r in generation.rounds for token in r.draft_ids)
    if unknown := [t for t in (*generation.prompt_ids, *generation.token_ids, *drafted) if not 0 <= t < vocab_size]:
        raise InputError(
            f"{path}: the models that are investigated have no token {unknown[0]} (0 to {vocab_size - 1}): give "
            "--draft and --target of this generation"
        )
    kind = kind_of(generation.drafter)
    return triage([generation], vocab_size=vocab_size, drafter_kind=kind, forks=[fork] if fork else [])


def acceptance_line(acceptance: Triage) -> str:
    """In a sentence, also where nothing is to be said against it."""
    return acceptance.line or acceptance.reason or "Nothing about the acceptance is suspicious."


def acceptance_document(acceptance: Triage) -> dict[str, Any]:
    """Plain values for JSON."""
    alpha = [share._asdict() for share in acceptance.profile.alpha]
    return {"verdict": acceptance.verdict, "line": acceptance.line, "reason": acceptance.reason, "alpha": alpha}


def write(
    investigation: Investigation,
    folder: Path,
    *,
    repro: "Repro | None" = None,
    triage: Triage | None = None,
    false_alarms: tuple[int, int] | None = None,
    slots: bool = False,
) -> Path:
    """Write `report.html`, `report.json`, `report.txt` and, of a `repro`, `repro/repro.py`; the path of the page.

    `repro` is `divergence.repro.minimal`'s, `triage` that of generations with this draft, `false_alarms` the structural
    verdicts among how many controls, where they were counted. `slots`: this is a report of the case, which the embedded
    pair stands for, so its slot arithmetic is told, too. An older report in `folder` is replaced; each file is written
    in one step. Raises InputError where the folder cannot be written.
    """
    folder = Path(folder)
    parts = [
        f"<h1>{html.escape(investigation.line)}</h1>",
        _section("What one asks first", _answers(report.answers(investigation, false_alarms))),
        *_where(investigation),
        _section("Set-ups", _setups(investigation)),
        *_why(investigation),
        *([_section("KV slots", _slots())] if slots else []),
        *([_section("Acceptance", _acceptance(triage))] if triage is not None else []),
        *([_section("Reproduction", _repro(repro))] if repro is not None else []),
        _section("Circumstances", _table(pd.DataFrame(list(investigation.facts.items()), columns=["what", "value"]))),
    ]
    title, colour = html.escape(investigation.line[:100]), COLOURS[investigation.verdict]
    page = PAGE.format(title=title, colour=colour, plotly=get_plotlyjs(), body="\n".join(parts))
    more: dict[str, object] = {"slots": report.slots().to_dict("records")} if slots else {}
    if repro is not None:
        more["repro"] = {"script": "repro/repro.py", "kind": repro.kind, "setup": repro.setup, "says": str(repro),
                         "tokens": len(repro.script.text), "feeds": len(repro.script.feeds)}  # fmt: skip
    if triage is not None:
        more["acceptance"] = acceptance_document(triage)
    if false_alarms is not None:
        more["false_alarms"] = Share.of(*false_alarms)._asdict()
    report.write_json(investigation, folder / "report.json", more)
    write_atomic(folder / "report.txt", report.text(investigation, false_alarms).encode())
    if repro is not None:
        repro.write(folder / "repro")
    write_atomic(folder / "report.html", page.encode("utf-8", "xmlcharrefreplace"))
    return folder / "report.html"


def _where(investigation: Investigation) -> Iterator[str]:
    """Where the draft parts from itself: one map of the first wrong set-up, or of the last."""
    name = (
        investigation.case.bad.setup.id if investigation.case.bad is not None else list(investigation.case.outcomes)[-1]
    )
    yield _section(f"Where, in {name}", _plot(heat(investigation, name)))
    if investigation.case.bad is not None:
        yield _section("Earliest divergences", _table(_nodes(report.earliest(investigation))))


def _nodes(nodes: pd.DataFrame) -> pd.DataFrame:
    """The table of nodes in as few columns as fit on a page."""
    tokens = nodes[["n_tokens", "first_token", "last_token"]].itertuples(index=False)
    merged = nodes.assign(
        module=[named(node) for node in nodes.itertuples()],
        tensor=nodes["role"] + " " + nodes["name"],
        tokens=[f"{n} ({first} to {last})" for n, first, last in tokens],
    )
    names = {"module": "module", "tensor": "tensor", "tokens": "tokens", "in_error": "error of inputs",
             "error": "largest error", "floor": "floor", "ratio": "error / floor", "gain": "gain", "cosine": "cosine",
             "reads": "parameters its operations read"}  # fmt: skip
    return merged[list(names)].rename(columns=names)


def heat(investigation: Investigation, setup: str | None = None, *, hover: bool = True) -> go.Figure:
    """The heat map of one set-up, the first divergence framed; None: the first that is wrong, else the last.

    With `hover` the largest error in each place is told on hover, which makes a figure some ten times as large.
    """
    name = setup or (
        investigation.case.bad.setup.id if investigation.case.bad is not None else list(investigation.case.outcomes)[-1]
    )
    first = (
        investigation.first if investigation.case.bad is not None and name == investigation.case.bad.setup.id else None
    )
    box = None if first is None else figures.Box(first.module, first.first_token, first.last_token)
    says = investigation.case.outcomes[name].setup.says
    title = f"{name}, {says}: where modules are wrong by themselves"
    return figures.heat(
        investigation.heat(name), box=box, cells=report.cells(investigation, name) if hover else None, title=title
    )


def heats(investigation: Investigation) -> go.Figure:
    """A small heat map of every set-up that was run."""
    runs = investigation.case.outcomes.items()
    tables = {
        f"{name}, {'clean' if item.clean else 'wrong'}:\n{item.setup.says}": investigation.heat(name)
        for name, item in runs
    }
    return figures.heats(tables, title="The same draft, the same tokens, other neighbours")


def _setups(investigation: Investigation) -> str:
    table = report.setups(investigation).rename(columns={
        "says": "the draft runs", "first": "first wrong module", "n_wrong": "wrong tensors",
        "foreign": "parameters of others read", "kills": "what it tells",
    })  # fmt: skip
    return _table(table) + _plot(heats(investigation))


def _why(investigation: Investigation) -> Iterator[str]:
    if not investigation.causes:
        return
    spoken = [cause for cause in investigation.causes if cause.for_it or cause.against_it]
    rows = [
        (cause.name, f"{cause.score:+.1f}", "; ".join(cause.for_it) or NOTHING, "; ".join(cause.against_it) or NOTHING,
         ", ".join(cause.issues), cause.next_experiment)
        for cause in spoken
    ]  # fmt: skip
    columns = ["cause", "score", "for it", "against it", "seen before in", "next experiment"]
    silent = ", ".join(cause.name for cause in investigation.causes if cause not in spoken)
    yield _section("Causes, likeliest first", _table(pd.DataFrame(rows, columns=columns)) + _paragraph(
        "The score is a log-likelihood: the frequency of the class among 30 upstream cases, a convenience sample, and "
        "a weight for each sign, by judgement." + (f" Nothing speaks for or against {silent}." if silent else "")
    ))  # fmt: skip


def _slots() -> str:
    table = report.slots().rename(columns={"block_table": "blocks held", "first_slot": "first slot"})
    return _paragraph(
        "Raw slot numbers of two runs are never compared. In a paged cache the groups of both models draw their blocks "
        "from one pool, so the draft's slots depend on its neighbour, and 336 beside gpt-oss-120b and 176 beside "
        f"gpt-oss-20b are what correct allocation gives ({report.CASE_TOKENS} tokens, blocks of 16, block 0 unused):"
    ) + _table(table)


def _acceptance(triage: Triage) -> str:
    parts = [_paragraph(acceptance_line(triage))]
    table = triage.profile.table()
    parts += [] if table.empty else [_plot(figures.acceptance(table))]
    parts += [_table(triage.table())] if triage.suspicious else []
    return "".join(parts)


def _repro(repro: "Repro") -> str:
    kinds = {
        "module": "The first module alone, on the inputs that it was given and with the draft's own weights.",
        "model": "The whole draft reads the text: the module cannot be told apart from its cache, masks or caller.",
    }
    return _paragraph(f"{repro}. {kinds[repro.kind]} Run it with torch, transformers and safetensors:") + (
        "<pre>python repro/repro.py</pre>"
    )


def _answers(answers: list[report.Answer]) -> str:
    rows = (f"<dt>{html.escape(answer.question)}</dt><dd>{html.escape(answer.answer)}</dd>" for answer in answers)
    return f"<dl>{''.join(rows)}</dl>"


def _section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{body}"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _table(table: pd.DataFrame) -> str:
    shown = table.to_html(index=False, border=0, escape=True, na_rep="", float_format=lambda value: f"{value:.4g}")
    return f'<div class="wide">{shown}</div>'


def _plot(figure: go.Figure) -> str:
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
