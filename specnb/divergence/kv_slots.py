"""Where a paged KV cache must put the tokens of each group of layers, by arithmetic alone.

In vLLM layers of one kind (full, sliding attention) share a block table by groups of equal size; block 0 is the null
block that nobody writes; the groups of all models of a process draw their blocks from one pool. A draft beside another
target therefore sits in other slots, and that is right: raw slot numbers are never compared. What must hold is that
position p lies in slot block_table[p // block_size] * block_size + p % block_size, and that no two places share a slot.

Where the draft's first slot is beside a larger target:

>>> models = {"target": {"full": 18, "sliding": 18}, "draft": {"full": 12, "sliding": 12}}
>>> next(group.first_slot for group in allocate(models, tokens=80) if group.model == "draft")
336
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

BLOCK_SIZE = 16


class Group(NamedTuple):
    """Layers that share a block table, and the blocks that a first sequence gets in a fresh pool."""

    gid: int
    model: str
    kind: str
    layers: int
    first_block: int
    blocks: int

    @property
    def first_slot(self) -> int:
        return self.first_block * BLOCK_SIZE


def allocate(models: Mapping[str, Mapping[str, int]], tokens: int, *, group_size: int | None = None) -> list[Group]:
    """The groups of all models, target first, and where correct allocation puts a first sequence of `tokens` tokens.

    `models`: by name, the number of attention layers of each kind. `group_size` layers share a group; None is vLLM's
    choice, the smallest number of layers of one kind in any model. A kind whose layers it does not divide has a last
    group that is not full.
    """
    size = group_size or min(n for kinds in models.values() for n in kinds.values())
    blocks, groups = -(-tokens // BLOCK_SIZE), []
    for model, kinds in models.items():
        for kind, n in kinds.items():
            for start in range(0, n, size):
                first = 1 + len(groups) * blocks  # block 0 is nobody's
                groups.append(Group(len(groups), model, kind, min(size, n - start), first, blocks))
    return groups


def arithmetic(groups: Sequence[Group]) -> pd.DataFrame:
    """The allocation as a table: gid, model, kind, layers, blocks, block_table, first_slot, and the sum in words."""
    rows = [
        {
            "gid": g.gid, "model": g.model, "kind": g.kind, "layers": g.layers, "blocks": g.blocks,
            "block_table": f"{g.first_block}..{g.first_block + g.blocks - 1}", "first_slot": g.first_slot,
            "sum": f"(1 + {g.gid} groups x {g.blocks} blocks) x {BLOCK_SIZE} = {g.first_slot}",
        }
        for g in groups
    ]  # fmt: skip
    return pd.DataFrame(rows)
