"""Memory of each rollback strategy, computed from the recurrent layer sizes in a model's config.

One description covers four kinds of layers. A state has heads x value_dim x key_dim elements. A
token updates it by the outer product of a value (heads x value_dim) and a key (key_heads x key_dim,
shared by groups of heads):

                value               key                 gates, float32      convolution inputs
gated-delta     v                   k                   g, beta             q, k, v
mamba2          x                   B (groups)          dt                  x, B, C
mamba1          x, head = channel   B (shared by all)   dt, by channel      x
short-conv      none: the convolution window is the entire state            B * x

All bytes are for one sequence and all recurrent layers; a batch of n needs n times as much. The KV
cache of a hybrid's attention layers is excluded, because cropping it is free.
"""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd

from specnb.errors import InputError, require_known
from specnb.io import read_toml, reading
from specnb.lm.files import local_folder

FLOAT32 = 4
"""Bytes per element."""
WIDTHS = (2, 4, 8, 16, 64)
"""Numbers of draft tokens in a round, or of nodes in a tree."""
RECURRENT_LAYERS = {"linear_attention", "hybrid", "conv", "mamba"}
"""Entries of `layer_types` with a recurrent state (hybrid: with attention in the same layer)."""

TABLE = read_toml(Path(__file__).with_suffix(".toml"))
KINDS = {family: kind for kind in TABLE["kinds"] for family in kind["model_types"]}
"""Kinds of recurrent layers by transformers' `model_type`, with their config attributes."""
PUBLISHED = TABLE["published"]
"""Models by name: `model_type`, and the attributes that differ from its defaults."""


def find_config(name: str) -> Any:
    """Return the transformers config of a model in state_memory.toml, a folder, or hf:ORG/NAME.

    Reads no weights. Raises InputError for an unknown name or a config that cannot be read.
    """
    from transformers import AutoConfig

    if name in PUBLISHED:
        return AutoConfig.for_model(**PUBLISHED[name])
    source = name.removeprefix("hf:")
    if source == name and not (source := local_folder(name)).is_dir():
        expected = f"{', '.join(PUBLISHED)}, a folder with a config, or hf:ORG/NAME"
        raise InputError(f"no model {name!r}, expected {expected}")
    with reading(f"the config of {name!r}"):
        return AutoConfig.from_pretrained(source)


def sizes_of(config: Any) -> dict[str, int]:
    """Return the bytes of a model's recurrent layers by quantity, summed over layers.

    `config` is a transformers config; for a composite config, the text part is used. Quantities per
    sequence, in float32 as in llama.cpp: `state` S (heads x value_dim x key_dim), `window` R (the
    columns that the convolution reads again, one fewer than its taps), and `snapshot`, their sum.
    Quantities per token, with values, keys and columns in the config's dtype (default float32) and
    gates in float32, because decay errors persist in the state:

    * `column`: the token's input to the convolution, to restore the window in addition to a replay;
    * `raw_replay`: value, key (before sharing among heads) and gates; queries only read the state;
    * `factor_replay`: the rank-one write u (beta (v - S k), or dt x), its key, and one decay per
      head, so that no serial dependency remains; long outputs drift unless these are float32;
    * `pre_conv`: the column and the projections computed with it (a and b, raw dt), which restore
      window and state; the convolution, the gates and Mamba-1's projections are then recomputed.

    Raises InputError for unknown families and for configs without recurrent layers.
    """
    text = config.get_text_config(decoder=True)
    family = text.model_type
    require_known("model_type of recurrent layers", family, KINDS)
    layers = sum(str(kind) in RECURRENT_LAYERS for kind in text.layer_types)
    if not layers:
        raise InputError(
            f"got a {family} config with {set(text.layer_types)}, expected recurrent layers"
        )
    kind = KINDS[family]
    taps, *sizes = (
        prod(getattr(text, attribute) for attribute in name.split()) for name in kind["sizes"]
    )
    heads, value_dim, key_heads, key_dim = sizes or (0, 0, 0, 0)
    item = text.dtype.itemsize if text.dtype else FLOAT32
    values = heads * value_dim
    keys = key_heads * key_dim
    gate = heads * FLOAT32
    channels = values + kind["keys_in_conv"] * keys or text.hidden_size
    layer = {
        "state": values * key_dim * FLOAT32,
        "window": channels * (taps - 1) * FLOAT32,
        "column": channels * item,
        "raw_replay": (values + keys) * item + kind["gates"] * gate,
        "factor_replay": (values + keys) * item + gate,
        "pre_conv": channels * item + kind["gates_before_conv"] * gate,
    }
    total = {name: layers * n_bytes for name, n_bytes in layer.items()}
    return total | {"snapshot": total["state"] + total["window"]}


def of_models(make: Callable[[dict[str, int]], pd.DataFrame], names: Sequence[str]) -> pd.DataFrame:
    """Return the tables of `make` (`parts` or `tabulate_memory`) for several models."""
    frames = {name: make(sizes_of(find_config(name))) for name in names}
    return pd.concat(frames, names=["model"]).reset_index("model").reset_index(drop=True)


def parts(n: dict[str, int]) -> pd.DataFrame:
    """Return a table of the sizes `n`: quantity, n_bytes, and times_smaller, (S + R) / n_bytes."""
    rows = {
        "state S": n["state"],
        "window R": n["window"],
        "snapshot S + R, a position": n["snapshot"],
        "raw replay, a token": n["raw_replay"],
        "raw replay and conv column, a token": n["raw_replay"] + n["column"],
        "factor replay, a token": n["factor_replay"],
        "factor replay and conv column, a token": n["factor_replay"] + n["column"],
        "inputs before the convolution, a token": n["pre_conv"],
    }
    frame = pd.DataFrame(rows.items(), columns=["quantity", "n_bytes"])
    # inf if nothing is stored
    return frame.assign(times_smaller=(n["snapshot"] / frame["n_bytes"]).round(1))


def tabulate_memory(n: dict[str, int]) -> pd.DataFrame:
    """Return the peak memory of a round in bytes, including the live state; one row per width.

    `width` is the number of draft tokens, or of tree nodes. These columns grow with it:
    `snapshots_bytes` (one per position), `raw_replay_bytes` and `factor_replay_bytes` (with their
    conv columns), `pre_conv_bytes`. These do not: `live_bytes`, `checkpoint_bytes`. The replays
    assume that verification does not change the state; an engine that updates it in place needs one
    more snapshot.
    """
    live = n["snapshot"]
    width = pd.Series(WIDTHS)
    columns = {
        "width": width,
        "live_bytes": live,
        "snapshots_bytes": live + width * live,
        "raw_replay_bytes": live + width * (n["raw_replay"] + n["column"]),
        "factor_replay_bytes": live + width * (n["factor_replay"] + n["column"]),
        "pre_conv_bytes": live + width * n["pre_conv"],
        "checkpoint_bytes": 2 * live,  # accepted tokens are recomputed
    }
    return pd.DataFrame(columns)
