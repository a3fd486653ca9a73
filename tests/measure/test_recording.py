"""What a recording may follow: exact for every setting that it takes, refused with the value for every other."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from specnb.decode.control import ConfidenceStop
from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure.follow import follow
from specnb.measure.recording import Trace
from specnb.measure.replay import fixed_k, walk

PROMPT = [0, 1, 2, 0, 1]


def draft_model(n_ctx):
    model = toy.markov(4, order=1, seed=3)
    model.caps = replace(model.caps, n_ctx=n_ctx)
    return ModelDrafter(model)


DRAFTERS = {"lookup": LookupDrafter, "model": lambda: draft_model(4096), "short": lambda: draft_model(16)}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("width", [1, 2, 4, 4096])
def test_rounds_and_texts_of_drafts_are_the_live_ones_in_narrow_forwards_too_and_old_files_have_no_texts(
    name, width, tmp_path
):
    target = toy.markov(4, order=2, seed=2)
    target.caps = replace(target.caps, max_width=width)
    (recording,) = follow(target, [DRAFTERS[name]()], generate(target, PROMPT, max_new_tokens=30), max_new_tokens=30)
    for k in (1, 3, 6):
        live = generate(target, PROMPT, drafter=DRAFTERS[name](), k=k, max_new_tokens=30)
        replayed, counts = fixed_k(recording, k), (len(live.rounds), live.total_draft_tokens, live.accepted_tokens)
        assert (replayed.rounds, replayed.drafted, replayed.accepted) == counts
        at = 0
        for r in live.rounds:
            texts, known = list(map(target.vocab.piece, r.draft_ids)), list(recording.drafts[at][:k])
            assert known == texts[: len(known)]
            assert len(known) == r.k if name == "lookup" else len(known) >= min(r.n_accepted + 1, r.k)
            at += len(r.committed_ids)
    Trace((recording,)).save(tmp_path / "new.parquet")
    assert Trace.load(tmp_path / "new.parquet").recordings == (recording,)
    pq.write_table(pq.read_table(tmp_path / "new.parquet").drop_columns("drafts"), tmp_path / "old.parquet")
    assert Trace.load(tmp_path / "old.parquet").recordings == (recording._replace(drafts=()),)


class Planned(LookupDrafter):
    tree_nodes = 5


def test_drafters_and_generations_that_cannot_be_followed_are_refused():
    target = toy.markov(4, order=2, seed=1)
    plain = generate(target, PROMPT, max_new_tokens=9)
    several = [LookupDrafter(), LookupDrafter()]
    for drafters, named in (([Planned()], "drafts trees"), (several, "name of 2 drafters")):
        with pytest.raises(InputError, match=named):
            follow(target, drafters, plain, max_new_tokens=9)
    drafted = generate(target, PROMPT, drafter=LookupDrafter(), k=3, max_new_tokens=9)
    stranger, old = (plain.model_copy(update=u) for u in ({"target": "stranger"}, {"max_new_tokens": None}))
    for generation, n, named in [(stranger, 9, "stranger"), (plain, 10, "9 tokens"), (drafted, 9, "K = 3")]:
        with pytest.raises(InputError, match=named):
            follow(target, [LookupDrafter()], generation, max_new_tokens=n)
    assert follow(target, [LookupDrafter()], old, max_new_tokens=9)  # a record from before it was kept


def test_a_controller_that_reads_further_than_those_that_walked_along_is_refused():
    target, drafter = toy.markov(4, order=2, seed=0), ModelDrafter(toy.markov(4, order=1, seed=1))
    walking = {drafter.name: [ConfidenceStop(24, 0.9)]}
    plain = generate(target, PROMPT, max_new_tokens=40)
    (recording,) = follow(target, [drafter], plain, max_new_tokens=40, walking=walking)
    walk(recording, ConfidenceStop(24, 0.9))
    with pytest.raises(InputError, match="wrong draft for token"):
        walk(recording, ConfidenceStop(24, 0.0))
