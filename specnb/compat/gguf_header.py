"""A GGUF's description from its header alone: no tensor is read, so a first shard cut after the header does.

What a header leaves out is filled in as llama.cpp fills it in (see `gguf_vocab`), because that is what the model does.
"""

import hashlib
import math
import weakref
from collections import Counter
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from specnb.compat.description import Description, Merges, Rope, state_of
from specnb.compat.gguf_reader import Header, read_header
from specnb.compat.gguf_vocab import (
    FAMILIES,
    NO_VOCAB,
    PRE_ADDS_BOS,
    PRE_ALWAYS_ADDS_BOS,
    PRE_WITHOUT_BOS,
    Family,
    added_ids,
    pieces_of,
    special_id,
    special_of,
    tokens_of,
)
from specnb.errors import InputError
from specnb.lm.gguf import binding
from specnb.lm.vocab import Vocabulary

MAX_ROWS = 2_000_000
"""No embedding has as many rows: a larger number is damage."""
ARRAYS = frozenset({"tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"})
NORMALIZER_KEYS = ("add_space_prefix", "remove_extra_whitespaces", "normalizer.lowercase", "normalizer.strip_accents")


def describe(path: Path | str) -> Description:
    """What the header of a GGUF file states, its defaults being llama.cpp's.

    `encode` is llama.cpp's own tokenizer, opened at its first call without weights. `normalizer` lists the header's
    flags as written, `quantisation` is the file type ("q4_k_m"), `eot` is None where several texts could be it.
    Raises InputError naming file, offset or key, value and remedy.
    """
    path = Path(path)
    header = read_header(path, ARRAYS)
    _require_first_shard(header)
    architecture = header.get("general.architecture", str)
    facts = {
        "name": header.get("general.name", str) or path.stem,
        "source": str(path),
        "architecture": architecture,
        "n_ctx": header.get(f"{architecture}.context_length", int),
        "rope": _rope(header, architecture),
        "quantisation": _quantisation(header),
        "state": state_of(architecture),
        "normalizer": _normalizer(header),
    }
    model = header.get("tokenizer.ggml.model", str)
    if model is None or model in NO_VOCAB:
        return Description(**facts, vocab_size=_rows(header, architecture))
    if model not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise header.fault("tokenizer.ggml.model", model, f"unknown kind of tokenizer; known are {known}")
    return _with_vocab(header, architecture, FAMILIES[model], facts)


def _require_first_shard(header: Header) -> None:
    number = header.get("split.no", int)
    if number:
        raise InputError(
            f"{header.path} is shard {number + 1} of {header.values.get('split.count', 'several')} (split.no is "
            f"{number}): give the first, which holds the header of the whole"
        )


def _with_vocab(header: Header, architecture: str | None, family: Family, facts: dict) -> Description:
    pre = header.get("tokenizer.ggml.pre", str) or ""
    # llama.cpp calls gemma4's pre-tokenizer by its model, whatever the header says
    rules = "gemma4" if header.get("tokenizer.ggml.model", str) == "gemma4" else pre if family.kind == "bpe" else ""
    tokens = tokens_of(header)
    n = len(tokens.texts)
    bos = special_id(header, "bos", n, None if rules in PRE_WITHOUT_BOS else family.bos)
    eos = special_id(header, "eos", n, family.eos)
    special = special_of(header, tokens, eos)
    add_bos = header.get("tokenizer.ggml.add_bos_token", bool, family.add_bos or rules in PRE_ADDS_BOS)
    add_bos = add_bos or rules in PRE_ALWAYS_ADDS_BOS
    pieces = pieces_of(header, tokens, family, rules, special.as_written)
    size = max(n, _rows(header, architecture) or 0)
    vocab = Vocabulary(
        pieces=(*pieces, *(b"" for _ in range(size - n))),
        kind=family.kind,
        pre=pre,
        bos=bos,
        eos=eos,
        eog=special.eog,
        special=special.control,
        add_bos=add_bos,
        chat_template=header.get("tokenizer.chat_template", str),
    )
    return Description(
        **facts,
        vocab=vocab,
        n_tokens=tokens.n_known,
        vocab_size=size,
        bos=bos,
        eos=eos,
        pad=special_id(header, "padding", n, family.pad),
        eot=special.eot,
        add_bos=add_bos,
        add_eos=header.get("tokenizer.ggml.add_eos_token", bool, family.add_eos),
        added=added_ids(tokens, special.control),
        merges=_merges(header),
        encode=_Encoder(header.path, vocab),
    )


