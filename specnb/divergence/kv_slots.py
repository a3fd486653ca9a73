"""Where a paged KV cache must put the tokens of each group of layers, by arithmetic alone.

In vLLM layers of one kind (full, sliding attention) share a block table by groups of equal size; block 0 is the null
block that nobody writes; the groups of all models of a process draw their blocks from one pool. A draft beside another
target therefore sits in other slots, and that is right: raw slot numbers are never compared. What must hold is that
position p lies in slot block_table[p // block_size] * block_size + p % block_size, and that no two places share a slot.

What an engine printed is held against these rules; here a row that lies elsewhere, and a block of two groups:

>>> slot_faults(slots=[80, 81, 83], positions=[0, 1, 2], block_table=[5], group="draft")
[Fault(rule='slot', group='draft', position=2, expected=82, found=83)]
>>> overlaps({"target": [1, 2], "draft": [2, 3]})
[Fault(rule='overlap with target', group='draft', position=0, expected=None, found=2)]

With which group sizes a log that tells of six groups can be explained, and where the draft's first slot then is:

>>> models = [Layers("target", {"full": 18, "sliding": 18}), Layers("draft", {"full": 12, "sliding": 12})]
>>> list(group_sizes_for(models, 6))
[12, 13, 14, 15, 16, 17]
>>> next(group.first_slot for group in allocate(models, tokens=80) if group.model == "draft")
336

Whether two runs' caches hold the same at each position, wherever they hold it (rows by slot; here a row is missing):

>>> cache = np.arange(8.0).reshape(8, 1)
>>> same_content(slots_a=[2, 3], rows_a=cache, slots_b=[0, 1], rows_b=cache[[2, 4]]).tolist()
[True, False]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.errors import InputError

BLOCK_SIZE = 16
NULL_BLOCK = 0
PADDING_SLOT = -1
"""Slot of a row that pads a batch: it is written nowhere."""
MOST = 1 << 20
"""Of layers, blocks and tokens: more is a mistake, and would only be counted slowly."""


@dataclass(frozen=True)
class Layers:
    """A model's attention layers by kind, in the order in which their groups are made: {"full": 18, "sliding": 18}."""

    model: str
    kinds: Mapping[str, int]

    def __post_init__(self) -> None:
        for kind, n in self.kinds.items():
            _whole(f"the number of {kind} layers of {self.model}", n, 1)
        if not self.kinds:
            raise InputError(f"{self.model} has no attention layers: give them by kind, such as {{'full': 12}}")


class Group(NamedTuple):
    """Layers that share a block table, and the blocks that a first sequence gets in a fresh pool."""

    gid: int
    model: str
    kind: str
    layers: int
    first_block: int
    blocks: int
    block_size: int

    @property
    def block_table(self) -> tuple[int, ...]:
        return tuple(range(self.first_block, self.first_block + self.blocks))

    @property
    def first_slot(self) -> int:
        return self.first_block * self.block_size


