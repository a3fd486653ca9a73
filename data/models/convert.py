"""Convert a transformers folder to GGUF: `python -m data.models.convert FOLDER DEST --dtype f16`.

llama.cpp's own converter, convert_hf_to_gguf.py, covers more models; this one needs the installed
packages only. transformers loads the model, in float32; the GGUF names of its tensors are the gguf
package's. The models are those whose torch and llama.cpp code were compared, logit by logit
(tests/lm/test_to_gguf.py). Where the two disagree on the meaning of a weight:

- Qwen3.5 ("qwen35") multiplies a normed vector by 1 + w, llama.cpp by w; the gated norm inside a
  linear layer has w in both;
- transformers keeps log(-A) of a recurrence, llama.cpp A itself;
- with more value heads than key heads, transformers gives key head i the value heads
  i·r … i·r + r - 1 (r value heads a key head), llama.cpp the heads i, i + n, i + 2n … (n key
  heads): the value heads are put in that order everywhere.

llama.cpp knows pre-tokenizers by name, each with its regular expression built in: a tokenizer is
written only when its own expression is one of those, because another would split text otherwise,
without a word.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from specnb.errors import InputError, require_known
from specnb.io import read_json, read_toml, writing
from specnb.lm.gguf.binding import FILE_TYPES
from specnb.lm.vocab import ALPHABET, Vocabulary

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("f16", "f32", "bf16")
FEED_FORWARD = ("mlp.up_proj.weight", "feed_forward.w3.weight")

Key = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[str]
Change = Callable[["Tensor"], "Tensor"]

FAMILIES = read_toml(Path(__file__).with_name("families.toml"))
"""By the `model_type` of a config.json; the head of the file says what the fields mean."""


# --- what is computed of a family -----------------------------------------------------------------


def _computed_keys(kind: str, config: "PretrainedConfig") -> dict[str, Key]:
    match kind:
        case "qwen3_5_text":
            # llama.cpp's recurrent state is square
            _require(config, linear_value_head_dim=config.linear_key_head_dim)
            rope = config.rope_parameters
            sections = rope.get("mrope_section", [11, 11, 10])  # as in transformers
            return {
                # the pattern itself; a `full_attention_interval` could only say "every n-th"
                "attention.recurrent_layers": [
                    layer == "linear_attention" for layer in config.layer_types
                ],
                "rope.dimension_count": int(
                    config.head_dim * rope.get("partial_rotary_factor", 0.25)
                ),
                "rope.dimension_sections": [*sections, 0],
                "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            }
        case "lfm2":  # a layer without heads of its own is a convolution
            heads = [
                config.num_key_value_heads if layer == "full_attention" else 0
                for layer in config.layer_types
            ]
            return {"attention.head_count_kv": heads}
        case "mamba2":  # it has no positions and no heads; llama.cpp's own converter writes these
            size = config.num_heads * config.head_dim
            return {"context_length": 2**20, "attention.head_count": 0, "ssm.inner_size": size}
    return {}


def _qwen35_changes(config: "PretrainedConfig") -> dict[str, Change]:
    n_keys = config.linear_num_key_heads
    n_values = config.linear_num_value_heads
    state = config.linear_key_head_dim

    def by_head(w: "Tensor", width: int = 1) -> "Tensor":
        """Value heads, `width` rows of `w` each, from grouped to tiled order."""
        return w.unflatten(0, (n_keys, n_values // n_keys, width)).transpose(0, 1).flatten(0, 2)

    def after_keys(w: "Tensor") -> "Tensor":
        start = 2 * n_keys * state  # after queries and keys
        return w.slice_scatter(by_value(w[start:]), 0, start)

    by_value = partial(by_head, width=state)
    return {
        "linear_attn.norm.weight": lambda w: w,
        "norm.weight": lambda w: 1 + w,
        "in_proj_qkv.weight": after_keys,
        "conv1d.weight": lambda w: after_keys(w.squeeze(1)),
        "in_proj_z.weight": by_value,
        "in_proj_b.weight": by_head,
        "in_proj_a.weight": by_head,
        "dt_bias": by_head,
        "A_log": lambda w: -by_head(w).exp(),
        "linear_attn.out_proj.weight": lambda w: by_value(w.T).T,
    }


def _changes(kind: str, config: "PretrainedConfig") -> dict[str, Change]:
    """Return endings of transformers' names, and what happens to the values."""
    match kind:
        case "qwen3_5_text":
            return _qwen35_changes(config)
        case "lfm2":
            return {"conv.conv.weight": lambda w: w.squeeze(1)}
        case "mamba2":
            return {
                "conv1d.weight": lambda w: w.squeeze(1),
                "A_log": lambda w: -w.exp()[:, None],
                "mixer.D": lambda w: w[:, None],
                "mixer.norm.weight": lambda w: w.unflatten(0, (config.n_groups, -1)),
            }
    return {}


