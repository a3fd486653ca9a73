"""Two vocabularies id by id: which ids mean the same. (What they share under whatever id is `draft.token_map.overlap`.)

Padding rows (ids that no tokenizer produces) are left out: they are no mismatch.
"""

from itertools import islice
from operator import ne
from typing import NamedTuple

from specnb.draft.token_map import Tokens

EXAMPLES = 5


class IdComparison(NamedTuple):
    """How far two vocabularies agree on what ids mean.

    `first_difference` is the smallest id that both have and that means two things; `n_different` counts these ids from
    0 on; `examples` hold the first few as (id, target's piece, draft's). `only_target`, `only_draft` count ids beyond
    the other's last.
    """

    n_target: int
    n_draft: int
    first_difference: int | None
    n_different: int
    examples: tuple[tuple[int, bytes, bytes], ...]

    @property
    def only_target(self) -> int:
        return max(0, self.n_target - self.n_draft)

    @property
    def only_draft(self) -> int:
        return max(0, self.n_draft - self.n_target)


def compare(target: Tokens, draft: Tokens) -> IdComparison:
    """Compare id by id from 0."""
    a, b = target.by_id, draft.by_id
    differ = [] if a == b else [i for i, unequal in enumerate(map(ne, a, b)) if unequal]
    examples = tuple((i, a[i], b[i]) for i in islice(differ, EXAMPLES))
    return IdComparison(len(a), len(b), differ[0] if differ else None, len(differ), examples)
