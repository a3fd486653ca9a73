"""`specnb divergence capture`: a model is fed a text, and what it computes is written down as a trace for `compare`."""

import shlex
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specnb.cli.show import Json, complain, print_json
from specnb.errors import InputError
from specnb.io import writing

if TYPE_CHECKING:
    from specnb.divergence.capture import TraceBuilder
    from specnb.divergence.trace import Trace
    from specnb.lm.base import LanguageModel

    Captured = tuple[LanguageModel, TraceBuilder]

NEW_TOKENS = 16
MADE_UP = 16
"""Ids of a prompt that is made up."""
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
    _require_agreeing(prompt, max_new_tokens, tokens, width, seed)
    from specnb.book.progress import ProgressBar
    from specnb.divergence.feeding import fed, feed, feed_greedily
    from specnb.divergence.script import Script

    script, stopped = None if tokens is None else fed(tokens), ""
    if width is not None:
        script = Script.blocks(script.text, width=width)
    with _new_folder(out) as folder:
        with _opened(model, backend, modules=modules, full=full) as (its, builder), ProgressBar() as progress:
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


def _require_agreeing(
    prompt: str | None, n_new: int | None, tokens: Path | None, width: int | None, seed: int | None
) -> None:
    for name, value in (("--prompt", prompt), ("--max-new-tokens", n_new), ("--seed", seed)):
        if tokens is not None and value is not None:
            raise InputError(f"--tokens {tokens} says all that is fed: leave {name} {value} out")
    if prompt is not None and seed is not None:
        raise InputError(f"--seed {seed} is that of random ids: leave it or --prompt out")
    if width is not None and tokens is None:
        raise InputError(f"--width {width}: it divides the text of --tokens into blocks: add --tokens")


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


@contextmanager
def _opened(name: str, backend: str | None, **chosen: str | None) -> Iterator["Captured"]:
    """The model, opened by the engine of its name or by `backend`, and what writes its forwards down."""
    from specnb.lm.load import parse

    spec = parse(name, **({"backend": backend} if backend else {}))
    # specnb's own attention would stand in for the one that is under suspicion
    extra = {"exact": False} if spec.backend == "hf" and "exact" not in spec.options else {}
    with {"hf": _in_torch, "llama": _in_llama}[spec.backend](name, chosen, backend=spec.backend, **extra) as both:
        yield both


@contextmanager
def _in_torch(name: str, chosen: dict[str, str | None], **options: Any) -> Iterator["Captured"]:
    from specnb.divergence.capture import capture
    from specnb.lm.load import load

    with closing(load(name, **options)) as model, capture(model.network, **chosen) as builder:
        yield model, builder


@contextmanager
def _in_llama(name: str, chosen: dict[str, str | None], **options: Any) -> Iterator["Captured"]:
    from specnb.divergence.gguf_capture import capture_gguf

    with capture_gguf(name, **chosen, **options) as captured:
        yield captured.model, captured.builder


def _prompt_ids(model: "LanguageModel", prompt: str | None, seed: int) -> tuple[int, ...]:
    if prompt is None:
        import numpy as np

        return tuple(np.random.default_rng(seed).integers(0, model.vocab.size, MADE_UP).tolist())
    from specnb.decode.generate import prompt_ids

    return prompt_ids(model, prompt)


def _document(trace: "Trace", out: Path, stopped: str, same: Path | None) -> dict[str, Any]:
    from specnb.divergence.feeding import engine_of

    facts = trace.facts
    before = engine_of(same) if same is not None and same.is_dir() else None
    apart = before not in (None, trace.engine)
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
        "apart": f"{same} is of {before}, and only runs of one engine are compared" if apart else None,
        "next": [
            shlex.join(["specnb", "divergence", *words])
            for words in _next(str(out), BACKENDS[trace.engine], None if apart or before is None else str(same))
        ],
    }


def _next(out: str, backend: str, other: str | None) -> list[list[str]]:
    """The commands that come next; where there is no `other` run of the same tokens and engine yet, one is made."""
    if other is not None:
        return [["compare", other, out]]
    return [
        ["capture", "OTHER-MODEL", "--backend", backend, "--tokens", out, "--out", "OTHER"],
        ["compare", out, "OTHER"],
    ]


def _show(document: dict[str, Any]) -> None:
    from specnb.lm.preflight import human_bytes

    seen, fed = document["modules"], sum(map(len, document["token_ids"]))
    print(
        f"{seen['written']} of {seen['hooked']} modules of {document['model']} ({document['engine']}), "
        f"{document['steps']} forwards of {fed} tokens: {document['rows']} tensors, {document['reads']} parameters read"
    )
    if never := seen["never_called"]:
        more = f" and {len(never) - SHOWN} more" if len(never) > SHOWN else ""
        print(f"never ran: {', '.join(path or 'the model itself' for path in never[:SHOWN])}{more}")
    print(f"{human_bytes(document['n_bytes'])} in {document['folder']}")
    if document["apart"]:
        print(document["apart"])
    for command in document["next"]:
        print(f"next: {command}")
