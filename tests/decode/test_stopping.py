"""Where a generation ends: the same place whether tokens come one by one or in blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.decode.stopping import Stopping, StopRules
from specnb.lm.vocab import Vocabulary

# 0 and 1 end a generation; 1 is no control token, so its piece could be seen; 2 is control, but no end
PIECES = (b"<end>", b"b", b"<ctl>", b"a", b"ab", b"ca", b"\xc3", b"\xa9", b"x\xc3\xa9y", b"", b"abc", b"\xe2\x82")
VOCAB = Vocabulary(PIECES, eog=frozenset({0, 1}), special=frozenset({0, 2}))
IDS = st.integers(0, len(PIECES) - 1)
STRINGS = st.lists(st.sampled_from(["a", "ab", "abca", "é", "éy", "ay", "bb", "<end>", "caab"]), max_size=3)


def stopping(n=100, *strings, ignore_eog=False):
    return Stopping(StopRules(n, tuple(strings), ignore_eog), VOCAB)


def visible(ids):
    """The text that `generate` shows: end-of-generation tokens are left out."""
    return VOCAB.decode(i for i in ids if i not in VOCAB.eog)


@given(
    ids=st.lists(IDS, max_size=14),
    sizes=st.lists(st.integers(1, 5), min_size=14, max_size=14),
    n=st.integers(0, 14),
    strings=STRINGS,
    ignore_eog=st.booleans(),
)
def test_any_split_into_blocks_ends_where_single_steps_do(ids, sizes, n, strings, ignore_eog):
    def run(blocks):
        state, kept = stopping(n, *strings, ignore_eog=ignore_eog), []
        for block in blocks:
            if state.reason:
                break
            kept += state.admit(block)
        return kept, state.reason, state.remaining

    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    blocks = [tuple(ids[at : at + size]) for at, size in zip(starts, sizes, strict=True)]
    assert run(blocks) == run([(i,) for i in ids])


@given(ids=st.lists(IDS, max_size=14), n=st.integers(1, 14), strings=STRINGS, ignore_eog=st.booleans())
def test_the_end_is_the_first_prefix_that_satisfies_a_rule(ids, n, strings, ignore_eog):
    """Against the definition, which rereads the whole text after each token."""

    def reason_of(prefix):
        if prefix[-1] in VOCAB.eog and not ignore_eog:
            return "eog"
        if any(s.encode() in VOCAB.decode_bytes(i for i in prefix if i not in VOCAB.eog) for s in strings):
            return "stop_string"
        return "length" if len(prefix) == n else None

    ends = (m for m in range(1, len(ids) + 1) if reason_of(ids[:m]))
    end = next(ends, len(ids))
    state = stopping(n, *strings, ignore_eog=ignore_eog)
    assert state.admit(ids) == tuple(ids[:end])
    assert state.reason == (reason_of(ids[:end]) if ids else None)
    assert state.remaining == n - end


@pytest.mark.parametrize(
    ("strings", "ids", "kept", "text"),
    [
        (("caab",), (3, 5, 4, 3), (3, 5, 4), "a"),  # across token borders, the rest of the block dropped
        (("bc",), (3, 10, 3), (3, 10), "aa"),  # inside one token: the completing token is kept, the text is cut
        (("é",), (3, 6, 7, 3), (3, 6, 7), "a"),  # a character in two tokens ends at its last byte
        (("éy",), (8, 3), (8,), "x"),
        (("y", "x"), (3, 8), (3, 8), "a"),  # both are there: the text ends before the first
        (("zz", "ab"), (3, 3, 4, 3), (3, 3, 4), "aa"),
        (("ac",), (3, 2, 9, 5), (3, 2, 9, 5), ""),  # a control token and an empty one between have no text
    ],
)  # fmt: skip
def test_stop_strings(strings, ids, kept, text):
    state = stopping(100, *strings)
    assert state.admit(ids) == kept and state.reason == "stop_string"
    assert state.cut(visible(kept)) == text


def test_half_a_character_is_no_match():
    state = stopping(100, "é")
    assert state.admit((6, 6, 11, 7)) == (6, 6, 11, 7) and state.reason is None


def test_control_tokens_are_no_text():
    state = stopping(100, "<ctl>", "<end>", ignore_eog=True)
    state.admit((2, 0))
    assert state.reason is None


def test_an_ignored_end_token_is_no_text_either():
    """Its piece is left out of the text that is shown; a match through it could not be cut there."""
    state = stopping(100, "b", ignore_eog=True)
    assert state.admit((1, 1)) == (1, 1) and state.reason is None
    around = stopping(100, "aca", ignore_eog=True)
    kept = around.admit((3, 1, 5, 3))
    assert around.reason == "stop_string" and around.cut(visible(kept)) == ""


def test_a_long_text_is_not_read_again_for_every_token():
    """A stop string that ends far back would have ended the generation there; only the newest bytes are looked at."""

    class Counted(bytearray):
        looked = 0

        def __getitem__(self, index):
            Counted.looked += len(range(*index.indices(len(self))))
            return super().__getitem__(index)

        def __contains__(self, text):
            Counted.looked += len(self)
            return super().__contains__(text)

    state = stopping(10_000, "zzzz")
    state._text = Counted()
    state.admit([3] * 2000)
    assert Counted.looked <= 2000 * 8
