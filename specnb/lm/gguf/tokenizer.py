"""A byte-level BPE tokenizer as GGUF header keys.

llama.cpp knows pre-tokenizers by name, each with its regular expression built in: a tokenizer is written only when
its own expression is one of those, because another would split text otherwise, without a word.
"""

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specnb.lm.gguf.families import Key, refusal
from specnb.lm.vocab import ALPHABET, Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_LINES = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = _WORDS + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + _LINES
QWEN35 = _WORDS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + _LINES
LLAMA3 = _WORDS + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + _LINES

DIGITS, BYTES, REGEX_BYTES = "single Digits", "ByteLevel", "ByteLevel's regex"
PRE_TYPES: Mapping[tuple[str, ...], str] = {
    (REGEX_BYTES,): "gpt-2",
    (DIGITS, REGEX_BYTES): "smollm",
    (f"split {QWEN2}", BYTES): "qwen2",
    (f"split {QWEN35}", BYTES): "qwen35",
    (f"split {LLAMA3}", BYTES): "llama-bpe",
}
"""The steps of a pre-tokenizer, and llama.cpp's name for them."""

IGNORE_MERGES = frozenset({"llama-bpe"})
"""Pre-tokenizers with which llama.cpp takes a whole word that is a token without trying merges."""

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def tokenizer_keys(tokenizer: "PreTrainedTokenizerBase", vocab: Vocabulary) -> dict[str, Key]:
    """The `tokenizer.*` keys for the `vocab.size` ids of the model's logits; ids without a token are unused.

    `vocab` is the same tokenizer as specnb's torch engine reads it (special ids, end tokens, chat template). A
    normalization to NFC (Qwen's) is left out with a warning: texts in NFC, nearly all, are split alike. Raises
    InputError for what llama.cpp would tokenize otherwise, and unless there are one to three end tokens: for none
    it would take id 11.
    """
    if not tokenizer.is_fast:
        raise refusal("the tokenizer", type(tokenizer).__name__, "only those with a tokenizer.json are written")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = _pre_type(state)
    _check(state, pre)
    plain, whole = (tokenizer("x", add_special_tokens=special).input_ids for special in (False, True))
    if whole != ([vocab.bos] if vocab.add_bos else []) + plain:
        raise refusal("a text between its special tokens", whole, "of these only BOS can be written")
    tokens, types = _tokens(state, vocab.size)
    ends = sorted(vocab.eog, key=lambda i: (i != vocab.eos, i))  # the tokenizer's own first
    if not 1 <= len(ends) <= len(END_KEYS):
        raise refusal("eos_token_id", ends, f"a GGUF names one to {len(END_KEYS)} end tokens")
    keys: dict[str, Key] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "add_bos_token": vocab.add_bos,
        "bos_token_id": ends[0] if vocab.bos is None else vocab.bos,  # the end begins where nothing else does (GPT-2)
        **dict(zip(END_KEYS, ends, strict=False)),
    }
    template = {"tokenizer.chat_template": vocab.chat_template} if vocab.chat_template else {}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | template


def _pre_type(state: dict[str, Any]) -> str:
    steps = []
    for step in _flat(state["pre_tokenizer"]):
        match step:
            case {"type": "Digits", "individual_digits": True}:
                steps.append(DIGITS)
            case {"type": "Split", "behavior": "Isolated", "invert": False}:
                steps.append(f"split {step['pattern'].get('Regex')}")
            case {"type": "ByteLevel", "add_prefix_space": False}:
                steps.append(REGEX_BYTES if step["use_regex"] else BYTES)
            case _:
                steps.append(str(step))
    if tuple(steps) not in PRE_TYPES:
        raise refusal("the pre-tokenizer", steps, f"it is none of {', '.join(PRE_TYPES.values())}")
    return PRE_TYPES[tuple(steps)]


def _flat(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    inner = (step or {"pretokenizers": []}).get("pretokenizers")
    return [step] if inner is None else [part for each in inner for part in _flat(each)]


def _check(state: dict[str, Any], pre: str) -> None:
    """Refuse a normalizer and a model that llama.cpp computes otherwise."""
    normalizer, model = state["normalizer"], state["model"]
    if normalizer == {"type": "NFC"}:
        why = "this tokenizer normalizes text to NFC, llama.cpp does not"
        warnings.warn(f"{why}: give both engines texts in NFC, or token ids", stacklevel=4)
    elif normalizer is not None:
        raise refusal("the normalizer", normalizer, "llama.cpp does not normalize text")
    if model["type"] != "BPE":
        raise refusal("the tokenizer", model["type"], "only byte-level BPE is written")
    if model.get("ignore_merges", False) != (pre in IGNORE_MERGES):
        raise refusal("ignore_merges", model.get("ignore_merges"), f"llama.cpp does otherwise for {pre}")
    if model["unk_token"] is not None and (missing := ALPHABET.keys() - model["vocab"].keys()):
        raise refusal("unk_token", model["unk_token"], f"{len(missing)} bytes become it, llama.cpp drops them")


def _tokens(state: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Text and type of each id. Added tokens stand over the entries of the vocabulary."""
    names = {i: (text, NORMAL) for text, i in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        if eats := [flag for flag in ("lstrip", "rstrip", "single_word") if added[flag]]:
            raise refusal("an added token", added["content"], f"it has {eats[0]}, which llama.cpp does not know")
        names[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    if (last := max(names)) >= size:
        raise refusal("a token", names[last][0], f"it has the id {last}, the model {size} ids")
    rows = [names.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)]
    return [text for text, _ in rows], [kind for _, kind in rows]
