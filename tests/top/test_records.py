"""Records: the derived numbers equal those computed by hand."""

import pytest

from specnb.records import Generation, Round

# 7 tokens in 3 rounds: 3 of 4 draft tokens accepted, 1 of 4, 0 of 0
ROUNDS = (
    Round(0, 4, 3, (1, 2, 3, 4), (1, 2, 3, 9), (1.0,) * 3, 2.0, 3.0, 0.5, 0.5, 4.5, 5),
    Round(1, 4, 1, (1, 2, 3, 4), (1, 8), (1.0,), 2.0, 3.0, 0.5, 0.5, 4.5, 5),
    Round(2, 0, 0, (), (7,), (), 0.0, 1.0, 0.0, 1.0, 0.9, 1),
)
DONE = Generation(
    prompt_id="p",
    category="code",
    target="t",
    drafter="d",
    rule="greedy",
    k=4,
    prompt_ids=(5, 6),
    token_ids=(1, 2, 3, 9, 1, 8, 7),
    text="x",
    rounds=ROUNDS,
    wall_s=18.0,
    prefill_s=3.0,
    stop_reason="length",
)


def test_the_summary_equals_one_computed_by_hand():
    s = DONE.summary()
    assert (s.n_tokens, s.n_rounds, s.total_draft_tokens, s.accepted_tokens, s.acceptance_rate) == (
        7,
        3,
        8,
        4,
        0.5,
    )
    assert (s.draft_s, s.verify_s, s.rewind_s, s.other_s) == (4.0, 7.0, 1.0, 2.0)
    assert (DONE.decode_s, s.tau, s.tokens_per_s) == (15.0, 7 / 3, 6 / 15)
    assert s.overhead_share == pytest.approx(1 - 0.9 * 11 / 15)
    # 15 s for the 6 tokens after prefill; 6 plain steps of 4 s take 24 s
    assert s.estimated_speedup is None and DONE.summary(
        step_s=4.0
    ).estimated_speedup == pytest.approx(24 / 15)


def test_ratios_without_a_denominator_are_none():
    empty = DONE.model_copy(update={"token_ids": (), "rounds": (), "wall_s": 3.0})
    s = empty.summary(step_s=1.0)
    assert (s.n_tokens, s.n_rounds, s.total_draft_tokens) == (0, 0, 0)
    ratios = (s.acceptance_rate, s.tau, s.tokens_per_s, s.estimated_speedup, s.overhead_share)
    assert {*ratios} == {None}
    plain = tuple(ROUNDS[2]._replace(committed_ids=(t,)) for t in DONE.token_ids)
    undrafted = DONE.model_copy(update={"rounds": plain})
    assert undrafted.acceptance_rate is None
    assert undrafted.tau == 1 == undrafted.summary(15 / 6).estimated_speedup
