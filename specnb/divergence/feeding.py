"""What a model of either engine is fed while it is captured: what another run was fed, ids of a file, its own text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from specnb.decode.sampling import argmax
from specnb.divergence.script import Feed, Script
from specnb.divergence.trace import FACT_BYTES, FACT_VALUES, TORCH
from specnb.errors import CapacityError, InputError, NonFiniteLogits
from specnb.lm.base import LanguageModel
from specnb.lm.bounded_json import Node, read_json, read_text
from specnb.measure.experiment import Progress, silent

IDS_BYTES = 1 << 24
LARGEST = (1 << 31) - 1
"""Of an id, and of a position: what a file may say at most, before a model is there to ask."""


def fed(path: Path) -> Script:
    """What the run was fed whose trace is in a folder, or the ids of a file, each line a forward. Raises InputError."""
    return Script(tuple(_fed_before(path) if path.is_dir() else _lines(path)))


def engine_of(folder: Path) -> str:
    """`Trace.engine` of the trace in a folder. Raises InputError for what is none."""
    return _facts(folder).text("engine") or TORCH


def feed(model: LanguageModel, script: Script, progress: Progress = silent) -> None:
    """Feed a script, and take back what it takes back. Raises CapacityError before anything is fed, RewindError."""
    _require_room(model, max(start + len(one.ids) for start, one in zip(script.starts, script.feeds, strict=True)))
    for number, one in enumerate(script.feeds):
        progress(number, len(script.feeds), "forwards")
        model.forward(one.ids)
        if one.forget:
            model.rewind(one.forget)


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
    steps = _facts(folder).nodes("steps")
    texts = [_ids(step) for step in steps]
    starts = [step.count("first_position", LARGEST) or 0 for step in steps]
    if steps and starts[0]:
        raise steps[0].fault("first_position", starts[0], "what was fed before is not in this trace: give the ids")
    for number, (ids, start) in enumerate(zip(texts, starts, strict=True)):
        end = start + len(ids)
        following = starts[number + 1] if number + 1 < len(starts) else end
        if following > end:
            why = f"the forward before it ends at {end}, and what was fed between them is not in this trace"
            raise steps[number + 1].fault("first_position", following, why)
        yield Feed(ids, end - following)


def _facts(folder: Path) -> Node:
    return read_json(folder / "facts.json", FACT_BYTES, FACT_VALUES).node("facts")


def _ids(step: Node) -> tuple[int, ...]:
    """The ids of a step without the padding that llama.cpp was given behind them."""
    ids = step.get("token_ids", list, "a list of token ids") or []
    batch, length = step.count("batch", LARGEST), step.count("length", LARGEST)
    if batch != 1 or length != len(ids):
        shown = f"{len(ids)} ids of {batch} rows of {length} tokens"
        raise step.fault("token_ids", shown, "one row is fed again, and all its ids must be there")
    if strange := [one for one in ids if type(one) is not int or not 0 <= one <= LARGEST]:
        raise step.fault("token_ids", strange[0], "a token id is a whole number from 0 on")
    return tuple(ids[: len(ids) - (step.count("padding", len(ids)) or 0)])
