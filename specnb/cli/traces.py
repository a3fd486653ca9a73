"""`specnb divergence capture` and `compare`: what a model computes is written down; two such traces are compared."""

import shlex
from contextlib import closing
from pathlib import Path

from typer import Exit

from specnb.cli.show import Json, complain, facts_of, frame_of, judged, print_result
from specnb.errors import InputError
from specnb.io import comma_list

NEW_TOKENS, MADE_UP = 16, 16
"""Tokens behind the prompt; ids of a prompt that is made up."""


def capture(
    model: str,
    out: Path,
    prompt: str | None = None,
    max_new_tokens: int | None = None,
    tokens: Path | None = None,
    width: int | None = None,
    as_json: Json = False,
) -> None:
    """Feed a model a text in torch, and write down what its modules were given and gave.

    The prompt goes in at once, then the tokens that the model likes best, one by one, also behind the end of a text.
    The run to be compared with it must be fed the same: with --tokens FOLDER of the first trace it is, forward for
    forward, and what was taken back is taken back. Then `compare` says where the two part, and whether it is rounding;
    the same model and tokens in blocks (--width 5) are a sound run for its --sound.

    It is transformers' own code. A GGUF file is opened in torch, too, dequantised: that shows
    transformers' code, not llama.cpp's.
    """
    if tokens and (prompt is not None or max_new_tokens is not None):
        raise InputError(f"--tokens {tokens} says all that is fed: leave --prompt and --max-new-tokens out")
    if width and not tokens:
        raise InputError(f"--width {width}: it divides the text of --tokens into blocks: add --tokens")
    if out.exists():
        raise InputError(f"--out {out} is there: give a new folder, or remove it first")
    from specnb.decode.generate import prompt_ids
    from specnb.divergence.capture import capture as capture_modules
    from specnb.divergence.script import Script, feed, feed_greedily, read_script
    from specnb.lm.load import load
    from specnb.lm.probe import probe_ids
    from specnb.measure.experiment import ProgressBar

    script, stopped = tokens and read_script(tokens), ""
    if width:
        script = Script.blocks(script.text, width=width)
    explain_torch(model)
    opened = load(model, backend="hf", decoder="transformers")
    with closing(opened) as its, capture_modules(its.network) as builder, ProgressBar() as progress:
        builder.facts["opened"] = its.name
        if script:
            feed(its, script, progress)
        else:
            ids = probe_ids(its.vocab.size, MADE_UP) if prompt is None else prompt_ids(its, prompt)
            stopped = feed_greedily(its, ids, NEW_TOKENS if max_new_tokens is None else max_new_tokens, progress)
    trace = builder.trace()
    trace.save(out)
    if stopped:
        complain(stopped)
    facts = trace.facts
    if tokens and tokens.is_dir():
        following = [("compare", tokens, out)]
    else:  # there is no run of the same tokens yet
        following = [("capture", "OTHER-MODEL", "--tokens", out, "--out", "OTHER"), ("compare", out, "OTHER")]
    table = {
        "model": facts["opened"], "engine": "torch", "steps": len(facts["steps"]), "rows": len(trace.tensors),
        "reads": len(trace.params), "n_bytes": sum(file.stat().st_size for file in out.iterdir()),
        "stopped": stopped or None,
    }  # fmt: skip
    lines = [shlex.join(map(str, ("specnb", "divergence", *words))) for words in following]
    token_ids = [step["token_ids"] for step in facts["steps"]]
    document = {"folder": str(out), "modules": facts["modules"], **table, "next": lines, "token_ids": token_ids}
    print_result(as_json, document, facts_of(str(out), table | facts["modules"]), *map("next: {}".format, lines))


def explain_torch(name: str) -> None:
    """Say on stderr that a model whose name is llama.cpp's is opened in torch."""
    from specnb.lm.files import parse

    if parse(name).backend == "llama":
        complain(f"{name} is opened in torch here, dequantised: this shows transformers' code, not llama.cpp's")


def compare(
    reference: Path,
    candidate: Path,
    sound: str | None = None,
    rename: list[str] | None = None,
    as_json: Json = False,
) -> None:
    """Find where two runs of one draft part, from the traces that `capture` wrote, on whatever machine.

    Exit code: 0 nothing but rounding, 1 divergent, 125 inconclusive, or a trace that cannot be read; 2 for options that
    cannot be.
    """
    import pandas as pd

    from specnb.divergence.errors import EXIT, Node
    from specnb.divergence.offline import compare_traces
    from specnb.divergence.trace import ModuleTrace, rename_all

    renames = dict(word.rpartition("=")[::2] for word in rename or ())  # the last one: lookaheads hold some
    if "" in renames:
        raise InputError(f"--rename {' '.join(rename)}: write OLD=NEW, such as '^engine\\.=' to take a prefix away")
    rename_all([""], renames)  # raises for what is no expression, before a trace is read
    with judged():
        more = [ModuleTrace.load(Path(folder)) for folder in (comma_list(sound) if sound else ())]
        both = map(ModuleTrace.load, (reference, candidate))
        comparison = compare_traces(*both, sound=more, rename=renames)
    columns = ["module", "name", "first_token", "n_tokens", "error", "floor", "gain"]
    nodes = pd.DataFrame(comparison.minimal, columns=Node._fields)
    print_result(
        as_json,
        comparison.document(),
        comparison.line,
        f"looked at: {comparison.coverage['says']}",
        frame_of("wrong by themselves, first in time first", nodes[columns]),
        frame_of("parameters that were not read alike", comparison.reads[["module", "read", "says"]]),
    )
    raise Exit(EXIT[comparison.verdict])
