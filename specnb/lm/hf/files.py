"""Load a folder, a hub id or a GGUF file as a torch module, with its tokenizer and vocabulary.

A GGUF is converted once, to a folder with the tokenizer and float32 weights (exactly those of the
file). transformers' conversion drops parts of the tokenizer and of the set of end tokens; these are
restored.
"""

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf as gguf_package
import numpy as np
import torch
from gguf import MODEL_ARCH
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from specnb.errors import InputError, LoadError, SpecnbError
from specnb.fetch import gguf_parts
from specnb.io import cache_dir, file_digest, make_once, need_space, read_json, size_of
from specnb.lm.base import DEFAULT_N_CTX, kv_bytes
from specnb.lm.gguf.header import ARCHITECTURE, read_header, sound_header
from specnb.lm.hf import int4
from specnb.lm.hf.blocks import FileMatrix
from specnb.lm.hf.decoder import refuse
from specnb.lm.vocab import (
    END_KEYS,
    Vocabulary,
    ids_in,
    kind_of,
    read_tokenizer,
    require_rows,
    spell_pieces,
    tokenizing,
)
from specnb.machine import require_memory

SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""Pre-tokenizers (`tokenizer.ggml.pre`) that split all digits; transformers 5.23 does not."""

ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
"""GGUF architectures whose tensors equal the weights in torch, except for the order of rows.
Mistral models have the architecture llama."""

CONVERSION = 1
"""Version in the folder name. Increase it when `_complete` changes, to convert files again."""

DIFFERS = "specnb.json"
"""File in the folder that lists the PROBES on which the tokenizers differ."""

PROBES = (
    "a).\n\n1. b",
    "x = 1234\n    y",
    "  two  spaces ",
    "naïve 日本語 🙂\t\t{};",
    "<|im_start|>user\nhi",
)
TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"}
)


def load_network(
    source: str, *, dtype: torch.dtype, device: str = "cpu", n_ctx: int = 0, revision: str = "main"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Check the memory, then load weights and tokenizer (None for a folder without one).

    Raises LoadError, MemoryShortError, InputError (n_ctx, device).
    """
    # repository code is never executed: without an explicit False, transformers asks the user
    options = {
        "pretrained_model_name_or_path": source,
        "revision": revision,
        "trust_remote_code": False,
    }
    folder = Path(source)
    with loading(source):
        config = AutoConfig.from_pretrained(**options)
        _check_memory(config, dtype, device, n_ctx, source)
        with quiet():
            model = _checked_model(source, dtype=dtype, **options).to(device)
        if folder.is_dir() and not TOKENIZER_FILES & {path.name for path in folder.iterdir()}:
            return model, None
        try:
            if file := cached_file(
                source,
                "tokenizer.json",
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
            ):
                read_tokenizer(Path(file))
            with tokenizing(source):
                return model, AutoTokenizer.from_pretrained(**options)
        except InputError as error:
            raise LoadError(str(error)) from error


