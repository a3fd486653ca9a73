"""Records: the derived numbers are those worked out by hand."""

import pytest
from pydantic import ValidationError

from specnb.records import Generation, Round


def round_(index, committed, *, drafts=(), n_accepted=0, draft_s=0.0, verify_s=1.0, rewind_s=0.0, other_s=0.0):
    forward_s, width = 0.9 * (draft_s + verify_s), len(drafts) + 1
    return Round(
        index, len(drafts), n_accepted, drafts, committed, (1.0,) * n_accepted,
        draft_s, verify_s, rewind_s, other_s, forward_s, width,
    )  # fmt: skip


# 7 tokens in 3 rounds: 4 drafts of which 3 kept, 4 of which 1 kept, 0; the last one was cut
ROUNDS = (
    round_(0, (1, 2, 3, 9), drafts=(1, 2, 3, 4), n_accepted=3, draft_s=2.0, verify_s=3.0, rewind_s=0.5, other_s=0.5),
    round_(1, (1, 8), drafts=(1, 2, 3, 4), n_accepted=1, draft_s=2.0, verify_s=3.0, rewind_s=0.5, other_s=0.5),
    round_(2, (7,), verify_s=1.0, other_s=1.0),
)
DONE = Generation(
    prompt_id="p", category="code", target="t", drafter="d", rule="greedy", k=4, prompt_ids=(5, 6),
    token_ids=(1, 2, 3, 9, 1, 8, 7), text="x", rounds=ROUNDS, wall_s=18.0, prefill_s=3.0, stop_reason="length",
)  # fmt: skip


def test_the_summary_by_hand():
    s = DONE.summary()
    assert (s.n_tokens, s.n_rounds, s.total_draft_tokens, s.accepted_tokens, s.acceptance_rate) == (7, 3, 8, 4, 0.5)
    assert (s.draft_s, s.verify_s, s.rewind_s, s.other_s) == (4.0, 7.0, 1.0, 2.0)
    assert (s.wall_s, s.prefill_s, DONE.decode_s, s.tau, s.tokens_per_s) == (18.0, 3.0, 15.0, 7 / 3, 6 / 15)
    assert s.overhead_share == pytest.approx(1 - 0.9 * 11 / 15)
    assert (s.stop_reason, s.fallback) == ("length", None)
    # tau where drafts are free; 6 tokens after the prefill's first, in 15 s, would take 24 s in plain steps of 4 s
    assert s.estimated_speedup is None and DONE.summary(step_s=4.0).estimated_speedup == pytest.approx(24 / 15)
    assert type(s).model_validate_json(s.model_dump_json()) == s


def test_ratios_without_a_denominator_are_none():
    empty = Generation(prompt_ids=(1,), token_ids=(), rounds=(), wall_s=2.0, prefill_s=2.0, stop_reason="length")
    s = empty.summary(step_s=1.0)
    assert (s.n_tokens, s.n_rounds, s.total_draft_tokens) == (0, 0, 0)
    assert {s.acceptance_rate, s.tau, s.tokens_per_s, s.estimated_speedup, s.overhead_share} == {None}
    undrafted = DONE.model_copy(update={"rounds": tuple(round_(i, (t,)) for i, t in enumerate(DONE.token_ids))})
    assert undrafted.acceptance_rate is None and undrafted.tau == 1 == undrafted.summary(15 / 6).estimated_speedup


def test_positions_of_a_chain():
    for drafts, n_accepted, committed, n_tested in (
        ((), 0, (7,), 0), ((1, 2, 3), 0, (7,), 1), ((1, 2, 3), 2, (1, 2, 7), 3), ((1, 2, 3), 3, (1, 2, 3, 7), 3),
        ((1, 2, 3), 2, (1, 2), 2),  # ended with its second draft
    ):  # fmt: skip
        chain = round_(0, committed, drafts=drafts, n_accepted=n_accepted)
        for same in (chain, chain._replace(parents=tuple(range(-1, len(drafts) - 1)))):
            assert same.n_tested == n_tested and same.accepted_nodes == tuple(range(n_accepted))


def test_positions_of_a_tree():
    """Token 2 stands in two places; which of them was kept, the tokens before it say."""
    for committed, n_accepted, nodes, n_tested in (
        ((9,), 0, (), 1), ((1, 9), 1, (0,), 2), ((1, 4, 9), 2, (0, 3), 2), ((1, 2, 5, 9), 3, (0, 2, 4), 3),
        ((2, 9), 1, (1,), 1),  # node 1 has no drafts behind it: none was rejected
        ((1, 2), 2, (0, 2), 2),  # ended with a draft
    ):  # fmt: skip
        tree = round_(0, committed, drafts=(1, 2, 2, 4, 5), n_accepted=n_accepted)._replace(parents=(-1, -1, 0, 0, 2))
        assert tree.accepted_nodes == nodes and tree.n_tested == n_tested


def test_rounds_must_make_the_tokens():
    for tokens in (DONE.token_ids[:-1], (*DONE.token_ids[:-1], 6)):
        with pytest.raises(ValidationError, match=f"token_ids holds {len(tokens)} others"):
            Generation(**(DONE.model_dump() | {"token_ids": tokens}))
