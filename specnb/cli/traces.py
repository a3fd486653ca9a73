"""`specnb divergence capture` and `compare`: what a model computes is written down; two such traces are compared."""

import shlex
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specnb.cli.show import Json, complain, judged, names, print_frame, print_json
from specnb.errors import InputError
from specnb.io import writing

if TYPE_CHECKING:
    from specnb.divergence.compare import Comparison
    from specnb.divergence.trace import Trace
    from specnb.lm.base import LanguageModel

NEW_TOKENS, MADE_UP = 16, 16
"""Tokens behind the prompt; ids of a prompt that is made up."""
BACKENDS = {"torch": "hf", "llama.cpp": "llama"}
"""What opens a model in an engine."""
SHOWN = 5
"""Modules that never ran, by name."""


def capture(
    model: Annotated[str, typer.Argument(help="zoo name, .gguf file, folder or hf:ORG/NAME; options as ?dtype=…&…")],
    out: Annotated[Path, typer.Option(help="new folder for the trace")],
    prompt: Annotated[str | None, typer.Option(help=f"text to be fed [{MADE_UP} random ids]")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"after the prompt, one by one [{NEW_TOKENS}]", min=0)
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="folder of a trace: feed what it was fed; or a file of ids, a line a forward")
    ] = None,
    width: Annotated[int | None, typer.Option(help="feed the text of --tokens in blocks of so many", min=1)] = None,
    backend: Annotated[str | None, typer.Option(help="hf or llama [as the name says]")] = None,
    modules: Annotated[str | None, typer.Option(help="regular expression in the paths that are written down")] = None,
    full: Annotated[str | None, typer.Option(help="regular expression: of these whole tensors are kept")] = None,
    seed: Annotated[int | None, typer.Option(help="of the random ids [0]")] = None,
    as_json: Json = False,
) -> None:
    """Feed a model a text, and write down what its modules (llama.cpp: nodes of its graph) were given and gave.

    The prompt goes in at once, then the tokens that the model likes best, one by one, also behind the end of a text.
    The run to be compared with it must be fed the same: with --tokens FOLDER of the first trace it is, forward for
    forward, and what was taken back is taken back. Then `compare` says where the two part, and whether it is rounding;
    the same model and tokens in blocks (--width 5) are a sound run for its --sound.

    In torch it is transformers' own attention, with ?exact=true the one that specnb has for bfloat16.
    """
    for name, value in (("--prompt", prompt), ("--max-new-tokens", max_new_tokens), ("--seed", seed)):
        if tokens is not None and value is not None:
            raise InputError(f"--tokens {tokens} says all that is fed: leave {name} {value} out")
    if prompt is not None and seed is not None:
        raise InputError(f"--seed {seed} is that of random ids: leave it or --prompt out")
    if width is not None and tokens is None:
        raise InputError(f"--width {width}: it divides the text of --tokens into blocks: add --tokens")
    from specnb.book.progress import ProgressBar
    from specnb.divergence.capture.feeding import captured, fed, feed, feed_greedily
    from specnb.divergence.script import Script

    script, stopped = None if tokens is None else fed(tokens), ""
    if width is not None:
        script = Script.blocks(script.text, width=width)
    with _new_folder(out) as folder:
        with captured(model, backend, modules=modules, full=full) as (its, builder), ProgressBar() as progress:
            builder.facts["opened"] = its.name
            if script is not None:
                feed(its, script, progress)
            else:
                n_new = NEW_TOKENS if max_new_tokens is None else max_new_tokens
                stopped = feed_greedily(its, _prompt_ids(its, prompt, seed or 0), n_new, progress)
        trace = builder.trace()
        if trace.tensors.empty:
            raise InputError(f"--modules {modules} is in no path of what ran: see those of a capture without it")
        with writing(out):
            trace.save(folder)
    if stopped:
        complain(stopped)
    document = _document(trace, out, stopped, tokens)
    if as_json:
        print_json(document)
    else:
        _show(document)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` when all went well, and vanishes when not; what is in `out` is never touched."""
    target = out.absolute()
    new = target.with_name(f".{target.name}.{uuid.uuid4().hex}.new")
    with writing(out):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise InputError(f"--out {out} is there and not an empty folder: give a new one, or remove it first")
        new.mkdir(parents=True)
    try:
        yield new
        with writing(out):
            new.replace(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _prompt_ids(model: "LanguageModel", prompt: str | None, seed: int) -> tuple[int, ...]:
    if prompt is None:
        import numpy as np

        return tuple(np.random.default_rng(seed).integers(0, model.vocab.size, MADE_UP).tolist())
    from specnb.decode.generate import prompt_ids

    return prompt_ids(model, prompt)


def _document(trace: "Trace", out: Path, stopped: str, same: Path | None) -> dict[str, Any]:
    from specnb.divergence.trace import engine_of

    facts = trace.facts
    before = engine_of(same) if same is not None and same.is_dir() else None
    if before == trace.engine:
        following = [["compare", str(same), str(out)]]
    else:  # there is no run of the same tokens and engine yet
        again = ["--backend", BACKENDS[trace.engine], "--tokens", str(out), "--out", "OTHER"]
        following = [["capture", "OTHER-MODEL", *again], ["compare", str(out), "OTHER"]]
    apart = f"{same} is of {before}, and only runs of one engine are compared"
    return {
        "folder": str(out),
        "model": facts["opened"],
        "engine": trace.engine,
        "modules": facts["modules"],
        "steps": len(facts["steps"]),
        "token_ids": [step["token_ids"] for step in facts["steps"]],
        "rows": len(trace.tensors),
        "reads": len(trace.params),
        "n_bytes": sum(file.stat().st_size for file in out.iterdir()),
        "stopped": stopped or None,
        "apart": apart if before not in (None, trace.engine) else None,
        "next": [shlex.join(["specnb", "divergence", *words]) for words in following],
    }


def _show(document: dict[str, Any]) -> None:
    from specnb.lm.preflight import human_bytes

    seen, n_fed = document["modules"], sum(map(len, document["token_ids"]))
    modules = f"{seen['written']} of {seen['hooked']} modules of {document['model']} ({document['engine']})"
    print(f"{modules}, {document['steps']} forwards of {n_fed} tokens: {document['rows']} tensors, {document['reads']} "
          "parameters read")  # fmt: skip
    if never := seen["never_called"]:
        more = f" and {len(never) - SHOWN} more" if len(never) > SHOWN else ""
        print(f"never ran: {', '.join(path or 'the model itself' for path in never[:SHOWN])}{more}")
    print(f"{human_bytes(document['n_bytes'])} in {document['folder']}")
    if document["apart"]:
        print(document["apart"])
    for command in document["next"]:
        print(f"next: {command}")


def compare(
    reference: Annotated[Path, typer.Argument(help="folder of the trace of a run that is right")],
    candidate: Annotated[Path, typer.Argument(help="folder of the trace of the run that is not")],
    sound: Annotated[
        str | None, typer.Option(help="folders of more runs that are right, by commas: the floors")
    ] = None,
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
        both = {folder: Trace.load(folder) for folder in (reference, candidate)}
        comparison = compare(both[reference], both[candidate], sound=more, rename=renamed)
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
        nodes = pd.DataFrame(comparison.minimal, columns=Node._fields)
        print_frame("wrong by themselves, first in time first", nodes[columns])
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
