"""The tokens that a draft is fed, the same in every setup: a prompt, then rounds with rollbacks.

Setups can be compared token by token only if none of them chooses its own tokens. A script fixes
them; the text has the token fed last at each position.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from specnb.decode.sampling import argmax
from specnb.divergence.trace import Alignment, ModuleTrace, read_facts
from specnb.errors import InputError, NonFiniteLogits
from specnb.io import read_text
from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress, silent


class Feed(NamedTuple):
    """One forward pass over `ids`, after which the last `forget` tokens are rolled back."""

    ids: tuple[int, ...]
    forget: int = 0


class Script:
    """Feeds in order, and the `text`: the tokens in the state at the end.

    `starts`: the position of the first token of each feed. Raises InputError for an empty script or
    feed, and for a rollback that leaves no token.
    """

    def __init__(self, feeds: Iterable[Feed]) -> None:
        self.feeds = tuple(feeds)
        self.starts, text = [], []
        for number, feed in enumerate(self.feeds):
            self.starts.append(len(text))
            text += feed.ids
            if not feed.ids or not 0 <= feed.forget < len(text):
                rollback = f"a rollback of {feed.forget} of {len(text)}"
                raise InputError(f"feed {number}: got {len(feed.ids)} tokens and {rollback}")
            del text[len(text) - feed.forget :]
        if not text:
            raise InputError("a script needs at least one feed: the prompt")
        self.text = tuple(text)

    @classmethod
    def drafting(
        cls, text: Sequence[int], *, prompt: int, k: int, vocab_size: int, seed: int = 0
    ) -> "Script":
        """Feed a prompt, then rounds of `k` tokens; every other round rejects all but the first."""
        rng = np.random.default_rng(seed)
        feeds = [Feed(tuple(text[:prompt]))]
        at = prompt
        wrong = False
        while at < len(text):
            right = 1 if wrong else min(k, len(text) - at)
            n_wrong = k - right if wrong else 0
            *first, last = *text[at : at + right], *rng.integers(0, vocab_size, n_wrong).tolist()
            feeds += [*(Feed((token,)) for token in first), Feed((last,), n_wrong)]
            at = at + right
            wrong = not wrong
        return cls(feeds)

    @classmethod
    def blocks(cls, text: Sequence[int], *, width: int) -> "Script":
        """Feed `text` in blocks of `width`: the same tokens in other shapes."""
        return cls(Feed(tuple(text[at : at + width])) for at in range(0, len(text), width))

    def align(self, trace: ModuleTrace) -> Alignment:
        """Align a run of this script: its step i is feed i, whatever position the run assumed.

        `whole` omits tensors that are missing in a step of the final text. Raises InputError for a
        trace with other steps.
        """
        lengths = [step["length"] for step in trace.facts["steps"]]
        if lengths != [len(feed.ids) for feed in self.feeds]:  # a service may split or merge feeds
            raise InputError(
                f"got a trace of {len(lengths)} steps, {sum(lengths)} tokens: "
                "not those of the script"
            )
        aligned = Alignment(trace, firsts=self.starts, text=self.text)
        steps = {*aligned.last_step}
        aligned.whole = {
            key: whole
            for key, whole in aligned.whole.items()
            if steps <= {row.step for row in aligned.rows[key]}
        }
        return aligned


@torch.no_grad()
def feed_script(
    model: Module,
    script: Script,
    *,
    before: Callable[[Feed], None] = lambda feed: None,
    after: Callable[[Feed], None] = lambda feed: None,
) -> list[Tensor]:
    """Feed a Transformers model; return logits `(tokens, vocab)` per feed, on the CPU.

    Raises InputError without a cache that can be cropped.
    """
    cache = None
    logits = []
    device = next(model.parameters()).device
    for feed in script.feeds:
        before(feed)
        ids = torch.tensor([feed.ids], device=device)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        if cache is None:
            cache = getattr(out, "past_key_values", None)
            if not hasattr(cache, "crop"):
                lack = f"{type(model).__name__} gives no `past_key_values` that can be cropped"
                raise InputError(
                    f"{lack}: capture traces of it (specnb divergence capture) and compare them"
                )
            for layer in cache.layers:  # or sliding-window layers discard what a crop needs
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
        logits.append(out.logits[0].cpu())
        if feed.forget:
            cache.crop(-feed.forget)
        after(feed)
    return logits


# --- for `capture`: tokens of another run, ids, greedy text ---------------------------------------


def read_script(path: Path) -> Script:
    """Read a trace folder, or a file of ids with one forward pass per line. Raises InputError."""
    return Script(_fed_before(path) if path.is_dir() else _lines(path))


def feed(model: LanguageModel, script: Script, progress: Progress = silent) -> None:
    """Feed a script, including its rollbacks. Raises CapacityError and RewindError."""
    for number, block in enumerate(script.feeds):
        progress(number, len(script.feeds), "forwards")
        model.forward(block.ids)
        if block.forget:
            model.rewind(block.forget)


def feed_greedily(
    model: LanguageModel, prompt: Sequence[int], n_new: int, progress: Progress = silent
) -> str:
    """Feed the prompt, then `n_new` greedy tokens; return why it stopped early (NaN), else ""."""
    logits = model.forward(prompt)
    for number in range(n_new):
        progress(number, n_new, "tokens")
        try:
            token = argmax(logits[-1])
        except NonFiniteLogits as error:
            return f"stopped after {model.n_past} tokens: {error}"
        logits = model.forward([token])
    return ""


def _lines(path: Path) -> Iterator[Feed]:
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            ids = tuple(map(int, line.replace(",", " ").split()))
        except ValueError as error:
            expected = f"expected token ids, one forward pass per line ({error!s:.80})"
            raise InputError(f"{path}, line {number}: {expected}") from error
        if ids:
            yield Feed(ids)


def _fed_before(folder: Path) -> Iterator[Feed]:
    """Yield the forward passes of a trace; a step back in position is a rollback."""
    steps = read_facts(folder)["steps"]
    end = 0
    for step, following in zip_longest(steps, steps[1:]):
        ids = step["token_ids"]
        start = step["first_position"]
        if step["batch"] != 1 or step["length"] != len(ids) or start > end:
            rows = f"{step['batch']} rows, {step['length']} tokens from position {start} on"
            raise InputError(
                f"{folder}: forward pass {step['step']} has {rows}, "
                "expected one full row: give the ids"
            )
        end = start + len(ids)
        yield Feed(tuple(ids), max(end - following["first_position"], 0) if following else 0)
