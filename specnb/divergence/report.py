"""An investigation in words and tables: what a reader asks first, and all of it as plain text and JSON. No torch."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence import errors
from specnb.divergence.tolerances import TIMES_FLOOR
from specnb.errors import InputError
from specnb.io import project_dir, read_json, write_atomic
from specnb.measure.triage import Share

if TYPE_CHECKING:
    from specnb.divergence.investigate import Investigation
    from specnb.divergence.setups import Outcome

LEFT_OUT = "left out (other shapes)"
"""As the coverage says it: no token axis, or not the shape that the pristine copy has."""
SCORE_BYTES = 1 << 24
EARLIEST = 8
"""Rows of the table of nodes."""
BLOCK_SIZE = 16
CASE_TOKENS, CASE_GROUP = 80, 12
"""Of the case's KV groups: 65 to 80 tokens take five blocks, and only groups of 12 layers give its six and four."""
GPT_OSS = {"120b": {"full": 18, "sliding": 18}, "20b": {"full": 12, "sliding": 12}}


class Answer(NamedTuple):
    """A frequently asked question about a divergence, and this investigation's answer."""

    question: str
    answer: str


def answers(investigation: "Investigation", false_alarms: tuple[int, int] | None = None) -> list[Answer]:
    """The questions that come first. `false_alarms`: structural verdicts among how many controls, if measured."""
    facts, coverage, floor = investigation.facts, investigation.coverage, investigation.floor
    repeats, inert = investigation.repeats, investigation.inert
    other = ", ".join(name for name, item in investigation.case.outcomes.items() if not _as_fed(item))
    effects = f"; of the {len(coverage.left_out)} tensors that were {LEFT_OUT} the effects only"
    questions = {
        "Same inputs?": (
            "Yes: every module is compared with what a pristine copy makes of the very inputs that the module was "
            f"given, so no error travels from one module to the next{effects if coverage.left_out else ''}."
        ),
        "Same tokens in all runs?": (
            f"{f'NO, the model got others in {other}' if other else 'Yes'}: nothing is sampled; each set-up is fed "
            f"the same {facts['tokens']} tokens, a prompt of {facts['prompt']} and then {facts['feeds'] - 1} feeds, "
            f"{facts['taken_back']} tokens taken back on the way (S0w: in blocks)."
        ),
        "Does it repeat?": (
            "Yes: run again without hooks, alone and where it is wrong, it gives the same bits."
            if repeats
            else "NO: run again without hooks it gives other bits; what is below the floor of that is not seen."
        ),
        "Do the hooks change anything?": (
            "No: the logits with hooks are the bits of those without."
            if inert
            else "YES: the logits with hooks are not those without: what was seen is not what runs."
            if repeats
            else "Not known, for it does not repeat."
        ),
        "Eager or graphs?": "Eager: a compiled model is refused; parts that run past hooks show as never run.",
        "What was looked at?": f"{coverage}.",
        "What was not?": _not_seen(investigation),
        "What counts as wrong?": (
            f"More than {TIMES_FLOOR:g} times the floor, the largest error of that tensor between sound runs of other "
            f"shapes: median {floor.median():.2g}, largest {floor.max():.2g} (relative L2)."
        ),
        "How often is that a false alarm?": _false_alarms(false_alarms),
    }
    if investigation.features is not None:
        questions["Which feature of the service does it need?"] = f"{investigation.features.line}."
    return [Answer(*item) for item in questions.items()]


def _as_fed(outcome: "Outcome") -> bool:
    """Whether the model was given the tokens that the script has, as far as the trace has them."""
    steps = [step["token_ids"] for step in outcome.trace.facts["steps"]]
    feeds = [list(feed.ids) for feed in outcome.script.feeds]
    return len(steps) == len(feeds) and all(
        ids and ids == fed[: len(ids)] for ids, fed in zip(steps, feeds, strict=True)
    )


