"""From a folder, a hub id or a GGUF file to a torch module, its tokenizer and its vocabulary.

A GGUF is dequantised once into a cached safetensors folder (values exact in float32); later loads take a second.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging as hf_logging

from specnb.errors import InputError, LoadError
from specnb.lm.memory import Need, kv_bytes, require
from specnb.lm.vocab import Vocabulary
from specnb.paths import cache_dir
from specnb.provenance import file_digest

# what transformers and huggingface_hub raise for a missing, unreachable, gated or broken model
UNUSABLE = (OSError, ValueError, KeyError, ImportError, RuntimeError)


def local_or_hub(source: Path | str) -> str:
    """A folder to load from (a GGUF is dequantised into one), or a hub id left as it is."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"no such model file: {path}")
        return str(dequantised(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{path} is not a model folder: it has no config.json")
        return str(path)
    if str(source).startswith((".", "/", "~")) or str(source).count("/") > 1:
        raise InputError(f"no such model folder: {path}")
    return str(source)


def load(
    source: str, *, dtype: torch.dtype, device: str, n_ctx: int, revision: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Check the memory, then load weights and tokenizer. A folder without a tokenizer gives None for it."""
    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
        _check_memory(config, dtype, device, n_ctx, source)
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, revision=revision)
    except UNUSABLE as error:
        raise _load_error(source, error) from error
    return model.to(device), _tokenizer(source, revision)


def _load_error(source: str, error: Exception) -> Exception:
    if isinstance(error, LoadError):
        return error
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return LoadError(
        f"transformers cannot load {source!r}: {first}. Give a local folder with config.json, weights and "
        "tokenizer, a .gguf file, or a hub id that this machine can reach"
    )


def _tokenizer(source: str, revision: str) -> PreTrainedTokenizerBase | None:
    folder = Path(source)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision)
    except UNUSABLE as error:
        raise _load_error(source, error) from error


def _check_memory(config: PretrainedConfig, dtype: torch.dtype, device: str, n_ctx: int, what: str) -> None:
    """Count parameters on the meta device (no memory), then ask for weights + state + margin."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    width = torch.finfo(dtype).bits // 8
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", 0) or 1
    state = kv_bytes(
        n_layers=getattr(text, "num_hidden_layers", 1),
        n_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or max(1, getattr(text, "hidden_size", 1) // heads),
        n_ctx=n_ctx or min(getattr(text, "max_position_embeddings", 4096), 4096),
        bytes_per_value=width,
    )
    weights = width * sum(p.numel() for p in skeleton.parameters())
    require(Need(weights, state), device=device, what=what)


def dequantised(gguf: Path) -> Path:
    """Cached folder with the float32 weights and the tokenizer of a GGUF file; made on first use."""
    folder = cache_dir() / "dequantised" / f"{gguf.stem}-{file_digest(gguf)[:16]}"
    done = folder / "config.json"
    if done.is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not done.is_file():
            _dequantise(gguf, folder)
    return folder


def _dequantise(gguf: Path, folder: Path) -> None:
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except UNUSABLE as error:
        raise _load_error(str(gguf), error) from error
    # The tensors are plain float32 now; transformers refuses to save a model that still says it is quantised.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = _end_of_generation(gguf, model.config)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _end_of_generation(gguf: Path, config: PretrainedConfig) -> list[int] | int | None:
    """The full end set of the file as llama.cpp derives it, so that both engines stop at the same tokens."""
    from specnb.lm import binding

    try:
        return sorted(binding.end_of_generation(gguf)) or config.eos_token_id
    except LoadError:  # torch alone is installed: the header's own EOS is what there is
        return config.eos_token_id


def vocabulary(
    tokenizer: PreTrainedTokenizerBase | None, config: PretrainedConfig, generation: GenerationConfig | None
) -> Vocabulary:
    """Ids 0..vocab_size-1 with the bytes each stands for; padding rows have b"".

    Without a tokenizer the pieces are placeholders that name the id.
    """
    eog = _ids(getattr(generation, "eos_token_id", None)) | _ids(getattr(config, "eos_token_id", None))
    if tokenizer is None:
        return Vocabulary(tuple(b"<%d>" % i for i in range(config.vocab_size)), kind="none", eog=frozenset(eog))
    state = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    added = {i: token for i, token in tokenizer.added_tokens_decoder.items()}
    to_bytes = _piece_reader(state)
    size = config.vocab_size  # the width of the logits; a tokenizer may know fewer ids, or more
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    pieces = [
        str(added[i]).encode() if i in added else to_bytes(name) if name is not None else b""
        for i, name in enumerate(names)
    ]
    probe = tokenizer("x").input_ids
    return Vocabulary(
        pieces=tuple(pieces[:size]) + (b"",) * (size - len(pieces)),
        kind=str(state.get("model", {}).get("type", "unknown")).lower(),
        pre=str((state.get("pre_tokenizer") or {}).get("type", "")).lower(),
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        eog=frozenset(eog | _ids(tokenizer.eos_token_id)),
        special=frozenset(i for i, token in added.items() if token.special),
        add_bos=bool(probe) and probe[0] == tokenizer.bos_token_id,
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )


def _ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else set(value) if isinstance(value, list) else {value}


def _piece_reader(state: dict):
    """How the tokenizer's written pieces become bytes: byte-level BPE's alphabet, or sentencepiece's marks."""
    if "ByteLevel" in json.dumps([state.get("decoder"), state.get("pre_tokenizer")]):
        alphabet = {c: b for b, c in bytes_to_unicode().items()}
        return lambda name: bytes(alphabet[c] for c in name) if all(c in alphabet for c in name) else name.encode()

    def sentencepiece(name: str) -> bytes:
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()

    return sentencepiece


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no chatter of transformers while it loads; the user's own settings come back afterwards."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
