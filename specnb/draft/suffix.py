"""Copy what followed the longest earlier match of the text's end, of any length, found by a suffix automaton.

The automaton (Blumer et al. 1985) has a state for each set of places where the same strings end; a token costs O(1)
amortised. Its newest state's suffix link is the longest end of the text that stood there before: SAM-Decoding
(Hu et al. 2411.10666). `lookup` looks at six tokens at most, and so takes the last of several places where a longer
match would tell which one. Drafts are as long as the match allows, as in `lookup`.

A loose match takes tokens for the same whose text differs in case, white space and underscores only, as
Engram's compressed tokenizer does: `my_name` then finds `myName`, and copies what followed that.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specnb.draft.base import Proposal
from specnb.draft.lookup import Copier
from specnb.io import read_text
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import Vocabulary

BORDER = -1
"""Stands between two texts; no draft holds it."""
ANCESTORS = 8
"""Shorter matches that learn of a newer place, at each token: all of them would take as long as the text loops."""


class SuffixAutomaton:
    """All strings of the `tokens` so far. `match` is the longest end that occurred before, and where it ended last.

    `same_as` gives for each token the one that it is taken for in a match.
    """

    def __init__(self, same_as: Mapping[int, int]) -> None:
        self.tokens: list[int] = []
        self._same_as = same_as
        self.match = (0, 0)
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._newest = 0

    def append(self, token: int) -> None:
        """Extend every string by one token."""
        self.tokens.append(token)
        token = self._same_as.get(token, token)
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

    With `keep` also from earlier texts; `corpus` are token ids to copy from beside, and keeps them, too. With the
    vocabulary as `loose` tokens match that it folds together.

    >>> from specnb import generate
    >>> from specnb.lm import toy
    >>> drafted = generate(toy.cyclic(3), [0], drafter=SuffixDrafter(), k=4, max_new_tokens=8)
    >>> [r.draft_ids for r in drafted.rounds]
    [(), (), (), (1, 2, 0, 1)]
    """

    def __init__(
        self,
        max_spec_factor: float = 4.0,
        *,
        keep: bool = False,
        corpus: Sequence[int] = (),
        loose: Vocabulary | None = None,
    ) -> None:
        super().__init__(max_spec_factor)
        options = {"keep": keep, "corpus": corpus, "loose": loose}
        self.name = (
            f"suffix({', '.join([f'x{max_spec_factor:g}', *(name for name, given in options.items() if given)])})"
        )
        self._keep = keep or bool(corpus)
        self._same_as = fold(loose) if loose else {}
        self._automaton, self._n_committed = SuffixAutomaton(self._same_as), 0
        for token in corpus:
            self._automaton.append(token)

    def start(self, tokens):
        if self._keep:
            self._automaton.append(BORDER)
        else:
            self._automaton = SuffixAutomaton(self._same_as)
        self._n_committed = 0
        self.commit(tokens)

    def propose(self, tokens, k, picker):
        n, start = self._automaton.match
        ids = self.copy(self._automaton.tokens, start, n, k, picker) if n else ()
        return Proposal(ids[: ids.index(BORDER)] if BORDER in ids else ids)

    def commit(self, tokens):
        for token in tokens[self._n_committed :]:
            self._automaton.append(token)
        self._n_committed = len(tokens)


def fold(vocab: Vocabulary) -> dict[int, int]:
    """Return for each token the first whose text is the same but for case, white space and underscores around it."""
    first: dict[bytes, int] = {}
    texts = (vocab.piece(token).strip(b" \t\r\n_").lower() for token in range(vocab.size))
    return {token: first.setdefault(text, token) if text else token for token, text in enumerate(texts)}


def suffix_drafter(
    target: LanguageModel, *, corpus: str | Path = "", loose: bool = False, **options: Any
) -> SuffixDrafter:
    """Make the drafter; `corpus` is a text file, in the target's tokens."""
    ids = target.encode(read_text(corpus)) if corpus else ()
    return SuffixDrafter(corpus=ids, loose=target.vocab if loose else None, **options)