def _not_seen(investigation: "Investigation") -> str:
    coverage, facts = investigation.coverage, investigation.facts
    parts = [] if facts["in_service"] else ["any service: none was given, so the models ran by themselves"]
    parts += [f"never ran: {', '.join(coverage.never_called)}"] if coverage.never_called else []
    parts += [f"ran and not compared: {', '.join(coverage.uncompared)}"] if coverage.uncompared else []
    held = ", ".join(coverage.with_holder)
    parts += [f"compared with the module that holds them only: {held}"] if held else []
    parts += [f"sound runs are too far apart to judge it: {', '.join(facts['unsteady'])}"] if facts["unsteady"] else []
    parts += [f"not readable: {', '.join(coverage.unread)}"] if coverage.unread else []
    parts += [f"{LEFT_OUT}: {', '.join(coverage.left_out)}"] if coverage.left_out else []
    not_run = investigation.setups().query("verdict == 'not run'")["setup"].tolist()
    parts += [f"set-ups not run: {', '.join(not_run)}"] if not_run else []
    unseen = coverage.parameters - coverage.seen_at_use
    parts += [f"{unseen} parameters of the draft that no operation was seen to read"] if unseen else []
    parts += ["whether the weights that were loaded are the checkpoint's (`specnb divergence preflight`)"]
    parts += [f"positions from {coverage.tokens} on"]
    return "; ".join(parts) + "."


def _false_alarms(measured: tuple[int, int] | None) -> str:
    if measured is None:
        return "Not known here: `tests/benchmarks/divergence_score` measures it on controls."
    share = Share.of(*measured)
    return f"{share} controls were called divergent (at most {share.high:.1%} at 95 %)."


def earliest(investigation: "Investigation", k: int = EARLIEST) -> pd.DataFrame:
    """The first `k` wrong tensors with what they need to be believed, the first in time first.

    Columns of `Investigation.nodes`, and `in_error`, the largest error of what that module was given, `cosine` at the
    worst token, and `reads`, the parameters that its operations read: those of others in full.
    """
    nodes, bad = investigation.nodes().head(k), investigation.case.bad
    if bad is None:
        return nodes.assign(in_error=[], cosine=[], reads=[])
    given = nodes["module"].map(bad.errors[bad.errors["role"] == "in"].groupby("at")["error"].max())
    itself = (nodes["role"] == "in") & (nodes["at"] == nodes["module"])  # what was given is what is wrong
    # by the law of cosines: |b|^2 = |a|^2 (error^2 + 2 gain - 1), and gain = |b| / |a| cosine
    squared = nodes["error"] ** 2 + 2 * nodes["gain"] - 1
    discrete = errors.nodes(bad.wrong).head(k)["discrete"].astype(bool)
    cosine = nodes["gain"] / np.sqrt(squared.where((squared > 0) & ~discrete))
    params = bad.trace.params
    reads = [_reads(params[params["module"] == module]) for module in nodes["module"]]
    return nodes.assign(in_error=given.mask(itself), cosine=cosine, reads=reads)


def _reads(params: pd.DataFrame) -> str:
    once = params.drop_duplicates(["owner", "owner_path"])
    of_draft = once[once["owner"] == "draft"]
    foreign = [f"{row.owner}:{row.owner_path}" for row in once[once["owner"] != "draft"].itertuples()]
    return ", ".join([*foreign, *([f"{len(of_draft)} of its own"] if len(of_draft) else [])]) or "no parameter"


def setups(investigation: "Investigation") -> pd.DataFrame:
    """`Investigation.setups` to be read: nothing is said of what was not counted."""
    table, counts = investigation.setups(), ["n_wrong", "foreign"]
    return table.assign(**table[counts].astype("string").fillna(""))


def cells(investigation: "Investigation", setup: str) -> pd.DataFrame:
    """What is behind each place of the heat map: by module and position the tensor that is farthest over its floor.

    Columns: module, position, at, role, name, error, floor, gain. Raises InputError for a set-up that was not run.
    """
    rows = investigation.errors(setup)
    worst = rows["ratio"].fillna(0).groupby([rows["module"], rows["position"]]).idxmax()
    columns = ["module", "position", "at", "role", "name", "error", "floor", "gain"]
    return rows.loc[worst, columns].reset_index(drop=True)


class Group(NamedTuple):
    """Layers that share a block table, and the blocks that a first sequence gets in a fresh pool."""

    gid: int
    model: str
    kind: str
    layers: int
    first_block: int
    blocks: int

    @property
    def first_slot(self) -> int:
        return self.first_block * BLOCK_SIZE


