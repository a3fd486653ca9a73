"""What a model's files say, against each other and against what was opened: weights, and configs of draft and target.

Each check returns its verdict, what it saw, and the remedy where something is not well. A file that cannot be read
raises: `preflight` makes a finding of that.
"""

import math
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specnb.errors import InputError
from specnb.io import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

Config = Mapping[str, Any]
Result = tuple[str, str] | tuple[str, str, str]
"""What a check says: its verdict (a key of `preflight.RANK`), what it saw, and perhaps a remedy."""
MAX_BYTES = 8 << 20
"""Of a config."""

# --- weights: transformers warns of what is left over in a file, and seldom of what was never written -----------------

INDEX = "model.safetensors.index.json"
PROBED_ROWS, PROBED_VALUES = 2, 4096
ROUNDED = 0.01
"""Share of the largest value that a cast to a 16-bit type may move a weight by (bfloat16: 0.4 %)."""
ALIKE = 0.1
"""Relative distance of a standard deviation from the config's initializer_range that looks freshly made."""
COMPUTED = (".inv_freq", ".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", "position_ids")
"""Ends of names of what old files hold, and models compute for themselves."""


class StoredTensor(NamedTuple):
    """A tensor in a file: where, its shape and its type as safetensors names it (F32, BF16, …)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in the safetensors files of a model folder, by name; no weight is read.

    Raises InputError for a folder without such files, a shard that is missing, or a file that is not sound.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if (shards := folder / INDEX).exists():
        files = [folder / name for name in sorted({*read_json(shards, MAX_BYTES).get("weight_map", {}).values()})]
    if not files:
        raise InputError(f"{folder} has no safetensors files: give the folder of a model")
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    part = file.get_slice(name)
                    tensors[name] = StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is missing or damaged ({str(error)[:200]}): fetch the model again") from error
    return tensors


def load_report(stored: Mapping[str, StoredTensor], network: "nn.Module") -> Result:
    """Weights that no file holds, or that are not what the file says.

    Tensors that transformers joins or splits while it loads (experts of a MoE) are counted by module: where it has as
    many values as the files hold for it under other names, they are taken for the same.
    """
    state = {name: value for name, value in network.state_dict().items() if hasattr(value, "data_ptr")}
    named = {name: _in_file(name, stored) for name in state}
    have = {_place(state[name]) for name, there in named.items() if there}
    missing = {name: state[name] for name, there in named.items() if not there and _place(state[name]) not in have}
    unexpected = [name for name in stored.keys() - set(named.values()) if not name.endswith(COMPUTED)]
    joined = _joined(missing, unexpected, stored)
    missing = {name: value for name, value in missing.items() if name not in joined}
    unexpected = [name for name in unexpected if name not in joined]
    remedy = "open the checkpoint with a loader that refuses missing weights, or convert it again"
    if missing:
        seen = "; ".join(f"{name} ({_looks(network, value)})" for name, value in islice(missing.items(), 3))
        return "fail", f"{len(missing)} weights are in no file: {seen}", remedy
    pairs = {name: there for name, there in named.items() if there}
    if wrong := [name for name, there in pairs.items() if not _written(state[name], there, stored[there])]:
        return "fail", f"{len(wrong)} weights are not what the file holds (the first: {wrong[0]})", remedy
    seen = f"{len(pairs)} weights are those of the files"
    if n_joined := len(joined & state.keys()):
        seen += f", {n_joined} more were joined on loading"
    if unexpected:
        seen += f"; {len(unexpected)} tensors of the files are not used (the first: {min(unexpected)})"
        return "warn", seen, "see whether they belong to this draft"
    return "ok", seen


def _in_file(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """The file's name of a weight, with or without the base model's prefix; "" for none."""
    return next((n for n in (name, name.removeprefix("model."), f"model.{name}") if n in stored), "")


def _place(tensor: "Tensor") -> tuple:
    return tensor.device, tensor.data_ptr() or id(tensor), tuple(tensor.shape)


def _joined(missing: Mapping[str, "Tensor"], unexpected: list[str], stored: Mapping[str, StoredTensor]) -> set[str]:
    """Names of modules for which model and files hold as many values, under different names."""
    joined: set[str] = set()
    for module in {name.rpartition(".")[0] for name in missing}:
        inside = [name for name in missing if name.rpartition(".")[0] == module]
        prefix = f"{module.removeprefix('model.')}."
        of_module = [name for name in unexpected if name.removeprefix("model.").startswith(prefix)]
        n_values = sum(math.prod(stored[name].shape) for name in of_module)
        if of_module and n_values == sum(missing[name].numel() for name in inside):
            joined |= {*inside, *of_module}
    return joined


def _looks(network: "nn.Module", value: "Tensor") -> str:
    """How a weight looks: freshly made, or not."""
    flat = value.detach().float().flatten()[:1_000_000]
    mean, std = float(flat.mean()), float(flat.std(unbiased=False))
    spread = getattr(network.config, "initializer_range", None) or 0.02
    fresh = std == 0 or (abs(std - spread) < ALIKE * spread and abs(mean) < spread)
    return f"std {std:.3g}, mean {mean:.2g}" + (", as freshly initialised" if fresh else "")


def _written(value: "Tensor", name: str, there: StoredTensor) -> bool:
    """Whether shape, first and last rows of a weight are the file's, up to rounding; of what is no float the shape."""
    from safetensors import safe_open

    if tuple(value.shape) != there.shape:
        return False
    readable = value.numel() and value.shape and value.is_floating_point()
    if not readable or there.dtype not in ("F64", "F32", "BF16", "F16"):
        return True
    with safe_open(there.file, framework="pt") as file:
        part = file.get_slice(name)
        for rows in (slice(0, PROBED_ROWS), slice(max(0, len(value) - PROBED_ROWS), len(value))):
            mine = value.detach()[rows].flatten()[:PROBED_VALUES].float().cpu()
            its = part[rows].flatten()[:PROBED_VALUES].float()
            if not float((mine - its).abs().max()) <= ROUNDED * float(its.abs().max()):
                return False
    return True


