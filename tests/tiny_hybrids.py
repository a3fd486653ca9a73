"""Tiny random hybrid models, and one with attention only, as transformers folders with a tokenizer.

Norms, gates and decays are far from their initialization, so that every change of a weight or of a
state is detected.
"""

from pathlib import Path

VOCAB = 512
END = "<|endoftext|>"
CORPUS = (
    "def forward(self, ids):\n    return self.layers[0](ids) + 12345\n" * 5
    + "The state of a recurrent layer cannot be cropped; it is 2026.\n" * 5
    + "e\u0301te\u0301 नमस्ते दुनिया 2026 2027\n" * 5
    + "日本語 naïve 🙂 don't we'll I'm\t\tx  y\r\n" * 5
)
BASE = {"vocab_size": VOCAB, "hidden_size": 64, "bos_token_id": 0, "eos_token_id": 0}
DECODER = BASE | {
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN3 = DECODER | {"head_dim": 32, "tie_word_embeddings": True}
QWEN = QWEN3 | {
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    # not "every n-th layer", so that the pattern itself must be used
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
LFM2 = DECODER | {
    "block_multiple_of": 32,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
MAMBA2 = BASE | {
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 32,
    "n_groups": 2,
    "chunk_size": 16,
    "pad_token_id": 0,
}
MODELS = {
    "qwen35": ("qwen3_5_text", QWEN),
    "qwen35-grouped": (
        "qwen3_5_text",
        QWEN | {"linear_num_value_heads": 4, "tie_word_embeddings": False},
    ),
    "lfm2": ("lfm2", LFM2),
    "mamba2": ("mamba2", MAMBA2),
    "qwen3": ("qwen3", QWEN3),
}


def random_model(kind: str, config: dict):
    """Return a random model in which norms, decays and convolutions have an effect.

    Norm weights vary around a factor of 1 (qwen3_5_text adds 1 to the weight), and decays from slow
    to fast.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=made)
            if name.endswith("A_log"):
                values = torch.rand(weight.shape, generator=made) * 3 - 3
            elif "norm" in name and (kind != "qwen3_5_text" or "linear_attn.norm" in name):
                values = 1 + 0.4 * values
            elif "norm" in name:
                values *= 0.4
            elif "embed" in name:
                values *= 0.5
            elif weight.dim() > 1:
                values *= weight[0].numel() ** -0.5
            weight.copy_(values)
    return model


def byte_level(steps: list | None = None, *, all_bytes: bool = True, **options):
    """Train a byte-level BPE tokenizer on CORPUS.

    `steps` precede ByteLevel; by default, they split off single digits, as SmolLM does.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(**options))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=steps is None or steps == [])
    first = [pre_tokenizers.Digits(individual_digits=True)] if steps is None else steps
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last]) if first else last
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if all_bytes else []
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def save_tokenizer(tokenizer, folder: Path, **options) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, **options
    ).save_pretrained(folder)


def hybrid_folder(path: Path, name: str, **config: object) -> Path:
    """Save the model `name` of MODELS and its tokenizer as a transformers folder; return `path`."""
    kind, known = MODELS[name]
    random_model(kind, known | config).save_pretrained(path)
    save_tokenizer(byte_level(), path)
    return path


GGUFS = {"qwen35-grouped.gguf": "snapshots", "lfm2.gguf": "snapshots", "mamba2.gguf": "fused"}
"""The strategy of rollback=auto in llama.cpp, which has no snapshots for Mamba-2."""
