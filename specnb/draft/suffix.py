"""Prompt lookup by the longest suffix of the text that occurred before, with a suffix automaton.

Each state of the automaton (Blumer et al. 1985) stands for the strings that end at the same set of
positions. A token takes amortized O(1) time. The suffix link of the newest state is the longest
suffix of the text that occurred before, as in SAM-Decoding (Hu et al. 2411.10666). By default,
`lookup` compares at most six tokens, so it cannot distinguish earlier positions that differ only
before these. The match length limits the number of copied tokens, as in `lookup`.

A loose match ignores case, and whitespace and underscores around a token's text, as Engram's
compressed tokenizer does: `my_name` matches `myName`, and the tokens after it are copied.
"""

from collections.abc import Mapping
from typing import Any

from specnb.draft.base import Proposal
from specnb.draft.lookup import Copier
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import Vocabulary

ANCESTORS = 8
"""Shorter matches whose last position is updated per token; updating all is slow in loops."""


class SuffixAutomaton:
    """Suffix automaton of the `tokens` so far.

    `match` is (length, end) of the longest suffix that occurred before, where `end` is the position
    after its last occurrence. `same_as` maps a token to the token that represents it in matches.
    """

    def __init__(self, same_as: Mapping[int, int]) -> None:
        self.tokens: list[int] = []
        self._same_as = same_as
        self.match = (0, 0)
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._newest = 0

    def append(self, token: int) -> None:
        """Append a token to the text."""
        self.tokens.append(token)
        token = self._same_as.get(token, token)
        state = self._newest
        new = self._add({}, self._length[self._newest] + 1, len(self.tokens))
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
        """Return the state for the longest string of `state` plus `token`; split one if needed."""
        whole = self._next[state][token]
        if self._length[whole] == self._length[state] + 1:
            return whole
        part = self._add(self._next[whole].copy(), self._length[state] + 1, self._end[whole])
        self._link[part] = self._link[whole]
        self._link[whole] = part
        while state >= 0 and self._next[state].get(token) == whole:
            self._next[state][token] = part
            state = self._link[state]
        return part


class SuffixDrafter(Copier):
    """Copies the tokens after the longest match, at most `max_spec_factor` times its length.

    With a vocabulary as `loose`, tokens match if `fold` maps them to the same token.

    >>> from specnb import generate
    >>> from specnb.lm import toy
    >>> drafted = generate(toy.cyclic(3), [0], drafter=SuffixDrafter(), k=4, max_new_tokens=8)
    >>> [r.draft_ids for r in drafted.rounds]
    [(), (), (), (1, 2, 0, 1)]
    """

    def __init__(self, max_spec_factor: float = 4.0, *, loose: Vocabulary | None = None) -> None:
        super().__init__(max_spec_factor)
        self.name = f"suffix(x{max_spec_factor:g}{', loose' if loose else ''})"
        self._same_as = fold(loose) if loose else {}

    def start(self, tokens):
        self._automaton = SuffixAutomaton(self._same_as)
        self.commit(tokens)

    def propose(self, tokens, k, picker):
        n, start = self._automaton.match
        return Proposal(self.copy(self._automaton.tokens, start, n, k, picker) if n else ())

    def commit(self, tokens):
        for token in tokens[len(self._automaton.tokens) :]:
            self._automaton.append(token)


def fold(vocab: Vocabulary) -> dict[int, int]:
    """Map each token to the first token with the same text.

    Case is ignored, and so are whitespace and underscores around the text.
    """
    first: dict[bytes, int] = {}
    texts = (vocab.piece(token).strip(b" \t\r\n_").lower() for token in range(vocab.size))
    return {token: first.setdefault(text, token) if text else token for token, text in enumerate(texts)}


def suffix_drafter(target: LanguageModel, *, loose: bool = False, **options: Any) -> SuffixDrafter:
    """Return the drafter; with `loose`, tokens match if `fold` maps them to the same token."""
    return SuffixDrafter(loose=target.vocab if loose else None, **options)
