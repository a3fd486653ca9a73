"""The tokens that a model is fed under capture: another run's tokens, ids, its own text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from specnb.decode.sampling import argmax
from specnb.divergence.script import Feed, Script
from specnb.divergence.trace import read_facts
from specnb.errors import InputError, NonFiniteLogits
from specnb.io import read_text
from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress, silent


def read_script(path: Path) -> Script:
    """Read what a run was fed, from its trace's folder or a file of ids, each line a forward. Raises InputError."""
    return Script(tuple(_fed_before(path) if path.is_dir() else _lines(path)))


def feed(model: LanguageModel, script: Script, progress: Progress = silent) -> None:
    """Feed a script, and take back what it takes back. Raises CapacityError, RewindError."""
    for number, block in enumerate(script.feeds):
        progress(number, len(script.feeds), "forwards")
        model.forward(block.ids)
        if block.forget:
            model.rewind(block.forget)


def feed_greedily(model: LanguageModel, prompt: Sequence[int], n_new: int, progress: Progress = silent) -> str:
    """Feed the prompt, then `n_new` times the likeliest token; why fewer (logits that are no numbers), else ""."""
    logits = model.forward(prompt)
    for number in range(n_new):
        progress(number, n_new, "tokens")
        try:
            token = argmax(logits[-1])
        except NonFiniteLogits as error:
            return f"fed {model.n_past} tokens and no more: {error}"
        logits = model.forward([token])
    return ""


def _lines(path: Path) -> Iterator[Feed]:
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            ids = tuple(map(int, line.replace(",", " ").split()))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: give whole numbers, a line a forward ({error!s:.80})") from error
        if ids:
            yield Feed(ids)


def _fed_before(folder: Path) -> Iterator[Feed]:
    """The forwards of a trace; where one begins before the end of the last, tokens were taken back between them."""
    steps = read_facts(folder).get("steps", [])
    end = 0
    for number, step in enumerate(steps):
        ids, start = step["token_ids"], step["first_position"]
        if step["batch"] != 1 or step["length"] != len(ids) or start > end:
            place = f"forward {number}, {step['batch']} rows of {step['length']} tokens from position {start} on"
            raise InputError(f"{folder}, {place}: only one whole row is fed again, give the ids")
        end = start + len(ids)
        following = steps[number + 1]["first_position"] if number + 1 < len(steps) else end
        yield Feed(tuple(ids), max(end - following, 0))
