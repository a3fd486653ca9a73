"""The two loops: what a round asks for, records and leaves behind; context, odd drafters, errors, time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.decode import accept, loop
from specnb.decode.control import FixedK
from specnb.decode.sampling import Chooser, Draws, Sampling
from specnb.decode.stopping import Stopping, StopRules
from specnb.draft.base import Proposal, TokenView
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import CapacityError, InputError, StateError
from specnb.lm import toy


def sized(model, n_ctx, max_width=None):
    model.caps = replace(model.caps, n_ctx=n_ctx, max_width=max_width or n_ctx, rewind_depth=n_ctx)
    return model


def run(target, prompt, drafter=None, *, k=4, n=50, sampling=None, eog=False):
    """All rounds and the state of the stopping rules."""
    sampling = sampling or Sampling()
    chooser = Chooser(sampling, Draws(np.random.default_rng(0)))
    stopping = Stopping(StopRules(n, ignore_eog=not eog), target.vocab)
    after_prompt = loop.prefill(target, prompt, drafter)
    if drafter is None:
        rounds = loop.autoregressive(target, prompt, after_prompt, chooser=chooser, stopping=stopping)
    else:
        rule = accept.rule_named("token", sampling)
        rounds = loop.speculative(
            target, drafter, prompt, after_prompt, control=FixedK(k), chooser=chooser, stopping=stopping, rule=rule
        )
    made = list(rounds)
    return made, tuple(t for r in made for t in r.committed_ids), stopping.reason


class Counted:
    """A model that notes what it is fed; everything else is the model's own."""

    def __init__(self, model):
        self._model, self.fed = model, []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, ids, n_logits=None):
        self.fed.append(list(ids))
        return self._model.forward(ids, n_logits)


class Spy:
    """A drafter that proposes what it is told to and keeps what it is asked."""

    name = "spy"

    def __init__(self, propose=lambda tokens, k: ()):
        self.rule, self.asked, self.seen, self.started = propose, [], [], []

    def start(self, tokens):
        self.started.append(tuple(tokens))

    def propose(self, tokens, k, rng):
        self.asked.append(k)
        return Proposal(tuple(self.rule(tokens, k)))

    def commit(self, tokens):
        self.seen.append(tuple(tokens))

    def close(self):
        pass


def successors(size):
    return lambda tokens, k: [(tokens[-1] + 1 + j) % size for j in range(k)]


# --- prefill --------------------------------------------------------------------------------------------------------


def test_prefill_feeds_the_whole_prompt_shows_it_to_the_drafter_and_returns_the_logits_after_it():
    target, spy = toy.cyclic(5), Spy()
    target.forward([4, 4, 4])
    after_prompt = loop.prefill(target, [0, 1, 2], spy)
    assert target.n_past == 3 and spy.started == [(0, 1, 2)]
    assert after_prompt.shape == (1, 5) and after_prompt[0].argmax() == 3
    assert loop.prefill(target, [3])[0].argmax() == 4 and target.n_past == 1


@pytest.mark.parametrize("drafter", [None, LookupDrafter(), ModelDrafter(toy.cyclic(7))], ids=["plain", "lookup", "lm"])
def test_n_tokens_take_a_prefill_and_at_most_n_minus_one_forwards(drafter):
    """The prompt's last token is not fed a second time: transformers and llama.cpp save this step as well."""
    target = Counted(toy.cyclic(7))
    made, tokens, _ = run(target, [0, 1], drafter, k=0, n=5)
    assert target.fed == [[0, 1], [2], [3], [4], [5]] and tokens == (2, 3, 4, 5, 6)
    assert [r.width for r in made] == [0, 1, 1, 1, 1]


def test_the_first_round_verifies_its_drafts_alone():
    target = Counted(toy.cyclic(7))
    made, tokens, _ = run(target, [0, 1], Spy(successors(7)), k=2, n=6)
    assert target.fed == [[0, 1], [2, 3], [4, 5, 6]] and tokens == (2, 3, 4, 5, 6, 0)
    assert [(r.k, r.width, r.n_accepted) for r in made] == [(2, 2, 2), (2, 3, 2)]


def test_a_prompt_longer_than_the_context_is_refused_before_anything_is_fed():
    target = sized(toy.cyclic(5), 4)
    with pytest.raises(CapacityError, match=r"has 5 tokens, but .* holds 4"):
        loop.prefill(target, [0, 1, 2, 3, 4])
    assert target.n_past == 0


