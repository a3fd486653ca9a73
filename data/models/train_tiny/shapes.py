"""The embedded pair: two small trained hybrids in the Qwen3-Next pattern that share a tokenizer.

Three gated delta rule layers, then one full attention layer, with dense MLPs: the text model of
Qwen3.5, so that transformers (`Qwen3_5ForCausalLM`) and llama.cpp (`qwen35`) both run it. Only
shapes and names live here.
"""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specnb.errors import InputError

if TYPE_CHECKING:
    from transformers import Qwen3_5TextConfig

TARGET = "tiny-hybrid"
DRAFT = "tiny-hybrid-draft"

VOCAB_SIZE = 4096
END_TEXT = "<|endoftext|>"
END_ID = 0

_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    # a text starts where another ended: training packs texts with this token between them
    "bos_token_id": END_ID,
    "eos_token_id": END_ID,
    "pad_token_id": None,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    # The family's partial rotation: 16 of the 64 values turn. The sections cover all 8 frequencies,
    # because llama.cpp gives a frequency outside them position 0; for text, where all three
    # positions are equal, they change nothing.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}

SHAPES = MappingProxyType(
    {
        TARGET: {
            **_SHARED,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        DRAFT: {
            **_SHARED,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
        },
    }
)


def shape(name: str) -> dict[str, Any]:
    """The fields of one config, a fresh copy, with `layer_types` written out.

    InputError for a name not in SHAPES.
    """
    if name not in SHAPES:
        raise InputError(f"no embedded model {name!r}: known are {', '.join(SHAPES)}")
    fields = {**SHAPES[name], "rope_parameters": dict(SHAPES[name]["rope_parameters"])}
    n_layers = fields["num_hidden_layers"]
    return fields | {
        "layer_types": [
            "linear_attention" if (i + 1) % 4 else "full_attention" for i in range(n_layers)
        ]
    }


def config(name: str) -> "Qwen3_5TextConfig":
    """The transformers config of one of the two models."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**shape(name))
