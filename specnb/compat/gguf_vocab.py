"""The vocabulary of a GGUF header, read as llama.cpp reads it (llama-vocab.cpp, `llama_vocab::impl::load`).

The pieces are those of `lm.gguf.binding.vocabulary`, byte for byte. Where several texts could be the end-of-turn token
or the same fill-in-the-middle token, llama.cpp takes the one that its hash map yields first; here only a single one is
taken, so `eot` may be None and, for fill-in-the-middle prefixes, one more id may count as control.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from specnb.compat import pieces as spell
from specnb.compat.gguf_reader import Header

# llama.h's token types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPELLED_OUT = frozenset({UNKNOWN, CONTROL, USER_DEFINED})


@dataclass(frozen=True)
class Family:
    """What llama.cpp assumes for a value of tokenizer.ggml.model where the header says nothing else."""

    kind: str
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    add_bos: bool = False
    add_eos: bool = False


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("spm", bos=1, eos=2, add_bos=True),
        "bert": Family("wpm", bos=101, pad=0, add_bos=True),
        "gpt2": Family("bpe", bos=11, eos=11),
        "whitespace": Family("bpe", bos=11, eos=11),
        "gemma4": Family("bpe"),
        "t5": Family("ugm", eos=1, pad=0, add_eos=True),
        "rwkv": Family("rwkv"),
        "plamo2": Family("plamo2", bos=1, eos=2, pad=3),
    }
)
NO_VOCAB = frozenset({"no_vocab", "none"})

# of the same function: what pre-tokenizers of a BPE change
PRE_ADDS_BOS = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("tekken", "chameleon"),
    }
)
PRE_ALWAYS_ADDS_BOS = frozenset({"gemma4", "granite-embed-multi-311m"})
PRE_WITHOUT_BOS = frozenset({"chatglm-bpe", "glm4", "glm5"})
PRE_WITH_SPACE_MARKS = PRE_ALWAYS_ADDS_BOS | {"sarvam-moe"}


# the last part of that function: which ids end a generation and which are control tokens. A header states a few;
# llama.cpp adds tokens by their text and corrects types that look wrong. A newer llama.cpp may know more texts.
END_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
END_OF_GENERATION = (
    *END_OF_TURN,
    *("<|eom_id|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "[EOS]", "<eos>", "<turn|>"),
    *("<|tool_response>", "[e~["),
)

# fill-in-the-middle tokens: all become control tokens, the last three end a generation too
FIM: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fim_pre": (
            *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
            *("<|code_prefix|>", "<|prefix|>"),
        ),
        "fim_suf": (
            *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
            "<|suffix|>",
        ),
        "fim_mid": (
            *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
            "<|middle|>",
        ),
        "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
        "fim_sep": ("<|file_sep|>",),
    }
)
FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")
OLD_NAMES = MappingProxyType({"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"})

ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Tokens of gpt-oss that are rendered, so not control."""


@dataclass(frozen=True)
class Tokens:
    """The entries of tokenizer.ggml.tokens: text and type of each id."""

    texts: tuple[str, ...]
    types: tuple[int, ...]

    @property
    def n_known(self) -> int:
        """Ids before the rows that a converter added to fill the embedding: "[PAD151665]".

        Their type is "unused" (their piece is b"") or, from older converters, "user defined".
        """
        n = len(self.texts)
        while n and self.texts[n - 1] == f"[PAD{n - 1}]":
            n -= 1
        return n


def tokens_of(header: Header) -> Tokens:
    """Raises InputError for a missing list, lists of different lengths, text that is no UTF-8, or a text used twice."""
    texts = _texts(header)
    return Tokens(texts, _types(header, len(texts)))


def pieces_of(header: Header, tokens: Tokens, family: Family, pre: str, as_written: frozenset[int]) -> list[bytes]:
    """The bytes of each id. The ids in `as_written` stand for their text, whatever their type.

    Raises InputError for a text that its type does not allow.
    """
    spelled = _speller(family, pre)
    pieces = []
    for i, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True)):
        try:
            pieces.append(spelled(text, USER_DEFINED if i in as_written else kind))
        except ValueError as error:
            raise header.fault(f"tokenizer.ggml.tokens[{i}]", text, str(error)) from error
    return pieces


def _texts(header: Header) -> tuple[str, ...]:
    key = "tokenizer.ggml.tokens"
    stored = header.get(key, list)
    if not stored:
        raise header.fault(key, stored, "it lists no token")
    seen: dict[str, int] = {}
    for i, raw in enumerate(stored):
        try:
            text = raw.decode("utf-8") or f"[EMPTY_{i}]"
        except UnicodeDecodeError as error:
            raise header.fault(f"{key}[{i}]", raw, "it is not UTF-8") from error
        if seen.setdefault(text, i) != i:  # llama.cpp ends the process here
            raise header.fault(f"{key}[{i}]", text, f"it is also the text of token {seen[text]}")
    return tuple(seen)


