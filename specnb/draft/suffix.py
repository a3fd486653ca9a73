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
from dataclasses import dataclass

from specnb.draft.base import Proposal
from specnb.draft.lookup import FACTOR, Copier
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import Vocabulary

ANCESTORS = 8
"""Shorter matches whose last position is updated per token; updating all is slow in loops."""


@dataclass(eq=False, repr=False)
class SuffixState:
    """The strings that end at the same positions: the longest has `length` tokens.

    `following` are the states after one more token, `end` is the position after the last
    occurrence, and `link` is the state of the longest suffix that ends at more positions.
    """

    following: dict[int, "SuffixState"]
    length: int
    end: int
    link: "SuffixState | None" = None


class SuffixAutomaton:
    """Suffix automaton of the `tokens` so far.

    `match` is (length, end) of the longest suffix that occurred before, where `end` is the position
    after its last occurrence. `same_as` maps a token to the token that represents it in matches.
    """

    def __init__(self, same_as: Mapping[int, int]) -> None:
        self.tokens: list[int] = []
        self.match = (0, 0)
        self._same_as = same_as
        self._root = self._newest = SuffixState({}, 0, 0)

    def append(self, token: int) -> None:
        """Append a token to the text."""
        self.tokens.append(token)
        token = self._same_as.get(token, token)
        state = self._newest
        new = SuffixState({}, state.length + 1, len(self.tokens))
        while state and token not in state.following:
            state.following[token] = new
            state = state.link
        longest = new.link = _extend(state, token) if state else self._root
        self._newest = new
        self.match = (longest.length, longest.end)
        for _ in range(ANCESTORS):
            if longest.link is None:
                break
            longest.end = len(self.tokens)
            longest = longest.link


def _extend(state: SuffixState, token: int) -> SuffixState:
    """Return the state for the longest string of `state` plus `token`; split one if needed."""
    whole = state.following[token]
    if whole.length == state.length + 1:
        return whole
    part = SuffixState(whole.following.copy(), state.length + 1, whole.end, whole.link)
    whole.link = part
    shorter: SuffixState | None = state
    while shorter and shorter.following.get(token) is whole:
        shorter.following[token] = part
        shorter = shorter.link
    return part


class SuffixDrafter(Copier):
    """Copies the tokens after the longest match, at most FACTOR times its length.

    With a vocabulary as `loose`, tokens match if `fold` maps them to the same token.

    >>> from specnb import generate
    >>> from specnb.lm import toy
    >>> drafted = generate(toy.cyclic(3), [0], drafter=SuffixDrafter(), k=4, max_new_tokens=8)
    >>> [r.draft_ids for r in drafted.rounds]
    [(), (), (), (1, 2, 0, 1)]
    """

    def __init__(self, *, loose: Vocabulary | None = None) -> None:
        self.name = f"suffix(x{FACTOR}{', loose' if loose else ''})"
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
    return {
        token: first.setdefault(text, token) if text else token for token, text in enumerate(texts)
    }


def suffix_drafter(target: LanguageModel, *, loose: bool = False) -> SuffixDrafter:
    """Return the drafter; with `loose`, tokens match if `fold` maps them to the same token."""
    return SuffixDrafter(loose=target.vocab if loose else None)
