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
from specnb.compat.gguf_reader import MAX_ITEMS, Header, read_header
from specnb.compat.gguf_vocab import (
    FAMILIES,
    NO_VOCAB,
    PRE_ADDS_BOS,
    PRE_ALWAYS_ADDS_BOS,
    PRE_WITHOUT_BOS,
    Family,
    added_ids,
    fault,
    flag,
    pieces_of,
    special_id,
    special_of,
    text_value,
    tokens_of,
)
from specnb.errors import InputError
from specnb.lm import binding
from specnb.lm.vocab import Vocabulary

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
    architecture = text_value(header, "general.architecture")
    facts = {
        "name": text_value(header, "general.name") or path.stem,
        "source": str(path),
        "architecture": architecture,
        "n_ctx": _integer(header, f"{architecture}.context_length"),
        "rope": _rope(header, architecture),
        "quantisation": _quantisation(header),
        "state": state_of(architecture),
        "normalizer": _normalizer(header),
    }
    model = text_value(header, "tokenizer.ggml.model")
    if model is None or model in NO_VOCAB:
        return Description(**facts, vocab_size=_rows(header, architecture))
    if model not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise fault(header, "tokenizer.ggml.model", model, f"unknown kind of tokenizer; known are {known}")
    return _with_vocab(header, architecture, FAMILIES[model], facts)


def _require_first_shard(header: Header) -> None:
    number = _integer(header, "split.no")
    if number:
        raise InputError(
            f"{header.path} is shard {number + 1} of {header.values.get('split.count', 'several')} (split.no is "
            f"{number}): give the first, which holds the header of the whole"
        )


def _with_vocab(header: Header, architecture: str | None, family: Family, facts: dict) -> Description:
    pre = text_value(header, "tokenizer.ggml.pre") or ""
    # llama.cpp calls gemma4's pre-tokenizer by its model, whatever the header says
    rules = "gemma4" if text_value(header, "tokenizer.ggml.model") == "gemma4" else pre if family.kind == "bpe" else ""
    tokens = tokens_of(header)
    n = len(tokens.texts)
    bos = special_id(header, "bos", n, None if rules in PRE_WITHOUT_BOS else family.bos)
    eos = special_id(header, "eos", n, family.eos)
    special = special_of(header, tokens, eos)
    add_bos = flag(header, "tokenizer.ggml.add_bos_token", family.add_bos or rules in PRE_ADDS_BOS)
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
        chat_template=text_value(header, "tokenizer.chat_template"),
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
        add_eos=flag(header, "tokenizer.ggml.add_eos_token", family.add_eos),
        added=added_ids(tokens, special.control),
        merges=_merges(header),
        encode=_Encoder(header.path, vocab),
    )


def _rows(header: Header, architecture: str | None) -> int | None:
    """The width of a row of logits: the embedding's, where tensors are listed, else the one that is stated."""
    embedding = next((t for t in header.tensors if t.name == "token_embd.weight" and len(t.shape) == 2), None)
    rows = embedding.shape[1] if embedding else _integer(header, f"{architecture}.vocab_size")
    if rows is not None and not 0 < rows <= MAX_ITEMS:
        raise fault(header, "the number of rows of the embedding", rows, f"{MAX_ITEMS} are the most that is read")
    return rows


def _merges(header: Header) -> Merges | None:
    stored = header.values.get("tokenizer.ggml.merges")
    if stored is None:
        return None
    if not isinstance(stored, list):
        raise fault(header, "tokenizer.ggml.merges", stored, "it must be an array of strings")
    digest = hashlib.sha256()
    for merge in stored:
        digest.update(merge + b"\n")
    return Merges(len(stored), digest.hexdigest())


def _rope(header: Header, architecture: str | None) -> Rope | None:
    """Frequencies that are stored as a tensor (Llama 3.1's) are not read: such a scaling is None."""
    base = _number(header, f"{architecture}.rope.freq_base")
    dims = _integer(header, f"{architecture}.rope.dimension_count")
    factor = _number(header, f"{architecture}.rope.scaling.factor")
    if factor is None:
        factor = _number(header, f"{architecture}.rope.scale_linear")
    # llama.cpp scales linearly where only a factor is given
    kind = text_value(header, f"{architecture}.rope.scaling.type") or ("linear" if factor else None)
    scaling = None if kind in (None, "none") else kind if factor is None else f"{kind} {factor:g}"
    return None if base is None and dims is None and scaling is None else Rope(base, dims, scaling)


def _quantisation(header: Header) -> str | None:
    """The stated file type; where none is stated, the type that most weights have, as llama.cpp guesses."""
    from gguf.constants import GGMLQuantizationType, LlamaFileType

    stated = _integer(header, "general.file_type")
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


def _integer(header: Header, key: str) -> int | None:
    value = header.values.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise fault(header, key, value, "it must be an integer of at least 0")
    return value


def _number(header: Header, key: str) -> float | None:
    value = header.values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise fault(header, key, value, "it must be a finite number")
    return float(value)


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
