"""Describe a GGUF file from its header.

No tensor is read, so a file truncated after its header is enough. llama.cpp reads the vocabulary
from a copy of the header's key-values.
"""

import struct
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np

from specnb.compat.description import Description, state_of
from specnb.errors import InputError, LoadError
from specnb.io import digest
from specnb.lm.gguf import binding
from specnb.lm.gguf.header import (
    ARCHITECTURE,
    ARRAY,
    MERGES,
    MODEL,
    NO_VOCABULARY,
    STRING,
    TOKENS,
    TYPES,
    Header,
    read_header,
)
from specnb.lm.vocab import MAX_ID

CONTROL, USER_DEFINED = 3, 4  # gguf.TokenType
VOCABULARY = "vocabulary.gguf"


def read_gguf(path: Path | str) -> Description:
    """Return what the header of a GGUF file states, with llama.cpp's defaults and tokenizer.

    Raises InputError with file, offset or key, value and remedy.
    """
    header = read_header(Path(path))
    if number := header.get("split.no", int):
        raise InputError(
            f"{path} is shard {number + 1} (split.no is {number}): "
            "give the first, which has the header"
        )
    architecture = header.get(ARCHITECTURE, str)
    embedding = header.shapes.get("token_embd.weight", ())
    rows = embedding[1] if len(embedding) == 2 else header.get(f"{architecture}.vocab_size", int)
    if rows is not None and not 0 < rows <= MAX_ID:
        raise header.fault("the number of rows of the embedding", rows, f"{MAX_ID} is the maximum")
    described = Description(
        name=header.get("general.name", str) or header.path.stem,
        source=str(path),
        architecture=architecture,
        vocab_size=rows,
        n_ctx=header.get(f"{architecture}.context_length", int),
        n_layers=header.get(f"{architecture}.block_count", int),
        licence=header.get("general.license", str),
        state=state_of(architecture),
    )
    bare = header.get(MODEL, str, "none") in NO_VOCABULARY
    return described if bare else _with_tokens(header, described)


def _with_tokens(header: Header, described: Description) -> Description:
    tokenizer = _tokenizer(header)
    types = header.get(TYPES, np.ndarray, np.zeros(0)).tolist()
    vocab = tokenizer.vocab
    api = binding.load_library().api
    raw = api.llama_model_get_vocab(tokenizer.model)
    texts = header.values[TOKENS]
    merges = header.values.get(MERGES)
    n_tokens = vocab.size
    # padding rows from a converter
    while n_tokens and texts[n_tokens - 1] == b"[PAD%d]" % (n_tokens - 1):
        n_tokens -= 1
    return described.with_pieces(
        vocab,
        n_tokens,
        pad=pad if (pad := api.llama_vocab_pad(raw)) >= 0 else None,
        eot=header.get("tokenizer.ggml.eot_token_id", int),
        add_eos=api.llama_vocab_get_add_eos(raw),
        added=vocab.special
        | {i for i, kind in enumerate(types[:n_tokens]) if kind in (CONTROL, USER_DEFINED)},
        merges={"count": len(merges), "digest": digest(b"\n".join([*merges, b""]))}
        if merges
        else None,
        tokenizer=tokenizer,
    )


def _tokenizer(header: Header) -> binding.FileTokenizer:
    """Open llama.cpp's tokenizer from the key-values alone, as the architecture "llama"."""
    pairs = [
        pair
        for key, pair in header.packed.items()
        if key.startswith("tokenizer.") or key == "general.name"
    ]
    pairs.append(_packed(ARCHITECTURE) + struct.pack("<I", STRING) + _packed("llama"))
    # llama.cpp requires the key; a vocabulary without merges lacks it
    if MERGES not in header.values:
        pairs.append(_packed(MERGES) + struct.pack("<IIQ", ARRAY, STRING, 0))
    try:
        return _open(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    except LoadError as error:
        reason = str(error).partition(f"{VOCABULARY}: ")[2]
        raise InputError(
            f"llama.cpp cannot read the vocabulary of {header.path}: {reason[:300]}"
        ) from error


@lru_cache(maxsize=4)
def _open(key_values: bytes) -> binding.FileTokenizer:
    """Open a GGUF without tensors. Copies of a model, with equal key-values, share a tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, VOCABULARY)
        file.write_bytes(key_values)
        return binding.FileTokenizer(file)


def _packed(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
