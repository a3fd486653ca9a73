"""The controller study on toys: what is replayed, what runs live, and what the tables make of it."""

from dataclasses import replace

import pytest

from specnb.book import adaptive as tables
from specnb.draft.load import LoadedDrafter
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure import adaptive
from specnb.measure.switching import SWITCHING, questions
from specnb.params import AdaptiveKParams

SMALL = AdaptiveKParams(
    categories=["code", "prose"], prompts_per_category=2, live_prompts=1, max_new_tokens=24, conversations=1
)
SPOKEN = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Reading(toy.ToyLM):
    """Reads any text: each byte is a token, modulo its few."""

    def encode(self, text, *, special=True):
        return [b % self.vocab.size for b in text.encode()][-40:]


@pytest.fixture(scope="module")
def study():
    target, draft = toy.markov(7, order=2, seed=1), toy.markov(7, order=1, seed=2)
    target.__class__ = Reading
    target.vocab = replace(target.vocab, chat_template=SPOKEN)
    made = {"lookup": LookupDrafter(), SMALL.drafters[1]: ModelDrafter(draft)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "load", lambda name: target)
        patch.setattr(adaptive, "load_drafter", lambda name, *_, **__: LoadedDrafter(made[name]))
        return adaptive.run(SMALL)


def test_every_prompt_is_generated_once_and_followed_by_every_drafter(study):
    plain = [g for g in study.record.generations if not g.k]
    turns = [f"turns.switching-01-{n}" for n in (1, 2, 3, 4)]
    assert [g.prompt_id for g in plain] == ["code-01", "code-02", "prose-01", "prose-02", *turns]
    assert len(study.trace.recordings) == 8 * 2


def test_the_first_prompts_run_live_with_every_controller_and_make_the_replays_rounds(study):
    check = tables.live_check(study)
    assert check.columns[-3:].tolist() == ["same", "same_text", "near_tie"] and check["near_tie"].isna().all()
    assert len(check) == 2 * 2 * 6 and set(check["content"]) == {"code", "prose"}
    assert check["same"].all() and check["same_text"].all()


def test_a_replay_of_another_controller_would_not_agree(study, monkeypatch):
    """The planted fault: the live runs are compared with a report controller that starts elsewhere."""
    real = adaptive.controllers

    def shifted(cost, k_max):
        made = real(cost, k_max)
        made["rolling acceptance"]._k = 4
        return made

    monkeypatch.setattr(tables, "controllers", shifted)
    check = tables.live_check(study)
    assert not check[check["policy"] == "rolling acceptance"]["same"].all()
    assert check[check["policy"] != "rolling acceptance"]["same"].all()


def test_shares_are_of_the_best_fixed_k_and_none_beats_the_oracle_of_lengths(study):
    share = tables.against_best(study.record)
    assert len(share) == 3 * 2 * (1 + 6 + 1)
    assert set(share["machine"]) == {adaptive.THIS_MACHINE, "memory-bound server", "laptop, compute-bound"}
    oracle = share[share["policy"] == "oracle"][["code", "prose", SWITCHING]]
    assert (oracle >= 1 - 1e-9).all(axis=None)  # it knows more than a K fixed in hindsight
    one = tables.against_best(study.record, machine="memory-bound server")
    assert len(one) == 2 * 8


def test_the_worst_content_is_named(study):
    worst = tables.worst(tables.against_best(study.record))
    assert len(worst) == 3 * 2 * 6 and set(worst["content"]) <= {"code", "prose"}


def test_one_controller_goes_through_the_answers_of_a_conversation(study):
    (drafter, *_) = {r.drafter for r in study.trace.recordings}
    frame = tables.trajectory(study, drafter, ["rolling acceptance", "cost-aware"])
    assert frame.groupby("policy")["token"].is_monotonic_increasing.all() and frame["token"].max() > 3 * 24
    figure = tables.k_over_time(frame)
    assert [trace.name for trace in figure.data] == ["rolling acceptance", "cost-aware"]
    without = study._replace(trace=study.trace.select(prompt_id="code-01"))
    with pytest.raises(InputError, match="conversations of 1 or more"):
        tables.trajectory(without, drafter, ["cost-aware"])


def test_questions_grow_with_their_conversation():
    found = questions(2)
    assert [p.id for p in found] == [f"turns.switching-0{c}-{n}" for c in (1, 2) for n in (1, 2, 3, 4)]
    assert [len(p.messages) for p in found] == [1, 3, 5, 7] * 2 and questions(0) == ()
    assert found[3].messages[:5] == found[2].messages


def test_what_was_generated_before_an_error_is_saved(monkeypatch, tmp_path):
    target, saved = toy.markov(7, order=2, seed=1), []
    target.__class__ = Reading

    def broken(*_):
        raise KeyboardInterrupt

    for name, value in {
        "load": lambda name: target, "load_drafter": lambda *_, **__: LoadedDrafter(LookupDrafter()),
        "_replayed": broken,
    }.items():  # fmt: skip
        monkeypatch.setattr(adaptive, name, value)
    monkeypatch.setattr("specnb.measure.experiment.save", saved.append)
    with pytest.raises(KeyboardInterrupt):
        adaptive.run(SMALL)
    (record,) = saved
    assert record.status == "failed" and len(record.generations) == 4 and "verify_curve" in record.measurements


def test_parameters_are_checked():
    with pytest.raises(InputError, match="'code' is listed twice"):
        AdaptiveKParams.checked(categories=["code", "code"])
    with pytest.raises(InputError, match="k_max"):
        AdaptiveKParams.checked(k_max=8)  # the report's controller goes up to 24
