"""What a GGUF of one model holds, before anything is read: header keys, and a weight for every tensor of the config.

A plan is exhaustive both ways: a tensor that the plan lacks, and one that the folder lacks, are errors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specnb.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig

Change = Callable[["np.ndarray"], "np.ndarray"]
Key = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[str]


def unchanged(weight: "np.ndarray") -> "np.ndarray":
    """As it is: both engines mean the same by it."""
    return weight


def negative_exp(weight: "np.ndarray") -> "np.ndarray":
    """A from log(-A)."""
    import numpy as np

    return -np.exp(weight)


@dataclass(frozen=True)
class Weight:
    """One tensor: its GGUF name, the transformers tensor it comes from with its shape, and what happens to the values.

    `change` maps the float32 tensor to that of the GGUF, of `out_shape` (None: the same shape). Vectors and weights
    with an `out_shape` stay float32 whatever the file's type is: llama.cpp's kernels read them so.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    change: Change = unchanged
    out_shape: tuple[int, ...] | None = None

    @property
    def written_shape(self) -> tuple[int, ...]:
        return self.out_shape or self.shape

    @property
    def exact(self) -> bool:
        """Whether it stays float32."""
        return self.out_shape is not None or len(self.shape) == 1


def convolution(name: str, source: str, channels: int, window: int, change: Change = unchanged) -> Weight:
    """The weight of a depthwise convolution: torch has a middle axis of one, which llama.cpp has not."""
    return Weight(name, source, (channels, 1, window), lambda weight: change(weight[:, 0]), (channels, window))


@dataclass(frozen=True)
class Plan:
    """`keys` are written as `ARCH.key`. Tensors whose name starts with one of `skipped` are not the text model's."""

    arch: str
    keys: Mapping[str, Key]
    weights: Sequence[Weight]
    skipped: tuple[str, ...] = ()


def head_weights(
    config: "PretrainedConfig", final_norm: Weight, embedding: str = "model.embed_tokens.weight"
) -> list[Weight]:
    """Embedding, last norm and, if it is not tied to the embedding, the output."""
    shape = (config.vocab_size, config.hidden_size)
    weights = [Weight("token_embd.weight", embedding, shape), final_norm]
    if not config.tie_word_embeddings:
        weights.append(Weight("output.weight", "lm_head.weight", shape))
    return weights


def skip_tied(config: "PretrainedConfig") -> tuple[str, ...]:
    """A tied output may be stored all the same; transformers takes the embedding."""
    return ("lm_head.weight",) if config.tie_word_embeddings else ()


def decoder_keys(config: "PretrainedConfig", *, feed_forward: int) -> dict[str, Key]:
    """The sizes that every decoder with attention layers states."""
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": feed_forward,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "rope.freq_base": rope_theta(config),
    }


def require(config: "PretrainedConfig", name: str, wanted: Any, why: str) -> None:
    """InputError unless the field has the one value that llama.cpp's code for this model has built in."""
    if (value := getattr(config, name, None)) != wanted:
        raise refusal(name, value, f"it must be {wanted!r}: {why}")


def require_both(config: "PretrainedConfig", recurrent: str, full: str) -> None:
    """InputError unless `layer_types` names one of the two kinds for each layer, and both of them.

    llama.cpp ends the process on a hybrid without recurrent layers, transformers fails on one without attention.
    """
    kinds = config.layer_types
    if len(kinds) != config.num_hidden_layers or set(kinds) != {recurrent, full}:
        raise refusal("layer_types", kinds, f"it must name {recurrent} or {full} for each layer, and both of them")


def refusal(name: str, value: object, why: str) -> InputError:
    """For a config that transformers runs and llama.cpp, or this converter, does not."""
    return InputError(f"config.json: {name} is {value!r:.80}: {why}; such a model runs in torch only (?backend=hf)")


def rope_theta(config: "PretrainedConfig") -> float:
    """The base of plain rotary embeddings; InputError for scaled ones."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        raise refusal("rope_type", rope["rope_type"], "only default, unscaled positions are written")
    return float(rope["rope_theta"])