def family_keys(kind: str, config: "PretrainedConfig") -> dict[str, Key]:
    """Return the keys of a config.

    InputError for what llama.cpp's code does not compute, scaled positions too.
    """
    family = FAMILIES[kind]
    _require(config, **family["built_in"])
    if family["layers"] and set(config.layer_types) != {*family["layers"]}:
        raise refusal(
            "layer_types", config.layer_types, f"layers must be {' and '.join(family['layers'])}"
        )
    keys = {key: getattr(config, name) for key, name in family["keys"].items()} | _computed_keys(
        kind, config
    )
    if rope := getattr(config, "rope_parameters", None):
        if (scaling := rope.get("rope_type", "default")) != "default":
            raise refusal("rope_type", scaling, "only default, unscaled positions are written")
        keys["rope.freq_base"] = float(rope["rope_theta"])
    return {f"{family['arch']}.{key}": value for key, value in keys.items()}


def _require(config: "PretrainedConfig", **fields: object) -> None:
    """InputError unless each field has the one value that llama.cpp has built in for this model."""
    for name, fixed in fields.items():
        value = getattr(config, name, None)
        if (list(value) if isinstance(value, tuple) else value) != fixed:
            raise refusal(name, value, f"llama.cpp computes with {fixed!r}")


def refusal(part: str, value: object, why: str) -> InputError:
    """For a config or tokenizer that runs in transformers, not in llama.cpp or this converter."""
    return InputError(
        f"{part} is {value!r:.400}: {why}; such a model runs in torch only (?backend=hf)"
    )


# --- the tokenizer: byte-level BPE ----------------------------------------------------------------

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
PRE_TYPES = read_toml(Path(__file__).with_name("pre_types.toml"))
"""By llama.cpp's name; the head of the file says what the fields mean."""

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def tokenizer_keys(tokenizer: "PreTrainedTokenizerBase", vocab: Vocabulary) -> dict[str, Key]:
    """Return the `tokenizer.*` keys for the `vocab.size` ids of the model's logits.

    Ids without a token are unused. `vocab` is the same tokenizer as specnb's torch engine reads it
    (special ids, end tokens, chat template). A normalization to NFC (Qwen's) is left out with a
    warning: texts in NFC, nearly all, are split alike. Raises InputError for what llama.cpp would
    tokenize otherwise, and unless there are one to three end tokens: for none it would take id 11.
    """
    if not tokenizer.is_fast:
        raise refusal(
            "the tokenizer",
            type(tokenizer).__name__,
            "only those with a tokenizer.json are written",
        )
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = _pre_type(state)
    _check(state, pre)
    plain, whole = (
        tokenizer("x", add_special_tokens=special).input_ids for special in (False, True)
    )
    if whole != ([vocab.bos] if vocab.add_bos else []) + plain:
        raise refusal(
            "a text between its special tokens", whole, "of these only BOS can be written"
        )
    tokens, types = _tokens(state, vocab.size)
    ends = sorted(vocab.eog, key=lambda i: (i != vocab.eos, i))  # the tokenizer's own first
    if not 1 <= len(ends) <= len(END_KEYS):
        raise refusal("eos_token_id", ends, f"a GGUF names one to {len(END_KEYS)} end tokens")
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": [*map(" ".join, state["model"]["merges"])],
        "add_bos_token": vocab.add_bos,
        "bos_token_id": ends[0]
        if vocab.bos is None
        else vocab.bos,  # the end begins where nothing else does (GPT-2)
        **dict(zip(END_KEYS, ends, strict=False)),
    }
    template = {"tokenizer.chat_template": vocab.chat_template} if vocab.chat_template else {}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | template


def _pre_type(state: dict[str, Any]) -> str:
    steps = _flat(state["pre_tokenizer"])
    for name, known in PRE_TYPES.items():
        pairs = zip(known["steps"], steps, strict=False)
        if len(steps) == len(known["steps"]) and all(
            fields.items() <= step.items() for fields, step in pairs
        ):
            return name
    raise refusal("the pre-tokenizer", steps, f"it is none of {', '.join(PRE_TYPES)}")


