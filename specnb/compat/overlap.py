"""Two vocabularies side by side: which ids mean the same, and which pieces both have.

Padding rows (ids that no tokenizer produces) are left out: they are no mismatch.
"""

from itertools import islice
from operator import ne
from typing import NamedTuple

from specnb.compat.description import Description

EXAMPLES = 5


class Pieces(NamedTuple):
    """The pieces of one tokenizer, prepared for comparison with many others.

    `known` has each with whether it is a control token: text and control tokens never stand for one another.
    """

    by_id: tuple[bytes, ...]
    known: frozenset[tuple[bytes, bool]]
    padded: int

    @classmethod
    def of(cls, described: Description) -> "Pieces | None":
        """None where only facts are published."""
        if described.vocab is None:
            return None
        by_id = described.vocab.pieces[: described.n_tokens]
        padded = described.vocab_size or described.vocab.size
        control = described.vocab.control
        return cls(by_id, frozenset((piece, i in control) for i, piece in enumerate(by_id) if piece), padded)


class Overlap(NamedTuple):
    """How far two vocabularies agree.

    `first_difference` is the smallest id that both have and that means two things; `n_different` counts these ids from
    0 on; `examples` hold the first few as (id, target's piece, draft's). `only_target`, `only_draft` count ids beyond
    the other's last. `shared` counts pieces that both have, under whatever id; `share_target` and `share_draft` are
    its shares of both vocabularies.
    """

    n_target: int
    n_draft: int
    first_difference: int | None
    n_different: int
    examples: tuple[tuple[int, bytes, bytes], ...]
    shared: int
    share_target: float
    share_draft: float

    @property
    def only_target(self) -> int:
        return max(0, self.n_target - self.n_draft)

    @property
    def only_draft(self) -> int:
        return max(0, self.n_draft - self.n_target)


def overlap(target: Pieces, draft: Pieces) -> Overlap:
    """Compare id by id from 0, and as sets."""
    a, b = target.by_id, draft.by_id
    differ = [] if a == b else [i for i, unequal in enumerate(map(ne, a, b)) if unequal]
    shared = len(target.known) if target.known is draft.known else len(target.known & draft.known)
    examples = tuple((i, a[i], b[i]) for i in islice(differ, EXAMPLES))
    return Overlap(
        len(a), len(b), differ[0] if differ else None, len(differ), examples, shared,
        shared / max(1, len(target.known)), shared / max(1, len(draft.known)),
    )  # fmt: skip
