"""What draft models say behind wrong drafts: no more than controllers ask for, and the same as in full."""

import pytest

from specnb.decode.control import ConfidenceStop, Controller, EntropyStop, FixedK
from specnb.decode.costaware import CostAware
from specnb.decode.generate import generate
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure.recording import Astray, follow, together
from specnb.measure.replay import Step, rounds, walk

PROMPTS = ([0, 1, 2, 0, 1], [3], [1, 1, 2])
VERIFY = [0.0, *(1.0 + 0.05 * n for n in range(1, 26))]


class Counted(toy.ToyLM):
    """Keeps what it was fed, and in which state."""

    def forward(self, ids, n_logits=None):
        self.fed = [*getattr(self, "fed", []), (self.n_past, tuple(ids))]
        return super().forward(ids, n_logits)


class ReadsAll(Controller):
    """Drafts as many as it may from `start` tokens on, and reads every row."""

    name, k_max, reads_drafts = "reads all", 24, True

    def __init__(self, start=0):
        self._left = start

    def draft_length(self):
        return 0 if self._left > 0 else self.k_max

    def update(self, outcome):
        self._left -= outcome.n_accepted + 1


def draft_model(name, seed):
    # "far" looks back over everything: one wrong token left in its state shows
    model = toy.markov(4, order={"far": 1000, "near": 1}[name], seed=seed + 1)
    model.__class__ = Counted
    return model


def readers():
    return [
        ConfidenceStop(24, 0.4), ConfidenceStop(24, 0.2, cumulative=True), EntropyStop(24, gamma=0.3, threshold=0.45),
        CostAware(VERIFY, 0.01, patience=3),
    ]  # fmt: skip


def followed(name, seed, walking=(), prompt=PROMPTS[0], n=40, model=None, **options):
    target = toy.markov(4, order=2, seed=seed, eog=frozenset({3}) if seed % 2 else frozenset())
    drafter = ModelDrafter(model or draft_model(name, seed))
    made = generate(target, prompt, max_new_tokens=n)
    drafter.model.fed = []
    (recording,) = follow(target, [drafter], made, max_new_tokens=n, walking={drafter.name: walking}, **options)
    return recording, drafter.model.fed


@pytest.mark.parametrize("name", ["far", "near"])
def test_along_what_was_followed_for_them_controllers_walk_as_along_everything(name):
    """Fresh ones and such that have learned on earlier texts, each with the others at once."""
    for seed in range(6):
        walking, later, full = readers(), readers(), readers()
        for prompt in PROMPTS:
            lazy, _ = followed(name, seed, walking=[*readers(), *walking], prompt=prompt)
            whole, _ = followed(name, seed, prompt=prompt, astray=True)
            for one, other in zip([*readers(), *later], [*readers(), *full], strict=True):
                assert walk(lazy, one) == walk(whole, other), (seed, one.name)
            pairs = list(zip(lazy.astray, whole.astray, strict=True))
            assert all(asked == all_of[: len(asked)] for asked, all_of in pairs)


def test_the_less_they_read_the_less_is_followed():
    rows = []
    for p_min in (0.9, 0.5, 0.4, 0.0):
        recording, fed = followed("far", 0, walking=[ConfidenceStop(24, p_min)])
        rows.append((sum(map(len, recording.astray)), len(fed)))
    assert rows == sorted(rows) and rows[0][0] < rows[-1][0] / 5 and rows[0][1] < rows[-1][1]


@pytest.mark.parametrize("name", ["far", "near"])
def test_everything_is_all_that_rounds_reach_and_no_more(name):
    for seed in range(6):
        for n in (1, 2, 3, 40):
            whole, _ = followed(name, seed, n=n, astray=True)
            asked, _ = followed(name, seed, n=n, walking=[ReadsAll(start) for start in range(n)])
            assert asked.astray == whole.astray


def test_what_nobody_asks_for_is_not_followed():
    along, model = followed("far", 0)
    assert along.astray == ()
    alone, fed = followed("far", 0, walking=[FixedK(24)])
    assert not any(alone.astray) and len(fed) == len(model)


def test_true_tokens_are_fed_once_more_at_most_however_many_walk():
    for seed in range(6):
        _, before = followed("far", seed)
        recording, fed = followed("far", seed, walking=[*readers(), *readers(), CostAware(VERIFY, 0.3)])
        drafts = sum(map(len, recording.astray))
        assert sum(len(ids) for _, ids in fed[len(before) :]) - drafts <= recording.n_tokens


def test_a_controller_that_reads_further_is_refused():
    recording, _ = followed("near", 0, walking=[ConfidenceStop(24, 0.9)])
    walk(recording, ConfidenceStop(24, 0.9))
    with pytest.raises(InputError, match=r"reads \d+ rows behind the wrong draft for token \d+ .*astray=True"):
        walk(recording, ReadsAll())


def test_the_order_of_questions_changes_no_answer():
    """Back and forth between paths: the state is rewound and fed again."""
    target = toy.markov(4, order=2, seed=0)
    made = generate(target, PROMPTS[0], max_new_tokens=12)
    whole = {}
    for order in ("forth", "back", "deepening"):
        model = draft_model("far", 0)
        model.forward([*made.prompt_ids, *made.token_ids[:-1]])
        paths = Astray(model, made, [0] * 11 + [None], 64)
        there = [*range(11), 12]  # the last draft is right, so a path leads on behind it
        asked = [(path, 5) for path in there]
        asked = {"forth": asked, "back": asked[::-1], "deepening": [(p, d) for d in range(6) for p in there]}[order]
        for path, depth in asked:
            paths.belief(path, depth)
        whole[order] = paths.beliefs
    assert whole["forth"] == whole["back"] == whole["deepening"]
    assert [len(path) for path in whole["forth"]] == [6] * 11 + [0, 6] and len(set(whole["forth"])) > 6


def test_whoever_is_furthest_behind_walks_on():
    """Rounds start in the order of the text, whatever their lengths."""
    seen = []

    def walking(lengths):
        at = 0
        for length in lengths:
            seen.append(at)
            yield Step(at, length, 0, length - 1)
            at += length

    together(map(walking, ([5, 1, 1, 9], [1] * 9, [], [3, 3, 3])))
    assert seen == sorted(seen) and len(seen) == 4 + 9 + 3


def test_controllers_that_walked_have_learned():
    control, alone = CostAware(VERIFY, 0.01), CostAware(VERIFY, 0.01)
    recording, _ = followed("near", 0, walking=[control])
    list(rounds(recording, alone))
    assert control._recent_rate == alone._recent_rate != CostAware(VERIFY, 0.01)._recent_rate
