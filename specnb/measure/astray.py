"""What a draft model would say behind its wrong drafts, followed no further than somebody asks.

Live, such drafts are made and thrown away. A replay needs them only to know how many a controller that reads drafts
would have made, and they are the dearest part of a recording: single steps, on a path that no other round shares.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heapreplace

from specnb.decode.control import Belief
from specnb.decode.sampling import argmax
from specnb.lm.base import LanguageModel
from specnb.measure.replay import Step
from specnb.records import Generation


class Astray:
    """Paths of greedy drafts that leave `made`: path i starts with the wrong draft for token i, if there is one.

    `model` holds true tokens of `made` alone, and nobody else uses it meanwhile: where a path starts is found by
    rewinding. The last path, one more than there are tokens, is behind the last token. Asking from the front to the
    end feeds every true token once.
    """

    def __init__(self, model: LanguageModel, made: Generation, wrong: Sequence[int | None], width: int) -> None:
        """`wrong[i]` is the draft for token i where it is wrong; true tokens are fed `width` at once, as live."""
        self._model, self._made, self._width = model, made, width
        self._drafts = [[] if draft is None else [draft] for draft in wrong]
        self._starts = list(range(len(wrong)))  # generated tokens in front of each path
        if 0 < len(wrong) == len(made.token_ids):
            self._drafts.append([made.token_ids[-1]] if wrong[-1] is None else [])  # a kept draft, and more behind it
            self._starts.append(len(wrong) - 1)
        self._beliefs: list[list[Belief]] = [[] for _ in self._drafts]
        self._on, self._fed = -1, 0  # the path that the state is on, and how many of its drafts it holds

    @property
    def beliefs(self) -> tuple[tuple[Belief, ...], ...]:
        """What was asked for: one row a draft, for every path."""
        return tuple(map(tuple, self._beliefs))

    def follow_all(self, offered: Sequence[int]) -> None:
        """Follow every path as far as any round goes: one that starts after i tokens has up to `offered[i]` drafts."""
        for path, (start, drafts) in enumerate(zip(self._starts, self._drafts, strict=True)):
            if drafts and offered[start] > 1:  # of two drafts, the first wrong, one row is behind it
                self.belief(path, offered[start] - 2)

    def belief(self, path: int, depth: int) -> Belief:
        """What the row says that follows `depth` + 1 drafts of a path. Raises what a forward raises."""
        drafts, beliefs = self._drafts[path], self._beliefs[path]
        if depth >= len(beliefs) and path != self._on:
            self._go_to(path)
        while depth >= len(beliefs):
            row = self._model.forward((drafts[self._fed],))[0]
            self._fed += 1
            if self._fed > len(beliefs):  # else the state only catches up
                beliefs.append(Belief.of(row))
                drafts.append(argmax(row))
        return beliefs[depth]

    def _go_to(self, path: int) -> None:
        """True tokens up to the start of the path in the state, and nothing else."""
        true = (*self._made.prompt_ids, *self._made.token_ids[: self._starts[path]])
        self._model.rewind(max(self._fed, self._model.n_past - len(true)))
        self._on, self._fed = path, 0
        for start in range(self._model.n_past, len(true), self._width):
            self._model.forward(true[start : start + self._width], n_logits=1)


def together(walks: Iterable[Iterator[Step]]) -> None:
    """Walk all to their ends, always the one that is furthest behind: what they ask comes in the order of the text."""
    waiting = [(0, index, walk) for index, walk in enumerate(walks)]  # a heap, by where the next round starts
    while waiting:
        _, index, walk = waiting[0]
        step = next(walk, None)
        if step is None:
            heappop(waiting)
        else:
            heapreplace(waiting, (step.at + step.n_accepted + 1, index, walk))
