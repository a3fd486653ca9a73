"""What a transformers config.json says about a model: sizes, rotary embedding, weights, state. Read as JSON only."""

from typing import Any

from specnb.compat.description import Rope
from specnb.compat.hf_tokenizer import MAX_ID
from specnb.compat.states import state_of
from specnb.lm.bounded_json import Node

MAX_CONTEXT = 1 << 40
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Names that model families give to the context length; the first that is stated holds."""


def text_config(config: Node) -> Node:
    """The language model's own part of a config: its `text_config`, where it has one (multimodal models)."""
    nested = config.node("text_config")
    return nested if nested.values else config


def model_facts(config: Node) -> dict[str, Any]:
    """Fields of a Description. Raises InputError for values of another type or out of any range."""
    text = text_config(config)
    kind = text.text("model_type") or config.text("model_type")
    layers = text.get("layer_types", list, "a list of texts") or []
    for i, layer in enumerate(layers):
        if not isinstance(layer, str):
            raise text.fault(f"layer_types[{i}]", layer, "it must be a text")
    lengths = (text.count(key, MAX_CONTEXT) for key in CONTEXT_KEYS)
    return {
        "architecture": kind,
        "n_ctx": next((n for n in lengths if n), None),
        "rope": _rope(text),
        "quantisation": _quantisation(config, text),
        "state": state_of(kind, layers),
        "mask": _mask(text),
    }


def _mask(text: Node) -> frozenset[int]:
    """Tokens that stand for positions to be drafted: of PARD, of the draft models that vLLM calls ptd, of DFlash."""
    places = ((text, "pard_token"), (text, "ptd_token_id"), (text.node("dflash_config"), "mask_token_id"))
    found = (node.count(key, MAX_ID) for node, key in places)
    return frozenset(i for i in found if i is not None)


def vocab_size(config: Node) -> int | None:
    """Rows of logits."""
    text = text_config(config)
    found = text.count("vocab_size", MAX_ID)
    return config.count("vocab_size", MAX_ID) if found is None else found


def ids(node: Node, key: str) -> frozenset[int]:
    """An id or a list of ids."""
    value = node.values.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    for i in found:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MAX_ID:
            raise node.fault(key, i, f"an id is an integer from 0 to {MAX_ID - 1}")
    return frozenset(found)


def first_id(node: Node, key: str) -> int | None:
    """An id, or the first of a list of ids. A padding id of -1 is none: so the first Llamas wrote it."""
    value = node.values.get(key)
    if key == "pad_token_id" and value == -1:
        return None
    ids(node, key)
    return next(iter(value), None) if isinstance(value, list) else value


def _rope(text: Node) -> Rope | None:
    """transformers 5 writes `rope_parameters`; before that it was `rope_theta` and `rope_scaling`."""
    parameters = text.node("rope_parameters")
    scaling = parameters if parameters.values else text.node("rope_scaling")
    base = scaling.number("rope_theta") or text.number("rope_theta") or text.number("rotary_emb_base")
    kind = scaling.text("rope_type") or scaling.text("type")
    factor = scaling.number("factor")
    named = None if kind in (None, "default") else kind if factor is None else f"{kind} {factor:g}"
    return None if base is None and named is None else Rope(base, _rotated(text, scaling), named)


def _rotated(text: Node, scaling: Node) -> int | None:
    dims = text.count("head_dim", MAX_ID)
    width, heads = text.count("hidden_size", MAX_CONTEXT), text.count("num_attention_heads", MAX_CONTEXT)
    if dims is None and width and heads:
        dims = width // heads
    share = scaling.number("partial_rotary_factor") or text.number("partial_rotary_factor") or 1.0
    return None if dims is None else int(dims * share)


def _quantisation(config: Node, text: Node) -> str | None:
    """ "gptq 4" where the weights are quantised, else the type they are stored in."""
    quantised = config.node("quantization_config")
    if method := quantised.text("quant_method"):
        bits = quantised.count("bits", 64)
        return method if bits is None else f"{method} {bits}"
    named = (text.text(key) or config.text(key) for key in ("dtype", "torch_dtype"))
    return next((name for name in named if name), None)