def _rows(header: Header, architecture: str | None) -> int | None:
    """The width of a row of logits: the embedding's, where tensors are listed, else the one that is stated."""
    embedding = next((t for t in header.tensors if t.name == "token_embd.weight" and len(t.shape) == 2), None)
    rows = embedding.shape[1] if embedding else header.get(f"{architecture}.vocab_size", int)
    if rows is not None and not 0 < rows <= MAX_ROWS:
        raise header.fault("the number of rows of the embedding", rows, f"{MAX_ROWS} are the most that is read")
    return rows


def _merges(header: Header) -> Merges | None:
    stored = header.get("tokenizer.ggml.merges", list)
    if stored is None:
        return None
    return Merges(len(stored), hashlib.sha256(b"".join(merge + b"\n" for merge in stored)).hexdigest())


def _rope(header: Header, architecture: str | None) -> Rope | None:
    """Frequencies that are stored as a tensor (Llama 3.1's) are not read: such a scaling is None."""
    base = header.get(f"{architecture}.rope.freq_base", int | float)
    dims = header.get(f"{architecture}.rope.dimension_count", int)
    factor = header.get(f"{architecture}.rope.scaling.factor", int | float)
    if factor is None:
        factor = header.get(f"{architecture}.rope.scale_linear", int | float)
    # llama.cpp scales linearly where only a factor is given
    kind = header.get(f"{architecture}.rope.scaling.type", str) or ("linear" if factor else None)
    scaling = None if kind in (None, "none") else kind if factor is None else f"{kind} {factor:g}"
    return None if base is None and dims is None and scaling is None else Rope(base, dims, scaling)


def _quantisation(header: Header) -> str | None:
    """The stated file type; where none is stated, the type that most weights have, as llama.cpp guesses."""
    from gguf.constants import GGMLQuantizationType, LlamaFileType

    stated = header.get("general.file_type", int)
    if stated is not None:
        names = {int(t): t.name for t in LlamaFileType}
        return names.get(stated, f"ftype{stated}").removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    weights: Counter[int] = Counter()
    for tensor in header.tensors:
        weights[tensor.type] += math.prod(tensor.shape)
    if not weights:
        return None
    most = weights.most_common(1)[0][0]
    return {int(t): t.name for t in GGMLQuantizationType}.get(most, f"type{most}").lower()


def _normalizer(header: Header) -> str | None:
    stated = [(key, header.values.get(f"tokenizer.ggml.{key}")) for key in NORMALIZER_KEYS]
    return ", ".join(f"{key} {str(value).lower()}" for key, value in stated if isinstance(value, bool)) or None


class _Encoder:
    """llama.cpp's tokenizer of a GGUF, opened at the first call and closed with this object."""

    def __init__(self, path: Path, vocab: Vocabulary) -> None:
        self._path, self._vocab = path, vocab

    def __call__(self, text: str) -> list[int]:
        # llama.cpp's sentencepiece ends the process on such a character
        if self._vocab.kind == "spm" and (missing := binding.unspellable(self._vocab, text)):
            raise InputError(f"the tokenizer of {self._path} has neither a token for {missing!r} nor for its bytes")
        return binding.tokenize(self._model, text, special=False)

    @cached_property
    def _model(self) -> object:
        opened = ExitStack()
        model = opened.enter_context(binding.header(self._path))
        weakref.finalize(self, opened.close)
        return model
