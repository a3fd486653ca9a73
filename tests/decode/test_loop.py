"""The two loops: forward passes, limits of drafting, invalid proposals, times, and the end."""

from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specnb.decode import accept, loop
from specnb.decode.generate import generate
from specnb.decode.loop import Stopping, StopRules
from specnb.draft.base import Proposal
from specnb.draft.lookup import LookupDrafter
from specnb.errors import CapacityError, InputError, StateError
from specnb.lm import toy
from specnb.lm.vocab import Vocabulary


class Spy(LookupDrafter):
    """Proposes the tokens of its rule, and records each requested K."""

    def __init__(self, rule=None):
        super().__init__()
        self.name = "spy"
        self.rule = rule
        self.asked = []

    def propose(self, tokens, k, picker):
        self.asked.append(k)
        return Proposal(tuple(self.rule(tokens, k)))


def successors(size):
    return lambda tokens, k: [(tokens[-1] + 1 + j) % size for j in range(k)]


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_n_tokens_take_one_prefill_and_at_most_n_minus_1_forward_passes(drafter):
    """The prompt's last token is processed only once, as in transformers and llama.cpp."""
    target = toy.cyclic(7)
    target.forward([4, 4, 4])
    target.forward = Mock(wraps=target.forward)
    generate(target, [0, 1], drafter=drafter, k=0, max_new_tokens=5)
    fed = [list(call.args[0]) for call in target.forward.call_args_list]
    assert fed == [[0, 1], [2], [3], [4], [5]]
    target.caps = replace(target.caps, n_ctx=4)
    with pytest.raises(CapacityError, match="5 more"):
        generate(target, [0, 1, 2, 3, 4], drafter=drafter)


@pytest.mark.parametrize(("k", "n", "asked"), [(4, 10, [4, 4]), (50, 10, [9]), (4, 6, [4])])
def test_k_is_limited_to_tokens_that_can_be_committed_and_more_is_rejected(k, n, asked):
    """A round commits up to K + 1 tokens, so one remaining token takes a plain step."""
    spy = Spy(successors(7))
    made = generate(toy.cyclic(7), [0], drafter=spy, k=k, max_new_tokens=n)
    assert spy.asked == asked and len(made.token_ids) == n
    careless = Spy(lambda tokens, k: successors(7)(tokens, k + 1))
    with pytest.raises(InputError, match="spy proposed 5 tokens"):
        generate(toy.cyclic(7), [0], drafter=careless, k=4)


GOOD = [0.7, 0.3, 0.0]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([GOOD], r"\(1, 3\).*\(2, 3\)"),
        ([GOOD, [0.0, 0.5, 0.5]], r"0\.7 0\. "),
        ([[float("nan")] * 3, GOOD], "nan"),
        ([GOOD, [0.3, 0.0, 0.0]], r"0\.3"),
    ],
)
def test_invalid_rows_are_rejected_with_the_drafter_and_the_value(rows, named):
    """Such draft tokens would always be accepted, because min(1, nan) and min(1, p/0) are 1."""
    spy = Spy()
    spy.propose = lambda tokens, k, rng: Proposal((0, 0), np.asarray(rows))
    with pytest.raises(InputError, match=f"(?=.*spy).*{named}"):
        generate(toy.markov(3, seed=0), [0, 1], drafter=spy, k=2, temperature=1.0)


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_another_use_of_the_same_model_is_detected(drafter):
    """Its tokens would be in the state, and silently change the output."""
    target = toy.cyclic(7)
    meanwhile = Mock(side_effect=lambda _: generate(target, [5] * 5, max_new_tokens=3))
    with pytest.raises(StateError):
        generate(target, [0, 1, 2], drafter=drafter, on_round=meanwhile)
    meanwhile.assert_called_once()


def test_every_second_of_a_round_is_counted_once(monkeypatch):
    """On a fake clock, which only `taking` advances."""
    now = [0.0]
    monkeypatch.setattr(loop, "perf_counter", lambda: now[0])

    def taking(seconds, method):
        def timed(*args, **kwargs):
            now[0] += seconds
            return method(*args, **kwargs)

        return timed

    target = toy.cyclic(7)
    spy = Spy(successors(7))
    target.forward = taking(10, target.forward)
    target.rewind = taking(1, target.rewind)
    spy.propose = taking(5, lambda tokens, k, rng: Proposal(successors(7)(tokens, k), None, 4.0))
    spy.commit = taking(2, spy.commit)
    monkeypatch.setattr(accept, "walk_drafts", taking(0.5, accept.walk_drafts))
    times = attrgetter("draft_s", "verify_s", "rewind_s", "other_s", "forward_s")
    rounds = generate(target, [0], drafter=spy, k=3, max_new_tokens=8).rounds
    assert [*map(times, rounds)] == [(5, 10, 3, 0.5, 14)] * 2
    rounds = generate(target, [0], max_new_tokens=2).rounds
    assert [*map(times, rounds)] == [(0,) * 5, (0, 10, 0, 0, 10)], "the first pass is the prefill"


# 0 and 1 end a generation; 1 is not a control token, so its piece could be shown; 2 is a control
# token that does not end it
PIECES = (
    b"<end>",
    b"b",
    b"<ctl>",
    b"a",
    b"ab",
    b"ca",
    b"\xc3",
    b"\xa9",
    b"x\xc3\xa9y",
    b"",
    b"abc",
    b"\xe2\x82",
)
VOCAB = Vocabulary(PIECES, eog=frozenset({0, 1}), special=frozenset({0, 2}))
IDS = st.lists(st.integers(0, len(PIECES) - 1), max_size=14)
STRINGS = st.lists(
    st.sampled_from(["a", "ab", "abca", "é", "éy", "ay", "bb", "<end>", "caab"]), max_size=3
)


@given(
    IDS,
    st.lists(st.integers(1, 5), min_size=14, max_size=14),
    st.integers(1, 14),
    STRINGS,
    st.booleans(),
)
@example([3, 8], [1] * 14, 9, ["y", "x"], False)  # both are in one token: the text ends before x
# the control token and the empty one have no text
@example([3, 2, 9, 5], [1] * 14, 9, ["ac"], False)
def test_any_split_into_blocks_ends_at_the_first_prefix_that_meets_a_rule(
    ids, sizes, n, strings, ignore_eog
):
    """Compared with the definition, which checks the whole text after each token."""

    def shown(ids):
        return VOCAB.decode_bytes(i for i in ids if i not in VOCAB.eog)

    def reason_of(prefix):
        if prefix[-1] in VOCAB.eog and not ignore_eog:
            return "eog"
        if any(s.encode() in shown(prefix) for s in strings):
            return "stop_string"
        return "length" if len(prefix) == n else None

    end = next((m for m in range(1, len(ids) + 1) if reason_of(ids[:m])), len(ids))
    blocks = [ids[a:b] for a, b in pairwise([0, *accumulate(sizes)])]
    for split in (blocks, [[i] for i in ids], [ids]):
        state = Stopping(StopRules(n, tuple(strings), ignore_eog), VOCAB)
        kept = []
        for block in split:
            kept += () if state.reason else state.admit(block)
        assert kept == ids[:end] and state.remaining == n - end
        assert state.reason == (reason_of(ids[:end]) if ids else None)
        text = shown(kept).decode(errors="replace")
        assert state.cut(text) == min(
            (text.partition(s)[0] for s in strings), key=len, default=text
        )
