"""What a draft is fed, the same tokens in every set-up: a prompt, then rounds of which some tokens are taken back.

Set-ups can be compared token by token only if none of them chooses its own: the tokens are given, and the last feed of
every position is the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from specnb.divergence.align import Alignment
from specnb.divergence.trace import ModuleTrace
from specnb.errors import InputError


@dataclass(frozen=True)
class Feed:
    """One forward over `ids`, after which the last `forget` tokens of the state are taken back."""

    ids: tuple[int, ...]
    forget: int = 0


@dataclass(frozen=True)
class Script:
    """Feeds in their order. InputError for an empty one, and where more is taken back than is there."""

    feeds: tuple[Feed, ...]

    def __post_init__(self) -> None:
        held = 0
        for number, feed in enumerate(self.feeds):
            held += len(feed.ids) - feed.forget
            if not feed.ids or feed.forget < 0 or held < 1:
                raise InputError(f"feed {number} of {len(feed.ids)} tokens, {feed.forget} taken back, leaves {held}")
        if not self.feeds:
            raise InputError("a script needs at least one feed: the prompt")

    @classmethod
    def drafting(cls, text: Sequence[int], *, prompt: int, k: int, vocab_size: int, seed: int = 0) -> "Script":
        """`text` as drafted: a prompt, then rounds of `k` steps, in every other one all but the first wrong."""
        rng = np.random.default_rng(seed)
        feeds, at, wrong = [Feed(tuple(text[:prompt]))], prompt, False
        while at < len(text):
            right = 1 if wrong else min(k, len(text) - at)
            drafts = [*text[at : at + right], *rng.integers(0, vocab_size, k - right if wrong else 0).tolist()]
            steps = [Feed((int(token),)) for token in drafts]
            steps[-1] = Feed(steps[-1].ids, len(drafts) - right)
            feeds += steps
            at, wrong = at + right, not wrong
        return cls(tuple(feeds))

    @classmethod
    def blocks(cls, text: Sequence[int], *, width: int) -> "Script":
        """`text` in blocks of `width`: the same tokens in other shapes."""
        return cls(tuple(Feed(tuple(text[at : at + width])) for at in range(0, len(text), width)))

    @cached_property
    def _held(self) -> list[tuple[int, int]]:
        """The last feed and the id of each token that is in the state at the end."""
        held: list[tuple[int, int]] = []
        for number, feed in enumerate(self.feeds):
            held += [(number, token) for token in feed.ids]
            del held[len(held) - feed.forget :]
        return held

    last_feeds = cached_property(lambda script: np.asarray([number for number, _ in script._held]))
    """The feed in which each position of the text came last, `(tokens,)`; positions are counted, not asked for."""
    text = cached_property(lambda script: tuple(token for _, token in script._held))
    """The tokens that are in the state at the end."""

    @cached_property
    def starts(self) -> list[int]:
        """The position of the first token of each feed."""
        return list(accumulate((len(feed.ids) - feed.forget for feed in self.feeds), initial=0))[:-1]

    def align(self, trace: ModuleTrace) -> Alignment:
        """Align a run of this script: its step i is feed i, whatever position it thought.

        `whole` lacks modules that some step did not run. Raises InputError for a trace of other steps.
        """
        lengths = [step["length"] for step in trace.facts["steps"]]
        if lengths != [len(feed.ids) for feed in self.feeds]:  # a service may feed otherwise than it is told
            raise InputError(f"the trace has {len(lengths)} steps of {sum(lengths)} tokens, the script other ones")
        aligned = Alignment(trace, firsts=dict(enumerate(self.starts)))
        aligned.positions, aligned.last_step = np.arange(len(self.text)), self.last_feeds
        aligned.tokens, steps = np.array(self.text), {*self.last_feeds.tolist()}
        ran = {key: {row.step for row in rows} for key, rows in aligned.rows.items()}
        aligned.whole = {key: whole for key, whole in aligned.whole.items() if steps <= ran[key]}
        return aligned


@torch.no_grad()
def feed_script(
    model: Module, script: Script, *, before: Callable[[Feed], None] = lambda feed: None,
    after: Callable[[Feed], None] = lambda feed: None,
) -> list[Tensor]:  # fmt: skip
    """Feed a transformers model with a croppable cache; the logits of each feed, `(tokens, vocab)`."""
    cache, logits, device = None, [], next(model.parameters()).device
    for feed in script.feeds:
        before(feed)
        ids = torch.tensor([feed.ids], device=device)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        if cache is None:
            cache = getattr(out, "past_key_values", None)
            if not hasattr(cache, "crop") or not hasattr(cache, "layers"):
                lack = f"{type(model).__name__} gives no `past_key_values` that can be cropped"
                raise InputError(f"{lack}: write traces of it (specnb divergence capture) and compare those")
            for layer in cache.layers:  # layers of a window forget at once what a crop would need
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
        logits.append(out.logits[0])
        if feed.forget:
            cache.crop(-feed.forget)
        after(feed)
    return logits
