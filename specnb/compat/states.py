"""Which architectures keep a recurrent state, by llama.cpp's names and by transformers' `model_type`.

From llm_arch_is_recurrent and llm_arch_is_hybrid of llama.cpp, and from the classes of transformers 5.23 that say
`_is_stateful` (lfm2, whose short convolutions are the state, does not say it). Every other architecture is attention.
"""

from collections.abc import Iterable

from specnb.compat.description import State

RECURRENT = frozenset(
    {
        *("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
        *("falcon_mamba", "rwkv", "xlstm"),
    }
)
HYBRID = frozenset(
    {
        *("jamba", "falcon_h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"),
        *("qwen3next", "kimi_linear", "bailingmoe3", "kimi_k3", "glm5_next", "qwen35", "qwen35moe", "qwen4exp"),
        *("deepseek4", "minimax_01"),
        *("bamba", "granitemoehybrid", "zamba", "zamba2", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
        *("olmo_hybrid", "recurrent_gemma", "deepseek_v4", "bailing_hybrid", "zaya", "lfm2_moe", "lfm3", "minimax"),
    }
)
RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm", "rwkv", "hybrid"})
"""Entries of a config's `layer_types`."""


def state_of(architecture: str | None, layer_types: Iterable[str] = ()) -> State | None:
    """What a model of this architecture remembers; None where no architecture is stated.

    `layer_types`, where a config lists them, speak for architectures that are not known here.
    """
    kinds = set(layer_types)
    if kinds & RECURRENT_LAYERS:
        return State.RECURRENT if kinds <= RECURRENT_LAYERS - {"hybrid"} else State.HYBRID
    if architecture is None:
        return None
    name = architecture.lower().replace("-", "_").removesuffix("_text")
    if name in RECURRENT:
        return State.RECURRENT
    return State.HYBRID if name in HYBRID else State.ATTENTION
