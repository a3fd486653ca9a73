"""A GGUF as a transformers folder: float32 weights and tokenizer, made once and cached; later loads take a second.

Every value of a GGUF is exact in float32. What transformers' conversion leaves out of the tokenizer and of the set
of end tokens is put back from the header, so that both engines read the same model.
"""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from specnb.errors import LoadError
from specnb.lm import binding
from specnb.paths import cache_dir
from specnb.provenance import file_digest

UNUSABLE = (OSError, ValueError, KeyError, ImportError, RuntimeError)
"""What transformers and huggingface_hub raise for a missing, unreachable, gated or broken model."""

SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Pre-tokenizers (`tokenizer.ggml.pre`) that part every digit first; transformers 5.23 converts them without that."""

PROBES = (
    "a).\n\n1. b",
    "x = 1234\n    y",
    "  two  spaces ",
    "naïve 日本語 🙂\t\t{};",
    "<|im_start|>user\nhi<|im_end|>",
)


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
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            # The tensors are plain float32 now; transformers refuses to save a model that says it is quantised.
            model.hf_quantizer, model.is_quantized = None, False
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            _complete(gguf, model, tokenizer)
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    except UNUSABLE as error:
        raise load_error(str(gguf), error) from error
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _complete(gguf: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Put back what the conversion leaves out: the full end-of-generation set, and single digits."""
    try:
        binding.library()
    except LoadError:  # without llama.cpp the header's own end token, which transformers reads, is what there is
        return
    with binding.header(gguf) as header:
        vocab = binding.vocabulary(header)
        model.generation_config.eos_token_id = sorted(vocab.eog) or None
        if vocab.pre in SINGLE_DIGITS:
            byte_level = tokenizer.backend_tokenizer.pre_tokenizer
            digits = pre_tokenizers.Digits(individual_digits=True)
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        differ = [t for t in PROBES if binding.tokenize(header, t, special=True) != tokenizer(t).input_ids]
    if differ:
        warnings.warn(
            f"{gguf.name}: transformers' tokenizer (pre-tokenizer {vocab.pre!r}) splits {differ[0]!r} otherwise than "
            "llama.cpp: the engines will see different prompts; pass token ids to compare them",
            stacklevel=2,
        )


def load_error(source: str, error: Exception) -> Exception:
    """One readable LoadError for whatever transformers raised; our own errors pass."""
    if isinstance(error, LoadError):
        return error
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return LoadError(
        f"transformers cannot load {source!r}: {first}. Give a local folder with config.json, weights and "
        "tokenizer, a .gguf file, or a hub id that this machine can reach"
    )


@contextmanager
def quiet() -> Iterator[None]:
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