def allocate(models: Mapping[str, Mapping[str, int]], tokens: int, *, group_size: int | None = None) -> list[Group]:
    """The groups of all models, target first, and where correct allocation puts a first sequence of `tokens` tokens.

    In vLLM layers of one kind share a block table by groups of equal size; block 0 is the null block that nobody
    writes; the groups of all models of a process draw their blocks from one pool. Position p lies in slot
    block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE. So a draft beside another target sits in other slots,
    and that is right: raw slot numbers are never compared. The draft's first slot beside a larger target:

    >>> models = {"target": {"full": 18, "sliding": 18}, "draft": {"full": 12, "sliding": 12}}
    >>> next(group.first_slot for group in allocate(models, tokens=80) if group.model == "draft")
    336

    `models`: by name, the number of attention layers of each kind. `group_size` layers share a group; None is vLLM's
    choice, the smallest number of layers of one kind in any model. A kind whose layers it does not divide has a last
    group that is not full.
    """
    size = group_size or min(n for kinds in models.values() for n in kinds.values())
    blocks, groups = -(-tokens // BLOCK_SIZE), []
    for model, kinds in models.items():
        for kind, n in kinds.items():
            for start in range(0, n, size):
                first = 1 + len(groups) * blocks  # block 0 is nobody's
                groups.append(Group(len(groups), model, kind, min(size, n - start), first, blocks))
    return groups


def arithmetic(groups: Sequence[Group]) -> pd.DataFrame:
    """The allocation as a table: gid, model, kind, layers, blocks, block_table, first_slot, and the sum in words."""
    rows = [
        {
            "gid": g.gid, "model": g.model, "kind": g.kind, "layers": g.layers, "blocks": g.blocks,
            "block_table": f"{g.first_block}..{g.first_block + g.blocks - 1}", "first_slot": g.first_slot,
            "sum": f"(1 + {g.gid} groups x {g.blocks} blocks) x {BLOCK_SIZE} = {g.first_slot}",
        }
        for g in groups
    ]  # fmt: skip
    return pd.DataFrame(rows)


def slots() -> pd.DataFrame:
    """The case's KV slots by arithmetic: where correct allocation puts each group, beside either target.

    The draft's first slot is 336 beside gpt-oss-120b and 176 beside a second gpt-oss-20b: other slots are no evidence.
    """
    tables = []
    for target in GPT_OSS:
        models = {f"target {target}": GPT_OSS[target], "draft 20b": GPT_OSS["20b"]}
        groups = allocate(models, CASE_TOKENS, group_size=CASE_GROUP)
        tables.append(arithmetic(groups).assign(beside=f"gpt-oss-{target}"))
    both = pd.concat(tables, ignore_index=True)
    return both[["beside", *(name for name in both.columns if name != "beside")]]


def text(investigation: "Investigation", false_alarms: tuple[int, int] | None = None) -> str:
    """The report as plain text: the verdict line first, ready to be printed."""
    parts = [investigation.line, ""]
    parts += [f"{item.question} {item.answer}" for item in answers(investigation, false_alarms)]
    parts += ["", "Set-ups", setups(investigation).to_string(index=False)]
    if investigation.case.bad is not None:
        nodes = earliest(investigation).drop(columns=["at", "call", "reads"])
        parts += ["", "Earliest divergences", nodes.to_string(index=False, float_format=lambda value: f"{value:.4g}")]
        parts += ["", "Causes, likeliest first", *_causes(investigation)]
    return "\n".join(parts) + "\n"


def _causes(investigation: "Investigation") -> Iterator[str]:
    for cause in investigation.causes:
        if cause.for_it:
            yield f"{cause.name} ({cause.score:+.1f}): {'; '.join(cause.for_it)}"
            if cause.against_it:
                yield f"  against it: {'; '.join(cause.against_it)}"
            yield f"  seen before: {', '.join(cause.issues)}; next: {cause.next_experiment}"


def write_json(investigation: "Investigation", path: Path, more: Mapping[str, object] | None = None) -> Path:
    """Write `Investigation.document()`, with `more` beside its keys, to `path` in one step, and return it."""
    content = json.dumps(investigation.document() | dict(more or {}), indent=1, allow_nan=False)
    write_atomic(path, f"{content}\n".encode())
    return Path(path)


def published_score() -> dict[str, Any]:
    """The score that `tests/benchmarks/divergence_score` writes. Raises InputError outside a checkout."""
    return read_json(project_dir() / "data" / "divergence" / "score.json", SCORE_BYTES)


def published_alarms() -> tuple[int, int] | None:
    """Of the published score: false alarms of the lab, and controls; None where there is no score."""
    with contextlib.suppress(InputError):
        lab = next(row for row in published_score()["by_tool"] if row["tool"] == "lab")
        return int(lab["alarms"]), int(lab["controls"])
    return None
