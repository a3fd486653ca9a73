"""`specnb divergence`, what stands around an investigation: preflight, traces compared, sampling audited, faults."""

import inspect
import shlex
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specnb.cli.divergence_capture import BACKENDS
from specnb.cli.show import Json, judged, names, print_frame, print_json, print_table
from specnb.errors import InputError

if TYPE_CHECKING:
    from specnb.divergence.compare import Comparison
    from specnb.divergence.sampling import Audit
    from specnb.divergence.trace import Trace


def preflight(
    draft: Annotated[str, typer.Option(help="draft model, or lookup, self, medusa")],
    target: Annotated[str | None, typer.Option(help="target, as specnb.load takes it")] = None,
    k: Annotated[int, typer.Option("--k", help="draft length of the checks")] = 4,
    training: Annotated[
        Path | None, typer.Option(help="checkpoint of trained heads, whose training log is checked", exists=True)
    ] = None,
    as_json: Json = False,
) -> None:
    """What takes seconds and explains most zero acceptances; exit code 1 if a check fails.

    Weights against the files they came from, tied heads, RoPE, quantisation and sampling defaults, whether the drafter
    leaves the caller's tokens alone and sees its own drafts, caches after a rejection, the training's learning rate.
    """
    from specnb.divergence.checks.config import table
    from specnb.divergence.preflight import preflight
    from specnb.draft.load import load_drafter
    from specnb.lm.load import load
    from specnb.registry import DRAFTERS

    if draft in DRAFTERS and target is None:
        raise InputError(f"--draft {draft} drafts for a target: add --target")
    with ExitStack() as opened:
        its = None if target is None else load(target)
        if its is not None:
            opened.callback(its.close)
        mine = load_drafter(draft, its, strict=True).drafter if draft in DRAFTERS else load(draft)
        opened.callback(mine.close)
        folders = {f"{role}_folder": _folder(name) for role, name in (("draft", draft), ("target", target)) if name}
        checks = preflight(mine, its, training=training, k=k, **folders)
    if as_json:
        print_json([check._asdict() for check in checks])
    else:
        rows = [
            [check.verdict, check.check, check.evidence + (f"\nremedy: {check.remedy}" if check.remedy else "")]
            for check in table(checks).itertuples()
        ]
        print_table("preflight", ["", "check", "found"], rows)
    raise typer.Exit(1 if any(check.verdict == "fail" for check in checks) else 0)


