"""`specnb divergence capture` and `compare`: record a model's computation; compare two traces."""

from contextlib import closing
from pathlib import Path

from typer import Exit

from specnb.cli.show import Json, complain, facts_of, frame_of, judged, print_result
from specnb.errors import InputError
from specnb.io import comma_list

NEW_TOKENS = 16
RANDOM_IDS = 16
"""Length of the prompt if none is given."""


def capture(
    model: str,
    out: Path,
    prompt: str | None = None,
    max_new_tokens: int | None = None,
    tokens: Path | None = None,
    as_json: Json = False,
) -> None:
    """Feed a text to a model in torch, and record the inputs and outputs of its modules.

    The prompt is fed at once, then greedy tokens one by one, even after an end-of-generation token.
    The run to compare with must be fed the same tokens: --tokens FOLDER repeats the forward passes
    and rollbacks of the first trace. `compare` then finds where the two diverge, and whether that
    is rounding. For its --sound, capture the same model with the same tokens in blocks: a file of
    ids has one forward pass per line.

    The forward pass is that of transformers. A GGUF file is also dequantized and loaded in torch,
    which shows transformers' code, not llama.cpp's.
    """
    if tokens and (prompt is not None or max_new_tokens is not None):
        raise InputError(
            f"--tokens {tokens} sets all tokens: leave out --prompt and --max-new-tokens"
        )
    if out.exists():
        raise InputError(f"--out {out} exists: choose a new folder, or remove it")
    from specnb.decode.generate import prompt_ids
    from specnb.divergence.capture import capture as capture_modules
    from specnb.divergence.script import feed, feed_greedily, read_script
    from specnb.lm.load import load
    from specnb.lm.probe import probe_ids
    from specnb.measure.experiment import ProgressBar

    script = read_script(tokens) if tokens else None
    explain_torch(model)
    stopped = ""
    opened = load(model, backend="hf", decoder="transformers")
    with closing(opened), capture_modules(opened.network) as builder, ProgressBar() as progress:
        builder.facts["opened"] = opened.name
        if script:
            feed(opened, script, progress)
        else:
            ids = (
                probe_ids(opened.vocab.size, RANDOM_IDS)
                if prompt is None
                else prompt_ids(opened, prompt)
            )
            n_new = NEW_TOKENS if max_new_tokens is None else max_new_tokens
            stopped = feed_greedily(opened, ids, n_new, progress)
    trace = builder.trace()
    trace.save(out)
    if stopped:
        complain(stopped)
    steps = trace.facts["steps"]
    table = {
        "model": trace.facts["opened"],
        "engine": "torch",
        "steps": len(steps),
        "rows": len(trace.tensors),
        "reads": len(trace.params),
        "n_bytes": sum(file.stat().st_size for file in out.iterdir()),
        "stopped": stopped or None,
    }
    modules = trace.facts["modules"]
    document = {
        "folder": str(out),
        "modules": modules,
        **table,
        "token_ids": [step["token_ids"] for step in steps],
    }
    print_result(as_json, document, facts_of(str(out), table | modules))


def explain_torch(name: str) -> None:
    """Print on stderr that a model with a llama.cpp name is loaded in torch."""
    from specnb.lm.files import parse

    if parse(name).backend == "llama":
        complain(
            f"{name} is dequantized and opened in torch here: "
            "this shows transformers' code, not llama.cpp's"
        )


def compare(
    reference: Path,
    candidate: Path,
    sound: str | None = None,
    rename: list[str] | None = None,
    as_json: Json = False,
) -> None:
    """Find where two runs of one draft model diverge, from traces of `capture`, on any machine.

    Exit code: 0 rounding only, 1 divergent, 125 inconclusive, or if a trace cannot be read; 2 for
    invalid options.
    """
    import pandas as pd

    from specnb.divergence.errors import EXIT, Node
    from specnb.divergence.offline import compare_traces
    from specnb.divergence.trace import ModuleTrace, rename_all

    # at the last "=": lookaheads contain some
    renames = dict(word.rpartition("=")[::2] for word in rename or ())
    if "" in renames:
        raise InputError(
            f"--rename {' '.join(rename)}: write OLD=NEW, such as '^engine\\.=' to remove a prefix"
        )
    rename_all([""], renames)  # reject an invalid expression before reading traces
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
        f"compared: {comparison.coverage['says']}",
        frame_of("wrong by themselves, in order of time", nodes[columns]),
        frame_of(
            "parameters that were read differently", comparison.reads[["module", "read", "says"]]
        ),
    )
    raise Exit(EXIT[comparison.verdict])