# --- the context ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, LookupDrafter(), ModelDrafter(toy.cyclic(5))], ids=["plain", "lookup", "lm"])
def test_a_prompt_as_long_as_the_context_gets_one_token(drafter):
    target = sized(toy.cyclic(5), 6)
    made, tokens, reason = run(target, [0, 1, 2, 3, 4, 0], drafter)
    assert tokens == (1,) and reason == "context" and len(made) == 1
    assert target.n_past == 6


@given(
    seed=st.integers(0, 5000),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    room=st.integers(0, 14),
    draft_ctx=st.integers(1, 24),
    width=st.integers(1, 6),
    k=st.integers(0, 6),
    n=st.integers(0, 16),
    kind=st.sampled_from(["lookup", "lm"]),
)
@settings(max_examples=150, deadline=None)
def test_the_context_ends_plain_and_speculative_alike(seed, prompt, room, draft_ctx, width, k, n, kind):
    """Also with a drafter of smaller context, and with a target whose widest forward is below K + 1."""
    target = sized(toy.markov(5, order=2, seed=seed), len(prompt) + room, width)
    draft = sized(toy.markov(5, order=1, seed=seed), draft_ctx)
    drafter = ModelDrafter(draft) if kind == "lm" else LookupDrafter()
    _, plain, why = run(target, prompt, n=n)
    made, tokens, reason = run(target, prompt, drafter, k=k, n=n)
    assert (tokens, reason) == (plain, why)
    assert reason == ("length" if n <= room + 1 else "context") and len(tokens) == min(n, room + 1)
    assert all(r.width <= width for r in made)


# --- how many drafts are asked for ----------------------------------------------------------------------------------


def test_no_more_drafts_are_asked_for_than_can_be_committed():
    """A round commits up to k + 1 tokens: 10 tokens are 5 + 5, then nothing remains."""
    spy = Spy(successors(7))
    made, tokens, _ = run(toy.cyclic(7), [0], spy, k=4, n=10)
    assert spy.asked == [4, 4] and [r.k for r in made] == [4, 4] and len(tokens) == 10
    spy = Spy(successors(7))
    made, tokens, _ = run(toy.cyclic(7), [0], spy, k=50, n=10)
    assert spy.asked == [9] and len(made) == 1 and len(tokens) == 10
    spy = Spy(successors(7))
    run(toy.cyclic(7), [0], spy, k=4, n=6)
    assert spy.asked == [4]  # the last token is the plain step of a round without drafts


def test_more_drafts_than_asked_for_are_refused():
    """Else a careless drafter would be recorded under a wrong K, and overrun the context near its end."""
    careless = Spy(lambda tokens, k: successors(7)(tokens, k + 1))
    with pytest.raises(InputError, match="drafter spy proposed 5 tokens, but was asked for 4"):
        run(toy.cyclic(7), [0], careless, k=4)
    assert len(run(toy.cyclic(7), [0], careless, k=0, n=3)[0]) == 3


# --- what the drafter sees ------------------------------------------------------------------------------------------


def test_the_drafter_is_told_the_whole_sequence_after_every_round():
    spy = Spy(lambda tokens, k: [(tokens[-1] + 1) % 7, 0, 0][:k])  # one right, then wrong
    made, tokens, _ = run(toy.cyclic(7), [3, 4], spy, k=3, n=7)
    whole = (3, 4, *tokens)
    ends = np.cumsum([2] + [len(r.committed_ids) for r in made])[1:]
    assert spy.seen == [whole[:end] for end in ends]


def test_the_view_reads_like_a_sequence_and_cannot_be_written():
    tokens = [5, 6, 7]
    view = TokenView(tokens)
    tokens.append(8)
    assert list(view) == [5, 6, 7, 8] and view[-1] == 8 and view[1:3] == (6, 7) and len(view) == 4 and 6 in view
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(AttributeError):
        view.other = 1
    assert not hasattr(view, "append") and not hasattr(view, "extend")


# --- errors pass, and the next call starts clean --------------------------------------------------------------------


@pytest.mark.parametrize("step", ["start", "propose", "commit"])
def test_an_error_of_the_drafter_passes_and_leaves_nothing_behind(step):
    target, drafter = toy.markov(5, order=2, seed=3), ModelDrafter(toy.markov(5, seed=4))
    expected = run(target, [0, 1], drafter, n=20)[1]

    class Breaking(ModelDrafter):
        calls = 0

        def _maybe(self, name):
            Breaking.calls += name == step
            if name == step and Breaking.calls == (1 if step == "start" else 3):
                raise RuntimeError(f"broken {step}")

        def start(self, tokens):
            self._maybe("start")
            super().start(tokens)

        def propose(self, tokens, k, rng):
            proposal = super().propose(tokens, k, rng)
            self._maybe("propose")
            return proposal

        def commit(self, tokens):
            self._maybe("commit")
            super().commit(tokens)

    broken, prompt = Breaking(toy.markov(5, seed=4)), [0, 1]
    with pytest.raises(RuntimeError, match=f"broken {step}"):
        run(target, prompt, broken, n=20)
    assert prompt == [0, 1]
    assert run(target, prompt, broken, n=20)[1] == expected


