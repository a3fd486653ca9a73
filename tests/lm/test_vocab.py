"""Bytes of token ids, comparison of vocabularies, and chat templates as in transformers."""

import copy
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specnb.errors import InputError, VocabularyMismatch
from specnb.lm.chat import render_chat
from specnb.lm.hf.files import tokenizer_vocabulary
from specnb.lm.vocab import Vocabulary, first_difference, require_same
from tests import tiny_hybrids
from tests.tiny_hybrids import END


def config(vocab_size, **tokens):
    return SimpleNamespace(**{"vocab_size": vocab_size, "eos_token_id": None} | tokens)


@pytest.mark.parametrize(
    ("pieces", "at"),
    [(b"a bc d", None), (b"ab c d", 0), (b"a bc", 2), (b"a bc e", 2), (b"a bc d e", 3)],
)
def test_the_first_difference_is_the_first_different_piece(pieces, at):
    left = Vocabulary((b"a", b"bc", b"d"))
    right = Vocabulary(tuple(pieces.split()), kind="spm", special=frozenset({0}))
    assert first_difference(left, right) == at
    if at is None:
        require_same(left, right, ("target", "draft"))
    else:
        with pytest.raises(VocabularyMismatch, match=f"id {at} "):
            require_same(left, right, ("target", "draft"))


@pytest.fixture(scope="module")
def byte_level():
    """Byte-level BPE with one control token, and `<tool>`, added but not special."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tiny_hybrids.byte_level([]), bos_token=END, eos_token=END
    )
    fast.add_tokens([AddedToken("<tool>", special=False)])
    return fast


@pytest.fixture(scope="module")
def byte_fallback():
    """SentencePiece: spaces as a mark, unknown characters as byte tokens, BOS at the start."""
    letters = ["▁", "a", "b", "▁a", "ab", "<0xZZ>", "▁▁"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters]
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_pieces_spell_the_text_that_was_encoded(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        vocab = tokenizer_vocabulary(tokenizer, config(len(tokenizer)), None)
        for text in ("naïve 日本語 🙂 hello\n", "  two  spaces\t", "👩‍👩‍👧 é̀ ﷽", "plain", ""):
            ids = tokenizer(text).input_ids
            assert vocab.decode(ids) == text
            assert vocab.raw_bytes(ids).endswith(vocab.decode_bytes(ids))


def test_special_tokens_added_tokens_eog_and_kinds(byte_level, byte_fallback):
    size = len(byte_level)
    tokens = config(size, eos_token_id=5, pad_token_id=-1)  # -1: no padding token
    vocab = tokenizer_vocabulary(byte_level, tokens, SimpleNamespace(eos_token_id=[1, 7]))
    assert (vocab.kind, vocab.bos, vocab.eos, vocab.add_bos) == ("bpe", 0, 0, False)
    assert vocab.eog == {0, 1, 5, 7} and vocab.special == {0}
    assert vocab.decode([0, size - 1]) == "<tool>"  # an added token that is not special is text
    assert {bytes([b]) for b in range(256)} <= set(vocab.pieces)
    # padding rows of the logits
    padded, shorter = (tokenizer_vocabulary(byte_level, config(size + n), None) for n in (40, -3))
    assert padded.pieces == (*vocab.pieces, *[b""] * 40) and shorter.pieces == vocab.pieces[:-3]
    vocab = tokenizer_vocabulary(byte_fallback, config(266), None)
    assert vocab.pieces[258:] == (b"\xff", b" ", b"a", b"b", b" a", b"ab", b"<0xZZ>", b"  ")
    assert (vocab.kind, vocab.bos, vocab.eog, vocab.add_bos) == ("spm", 1, {2}, True)
    assert vocab.special >= {1, 2}


@pytest.mark.model
def test_engines_agree_with_and_without_special_tokens(opened):
    """Control tokens in the text become one id, or are spelled out if requested."""
    for model in (opened("smollm2-135m"), opened("smollm2-135m?backend=hf")):
        assert len(model.encode("<|im_start|>user", special=False)) > 4
        assert model.encode("<|im_start|>user") == [1, 4093]  # the other call has no effect
        assert model.vocab.decode(model.encode("a\0b🙂")) == "a\0b🙂"
        with pytest.raises(InputError, match="cannot be tokenized"):
            model.encode("half a pair \ud800")


# --- chat templates are part of downloaded models, so they run in a sandbox ---

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>&</b> 日本"},
]


def test_a_hostile_or_broken_template_raises_one_error_and_has_no_effect():
    before = [dict(message) for message in MESSAGES]
    for template in (
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages.append({'role': 'user', 'content': 'more'}) }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('no system role') }}",
        None,
    ):
        with pytest.raises(InputError, match="template"):
            render_chat(Vocabulary((b"<s>",), chat_template=template), MESSAGES)
    assert before == MESSAGES


def test_the_default_of_named_templates_is_used(byte_level):
    tokenizer = copy.copy(byte_level)
    for stated, expected in (({"default": "a", "tool_use": "b"}, "a"), ({"tool_use": "b"}, None)):
        tokenizer.chat_template = stated
        assert tokenizer_vocabulary(tokenizer, config(300), None).chat_template == expected


@pytest.mark.parametrize(
    ("own", "generation", "says"),
    [
        ({"eos_token_id": [5, 300]}, {}, "eos_token_id is 300"),
        ({"pad_token_id": 300}, {}, "pad_token_id is 300"),
        ({}, {"eos_token_id": [1, 301]}, "eos_token_id is 301"),
    ],
)
def test_an_id_without_an_embedding_row_is_rejected(byte_level, own, generation, says):
    settings = config(300, **own), SimpleNamespace(**generation)
    with pytest.raises(InputError, match=rf"{says}\b.*\b300 rows"):
        tokenizer_vocabulary(byte_level, *settings)
