"""An attention-only model of the size of a hybrid: what the same speculation costs where going back is free.

Its weights are random, for nothing but time is measured with it; its tokenizer is the hybrid's.
"""

import shutil
from pathlib import Path

from filelock import FileLock

from specnb.errors import InputError
from specnb.lm import embedded
from specnb.lm.bounded_json import read_json
from specnb.lm.download import files_digest
from specnb.paths import cache_dir

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
MAX_BYTES, MAX_VALUES = 16 << 20, 1_000_000


def attention_twin(name: str) -> Path:
    """A cached transformers folder (Qwen3): depth, widths, heads and vocabulary of the hybrid `name`, no recurrence.

    `name` is an embedded model or a local folder. Raises InputError for anything else, and for a model without
    attention heads or a tokenizer.
    """
    folder = embedded.local_folder(name)
    if not (folder / "config.json").is_file():
        raise InputError(f"{name!r} is neither an embedded model ({', '.join(embedded.names())}) nor a model's folder")
    read = (folder / file for file in ("config.json", *TOKENIZER))
    digest = files_digest(path for path in read if path.is_file())
    made = cache_dir() / "twins" / f"{folder.resolve().name}-{digest[:16]}"
    if not (made / "model.safetensors").is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{made}.lock"):
            if not (made / "model.safetensors").is_file():
                _make(folder, made)
    return made


def _make(folder: Path, made: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from specnb.lm.dequantise import quiet

    read = read_json(folder / "config.json", MAX_BYTES, MAX_VALUES).values
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "bos_token_id",
            "eos_token_id")  # fmt: skip
    if missing := [field for field in same if field not in read] + [f for f in TOKENIZER if not (folder / f).is_file()]:
        raise InputError(f"{folder} has no attention-only twin: it lacks {', '.join(missing)}")
    config = Qwen3Config(**{field: read[field] for field in same})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    partial = made.with_name(f"{made.name}.making")
    shutil.rmtree(partial, ignore_errors=True)
    with quiet():
        model.save_pretrained(partial)
    for file in TOKENIZER:
        shutil.copy(folder / file, partial / file)
    shutil.rmtree(made, ignore_errors=True)
    partial.replace(made)
