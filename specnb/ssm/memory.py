"""Bytes that each rollback strategy keeps, from the sizes of a model's recurrent layers in its config.

One description covers four kinds of layer, because a state is always heads x value_dim x key_dim numbers that a token
changes by an outer product of a value (heads x value_dim) and a key (key_heads x key_dim, shared by groups of heads):

                value               key                 gates, float32      convolved before
gated-delta     v                   k                   g, beta             q, k, v
mamba2          x                   B (groups)          dt                  x, B, C
mamba1          x, a channel a head B (one for all)     dt, a channel       x
short-conv      none: the convolution window is all its state               B * x

All bytes are for one sequence and all recurrent layers together; a batch of n takes n times as much. What the
attention layers of a hybrid cache is not counted: cropping it costs nothing.
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
"""Bytes of a number."""
WIDTHS = (2, 4, 8, 16, 64)
"""Drafted tokens, or nodes of a tree, of a round."""
RECURRENT_LAYERS = {"linear_attention", "hybrid", "conv", "mamba"}
"""Entries of `layer_types` that carry a recurrent state (hybrid: beside attention, in one layer)."""

TABLE = read_toml(Path(__file__).with_name("families.toml"))
KINDS = {family: kind for kind in TABLE["kinds"] for family in kind["model_types"]}
"""Kinds of recurrent layers by transformers' `model_type`: where the config has their sizes."""
PUBLISHED = TABLE["published"]
"""Models by name: their `model_type`, and what differs from its defaults."""


def find_config(name: str) -> Any:
    """Return the transformers config of a model of families.toml, of a folder, or of hf:ORG/NAME; no weights are read.

    Raises InputError where there is none.
    """
    from transformers import AutoConfig

    if name in PUBLISHED:
        return AutoConfig.for_model(**PUBLISHED[name])
    source = name.removeprefix("hf:")
    if source == name and not (source := local_folder(name)).is_dir():
        raise InputError(f"no model {name!r}: give {', '.join(PUBLISHED)}, a folder with a config, or hf:ORG/NAME")
    with reading(f"the config of {name!r}"):
        return AutoConfig.from_pretrained(source)


def sizes_of(config: Any) -> dict[str, int]:
    """Return the bytes of a model's recurrent layers together, by what is kept of them.

    `config` is a transformers config, or one with a text part. For the sequence: `state` S (heads x value_dim x
    key_dim), `window` R (the columns that the convolution reads again, one fewer than its taps), and `snapshot`, both;
    all float32, as llama.cpp holds them. For a token, values, keys and columns in the config's dtype, by default
    float32, and gates in float32, for an error in a decay stays in the state:

    * `column`: its input of the convolution, which the window needs back beside either replay;
    * `raw_replay`: value, key (not yet shared out to heads) and gates. Queries only read the state;
    * `factor_replay`: the rank-one write u (beta (v - S k), or dt x), its key and one decay a head: no serial chain is
      left. Only float32 keeps long outputs from drifting;
    * `pre_conv`: the column and what is projected beside it (a and b, raw dt). It brings back window and state both, at
      the price of convolution and gates (and Mamba-1's projections) once more.

    Raises InputError for a family that is not known here, and for a config without recurrent layers.
    """
    text = config.get_text_config(decoder=True)
    family = text.model_type
    require_known("model_type of recurrent layers", family, KINDS)
    layers = sum(str(kind) in RECURRENT_LAYERS for kind in text.layer_types)
    if not layers:
        raise InputError(f"this {family} config has no recurrent layer, only {set(text.layer_types)}: crop it back")
    kind = KINDS[family]
    taps, *sizes = (prod(getattr(text, attribute) for attribute in name.split()) for name in kind["sizes"])
    heads, value_dim, key_heads, key_dim = sizes or (0, 0, 0, 0)
    item = text.dtype.itemsize if text.dtype else FLOAT32
    values, keys, gate = heads * value_dim, key_heads * key_dim, heads * FLOAT32
    channels = values + kind["keys_in_conv"] * keys or text.hidden_size
    each = {
        "state": values * key_dim * FLOAT32,
        "window": channels * (taps - 1) * FLOAT32,
        "column": channels * item,
        "raw_replay": (values + keys) * item + kind["gates"] * gate,
        "factor_replay": (values + keys) * item + gate,
        "pre_conv": channels * item + kind["gates_before_conv"] * gate,
    }
    sizes = {name: layers * n_bytes for name, n_bytes in each.items()}
    return sizes | {"snapshot": sizes["state"] + sizes["window"]}


def of_models(make: Callable[[dict[str, int]], pd.DataFrame], names: Sequence[str]) -> pd.DataFrame:
    """Return the tables of `make` (`parts`, `table`) for the models of `names`."""
    frames = {name: make(sizes_of(find_config(name))) for name in names}
    return pd.concat(frames, names=["model"]).reset_index("model").reset_index(drop=True)


def parts(n: dict[str, int]) -> pd.DataFrame:
    """Return what there is to keep of the sizes `n`: `quantity`, `n_bytes`, how many times smaller than S + R."""
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
    return frame.assign(times_smaller=n["snapshot"] / frame["n_bytes"])  # inf where nothing is kept


def tabulate_memory(n: dict[str, int]) -> pd.DataFrame:
    """Bytes held at the widest moment of a round, the live state included, a row for each width.

    `width` is the number of drafted tokens, or nodes of a tree. Columns: `live_bytes`; `snapshots_bytes` (one a
    position), `raw_replay_bytes` and `factor_replay_bytes` (with their conv columns), `pre_conv_bytes`, each growing
    with the width; `checkpoint_bytes`, which does not. The replays suppose a verification that reads the state and
    leaves it as it was; an engine that advances it in place keeps one snapshot more.
    """
    live, width = n["snapshot"], pd.Series(WIDTHS)
    return pd.DataFrame({
        "width": width,
        "live_bytes": live,
        "snapshots_bytes": live + width * live,
        "raw_replay_bytes": live + width * (n["raw_replay"] + n["column"]),
        "factor_replay_bytes": live + width * (n["factor_replay"] + n["column"]),
        "pre_conv_bytes": live + width * n["pre_conv"],
        "checkpoint_bytes": 2 * live,  # whatever the width: the accepted tokens are run again
    })  # fmt: skip