@pytest.mark.parametrize("drafter", [None, LookupDrafter()], ids=["plain", "lookup"])
def test_another_user_of_the_same_model_is_noticed(drafter):
    """Its tokens would be in the state, and change the output without a word."""
    target = toy.cyclic(7)
    chooser, stopping = Chooser(Sampling(), Draws(np.random.default_rng(0))), Stopping(StopRules(20), target.vocab)
    after_prompt = loop.prefill(target, [0, 1, 2], drafter)
    common = {"chooser": chooser, "stopping": stopping}
    rounds = (
        loop.autoregressive(target, [0, 1, 2], after_prompt, **common)
        if drafter is None
        else loop.speculative(
            target,
            drafter,
            [0, 1, 2],
            after_prompt,
            control=FixedK(3),
            rule=accept.rule_named("token", Sampling()),
            **common,
        )
    )
    next(rounds)
    run(target, [5, 5, 5, 5, 5], n=3)
    with pytest.raises(StateError, match="used by another generation"):
        next(rounds)


def test_accept_probabilities_end_where_the_generation_does():
    """Three drafts were accepted, but the second of them is the end."""
    target = toy.cyclic(7)
    target.vocab = replace(target.vocab, eog=frozenset({2}))
    (made,), _, reason = run(target, [0], Spy(successors(7)), k=4, eog=True)
    assert reason == "eog" and made.committed_ids == (1, 2) and made.draft_ids == (1, 2, 3, 4)
    assert made.n_accepted == 2 and made.accept_prob == (1.0, 1.0)


class Misreporting(Spy):
    """Drafts token 0 and reports `rows` for it."""

    def __init__(self, rows):
        super().__init__()
        self.rows = np.asarray(rows)

    def propose(self, tokens, k, rng):
        return Proposal((0, 0), self.rows)


GOOD = [0.7, 0.3, 0.0]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([GOOD], r"\(1, 3\).*\(2, 3\)"),
        ([GOOD[:2]] * 2, r"\(2, 2\).*\(2, 3\)"),
        ([GOOD, [0.0, 0.5, 0.5]], "draft 1 .*token 0.* 0.0"),
        ([[float("nan")] * 3, GOOD], "draft 0 .*nan"),
        ([GOOD, [float("inf"), 0.0, 0.0]], "draft 1 .*inf"),
        ([GOOD, [0.3, 0.0, 0.0]], "draft 1 .*0.3"),
    ],
)
def test_a_drafter_that_misreports_its_rows_is_named_with_the_place_and_the_value(rows, named):
    """Such drafts were kept with certainty: min(1, nan) is 1, and so is min(1, p/0)."""
    target = toy.markov(3, order=1, seed=0)
    with pytest.raises(InputError, match=f"(?s)spy.*{named}"):
        run(target, [0, 1], Misreporting(rows), k=2, sampling=Sampling(1.0))


# --- time -----------------------------------------------------------------------------------------------------------


def test_every_second_of_a_round_is_booked_once(monkeypatch):
    """On a clock that only moves when something is said to take time."""
    now = [0.0]
    monkeypatch.setattr(loop, "perf_counter", lambda: now[0])

    def taking(seconds, method):
        def timed(*args, **kwargs):
            now[0] += seconds
            return method(*args, **kwargs)

        return timed

    target, spy = toy.cyclic(7), Spy(successors(7))
    target.forward, target.rewind = taking(10, target.forward), taking(1, target.rewind)
    spy.propose = taking(5, lambda tokens, k, rng: Proposal(successors(7)(tokens, k), None, 4.0))
    spy.commit = taking(2, spy.commit)
    monkeypatch.setattr(accept, "greedy", taking(0.5, accept.greedy))
    made, _, _ = run(target, [0], spy, k=3, n=8)
    assert [(r.draft_s, r.verify_s, r.rewind_s, r.other_s, r.forward_s) for r in made] == [(5, 10, 3, 0.5, 14)] * 2
    made, _, _ = run(target, [0], n=2)
    times = [(r.draft_s, r.verify_s, r.rewind_s, r.other_s, r.forward_s) for r in made]
    assert times == [(0, 0, 0, 0, 0), (0, 10, 0, 0, 10)]  # the first forward is the prefill's