def _ends(network: "nn.Module") -> list["Tensor | None"]:
    """The weights of embedding and output head, None where the model does not tell."""
    modules = [getattr(network, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    return [getattr(module, "weight", None) for module in modules]


def tied_head(network: "nn.Module", stored: Mapping[str, StoredTensor]) -> Result:
    """Whether embedding and output head are one tensor where the config says so, and two where the files hold two."""
    embedding, head = _ends(network)
    if embedding is None or head is None:
        return "skipped", "the opened model does not tell its embedding and its head"
    says, shared = bool(network.config.tie_word_embeddings), _place(embedding) == _place(head)
    if says and not shared:
        same = embedding.shape == head.shape and bool((embedding == head).all())
        seen = f"the config says tied, but they are two tensors of {'the same' if same else 'different'} values"
        return "warn" if same else "fail", seen, "tie them (tie_weights) after loading"
    if shared and not says and _in_file("lm_head.weight", stored):
        seen = "the files hold a head of its own, but the model uses its embedding"
        return "fail", seen, "set tie_word_embeddings to false in config.json"
    return "ok", f"config: {'tied' if says else 'not tied'}; {'one tensor' if shared else 'two tensors'}"


# --- configs: what matters is where the draft ends before the target does, or is taken for what it is not -------------

FROM_TARGET = ("eagle", "mtp", "dflash", "medusa", "nextn")
"""In the name of an architecture: it runs on the target's hidden states, so that it must have the target's RoPE."""
SCALE_NAMES = (
    ".weight_scale", ".weight_scale_inv", ".weight_packed", ".qzeros", ".scales", "_scales", "_blocks", ".absmax",
)  # fmt: skip
"""Ends of the names of tensors that only quantised weights have."""


def read_config(folder: Path) -> Config | None:
    """The config of a model folder; None without the file. Raises InputError for one that is not sound."""
    path = folder / "config.json"
    return read_json(path, MAX_BYTES) if path.exists() else None


def text_part(config: Config) -> Config:
    """The language model's part of a config that has others as well."""
    return config.get("text_config") or config


def rope(draft: Config | None, target: Config | None) -> Result:
    """Whether positions mean the same as far as the target goes; models trained apart have each their own RoPE."""
    if draft is None or target is None:
        return "skipped", "it needs config.json of draft and target"
    a, b = _rope(text_part(draft)), _rope(text_part(target))
    keys = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    shown = "; ".join(f"{key}: {a.get(key)!r:.40} against {b.get(key)!r:.40}" for key in keys)
    architectures = [draft.get("model_type"), *(draft.get("architectures") or [])]
    if shown and any(mark in str(name).lower() for name in architectures for mark in FROM_TARGET):
        remedy = "copy rope_parameters (or rope_theta and rope_scaling) of the target into the draft's config"
        return "fail", f"the draft runs on the target's states, with another RoPE: {shown}", remedy
    ends = [text_part(config).get("max_position_embeddings") for config in (draft, target)]
    if None not in ends and ends[0] < ends[1]:
        seen = f"the draft knows {ends[0]} positions, the target {ends[1]}" + (f"; {shown}" if shown else "")
        return "warn", seen, f"keep prompt and answer within {ends[0]} tokens, or expect no acceptance beyond"
    if shown:
        return "ok", f"they differ, as models trained apart do: {shown}"
    return "ok", f"the same: {', '.join(f'{key} {value}' for key, value in a.items()) or 'none given'}"


def _rope(text: Config) -> dict[str, Any]:
    """RoPE as stated, old keys and new (transformers 5: rope_parameters, possibly by layer type), None left out."""
    stated = {key: text.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for key, value in ((text.get("rope_scaling") or {}) | (text.get("rope_parameters") or {})).items():
        by_layer = isinstance(value, dict)
        stated |= {f"{key}.{inner}": deeper for inner, deeper in value.items()} if by_layer else {key: value}
    stated = {("rope_type" if key == "type" else key): value for key, value in stated.items()}
    return {k: v for k, v in stated.items() if v is not None and (k, v) != ("rope_type", "default")}


def quantisation(
    draft: Config | None, target: Config | None, stored: Collection[str], opened: Config | None = None
) -> Result:
    """Whether the draft is quantised as its own files say, and not as the target is.

    `stored` are the names in the files; `opened` is the opened model's config (None: no model).
    """
    if draft is None:
        return "skipped", "it needs the draft's config.json"
    mine, its = (_method((config or {}).get("quantization_config") or {}) for config in (draft, target))
    now = mine if opened is None else _method(opened.get("quantization_config") or {})
    if now != mine:
        inherited = " (the target's)" if its and now == its else ""
        seen = f"its config says {mine or 'none'}, the opened model has {now or 'none'}{inherited}"
        return "fail", seen, "open the draft with its own quantisation_config"
    scales = [name for name in stored if name.endswith(SCALE_NAMES)]
    if stored and bool(scales) != bool(mine) and (scales or mine != "bitsandbytes"):
        seen = f"{len(scales)} tensors of scales (the first: {scales[0]:.80})" if scales else "no scales"
        remedy = "fetch config.json and weights of the same revision"
        return "fail", f"its config says {mine or 'none'}, its files hold {seen}", remedy
    seen = f"draft: {mine or 'none'}" + (f", target: {its or 'none'}" if target is not None else "")
    if target is not None and mine != its:
        return "warn", seen, "make sure that the engine takes each from its own config"
    return "ok", seen


def _method(config: Config) -> str:
    return str(config.get("quant_method") or ("unnamed" if config else ""))[:40]