class Fault(NamedTuple):
    """A rule that does not hold, at which place, with what was expected and what was found."""

    rule: str
    group: str
    position: int
    expected: int | None
    found: int | None


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold that many tokens."""
    return -(-_whole("the number of tokens", tokens, 1) // _whole("the block size", block_size, 1))


def allocate(
    models: Sequence[Layers], tokens: int, *, group_size: int | None = None, block_size: int = BLOCK_SIZE
) -> list[Group]:
    """The groups of all models, target first, and where correct allocation puts a first sequence of `tokens` tokens.

    `group_size` layers share a group; None is vLLM's choice, the smallest number of layers of one kind in any model.
    A kind whose layers it does not divide has a last group that is not full. Raises InputError.
    """
    if not models:
        raise InputError("there is nothing to allocate for: give the layers of at least one model")
    size = min(n for one in models for n in one.kinds.values()) if group_size is None else group_size
    _whole("the group size", size, 1)
    blocks = blocks_for(tokens, block_size)
    groups: list[Group] = []
    for model in models:
        for kind, n in model.kinds.items():
            for start in range(0, n, size):
                gid = len(groups)
                layers = min(size, n - start)
                groups.append(Group(gid, model.model, kind, layers, NULL_BLOCK + 1 + gid * blocks, blocks, block_size))
    return groups


def slot(position: int, block_table: Sequence[int], block_size: int = BLOCK_SIZE) -> int:
    """Slot of a position: block_table[position // block_size] * block_size + position % block_size.

    Raises InputError for a position that the table has no block for.
    """
    at, within = divmod(_whole("a position", position, 0), _whole("the block size", block_size, 1))
    if at >= len(block_table):
        raise InputError(
            f"position {position} needs block {at} of the sequence, but its block table has {len(block_table)}"
        )
    return _whole("a block", block_table[at], 0) * block_size + within


def slot_faults(
    slots: Sequence[int],
    positions: Sequence[int],
    block_table: Sequence[int],
    *,
    block_size: int = BLOCK_SIZE,
    group: str = "",
) -> list[Fault]:
    """Rows of one sequence whose slot breaks a rule, in order of the rows.

    Rules: `slot` (the formula), `null block` (a token in the block that is never read), `bijection` (two positions in
    one slot). A row with PADDING_SLOT is left out, whatever its position. Raises InputError for lists that do not fit.
    """
    if len(slots) != len(positions):
        raise InputError(f"{len(slots)} slots for {len(positions)} positions: each row has one of both")
    _whole("the block size", block_size, 1)
    found: list[Fault] = []
    holder: dict[int, int] = {}
    rows = zip((_index("a slot", one) for one in slots), (_index("a position", one) for one in positions), strict=True)
    for given, position in rows:
        if given == PADDING_SLOT:
            continue
        inside = 0 <= position < len(block_table) * block_size
        expected = slot(position, block_table, block_size) if inside else None
        if given != expected:
            found.append(Fault("slot", group, position, expected, given))
        if given // block_size == NULL_BLOCK:
            found.append(Fault("null block", group, position, expected, given))
        if holder.setdefault(given, position) != position:
            found.append(Fault("bijection", group, position, expected, given))
    return found


def overlaps(block_tables: Mapping[str, Sequence[int]]) -> list[Fault]:
    """Blocks that two groups, or two places of one, hold at once; the null block, which may fill any, is no such.

    A fault carries the place in the later table and the block, as expected (None: nobody else's) and found.
    """
    owner: dict[int, str] = {}
    found: list[Fault] = []
    for name, table in block_tables.items():
        for at, block in enumerate(map(index, table)):
            if block == NULL_BLOCK:
                continue
            if block in owner:
                found.append(Fault(f"overlap with {owner[block]}", name, at, None, block))
            owner.setdefault(block, name)
    return found


def arithmetic(groups: Sequence[Group]) -> pd.DataFrame:
    """The allocation as a table: gid, model, kind, layers, blocks, block_table, first_slot, and the sum in words."""
    rows = [
        {
            "gid": g.gid, "model": g.model, "kind": g.kind, "layers": g.layers, "blocks": g.blocks,
            "block_table": f"{g.first_block}..{g.block_table[-1]}", "first_slot": g.first_slot,
            "sum": f"({NULL_BLOCK + 1} + {g.gid} groups x {g.blocks} blocks) x {g.block_size} = {g.first_slot}",
        }
        for g in groups
    ]  # fmt: skip
    columns = ["gid", "model", "kind", "layers", "blocks", "block_table", "first_slot", "sum"]
    return pd.DataFrame(rows, columns=columns)


def group_sizes_for(models: Sequence[Layers], n_groups: int) -> Iterator[int]:
    """The group sizes with which these models have that many groups: what a log's number of groups leaves open."""
    for size in range(1, max(n for one in models for n in one.kinds.values()) + 1):
        if len(allocate(models, 1, group_size=size)) == n_groups:
            yield size


def same_content(slots_a: Sequence[int], rows_a: np.ndarray, slots_b: Sequence[int], rows_b: np.ndarray) -> np.ndarray:
    """Whether two caches hold the same at each position, wherever they hold it: bool `(positions,)`.

    `rows` `(slots, …)` are the caches by slot; NaN equals NaN. Raises InputError for slots that a cache has not.
    """
    if len(slots_a) != len(slots_b):
        raise InputError(f"{len(slots_a)} and {len(slots_b)} slots: give those of the same positions on both sides")
    gathered = []
    for slots, rows in ((slots_a, rows_a), (slots_b, rows_b)):
        at = np.asarray(slots, dtype=np.int64)
        if at.size and not (at.min() >= 0 and at.max() < len(rows)):
            raise InputError(f"slots {at.min()}..{at.max()} are outside the cache of {len(rows)} slots")
        gathered.append(rows[at].reshape(len(at), -1))
    a, b = gathered
    if a.shape != b.shape:
        raise InputError(f"a position holds {a.shape[1]} values in one cache and {b.shape[1]} in the other")
    return ((a == b) | ((a != a) & (b != b))).all(axis=1)  # only NaN differs from itself


def _index(what: str, value: int) -> int:
    try:
        return index(value)
    except TypeError as error:
        raise InputError(f"{what} is {value!r}: give a whole number") from error


def _whole(what: str, value: int, least: int) -> int:
    number = _index(what, value)
    if not least <= number <= MOST:
        raise InputError(f"{what} is {number}: it must be {least} to {MOST}")
    return number