def _flat(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    inner = (step or {"pretokenizers": []}).get("pretokenizers")
    return [step] if inner is None else [part for part in inner for part in _flat(part)]


def _check(state: dict[str, Any], pre: str) -> None:
    """Refuse a normalizer and a model that llama.cpp computes otherwise."""
    normalizer = state["normalizer"]
    model = state["model"]
    if normalizer == {"type": "NFC"}:
        why = "this tokenizer normalizes text to NFC, llama.cpp does not"
        warnings.warn(f"{why}: give both engines texts in NFC, or token ids", stacklevel=4)
    elif normalizer is not None:
        raise refusal("the normalizer", normalizer, "llama.cpp does not normalize text")
    if model["type"] != "BPE":
        raise refusal("the tokenizer", model["type"], "only byte-level BPE is written")
    if model.get("ignore_merges", False) != PRE_TYPES[pre]["ignore_merges"]:
        raise refusal(
            "ignore_merges", model.get("ignore_merges"), f"llama.cpp does otherwise for {pre}"
        )
    if model["unk_token"] is not None and (missing := ALPHABET.keys() - model["vocab"].keys()):
        raise refusal(
            "unk_token", model["unk_token"], f"{len(missing)} bytes become it, llama.cpp drops them"
        )


def _tokens(state: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Text and type of each id. Added tokens stand over the entries of the vocabulary."""
    names = {i: (text, NORMAL) for text, i in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        if eats := [flag for flag in ("lstrip", "rstrip", "single_word") if added[flag]]:
            raise refusal(
                "an added token",
                added["content"],
                f"it has {eats[0]}, which llama.cpp does not know",
            )
        names[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    if (last := max(names)) >= size:
        raise refusal("a token", names[last][0], f"it has the id {last}, the model {size} ids")
    rows = [names.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)]
    return [text for text, _ in rows], [kind for _, kind in rows]


# --- the file -------------------------------------------------------------------------------------


def write_gguf(folder: Path, dest: Path, *, dtype: str = "f16") -> Path:
    """Write `folder`'s model (config.json, safetensors, tokenizer) to the GGUF file `dest`.

    Returns `dest`. `dtype` of the matrices: "f16", "f32" or "bf16"; vectors and convolutions stay
    float32, as llama.cpp's kernels read them. Raises InputError for a model, config or tokenizer
    that llama.cpp would compute otherwise, for values that `dtype` does not hold, and for a `dest`
    that cannot be written; LoadError for files that transformers cannot read, MemoryShortError for
    a model that is too large in float32.
    """
    require_known("dtype", dtype, DTYPES)
    kind = read_json(folder / "config.json").get("model_type")
    if kind not in FAMILIES:
        raise InputError(
            f"{folder} has the model_type {kind!r:.80}: known are {', '.join(FAMILIES)}"
        )
    import torch

    from specnb.lm.hf.files import load_network, tokenizer_vocabulary

    model, tokenizer = load_network(str(folder), dtype=torch.float32)
    if tokenizer is None:
        raise InputError(
            f"{folder} has no tokenizer.json: save the tokenizer into it with save_pretrained"
        )
    arch = FAMILIES[kind]["arch"]
    config = model.config
    # asked for of Mamba too, which has none; LFM2's is not its config's `intermediate_size`
    widths = [
        w.shape[0] for name, w in model.state_dict().items() if name.endswith(FEED_FORWARD)
    ] or [0]
    keys = family_keys(kind, config) | {f"{arch}.feed_forward_length": widths[0]}
    keys |= {"general.name": folder.resolve().name, "general.file_type": FILE_TYPES[dtype]}
    keys |= tokenizer_keys(
        tokenizer, tokenizer_vocabulary(tokenizer, config, model.generation_config)
    )
    with writing(dest):
        _write(dest, arch, keys, model, _changes(kind, config), dtype)
    return dest


def _write(
    dest: Path,
    arch: str,
    keys: Mapping[str, Key],
    model: "PreTrainedModel",
    changes: Mapping[str, Change],
    dtype: str,
) -> None:
    """Write the keys, then each tensor by its GGUF name; a tied output is the embedding.

    InputError for values that are not finite, or that float16 does not reach.
    """
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize

    writer = GGUFWriter(dest, arch)
    # each key with the type that llama.cpp's loader asks for: gguf-py lacks a method for some names
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in keys.items():
        add.get(type(value), writer.add_array)(key, value)
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], model.config.num_hidden_layers)
    for source, weight in model.state_dict().items():
        if source == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = names.get_name(
            source.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias")
        )
        change = next(
            (change for ending, change in changes.items() if source.endswith(ending)), lambda w: w
        )
        values = change(weight).contiguous().numpy()
        stored = dtype if weight.dim() == 2 else "f32"
        kind = GGMLQuantizationType[stored.upper()]
        with np.errstate(over="ignore"):
            packed = quantize(values, kind)
        if not np.isfinite(values).all() or (stored == "f16" and not np.isfinite(packed).all()):
            raise InputError(
                f"{name} has values that {stored} does not hold: "
                "damaged, or write it with dtype='f32'"
            )
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    typer.run(write_gguf)
