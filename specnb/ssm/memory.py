"""Bytes that each way of rolling a recurrent state back keeps, from the sizes of the layers alone.

All numbers are for one sequence and all recurrent layers together; a batch of n takes n times as much. What the
attention layers of a hybrid cache is not counted: cropping it costs nothing.
"""

from collections.abc import Sequence

import pandas as pd

from specnb.ssm.shapes import ITEM_BYTES, RecurrentShape

GATE_BYTES = 4
"""Gates are kept in float32 in every record: they are few, and an error in a decay stays in the state."""


def state_bytes(shape: RecurrentShape) -> int:
    """S: the recurrent states, heads x value_dim x key_dim a layer. 0 for short convolutions."""
    return shape.layers * shape.values * shape.key_dim * ITEM_BYTES[shape.state_dtype]


def window_bytes(shape: RecurrentShape) -> int:
    """R: the convolution windows, `conv_columns` as the engine holds them (transformers: 4 where 3 are read)."""
    return shape.layers * shape.conv_channels * shape.conv_columns * ITEM_BYTES[shape.conv_dtype]


def snapshot_bytes(shape: RecurrentShape) -> int:
    """One position's snapshot: S + R. The live state itself takes as much."""
    return state_bytes(shape) + window_bytes(shape)


def conv_column_bytes(shape: RecurrentShape) -> int:
    """One token's column before the convolution, which the window needs back: raw and factor records go with it."""
    return shape.layers * shape.conv_channels * ITEM_BYTES[shape.record_dtype]


def raw_replay_bytes(shape: RecurrentShape) -> int:
    """One token's inputs of the recurrence: values, keys before they are shared out to heads, gates in float32.

    Queries (C of Mamba) are not in it: they read the state and do not change it. Without the convolution's column.
    """
    return shape.layers * ((shape.values + shape.keys) * ITEM_BYTES[shape.record_dtype] + shape.gates * GATE_BYTES)


def factor_replay_bytes(shape: RecurrentShape) -> int:
    """One token's rank-one write: u (beta (v - S k), or dt x), key, one decay a head in float32; no serial chain left.

    Counted with `record_dtype`; only float32 keeps long outputs from drifting. Without the
    convolution's column.
    """
    return shape.layers * ((shape.values + shape.keys) * ITEM_BYTES[shape.record_dtype] + shape.heads * GATE_BYTES)


def pre_conv_bytes(shape: RecurrentShape) -> int:
    """One token's column before the convolution and what else is projected beside it (a and b, raw dt; float32).

    Brings back window and state both, at the price of convolution and gates (and Mamba-1's projections) once more.
    """
    return conv_column_bytes(shape) + shape.layers * shape.gates_before_conv * GATE_BYTES


def parts(shape: RecurrentShape) -> pd.DataFrame:
    """What there is to keep, a row each: `quantity`, `n_bytes`, and how many times smaller than S + R it is."""
    rows = {
        "state S": state_bytes(shape),
        "window R": window_bytes(shape),
        "snapshot S + R, a position": snapshot_bytes(shape),
        "raw replay, a token": raw_replay_bytes(shape),
        "raw replay and conv column, a token": raw_replay_bytes(shape) + conv_column_bytes(shape),
        "factor replay, a token": factor_replay_bytes(shape),
        "factor replay and conv column, a token": factor_replay_bytes(shape) + conv_column_bytes(shape),
        "inputs before the convolution, a token": pre_conv_bytes(shape),
    }
    whole = snapshot_bytes(shape)
    table = pd.DataFrame({"quantity": list(rows), "n_bytes": list(rows.values())})
    return table.assign(times_smaller=[whole / n if n else float("inf") for n in rows.values()])


def table(shape: RecurrentShape, widths: Sequence[int] = (2, 4, 8, 16, 64)) -> pd.DataFrame:
    """Bytes held at the widest moment of a round, the live state included, a row for each width.

    `width` is the number of drafted tokens, or nodes of a tree. Columns: `live_bytes`; `snapshots_bytes` (one a
    position), `raw_replay_bytes` and `factor_replay_bytes` (with their conv columns), `pre_conv_bytes`, each growing
    with the width; `checkpoint_bytes`, which does not. The replays suppose a verification that reads the state and
    leaves it as it was; an engine that advances it in place keeps one snapshot more.
    """
    live, column = snapshot_bytes(shape), conv_column_bytes(shape)
    per_token = {
        "snapshots_bytes": snapshot_bytes(shape),
        "raw_replay_bytes": raw_replay_bytes(shape) + column,
        "factor_replay_bytes": factor_replay_bytes(shape) + column,
        "pre_conv_bytes": pre_conv_bytes(shape),
    }
    grown = {name: [live + width * n for width in widths] for name, n in per_token.items()}
    fixed = {"checkpoint_bytes": 2 * live}  # whatever the width: the accepted tokens are run again
    return pd.DataFrame({"width": widths, "live_bytes": live, **grown, **fixed})
