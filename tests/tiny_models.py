"""Tiny random models. The engines open them in milliseconds, so unit tests need no download."""

from pathlib import Path

import gguf
import numpy as np

VOCAB = 64
WIDTH = 32
BYTES = tuple(b"<0x%02X>" % i for i in range(256))


def sentencepiece_tokens(*, all_bytes: bool = False) -> list[bytes]:
    """Return VOCAB tokens: control tokens, one byte token, the space mark, letters, and fillers.

    With `all_bytes`, there are all 256 byte tokens, and 255 more tokens in total.
    """
    plain = ["▁".encode(), *(bytes([97 + i]) for i in range(26))]
    start = [b"<unk>", b"<s>", b"</s>", *(BYTES if all_bytes else (b"<0x0A>",))]
    return start + plain + [b"t%d" % i for i in range(VOCAB - 4 - len(plain))]


def _write(
    path: Path,
    arch: str,
    n_ctx: int,
    tokens: list[bytes] | None,
    tensors: dict[str, np.ndarray],
    **keys: object,
) -> Path:
    keys |= {
        "context_length": n_ctx,
        "embedding_length": WIDTH,
        "block_count": 2,
        "feed_forward_length": 48,
    }
    keys |= {
        "file_type": 0,
        "vocab_size": len(tokens or range(VOCAB)),
        "tokenizer_model": "no_vocab",
    }
    if tokens is not None:
        kinds = {b"<unk>": 2, b"<s>": 3, b"</s>": 3, **dict.fromkeys(BYTES, 6)}
        keys |= {
            "tokenizer_model": "llama",
            "token_list": tokens,
            "token_types": [kinds.get(t, 1) for t in tokens],
        }
        keys |= {"token_scores": [-float(i) for i in range(len(tokens))]}
        keys |= {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    out = gguf.GGUFWriter(str(path), arch)
    for key, value in keys.items():
        getattr(out, f"add_{key}")(value)
    for name, values in tensors.items():
        out.add_tensor(name, values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def _random(seed: int):
    rng = np.random.default_rng(seed)
    return lambda *shape: (0.3 * rng.standard_normal(shape)).astype(np.float32)


ONE = np.ones(WIDTH, np.float32)


def llama_gguf(
    path: Path, *, n_ctx: int = 64, seed: int = 0, vocab: bool = True, all_bytes: bool = False
) -> Path:
    """Write a float32 llama model of two layers, with 4 heads over 2 key/value heads."""
    tokens = sentencepiece_tokens(all_bytes=all_bytes) if vocab else None
    made = _random(seed)
    size = len(tokens) if tokens else VOCAB
    tensors = {
        "token_embd.weight": made(size, WIDTH),
        "output_norm.weight": ONE,
        "output.weight": made(size, WIDTH),
    }
    for layer in range(2):
        shapes = {
            "attn_q": (32, 32),
            "attn_k": (16, 32),
            "attn_v": (16, 32),
            "attn_output": (32, 32),
        }
        shapes |= {"ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
        tensors |= {f"blk.{layer}.{name}.weight": made(*shape) for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": ONE for name in ("attn_norm", "ffn_norm")}
    keys = {
        "head_count": 4,
        "head_count_kv": 2,
        "layer_norm_rms_eps": 1e-5,
        "rope_dimension_count": 8,
    }
    return _write(path, "llama", n_ctx, tokens, tensors, **keys)


def mamba_gguf(path: Path, *, n_ctx: int = 64) -> Path:
    """Write a Mamba model of two layers: recurrent state, no attention."""
    made = _random(0)
    tensors = {
        "token_embd.weight": made(VOCAB, WIDTH),
        "output_norm.weight": ONE,
        "output.weight": made(VOCAB, WIDTH),
    }
    shapes = {
        "ssm_in.weight": (128, 32),
        "ssm_conv1d.weight": (64, 4),
        "ssm_conv1d.bias": (64,),
        "ssm_d": (64,),
    }
    shapes |= {
        "ssm_x.weight": (34, 64),
        "ssm_dt.weight": (64, 2),
        "ssm_dt.bias": (64,),
        "ssm_out.weight": (32, 64),
    }
    for layer in range(2):
        tensors |= {f"blk.{layer}.{name}": made(*shape) for name, shape in shapes.items()}
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ONE,
            f"blk.{layer}.ssm_a": -np.abs(made(64, 16)),
        }
    keys = {"head_count": 0, "layer_norm_rms_eps": 1e-5, "ssm_conv_kernel": 4, "ssm_inner_size": 64}
    keys |= {"ssm_state_size": 16, "ssm_time_step_rank": 2}
    return _write(path, "mamba", n_ctx, sentencepiece_tokens(), tensors, **keys)


TORCH_CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
FAMILIES = {
    # attention
    "mistral": {"sliding_window": 8},
    "gemma3_text": {
        "sliding_window": 8,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {"head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 16,
    },
    # recurrent and hybrid
    "qwen3_next": {
        "num_hidden_layers": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "head_dim": 16,
        **_DELTA,
    },
    "qwen3_5_text": {"num_hidden_layers": 4, "head_dim": 16, **_DELTA},
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        **_DELTA,
        "linear_num_key_heads": 4,
    },
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_h1": {"head_dim": 8, **_MAMBA2, "mamba_d_ssm": 64},
    "bamba": {"attn_layer_indices": [1], **_MAMBA2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
        **_MAMBA2,
    },
    "lfm2": {"full_attn_idxs": [1]},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_expand": 2,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "chunk_size": 8,
        "num_mem_blocks": 1,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 8,
        "expand": 2,
    },
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {
        "num_hidden_layers": 4,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
}
"""Settings of small models by family, beyond TORCH_CONFIG."""


def torch_model(kind: str = "llama", *, seed: int = 0, **config: object):
    """Return a small random transformers model.

    Its weights are large enough for the logits to depend on the whole past.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        whole = TORCH_CONFIG | FAMILIES.get(kind, {}) | config
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **whole))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def hf_model(
    kind: str = "llama",
    *,
    seed: int = 0,
    n_ctx: int = 64,
    config: dict | None = None,
    **options: object,
):
    """Return `torch_model` in the torch engine."""
    from specnb.lm.hf.model import HfModel

    net = torch_model(kind, seed=seed, max_position_embeddings=n_ctx, **config or {})
    return HfModel(net, None, name=kind, n_ctx=n_ctx, **options)


def torch_folder(path: Path, kind: str = "llama", **config: object) -> Path:
    """Save `torch_model` as a transformers folder without a tokenizer; return `path`."""
    from specnb.lm.hf.files import quiet

    with quiet():
        torch_model(kind, **config).save_pretrained(path)
    return path
