"""A GGUF as a transformers folder: float32 weights and tokenizer, made once and cached; later loads take a second.

Every value of a GGUF is exact in float32. What transformers' conversion leaves out of the tokenizer and of the set
of end tokens is put back from the header, so that both engines read the same model.
"""

import json
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from specnb.errors import LoadError, SpecnbError
from specnb.io import file_digest
from specnb.lm import binding
from specnb.lm.cache import made_once, need_space
from specnb.lm.memory import Need, require
from specnb.paths import cache_dir

SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Pre-tokenizers (`tokenizer.ggml.pre`) that part every digit first; transformers 5.23 converts them without that."""

CONVERSION = 1
"""Part of the folder's name: raise it when `_complete` changes, and older folders are made again."""

NOTE = "specnb.json"
"""In a folder: the texts that the two tokenizers split differently."""

PROBES = (
    "a).\n\n1. b",
    "x = 1234\n    y",
    "  two  spaces ",
    "naïve 日本語 🙂\t\t{};",
    "<|im_start|>user\nhi<|im_end|>",
)


def dequantised(gguf: Path) -> Path:
    """Cached folder with the float32 weights and the tokenizer of a GGUF file; made on first use."""
    made_by = f"{CONVERSION}-{version('transformers')}" + ("" if _llama_here() else "-without-llama")
    folder = cache_dir() / "dequantised" / f"{gguf.stem}-{file_digest(gguf)[:16]}-{made_by}"
    made_once(folder, lambda partial: _dequantise(gguf, partial), n_bytes=0)
    note = folder / NOTE
    if differs := json.loads(note.read_text(encoding="utf-8"))["tokenizer_differs_on"]:
        warnings.warn(
            f"{gguf.name}: transformers' tokenizer splits {differs[0]!r} otherwise than llama.cpp: the engines will "
            "see different prompts; pass token ids to compare them",
            stacklevel=2,
        )
    return folder


def _llama_here() -> bool:
    try:
        binding.library()
    except LoadError:
        return False
    return True


def _dequantise(gguf: Path, folder: Path) -> None:
    try:
        _check_room(gguf)
        with quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
            )
            refuse_missing(str(gguf), report)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            # The tensors are plain float32 now; transformers refuses to save a model that says it is quantised.
            model.hf_quantizer, model.is_quantized = None, False
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            differs = _complete(gguf, model, tokenizer) if _llama_here() else []
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:
        raise load_error(str(gguf), error) from error
    (folder / NOTE).write_text(json.dumps({"tokenizer_differs_on": differs}), encoding="utf-8")


def _check_room(gguf: Path) -> None:
    """Memory for the float32 weights, twice while they are written, and disk for them."""
    from gguf import GGUFReader

    n = sum(math.prod(int(d) for d in tensor.shape) for tensor in GGUFReader(gguf).tensors)
    require(Need(8 * n, 0), device="cpu", what=f"{gguf.name} as float32")
    need_space(cache_dir(), 4 * n)


def _complete(gguf: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Put back what the conversion leaves out: the full end-of-generation set, and single digits.

    Returns the probes that the two tokenizers still split differently.
    """
    with binding.header(gguf) as header:
        vocab = binding.vocabulary(header)
        model.generation_config.eos_token_id = sorted(vocab.eog) or None
        if vocab.pre in SINGLE_DIGITS:
            byte_level = tokenizer.backend_tokenizer.pre_tokenizer
            digits = pre_tokenizers.Digits(individual_digits=True)
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        texts = [t for t in PROBES if not binding.unspellable(vocab, t)]
        return [t for t in texts if binding.tokenize(header, t, special=True) != tokenizer(t).input_ids]


def refuse_missing(source: str, report: Mapping[str, Collection[str]]) -> None:
    """Refuse weights that the files do not hold: transformers would leave them random and go on.

    `report` is `from_pretrained`'s loading info. Raises LoadError naming the first of them.
    """
    missing = sorted(report["missing_keys"]) + sorted(name for name, *_shapes in report["mismatched_keys"])
    if missing:
        raise LoadError(
            f"{source!r} lacks {len(missing)} of the model's weights in the shape of its config (the first: "
            f"{missing[0]}): the download is incomplete, or config.json belongs to another model"
        )


def load_error(source: str, error: Exception) -> Exception:
    """One readable LoadError for whatever transformers, the hub or safetensors raised; our own errors pass.

    Broken files make them raise nearly any class.
    """
    if isinstance(error, SpecnbError):
        return error
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    # a first line that ends with a colon announces the reason
    reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    return LoadError(
        f"transformers cannot load {source!r}: {reason}. Give a local folder with config.json, weights and "
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
