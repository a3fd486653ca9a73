"""Copy what followed the longest earlier match of the text's end, of any length, found by a suffix automaton.

The automaton (Blumer et al. 1985) has a state for each set of places where the same strings end; a token costs O(1)
amortised. Its newest state's suffix link is the longest end of the text that stood there before: SAM-Decoding
(Hu et al. 2411.10666). `lookup` looks at six tokens at most, and so takes the last of several places where a longer
match would tell which one. Drafts are as long as the match allows, as in `lookup`.
"""

from collections.abc import Sequence
from typing import Any

from specnb.draft.base import Picker, Proposal
from specnb.draft.lookup import Copier
from specnb.lm.base import LanguageModel

ANCESTORS = 8
"""Shorter matches that learn of a newer place, at each token: all of them would take as long as the text loops."""


class SuffixAutomaton:
    """All strings of the `tokens` so far. `match` is the longest end that occurred before, and where it ended last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.match = (0, 0)
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._newest = 0

    def append(self, token: int) -> None:
        """Extend every string by one token."""
        self.tokens.append(token)
        state, new = self._newest, self._add({}, self._length[self._newest] + 1, len(self.tokens))
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = self._target(state, token) if state >= 0 else 0
        self._newest = new
        longest = state = self._link[new]
        self.match = (self._length[longest], self._end[longest])
        for _ in range(ANCESTORS):
            if state <= 0:
                break
            self._end[state] = len(self.tokens)
            state = self._link[state]

    def _add(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def _target(self, state: int, token: int) -> int:
        """Return the state of this state's longest string and `token`, split off where it has longer strings."""
        whole = self._next[state][token]
        if self._length[whole] == self._length[state] + 1:
            return whole
        part = self._add(self._next[whole].copy(), self._length[state] + 1, self._end[whole])
        self._link[part], self._link[whole] = self._link[whole], part
        while state >= 0 and self._next[state].get(token) == whole:
            self._next[state][token] = part
            state = self._link[state]
        return part


class SuffixDrafter(Copier):
    """Copies from the tokens so far, after the longest match, at most `max_spec_factor` times its length.

    >>> from specnb import generate
    >>> from specnb.lm import toy
    >>> drafted = generate(toy.cyclic(3), [0], drafter=SuffixDrafter(), k=4, max_new_tokens=8)
    >>> [r.draft_ids for r in drafted.rounds]
    [(), (), (), (1, 2, 0, 1)]
    """

    def __init__(self, max_spec_factor: float = 4.0) -> None:
        super().__init__(max_spec_factor)
        self.name = f"suffix(x{max_spec_factor:g})"
        self._automaton = SuffixAutomaton()

    def start(self, tokens: Sequence[int]) -> None:
        self._automaton = SuffixAutomaton()
        self.commit(tokens)

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        n, start = self._automaton.match
        return Proposal(self.copy(self._automaton.tokens, start, n, k, picker) if n else ())

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens[len(self._automaton.tokens) :]:
            self._automaton.append(token)


def suffix_drafter(_target: LanguageModel, **options: Any) -> SuffixDrafter:
    return SuffixDrafter(**options)