def load_int4(
    source: str,
    *,
    device: str,
    n_ctx: int,
    revision: str,
    coarse: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a GGUF file with matrices in 4- and 8-bit blocks, or round those of a folder or hub id.

    `coarse` rounds 8-bit matrices to 4 bits, including lm_head, for draft models. Raises InputError
    for devices other than the CPU, and for families that `hf.decoder` does not support.
    """
    if device != "cpu":
        raise InputError(f"got device={device}, expected cpu for dtype=int4: use bfloat16 there")
    if source.endswith(".gguf"):
        file = Path(source)
        folder = dequantize_once(file, weights=False)
        with loading(source):
            config = AutoConfig.from_pretrained(folder)
            n_bytes = sum(map(size_of, gguf_parts(file)))
            require_memory(
                n_bytes, _state_bytes(config, torch.bfloat16, n_ctx, source), name=source
            )
            net = blocks_network(file, config, most_bits=4 if coarse else 8)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            net.generation_config = GenerationConfig.from_pretrained(folder)
    else:
        net, tokenizer = load_network(source, dtype=torch.bfloat16, n_ctx=n_ctx, revision=revision)
        int4.round_network(net, head_bits=4 if coarse else 8)
    if reason := refuse(net):
        raise InputError(f"dtype=int4 does not support {source}: {reason}; use bfloat16 or float32")
    return net, tokenizer


def blocks_network(file: Path, config: PretrainedConfig, most_bits: int = 8) -> PreTrainedModel:
    """Return the network of a GGUF file in bfloat16; its matrices are read on use.

    Raises InputError like `read_header` and for other architectures; LoadError for missing tensors.
    """
    headers = {
        name: header for header in map(read_header, gguf_parts(file)) for name in header.shapes
    }
    architecture = next(iter(headers.values())).get(ARCHITECTURE, str)
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"got the architecture {architecture}, expected {', '.join(ARCHITECTURES)} for "
            "dtype=int4: use dtype=bfloat16"
        )
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    names = gguf_package.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def read(module: str, part: str, order: np.ndarray | None) -> FileMatrix | None:
        """Return a tensor of a module, a vector as `(n, 1)`; None for a missing bias."""
        name = f"{names.get_name(module)}.{part}"
        if name == "output.weight" and name not in headers:  # tied to the embedding
            name = "token_embd.weight"
        if name not in headers:
            if part == "bias":
                return None
            raise LoadError(
                f"{file.name} lacks {name}, expected for {module} of {type(net).__name__}: "
                "convert it again"
            )
        kind, data = headers[name].rows(name)
        shape = headers[name].shapes[name][::-1]
        if len(shape) == 1:  # a vector: one number per row, so that `order` applies
            data = data.view(np.uint8).reshape(shape[0], -1)
            shape = (shape[0], 1)
        return FileMatrix(kind, data, shape, order, most_bits)

    for module_name, module in [*net.named_modules()]:
        if not isinstance(getattr(module, "weight", None), Tensor):
            continue
        parent, _, child = module_name.rpartition(".")
        order = None
        # llama.cpp rotates neighbors, transformers halves
        if architecture == "llama" and child in heads:
            order = (
                np.arange(len(module.weight)).reshape(heads[child], -1, 2).swapaxes(1, 2).ravel()
            )
        weight, bias = (read(module_name, part, order) for part in ("weight", "bias"))
        bias = None if bias is None else bias.weights(slice(None)).flatten()
        if isinstance(module, nn.Embedding):
            module = int4.BlockEmbedding(weight)
        elif int4.fits(module):
            module = int4.BlockLinear(weight, bias)
        else:
            values = weight.weights(slice(None)).view(module.weight.shape).bfloat16()
            module.weight = nn.Parameter(values, requires_grad=False)
            if bias is not None:
                module.bias = nn.Parameter(bias.bfloat16(), requires_grad=False)
        setattr(net.get_submodule(parent), child, module)
    net.model.rotary_emb = type(net.model.rotary_emb)(config)
    return net


def context(config: PretrainedConfig, n_ctx: int, name: str) -> int:
    """Return `n_ctx`; for 0, the model's limit, at most 4096. Raises InputError above the limit."""
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    most = most or max(n_ctx, DEFAULT_N_CTX)
    if n_ctx > most:
        raise InputError(f"got n_ctx={n_ctx}, expected at most {most}, the positions of {name}")
    return n_ctx or min(most, DEFAULT_N_CTX)


def _state_bytes(config: PretrainedConfig, dtype: torch.dtype, n_ctx: int, name: str) -> int:
    """Return the size of the full KV cache in bytes. Raises InputError as `context` does."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", 0) or 1
    n_layers = getattr(text, "num_hidden_layers", 1)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or max(1, getattr(text, "hidden_size", 1) // heads)
    return kv_bytes(n_layers, kv_heads, head_dim, context(config, n_ctx, name), dtype.itemsize)


def _check_memory(
    config: PretrainedConfig, dtype: torch.dtype, device: str, n_ctx: int, name: str
) -> None:
    state = _state_bytes(config, dtype, n_ctx, name)
    with torch.device("meta"):  # shapes without memory
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    weights = dtype.itemsize * sum(p.numel() for p in model.parameters())
    require_memory(weights, state, device=device, name=name)


def tokenizer_vocabulary(
    tokenizer: PreTrainedTokenizerBase | None,
    config: PretrainedConfig,
    generation: GenerationConfig | None,
) -> Vocabulary:
    """Return the vocabulary of ids 0..vocab_size-1; padding rows have the piece b"".

    Without a tokenizer the pieces are placeholders such as <7>. Raises InputError like
    `require_rows`.
    """
    size = config.vocab_size  # the width of the logits; a tokenizer may have fewer ids, or more
    stated = {
        "config.json": vars(config),
        "generation_config.json": vars(generation or config),
        "tokenizer_config.json": {key: getattr(tokenizer, key, None) for key in END_KEYS},
    }
    for file, values in stated.items():
        require_rows(size, f"{getattr(tokenizer or config, 'name_or_path', '')}/{file}", values)
    eog = frozenset(i for values in stated.values() for i in ids_in(values.get("eos_token_id")))
    if tokenizer is None:
        return Vocabulary(tuple(b"<%d>" % i for i in range(size)), kind="none", eog=eog)
    state = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    added = tokenizer.added_tokens_decoder
    names = tokenizer.convert_ids_to_tokens(list(range(size)))  # None for unknown ids
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several templates, by name
        template = template.get("default")
    with tokenizing("x"):
        ids = tokenizer("x").input_ids
    return Vocabulary(
        pieces=spell_pieces(state, names, added),
        kind=kind_of(state),
        pre=str((state.get("pre_tokenizer") or {}).get("type", "")).lower(),
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        eog=eog,
        special=frozenset(i for i, token in added.items() if token.special),
        add_bos=ids[:1] == [tokenizer.bos_token_id],
        chat_template=template,
    )


def dequantize_once(gguf: Path, *, weights: bool = True) -> Path:
    """Return the cached folder of a GGUF: config, tokenizer and, if `weights`, float32 weights."""
    folder = (
        cache_dir()
        / ("dequantised" if weights else "described")
        / f"{gguf.stem}-{file_digest(gguf)[:16]}-{CONVERSION}-{version('transformers')}"
    )
    make_once(folder, partial(dequantize, gguf, weights=weights), n_bytes=0)
    if differs := read_json(folder / DIFFERS)["tokenizer_differs_on"]:
        warnings.warn(
            f"{gguf.name}: transformers' tokenizer splits {differs[0]!r} differently from "
            "llama.cpp: prompts will differ between engines; pass token ids to compare them",
            stacklevel=2,
        )
    return folder


def dequantize(gguf: Path, folder: Path, *, weights: bool) -> None:
    """Write config, tokenizer and, if `weights`, float32 weights of a GGUF into `folder`.

    The file DIFFERS lists probe texts that the tokenizers split differently.
    """
    with loading(str(gguf)):
        n = sum(map(math.prod, sound_header(gguf).shapes.values()))
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        if weights:
            require_memory(8 * n, name=f"{gguf.name} as float32")  # two copies while writing
            need_space(cache_dir(), 4 * n)
        # 4 times as fast: transformers reads the GGUF 3 times, and creates the name map per module
        cached = {
            "GGUFReader": cache(ArrayReader),
            "get_tensor_name_map": cache(gguf_package.get_tensor_name_map),
        }
        with quiet(), patch.multiple(gguf_package, **cached):
            if weights:
                model = _checked_model(str(gguf), dtype=torch.float32, **source)
            else:
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source))
            tokenizer = AutoTokenizer.from_pretrained(**source)
            # The tensors are float32 now; transformers does not save models marked as quantized.
            model.hf_quantizer = None
            model.is_quantized = False
            vars(model.config).pop("quantization_config", None)
            differs = _complete(gguf, model, tokenizer)
            for part in (model,) if weights else (model.config, model.generation_config):
                part.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    (folder / DIFFERS).write_text(json.dumps({"tokenizer_differs_on": differs}), encoding="utf-8")


class ArrayReader(gguf_package.GGUFReader):
    """gguf's reader with an ndarray instead of a memmap, whose 100,000 slices would be slow."""

    data = property(
        lambda self: self._array, lambda self, file: setattr(self, "_array", np.asarray(file))
    )


def _complete(gguf: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Restore what the conversion drops: the full set of end tokens, and the splitting of digits.

    Returns the probe texts that the two tokenizers still split differently.
    """
    from specnb.lm.gguf.binding import FileTokenizer  # only a conversion needs llama.cpp

    llama = FileTokenizer(gguf)
    model.generation_config.eos_token_id = sorted(llama.vocab.eog) or None
    if llama.vocab.pre in SINGLE_DIGITS:
        byte_level = tokenizer.backend_tokenizer.pre_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    differs = []
    for text in PROBES:
        with suppress(InputError):  # llama.cpp has no token for a character
            if llama(text, special=True) != tokenizer(text).input_ids:
                differs.append(text)
    return differs


def _checked_model(name: str, **options: Any) -> PreTrainedModel:
    """Call `from_pretrained`. Raises LoadError for missing weights, which would be random."""
    # tensors of another shape are listed in the report
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = AutoModelForCausalLM.from_pretrained(**options)
    if missing := sorted(report["missing_keys"]) + sorted(
        key for key, *_shapes in report["mismatched_keys"]
    ):
        raise LoadError(
            f"{name!r} lacks {len(missing)} weights of its config, or their shapes differ (first "
            f"{missing[0]}): download it again, with its config.json"
        )
    return model


@contextmanager
def loading(source: str) -> Iterator[None]:
    """Convert errors of transformers, the hub or safetensors to LoadError; raise ours unchanged."""
    try:
        yield
    except SpecnbError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise LoadError(
            f"transformers cannot load {source!r}: {reason}. Pass a local folder with config.json, "
            "weights and tokenizer, a .gguf file, or the id of a model on a hub that can be reached"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars in the block."""
    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
