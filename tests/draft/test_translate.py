"""Translation between vocabularies: which ids match, and how other tokens are spelled."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.decode.generate import generate
from specnb.draft.model import fit_drafter
from specnb.draft.spelling import GreedySpeller, encode_exact
from specnb.draft.token_map import TokenMap, Tokens, Translation, choose_translation, ids_agree
from specnb.draft.translate import TokenIntersection
from specnb.errors import InputError, NonFiniteLogits, VocabularyMismatch
from specnb.lm import toy
from specnb.lm.vocab import Vocabulary
from tests.laws.vocabularies import SpellingLM, model


def mapped(target, draft):
    return TokenMap(Tokens(target), Tokens(draft))


def pairs(target, draft):
    both = mapped(target, draft)
    return dict(zip(both.draft_ids.tolist(), both.target_ids.tolist(), strict=True))


ANY = st.lists(
    st.sampled_from([b"a", b"b", b"c", b"ab", b"\xf0\x9f", b"<s>", b""]), min_size=1, max_size=10
)


@given(pieces=ANY, others=ANY, special=st.sets(st.integers(0, 9)))
def test_matched_ids_have_equal_bytes_and_are_both_text_or_both_control(pieces, others, special):
    target = model(pieces, special=special & {*range(len(pieces))})
    draft = model(others, special=frozenset(i for i, p in enumerate(others) if p == b"<s>"))
    both = pairs(target, draft)
    assert [*both] == sorted(both), "in the order of ids"
    assert len(set(both.values())) == len(both), "one to one"
    for d, t in both.items():
        assert others[d] == pieces[t] != b"" and mapped(target, draft).draft_of(t) == d
    if not ids_agree(Tokens(target), Tokens(draft)):
        ours, theirs = (
            [(piece, i in m.vocab.special) for i, piece in enumerate(m.vocab.pieces)]
            for m in (target, draft)
        )
        assert all(theirs[d] == ours[t] for d, t in both.items())
        shared = {kind for kind in {*ours} & {*theirs} if kind[0]}
        assert len(both) == len(shared), "nothing shared is left out"


def test_an_added_bos_becomes_the_draft_models_bos_once():
    target = model([b"<s>", b"a", b"<u>"], special=frozenset({0, 2}), bos=0, add_bos=True)
    draft = model(
        [b"a", b"<b>", b"<", b"u", b">"], special=frozenset({1}), bos=1, eos=1, add_bos=True
    )
    both = mapped(target, draft)
    assert both.draft_of(0) == 1 and both.draft_of(2) is None
    made = TokenIntersection(draft, target)
    for ids in ([0, 1], [1]):
        for token in ids:
            made.forward([token])
        assert draft._ids == [1, 0] and made.n_past == len(ids)
        made.rewind(len(ids))
        assert draft._ids == []
    made.forward([2])
    assert draft._ids == [1, 2, 3, 4], "a control token that the draft lacks is read as its text"
    target.vocab = replace(target.vocab, add_bos=False)
    assert mapped(target, draft).draft_of(0) is None, "a mark among others, such as <|im_start|>"


class SentencePiece(SpellingLM):
    """Prepends a space, and encodes a letter with the last of its ids, not as a byte token."""

    def encode(self, text, *, special=True):
        space = self.vocab.pieces.index(b" ")
        last = {p: i for i, p in enumerate(self.vocab.pieces)}
        if not {c.encode() for c in text} <= last.keys():
            raise InputError("unknown letter")
        return [space, *(last[c.encode()] for c in text)]


def test_equal_pieces_map_to_the_id_that_the_tokenizer_returns():
    spm = model([b"a", b"b", b"\n", b" ", b"a", b"b"])
    assert pairs(model([b"b", b"a"]), spm) == {0: 1, 1: 0}
    spm.__class__ = SentencePiece
    assert pairs(model([b"b", b"a"]), spm) == {4: 1, 5: 0}
    assert pairs(spm, model([b"b", b"a"])) == {0: 5, 1: 4}


@pytest.mark.parametrize("row", [[np.nan, 1, 0], [-np.inf] * 3], ids=str)
def test_a_nonfinite_row_is_reported_also_for_unshared_tokens(row):
    """The draft model's first piece is not shared."""
    target = model([b"x", b"a", b"b"], order=2)
    draft = model([b"z", b"a", b"x"])
    draft._logits_of = lambda _: np.array(row, dtype=float)
    with pytest.raises(NonFiniteLogits, match="while drafting"):
        generate(target, [1, 1], drafter=TokenIntersection(draft, target), k=2, strict=True)


@given(st.binary(max_size=12))
def test_the_speller_reproduces_any_bytes(text):
    pieces = [bytes([i]) for i in range(256)] + [b"\xe2\x82", "€".encode(), b"ab", b"<x>"]
    everything = model(pieces, special=frozenset({259}))
    ids = GreedySpeller(everything).spell(text)
    assert everything.vocab.raw_bytes(ids) == text and 259 not in ids


def test_encode_exact_returns_exact_tokens_or_none():
    spm = model([b"a", b"b", b"\n", b" ", b"ab"])
    spm.__class__ = SentencePiece
    assert encode_exact(spm, b"", b"ab") == (0, 1), "without the space that the tokenizer adds"
    plain = model([b"a", b"b", b"ab", b"<e>"], special=frozenset({3}))
    assert encode_exact(plain, b"b", b"ab") == (2,)
    assert encode_exact(plain, b"a", b"b") == (1,), "no border behind a: by itself"
    assert encode_exact(plain, b"", b"z") is None and encode_exact(plain, b"", b"\xff") is None
    assert encode_exact(model([b"a", b"b"], eog=frozenset({1})), b"", b"ab") is None, (
        "an end is never made from text"
    )


def test_models_without_shared_pieces_or_tokenizer_are_not_translated():
    with pytest.raises(VocabularyMismatch, match="lookup"):
        fit_drafter(model([b"zz"]), model([b"a", b"b"]))
    three, two = (
        Tokens(toy.ToyLM(None, Vocabulary((b"<0>", b"<1>", b"<2>")[:n], kind="none")))
        for n in (3, 2)
    )
    # no tokenizer, no meaning of ids
    assert choose_translation(two, three).way is Translation.NONE
