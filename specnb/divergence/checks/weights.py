"""Is every weight of an opened draft the one in its files, and are shared ones shared?

Loaders warn of what is left over in a file, and seldom of what was never written: a head that no file holds stays as
random as it was made, and acceptance is 1 in the size of the vocabulary.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specnb.divergence.checks.config import MAX_BYTES, Finding, count, read_config, text_part
from specnb.errors import InputError
from specnb.io import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

INDEX = "model.safetensors.index.json"
PROBED_ROWS, PROBED_VALUES = 2, 4096
ROUNDED = 0.01
"""Share of the largest value that a cast to a 16-bit type may move a weight by (bfloat16: 0.4 %)."""
ALIKE = 0.1
"""Relative distance of a standard deviation from the config's initializer_range that looks freshly made."""
COMPUTED = (".inv_freq", ".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", "position_ids")
"""Ends of names of what old files hold, and models compute for themselves."""
LOADING = ("SGLang #27829", "SGLang #27908", "speculators #1131", "TorchSpec #38")


class Stored(NamedTuple):
    """A tensor in a file: where, its shape and its type as safetensors names it (F32, BF16, …)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def headers(folder: Path | str) -> dict[str, Stored]:
    """The tensors in the safetensors files of a model folder, by name; no weight is read.

    Raises InputError for a folder without such files, a shard that is missing, or a file that is not sound.
    """
    from safetensors import SafetensorError, safe_open

    stored_tensors: dict[str, Stored] = {}
    for path in _files(Path(folder)):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    part = file.get_slice(name)
                    stored_tensors[name] = Stored(path, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path} is no sound safetensors file: {str(error)[:200]}; fetch it again") from error
    return stored_tensors


def _files(folder: Path) -> list[Path]:
    if (index := folder / INDEX).exists():
        files = [folder / name for name in sorted({*read_json(index, MAX_BYTES).get("weight_map", {}).values()})]
        if missing := next((file for file in files if not file.is_file()), None):
            raise InputError(f"{index} names {missing.name!r}, which is not in the folder: fetch the model again")
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} has no safetensors files: give the folder of a model")
    return files


def load_report(stored: Mapping[str, Stored], network: "nn.Module") -> Finding:
    """Weights that no file holds, that have another shape there, or that are not what the file says.

    Tensors that transformers joins or splits while it loads (experts of a MoE) are counted by layer: where a module
    has as many values as the files hold for it under other names, they are taken for the same.
    """
    check = "load report"
    state = {name: value for name, value in network.state_dict().items() if hasattr(value, "data_ptr")}
    named = {name: _in_file(name, stored) for name in state}
    have = {_place(state[name]) for name, there in named.items() if there}
    missing = {name: state[name] for name, there in named.items() if not there and _place(state[name]) not in have}
    unexpected = [name for name in stored.keys() - set(named.values()) if not name.endswith(COMPUTED)]
    missing, unexpected, joined = _without_joined(missing, unexpected, stored)
    pairs = {name: there for name, there in named.items() if there}
    shapes = [name for name, there in pairs.items() if tuple(state[name].shape) != stored[there].shape]
    other = [n for n, there in pairs.items() if n not in shapes and not _written(state[n], there, stored[there])]
    remedy = "open the checkpoint with a loader that refuses missing weights, or convert it again"
    if missing:
        seen = "; ".join(f"{name} ({_looks(network, value)})" for name, value in islice(missing.items(), 3))
        return Finding(check, "fail", f"{len(missing)} weights are in no file: {seen}", remedy, LOADING)
    if shapes or other:
        fault = "have another shape in the file" if shapes else "are not what the file holds"
        first = (shapes or other)[0]
        return Finding(check, "fail", f"{len(shapes or other)} weights {fault} (the first: {first})", remedy, LOADING)
    message = f"{len(pairs)} weights are those of the files" + (
        f", {joined} more were joined on loading" if joined else ""
    )
    if unexpected:
        return Finding(check, "warn", f"{message}; {len(unexpected)} tensors of the files are not used "
                       f"(the first: {min(unexpected)})", "see whether they belong to this draft", LOADING)  # fmt: skip
    return Finding(check, "ok", message)


def _in_file(name: str, stored: Mapping[str, Stored]) -> str:
    """The file's name of a weight, with or without the base model's prefix; "" for none."""
    spelled = (name, name.removeprefix("model."), f"model.{name}")
    return next((spelling for spelling in spelled if spelling in stored), "")


def _place(tensor: "Tensor") -> tuple:
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape)) if tensor.numel() else (id(tensor),)


def _without_joined(
    missing: Mapping[str, "Tensor"], unexpected: list[str], stored: Mapping[str, Stored]
) -> tuple[dict[str, "Tensor"], list[str], int]:
    """Leave out modules for which model and files hold as many values, under different names."""
    modules = {name.rpartition(".")[0] for name in missing}
    joined: set[str] = set()
    for module in modules:
        inside = [n for n in missing if n.rpartition(".")[0] == module]
        of_module = [n for n in unexpected if n.removeprefix("model.").startswith(f"{module.removeprefix('model.')}.")]
        held = sum(int(np.prod(stored[n].shape, dtype=object)) for n in of_module)
        if of_module and held == sum(missing[n].numel() for n in inside):
            joined |= {*inside, *of_module}
    left = {name: value for name, value in missing.items() if name not in joined}
    return left, [n for n in unexpected if n not in joined], len(joined & missing.keys())


def _looks(network: "nn.Module", value: "Tensor") -> str:
    """How a weight looks: freshly made, or not."""
    flat = value.detach().float().flatten()[:1_000_000]
    mean, std = float(flat.mean()), float(flat.std(unbiased=False))
    spread = getattr(getattr(network, "config", None), "initializer_range", None) or 0.02
    fresh = std == 0 or (abs(std - spread) < ALIKE * spread and abs(mean) < spread)
    return f"std {std:.3g}, mean {mean:.2g}" + (", as freshly initialised" if fresh else "")


def _written(value: "Tensor", name: str, there: Stored) -> bool:
    """Whether the first and last rows of a weight are the file's, up to rounding; True for what is no float."""
    from safetensors import safe_open

    if not value.is_floating_point() or there.dtype not in ("F64", "F32", "BF16", "F16"):
        return True
    with safe_open(there.file, framework="pt") as file:
        part = file.get_slice(name)
        for rows in _ends(there.shape):
            mine = value.detach()[rows].flatten()[:PROBED_VALUES].float().cpu()
            its = part[rows].flatten()[:PROBED_VALUES].float()
            if its.numel() and not float((mine - its).abs().max()) <= ROUNDED * float(its.abs().max()):
                return False
    return True


