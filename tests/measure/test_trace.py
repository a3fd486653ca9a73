"""What a replay may follow: exact for every setting that it takes, refused with the value for every other."""

import re
from dataclasses import replace

import numpy as np
import pytest

from specnb.book.explorer.live import Workbench
from specnb.decode.control import ConfidenceStop
from specnb.decode.generate import generate
from specnb.draft.load import LoadedDrafter
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.draft.translate import StringMatch
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure import adaptive, ksweep
from specnb.measure.recording import follow
from specnb.measure.replay import fixed_k, walk
from specnb.params import AdaptiveKParams, ExplorerParams, KSweepParams
from tests.laws.vocabularies import model

PROMPT = [0, 1, 2, 0, 1]
DRAFTERS = {"lookup": LookupDrafter, "model": lambda: ModelDrafter(toy.markov(4, order=1, seed=3))}


def counts(live):
    return len(live.rounds), live.total_draft_tokens, live.accepted_tokens


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_narrow_forward_bounds_replayed_drafts_as_it_bounds_live_ones(name, width):
    target = toy.markov(4, order=2, seed=2)
    target.caps = replace(target.caps, max_width=width)
    plain = generate(target, PROMPT, max_new_tokens=30)
    (recording,) = follow(target, [DRAFTERS[name]()], plain, max_new_tokens=30)
    for k in (1, 3, 6):
        live = generate(target, PROMPT, drafter=DRAFTERS[name](), k=k, max_new_tokens=30)
        replayed = fixed_k(recording, k)
        assert (replayed.rounds, replayed.drafted, replayed.accepted) == counts(live)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.6}], ids=str)
def test_top_k_and_top_p_are_replayed_as_they_were_sampled(name, cut):
    target, live, replayed = toy.markov(4, order=2, seed=2), [], []
    for seed in range(1 if cut == {"top_k": 1} else 120):
        settings = {"max_new_tokens": 20, "temperature": 1.0, "seed": seed, **cut}
        live.append(len(generate(target, PROMPT, drafter=DRAFTERS[name](), k=3, **settings).rounds))
        plain = generate(target, PROMPT, **settings)
        (recording,) = follow(target, [DRAFTERS[name]()], plain, max_new_tokens=20)
        replayed.append(fixed_k(recording, 3).rounds)
    spread = np.hypot(np.std(live), np.std(replayed)) / np.sqrt(len(live))
    assert abs(np.mean(live) - np.mean(replayed)) <= 3 * spread


class Heads(LookupDrafter):
    """Reads hidden states of `target`."""

    def __init__(self):
        super().__init__()
        self.name, self.reads_hidden = "medusa", True


class Planned(LookupDrafter):
    tree_nodes = 5


NOT_FOLLOWED = {
    "medusa": [Heads()], "trees of 5 nodes": [Planned()],
    r"2 of the drafters are called lookup": [LookupDrafter(), LookupDrafter()],
}  # fmt: skip


@pytest.mark.parametrize("named", NOT_FOLLOWED)
def test_drafters_that_cannot_be_followed_are_refused(named):
    target = toy.markov(4, order=2, seed=1)
    with pytest.raises(InputError, match=named):
        follow(target, NOT_FOLLOWED[named], generate(target, PROMPT, max_new_tokens=9), max_new_tokens=9)


def test_a_generation_of_another_target_length_or_drafter_is_refused():
    target = toy.markov(4, order=2, seed=1)
    plain = generate(target, PROMPT, max_new_tokens=9)
    cases = [
        (plain.model_copy(update={"target": "stranger"}), 9, "stranger"),
        (plain, 10, "= 9"),
        (generate(target, PROMPT, drafter=LookupDrafter(), k=3, max_new_tokens=9), 9, "K = 3"),
    ]
    for made, n, named in cases:
        with pytest.raises(InputError, match=named):
            follow(target, [LookupDrafter()], made, max_new_tokens=n)
    old = plain.model_copy(update={"max_new_tokens": None})  # a record from before it was kept
    assert follow(target, [LookupDrafter()], old, max_new_tokens=9)


def test_a_controller_that_reads_rows_is_not_replayed_along_strings():
    target, draft = model((b"a", b"b", b"ab"), order=2, seed=1), model((b"ba", b"b", b"a"), seed=2)
    drafter = StringMatch(draft, target)
    plain = generate(target, [0, 1, 2], max_new_tokens=12)
    (recording,) = follow(target, [drafter], plain, k_max=4, max_new_tokens=12, only_k_max=True)
    assert fixed_k(recording, 4).drafted
    with pytest.raises(InputError, match=re.escape(drafter.name)):
        walk(recording, ConfidenceStop(4, 0.5))


EXPERIMENTS = {
    "01": (ksweep, lambda: ksweep.run(KSweepParams(max_new_tokens=4))),
    "02": (adaptive, lambda: adaptive.run(AdaptiveKParams(max_new_tokens=4))),
    "09": (None, lambda: Workbench.open(ExplorerParams(max_new_tokens=4))),
}


@pytest.mark.parametrize("number", EXPERIMENTS)
@pytest.mark.parametrize("drafter", [Heads, Planned, LookupDrafter])
def test_experiments_refuse_before_the_work(monkeypatch, number, drafter):
    """Two lookups are one name twice; one is what 01 is for."""
    import specnb.book.explorer.live as live

    if number == "01" and drafter is LookupDrafter:
        return
    module, run = EXPERIMENTS[number]
    module, target = module or live, toy.markov(4, seed=1)
    target.forward = lambda *_: pytest.fail("worked")
    monkeypatch.setattr(module, "load", lambda *_, **__: target)
    monkeypatch.setattr(module, "load_drafter", lambda *_, **__: LoadedDrafter(drafter()))
    with pytest.raises(InputError, match=drafter().name.partition("(")[0]):
        run()