def compare(
    reference: Annotated[Path, typer.Argument(help="folder of the trace of a run that is right")],
    candidate: Annotated[Path, typer.Argument(help="folder of the trace of the run that is not")],
    sound: Annotated[
        str | None, typer.Option(help="folders of more runs that are right, by commas: the floors")
    ] = None,
    precise: Annotated[Path | None, typer.Option(help="folder of a float32 run of the same draft")] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OLD=NEW", help="in module paths, of all traces: regular expression, and what replaces it"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Where two runs of one draft part, from the traces that `capture` wrote, on whatever machine.

    Exit code: 0 nothing but rounding, 1 divergent, 125 inconclusive, or a trace that cannot be read; 2 for options that
    cannot be.
    """
    import pandas as pd

    from specnb.divergence.compare import compare
    from specnb.divergence.errors import EXIT, Node
    from specnb.divergence.trace import Trace

    renamed = _renamed(rename or [])
    with judged():
        more = [Trace.load(Path(folder)) for folder in names(sound) or ()]
        exact = None if precise is None else Trace.load(precise)
        both = {folder: Trace.load(folder) for folder in (reference, candidate)}
        comparison = compare(both[reference], both[candidate], sound=more, precise=exact, rename=renamed)
    closer = _closer(comparison, both)
    if as_json:
        print_json(comparison.document() | {"next": closer})
    else:
        print(comparison.line)
        print(f"looked at: {comparison.coverage}")
        for doubt in comparison.doubts:
            print(
                f"doubtful: {doubt.module} chose otherwise at {doubt.count} tokens, from position {doubt.position} on"
            )
        columns = ["module", "name", "first_token", "n_tokens", "error", "floor", "gain"]
        print_frame(
            "wrong by themselves, first in time first", pd.DataFrame(comparison.minimal, columns=Node._fields)[columns]
        )
        print_frame("parameters that were not read alike", comparison.reads[["module", "read", "says"]])
        for command in closer:
            print(f"next: {command}")
    raise typer.Exit(EXIT[comparison.verdict])


def _renamed(words: list[str]) -> dict[str, str]:
    """Regular expressions and what replaces them. InputError for what is no such, before a trace is read."""
    from specnb.divergence.trace import canonical_name

    renames = {}
    for word in words:
        old, equals, new = word.rpartition("=")  # the last one: lookaheads have some, and paths have none
        if not (old and equals):
            raise InputError(f"--rename {word}: write OLD=NEW, such as '^engine\\.=' to take a prefix away")
        renames[old] = new
    try:
        canonical_name("", renames)
    except InputError as error:
        raise InputError(f"--rename: {error}") from error
    return renames


def _closer(comparison: "Comparison", traces: "dict[Path, Trace]") -> list[str]:
    """The commands that keep whole what is wrong or doubtful, of either run, fed what it was fed; none for nothing."""
    if not (comparison.minimal or comparison.doubts):
        return []
    roles = zip(("REFERENCE", "CANDIDATE"), traces.items(), strict=False)  # one, where a run is compared with itself
    return [
        shlex.join([
            "specnb", "divergence", "capture", f"{role}-MODEL", "--backend", BACKENDS[trace.engine], "--tokens",
            str(folder), "--full", comparison.around(), "--out", f"{role}-IN-FULL",
        ])
        for role, (folder, trace) in roles
        if trace.engine in BACKENDS
    ]  # fmt: skip


def audit(
    target: Annotated[str, typer.Option(help="target, as specnb.load takes it")],
    draft: Annotated[str, typer.Option(help="draft model, or lookup, self, medusa")],
    temperature: Annotated[float, typer.Option(help="0 is greedy: exact checks only")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    k: Annotated[int, typer.Option("--k", help="draft length", min=1)] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="after each prompt", min=1)] = 128,
    prompts: Annotated[int, typer.Option(help="shipped prompts, of all categories in turn", min=1)] = 12,
    seed: Annotated[int, typer.Option(help="of the first prompt's random draws; the next has the next one", min=0)] = 0,
    effect: Annotated[
        float,
        typer.Option(help="smallest fault that must not be missed, as a share of probability; less needs more text"),
    ] = 0.1,
    as_json: Json = False,
) -> None:
    """Decode, note each draft with its rows, and see whether drafts and tokens follow them.

    Exit code: 0 sound, 1 wrong, 125 inconclusive, or a model that does not open; 2 for options that cannot be.
    """
    from specnb.book.progress import ProgressBar
    from specnb.decode.sampling import Sampling
    from specnb.divergence.lossless import audited, in_turn
    from specnb.divergence.sampling import Tally
    from specnb.draft.load import load_drafter
    from specnb.lm.load import load

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    Sampling(**sampling)
    Tally().audit(effect=effect)  # what is wrong whatever the models are is no verdict
    chosen, options = in_turn(prompts), sampling | {"k": k, "max_new_tokens": max_new_tokens}
    with judged(), ProgressBar() as progress, ExitStack() as opened:
        model = opened.enter_context(closing(load(target)))
        drafter = opened.enter_context(closing(load_drafter(draft, model, strict=True).drafter))
        result = audited(model, drafter, chosen, seed=seed, effect=effect, progress=progress, **options)
    if as_json:
        print_json(result.document())
    else:
        _print_audit(result)
    raise typer.Exit(result.exit_code)


def _print_audit(audit: "Audit") -> None:
    import pandas as pd

    print(audit.line)
    panel = pd.DataFrame(audit.panel)
    print_frame("five sums: z counts standard deviations from what the rows promise, and beyond 4 is no accident",
               panel[["name", "n", "z", "p_value", "detectable", "needed", "meaning"]])  # fmt: skip
    print(
        f"detectable: the share of probability that these positions would have shown to be misplaced; needed: how many "
        f"positions would show {audit.effect:g}"
    )
    flaws = [(kind, count, first.position, first.says) for kind, (count, first) in audit.flaws.items()]
    print_frame("what cannot be", pd.DataFrame(flaws, columns=["check", "times", "first", "what"]))
    print(
        f"of {audit.n} positions {audit.replayed} were replayed with their random numbers, of {audit.exact} the token "
        f"was checked without statistics; {audit.repeated} repeated prefixes were left out"
    )


def faults(as_json: Json = False) -> None:
    """The planted faults: their cause, the module that must be found first, the upstream issue."""
    from specnb.divergence.faults import FAULTS
    from specnb.divergence.pair import pair

    models, rows = pair(), []
    for name, make in FAULTS.items():
        with make(models.draft, models.target) as fault:
            options = list(inspect.signature(make).parameters.values())[2:]
            rows.append(
                {
                    "fault": name, "cause": fault.cause, "first": fault.first, "note": fault.note,
                    "issues": list(fault.issues), "options": {option.name: option.default for option in options},
                }
            )  # fmt: skip
    if as_json:
        print_json(rows)
        return
    shown = [[r["fault"], r["cause"], f"{_place(r['first'])}\n{r['note']}", "\n".join(r["issues"])] for r in rows]
    print_table("planted faults", ["fault", "cause", "where and what", "upstream"], shown)


def _place(first: str | None) -> str:
    return "nothing is to be found" if first is None else first or "the model's inputs"


def _folder(name: str) -> Path | None:
    """Where the files of a transformers model lie, fetched by the hub's library or before; None for other models."""
    from specnb.lm import embedded
    from specnb.lm.load import parse
    from specnb.registry import DRAFTERS

    spec = None if name in DRAFTERS else parse(name)
    if spec is None or spec.where != "hf":
        return None
    folder = embedded.local_folder(spec.source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    revision = spec.options.get("revision", "main")
    return Path(snapshot_download(spec.source, revision=revision, local_files_only=True))  # it has just been opened
