"""What a model of either engine is fed while it is captured: what another run was fed, ids of a file, its own text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from specnb.decode.sampling import argmax
from specnb.divergence.script import Feed, Script
from specnb.divergence.trace import TORCH, read_header
from specnb.errors import CapacityError, InputError, NonFiniteLogits
from specnb.io import read_text
from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress, silent

IDS_BYTES = 1 << 24
LARGEST = (1 << 31) - 1
"""Of an id, and of a position: what a file may say at most, before a model is there to ask."""


def fed(path: Path) -> Script:
    """What the run was fed whose trace is in a folder, or the ids of a file, each line a forward. Raises InputError."""
    return Script(tuple(_fed_before(path) if path.is_dir() else _lines(path)))


def engine_of(folder: Path) -> str:
    """`Trace.engine` of the trace in a folder. Raises InputError for what is none."""
    return read_header(folder)["facts"].get("engine", TORCH)


def feed(model: LanguageModel, script: Script, progress: Progress = silent) -> None:
    """Feed a script, and take back what it takes back. Raises CapacityError before anything is fed, RewindError."""
    _require_room(model, max(start + len(block.ids) for start, block in zip(script.starts, script.feeds, strict=True)))
    for number, block in enumerate(script.feeds):
        progress(number, len(script.feeds), "forwards")
        model.forward(block.ids)
        if block.forget:
            model.rewind(block.forget)


def feed_greedily(model: LanguageModel, prompt: Sequence[int], n_new: int, progress: Progress = silent) -> str:
    """Feed the prompt, then `n_new` times the likeliest token, end-of-generation tokens too; why fewer, else "".

    Logits that are no numbers end it without an error: where they come from is what a trace is for.
    """
    _require_room(model, len(prompt) + n_new)
    logits = model.forward(prompt)
    for number in range(n_new):
        progress(number, n_new, "tokens")
        try:
            token = argmax(logits[-1])
        except NonFiniteLogits as error:
            return f"fed {model.n_past} tokens and no more: {error}"
        logits = model.forward([token])
    return ""


def _require_room(model: LanguageModel, n: int) -> None:
    if n > model.caps.n_ctx:
        raise CapacityError(f"{n} tokens are to be fed, and {model.name} holds {model.caps.n_ctx}: give ?n_ctx={n}")


def _lines(path: Path) -> Iterator[Feed]:
    for number, line in enumerate(read_text(path, IDS_BYTES).splitlines(), 1):
        words = line.replace(",", " ").split()
        for word in words:
            if not (word.isascii() and word.isdigit() and len(word) <= len(str(LARGEST)) and int(word) <= LARGEST):
                raise InputError(
                    f"{path}, line {number}: {word[:40]!r} is no token id: give whole numbers with blanks or commas "
                    "between them, a line for each forward, or the folder of a trace"
                )
        if words:
            yield Feed(tuple(map(int, words)))


def _fed_before(folder: Path) -> Iterator[Feed]:
    """The forwards of a trace; where one begins before the end of the last, tokens were taken back between them."""
    steps = read_header(folder)["facts"].get("steps", [])
    starts = [step["first_position"] for step in steps]
    if any(starts[:1]):
        raise InputError(f"{folder} begins at position {starts[0]}, and what was fed before is not in it: give the ids")
    for number, (step, start) in enumerate(zip(steps, starts, strict=True)):
        ids = step["token_ids"]
        if step["batch"] != 1 or step["length"] != len(ids):
            shown = f"{len(ids)} ids of {step['batch']} rows of {step['length']} tokens"
            raise InputError(
                f"{folder}, forward {number}: {shown}: one row is fed again, and all its ids must be there"
            )
        end = start + len(ids) - step.get("padding", 0)
        following = starts[number + 1] if number + 1 < len(starts) else end
        if following > end:
            raise InputError(
                f"{folder}, forward {number + 1} begins at {following} and the one before it ends at {end}: what was "
                "fed between them is not in this trace"
            )
        yield Feed(tuple(ids[: end - start]), end - following)