def _ends(shape: tuple[int, ...]) -> Iterator[slice]:
    if shape and 0 not in shape:
        yield slice(0, min(PROBED_ROWS, shape[0]))
        yield slice(max(0, shape[0] - PROBED_ROWS), shape[0])


def tied_head(network: "nn.Module", stored: Mapping[str, Stored]) -> Finding:
    """Whether embedding and output head are one tensor where the config says so, and two where the files hold two."""
    check, issues = "tied head", ("vLLM #46435", "SGLang #27829")
    pair = [getattr(network, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    if any(getattr(module, "weight", None) is None for module in pair):
        return Finding(check, "skipped", "the opened model does not tell its embedding and its head")
    embedding, head = (module.weight for module in pair)
    says = bool(getattr(getattr(network, "config", None), "tie_word_embeddings", False))
    shared = _place(embedding) == _place(head)
    if says and not shared:
        same = embedding.shape == head.shape and bool((embedding == head).all())
        return Finding(check, "warn" if same else "fail", "the config says tied, but they are two tensors"
                       + (" of the same values" if same else " of different values"),
                       "tie them (tie_weights) after loading", issues)  # fmt: skip
    if shared and not says and _in_file("lm_head.weight", stored):
        return Finding(check, "fail", "the files hold a head of its own, but the model uses its embedding",
                       "set tie_word_embeddings to false in config.json", issues)  # fmt: skip
    return Finding(
        check, "ok", f"config: {'tied' if says else 'not tied'}; {'one tensor' if shared else 'two tensors'}"
    )


def shared_head(draft: "nn.Module", target: "nn.Module", stored: Mapping[str, Stored]) -> Finding:
    """A draft whose files hold no head must have the target's; rows that pad the vocabulary do not count."""
    check = "shared head"
    heads = [getattr(network, "get_output_embeddings", lambda: None)() for network in (draft, target)]
    if any(getattr(head, "weight", None) is None for head in heads):
        return Finding(check, "skipped", "an opened model does not tell its head")
    if _in_file("lm_head.weight", stored) or getattr(draft.config, "tie_word_embeddings", False):
        return Finding(check, "ok", "the draft has a head of its own")
    mine, its = (head.weight.detach() for head in heads)
    rows = min(len(mine), len(its))
    same = mine.shape[1:] == its.shape[1:] and bool((mine[:rows] == its[:rows].to(mine)).all())
    message = f"the draft's files hold no head, and its {rows} rows are {'' if same else 'not '}the target's"
    return Finding(check, "ok", message) if same else Finding(
        check, "fail", message, "share the target's lm_head with the draft", ("vLLM #46435", "SGLang #27829")
    )  # fmt: skip


def token_map(folder: Path | str, stored: Mapping[str, Stored]) -> Finding:
    """Whether a draft of a smaller vocabulary says which target ids its own are: `d2t`, offsets to be added."""
    check, issues = "d2t", ("NeMo Automodel #2447", "EAGLE #222")
    remedy = "convert the checkpoint again, with its d2t"
    config = read_config(folder)
    draft_size, whole = (count(text_part(config or {}), key) for key in ("draft_vocab_size", "vocab_size"))
    name = next((n for n in sorted(stored) if n.rpartition(".")[2] == "d2t"), None)
    if name is None and (draft_size is None or whole is None or draft_size >= whole):
        return Finding(check, "skipped", "the draft has no vocabulary of its own")
    if name is None:
        return Finding(check, "fail", f"the draft knows {draft_size} of {whole} ids, and no tensor d2t says which",
                       remedy, issues)  # fmt: skip
    fault, message = _map_fault(name, stored[name], draft_size, whole)
    return Finding(check, "fail" if fault else "ok", message, remedy if fault else "", issues if fault else ())


def _map_fault(name: str, there: Stored, draft_size: int | None, whole: int | None) -> tuple[bool, str]:
    offsets = _integers(name, there)
    if draft_size is not None and len(offsets) != draft_size:
        return True, f"d2t has {len(offsets)} entries for a draft vocabulary of {draft_size}"
    if len(offsets) > 1 and (offsets == offsets[0]).all():
        return True, f"d2t is {offsets[0]} everywhere: draft ids are taken for neighbouring target ids"
    ids = np.arange(len(offsets)) + offsets
    if len(ids) and (ids.min() < 0 or (whole is not None and ids.max() >= whole)):
        return True, f"d2t leads to ids {ids.min()}..{ids.max()}, outside the target's {whole}"
    if (twice := len(ids) - len(np.unique(ids))) > 0:
        return True, f"d2t leads {twice} draft ids to a target id that another one has"
    return False, f"{len(ids)} draft ids, each with a target id of its own"


def _integers(name: str, there: Stored) -> np.ndarray:
    from safetensors import safe_open

    if there.dtype not in ("I64", "I32") or len(there.shape) != 1 or there.shape[0] > 1 << 24:
        raise InputError(f"{there.file}: {name} is {there.dtype} of shape {there.shape}: it must be a list of integers")
    with safe_open(there.file, framework="numpy") as file:
        return file.get_tensor(name).astype(np.int64)


def opened_quantisation(network: Any) -> Mapping[str, Any]:
    """The quantisation_config that an opened model has; {} for none."""
    config = getattr(getattr(network, "config", None), "quantization_config", None) or {}
    return config if isinstance(config, Mapping) else config.to_dict()