def _types(header: Header, n: int) -> tuple[int, ...]:
    key = "tokenizer.ggml.token_type"
    stored = header.get(key, np.ndarray)
    if stored is None:
        return (NORMAL,) * n
    if len(stored) != n:
        raise header.fault(key, len(stored), f"it has {len(stored)} entries for {n} tokens")
    return tuple(stored.tolist())


def _speller(family: Family, pre: str) -> Callable[[str, int], bytes]:
    """llama_token_to_piece of this family: from a token's text and type to its bytes."""
    if family.kind == "rwkv":
        return lambda text, kind: spell.rwkv(text)
    if family.kind == "plamo2":
        return lambda text, kind: (kind == BYTE and spell.fallback_byte(text)) or text.encode()
    normal = spell.marked if family.kind != "bpe" or pre in PRE_WITH_SPACE_MARKS else _byte_level

    def spelled(text: str, kind: int) -> bytes:
        if kind == NORMAL:
            return normal(text)
        if kind in SPELLED_OUT:
            return text.encode()
        if kind != BYTE:
            return b""  # unused or undefined: llama.cpp writes nothing
        byte = spell.fallback_byte(text)
        if byte is None:
            raise ValueError("a token of the type byte must read <0x00> to <0xFF>")
        return byte

    return spelled


def _byte_level(text: str) -> bytes:
    """As llama_decode_text: a character that stands for no byte becomes a note, with the whole text in it."""
    piece = spell.byte_level(text)
    if piece is not None:
        return piece
    if len(text) > 4096:
        raise ValueError("it is long and not in the alphabet of byte-level BPE")
    return b"".join(
        bytes([spell.ALPHABET[c]]) if c in spell.ALPHABET else f"[UNK_BYTE_0x{c.encode().hex()}{text}]".encode()
        for c in text
    )


def special_id(header: Header, key: str, n_tokens: int, default: int | None) -> int | None:
    """A special token's id: as stated, else or out of range llama.cpp's default, if the vocabulary has such an id."""
    key = f"tokenizer.ggml.{key}_token_id"
    stated = header.get(key, int)
    if stated is not None and 0 <= stated < n_tokens:
        return stated
    # old converters wrote -1 or the count for "none": llama.cpp warns, and goes on with its default
    return default if default is not None and default < n_tokens else None


class Special(NamedTuple):
    """Ids that end a generation, control ids, and the end-of-turn id where it is certain.

    `as_written` are ids whose piece is their text, whatever their type says: the types that were corrected.
    """

    eog: frozenset[int]
    control: frozenset[int]
    eot: int | None
    as_written: frozenset[int]


def special_of(header: Header, tokens: Tokens, eos: int | None) -> Special:
    """Raises InputError for a stated id that is out of range."""
    n = len(tokens.texts)
    ids = {text: i for i, text in enumerate(tokens.texts)}
    control = {i for i, kind in enumerate(tokens.types) if kind == CONTROL}
    eog = set() if eos is None else {eos}

    def stated(key: str) -> list[int]:
        found = special_id(header, key, n, None)
        if key in OLD_NAMES:  # llama.cpp reads the old name last
            found = special_id(header, OLD_NAMES[key], n, found)
        return [] if found is None else [found]

    eot = stated("eot") or _with_text(ids, END_OF_TURN)
    eog.update(eot, stated("eom"))
    for key, texts in FIM.items():
        found = stated(key)
        if not found:
            found = _with_text(ids, texts)[:1]  # of several llama.cpp takes one, in no certain order
            control.update(found)
        eog.update(found if key in FIM_ENDS else ())
    by_text = _with_text(ids, END_OF_GENERATION)
    eog.update(by_text)
    control.update(by_text)
    shown = _with_text(ids, ALWAYS_SHOWN)
    as_written = frozenset(control) | frozenset(shown)
    control.difference_update(shown)
    _take_back(ids, eog, control)
    return Special(frozenset(eog), frozenset(control), eot[0] if len(eot) == 1 else None, as_written)


def _take_back(ids: Mapping[str, int], eog: set[int], control: set[int]) -> None:
    """Texts that end a generation in one family of models and are ordinary in another."""
    ends = {text for text, i in ids.items() if i in eog}
    calls = ends & {"<|call|>", "<|calls|>"}
    harmony = {"<|end|>"} if calls and ends & {"<|return|>", "<|flush|>"} else set()
    sentence = {"</s>"} if ends & {"<|tool_response>", "<|plamo:eos|>"} else set()
    for text in ends & (harmony | sentence):
        eog.discard(ids[text])
        control.discard(ids[text])


def added_ids(tokens: Tokens, control: frozenset[int]) -> frozenset[int]:
    """Ids that a converter marked as added, control and user-defined tokens; rows of padding are none."""
    marked = {i for i, kind in enumerate(tokens.types[: tokens.n_known]) if kind in (CONTROL, USER_DEFINED)}
    return frozenset(marked | control)


def _with_text(texts: Mapping[str, int], wanted: Iterable[str]) -> list[int]:
    """Ids of those of the `wanted` texts that are there, in order of id."""
    return sorted(texts[text] for text in wanted if text in texts)
