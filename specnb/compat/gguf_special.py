"""Which ids of a GGUF end a generation and which are control tokens, by llama.cpp's rules.

A header states a few ids; llama.cpp adds tokens by their text and corrects types that look wrong (the last part of
`llama_vocab::impl::load`). The lists below are its lists; a newer llama.cpp may know more texts.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from specnb.compat.gguf_reader import Header
from specnb.compat.gguf_vocab import CONTROL, USER_DEFINED, Tokens, special_id, with_text

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
            *(
                "<|fim_prefix|>",
                "<fim-prefix>",
                "<fim_prefix>",
                "<｜fim▁begin｜>",
                "<PRE>",
                "▁<PRE>",
                "<|code_prefix|>",
            ),
            "<|prefix|>",
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

    eot = stated("eot") or with_text(ids, END_OF_TURN)
    eog.update(eot, stated("eom"))
    for key, texts in FIM.items():
        found = stated(key)
        if not found:
            found = with_text(ids, texts)[:1]  # of several llama.cpp takes one, in no certain order
            control.update(found)
        eog.update(found if key in FIM_ENDS else ())
    by_text = with_text(ids, END_OF_GENERATION)
    eog.update(by_text)
    control.update(by_text)
    shown = with_text(ids, ALWAYS_SHOWN)
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
