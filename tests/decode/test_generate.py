"""From a prompt to its record: kinds of prompts, settings, opened models, and times."""

import inspect
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from specnb.decode.generate import TextStream, generate, prompt_ids
from specnb.draft import load as load_room
from specnb.draft.load import LoadedDrafter
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, SpecnbError
from specnb.lm import toy
from specnb.lm.vocab import Vocabulary
from specnb.prompts import Prompt

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def with_vocab(**changes):
    model = toy.cyclic(5)
    model.vocab = replace(model.vocab, **changes)
    return model


@pytest.mark.parametrize(
    "prompt",
    ["bcd", [1, 2, 3], np.array([1, 2, 3]), range(1, 4), iter([1, 2, 3])],
    ids=lambda p: type(p).__name__,
)
def test_text_and_ids_are_equivalent_and_the_id_of_a_prompt_is_recorded(prompt):
    generation = generate(toy.cyclic(5), prompt, max_new_tokens=3)
    assert (
        generation.prompt_ids == (1, 2, 3)
        and generation.token_ids == (4, 0, 1)
        and generation.text == "eab"
    )
    assert all(type(i) is int for i in generation.prompt_ids)
    named = generate(toy.cyclic(5), Prompt(id="p-1", category="code", text="bcd"), max_new_tokens=3)
    assert (named.prompt_id, named.category, named.prompt_ids) == ("p-1", "code", (1, 2, 3))


class Adding(toy.ToyLM):
    """A model whose tokenizer adds tokens before and after a text."""

    def encode(self, text, *, special=True):
        return (
            [*self.before, *super().encode(text), *self.after] if special else super().encode(text)
        )


@pytest.mark.parametrize("after", [[], [4], [4, 4]])
@pytest.mark.parametrize("before", [[], [0]])
def test_a_chat_prompt_has_one_bos_and_no_eos_is_appended_to_prompts(before, after):
    """A tokenizer may append EOS, but a prompt is continued. A chat template may write BOS."""
    model = with_vocab(chat_template=TEMPLATE, add_bos=bool(before))
    model.__class__ = Adding
    model.before = before
    model.after = after
    messages = [{"role": "user", "content": "cd"}, {"role": "user", "content": "b"}]
    assert prompt_ids(model, messages) == (0, 2, 3, 1)
    assert prompt_ids(model, Prompt(id="p", category="chat", messages=messages)) == (0, 2, 3, 1)
    assert prompt_ids(model, "acd") == (*before, 0, 2, 3), "text is taken as it stands"
    assert prompt_ids(model, "cde") == (*before, 2, 3, 4), "what the text itself says stays"
    assert prompt_ids(model, "") == (0,)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "without tokens"),
        ([], "without tokens"),
        (["ab", "cd"], r"\['ab', 'cd'\]"),
        ([1.5, 2.0], r"\[1.5, 2.0\]"),
        ("a\udcffb", r"'\\udcff'"),
        ("a!", "'!'"),
        ([0, 5], "5"),
        ([-1, 0], "-1"),
        ([{"role": "user", "content": "ab"}], "chat template"),
    ],
)
def test_an_invalid_prompt_is_rejected_with_its_value(prompt, named):
    with pytest.raises(InputError, match=named):
        generate(with_vocab(bos=None), prompt)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"k": -1}, "k must be .*-1"),
        ({"max_new_tokens": -2}, "max_new_tokens .*-2"),
        ({"top_p": 0}, "top_p .*0"),
        ({"rule": "tree"}, "'tree'"),
        ({"rule": "typical"}, "'typical'"),
        ({"stop": ("",)}, "stop string"),
        ({"k": 2.5}, "k .*2.5"),
        ({"k": True}, "k .*True"),
        ({"top_k": 1.5}, "top_k .*1.5"),
        ({"rule": 5}, "5"),
        ({"temperature": "x"}, "temperature .*'x'"),
        ({"temperature": 101}, "101"),
        ({"top_p": np.nan}, "top_p .*nan"),
        ({"seed": 0.5}, "seed .*0.5"),
        ({"seed": -1}, "-1"),
        ({"stop": ["a", b"b"]}, "stop string .*b'b'"),
        ({"prompt": None}, "prompt .*None"),
        ({"prompt": [{"role": "user"}, 5]}, "prompt .*'user'"),
    ],
)
def test_invalid_settings_are_rejected_before_a_model_is_loaded(settings, named, monkeypatch):
    monkeypatch.setattr(load_room, "load", lambda name: pytest.fail("a model was loaded"))
    with pytest.raises(InputError, match=named):
        generate("no-such-model", **({"prompt": "ab", "drafter": "lookup"} | settings))


def test_none_is_the_default_of_all_settings_and_numbers_may_be_from_numpy():
    names = inspect.signature(generate).parameters.keys() - {"target", "prompt", "drafter"}
    run = partial(generate, toy.markov(5, seed=1), [0], drafter="lookup")
    times = {"wall_s", "prefill_s", "rounds"}
    assert run(**dict.fromkeys(names)).model_dump(exclude=times) == run().model_dump(exclude=times)
    numbers = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "k": 2, "max_new_tokens": 9, "seed": 3}
    numpys = {name: np.array(value)[()] for name, value in numbers.items()}
    assert run(**numpys).model_dump(exclude=times) == run(**numbers).model_dump(exclude=times)


@pytest.mark.parametrize(
    ("settings", "ids", "text", "reason"),
    [
        ({}, (2, 3, 4), "cd", "eog"),  # EOG is in the ids, but not in the text
        ({"max_new_tokens": 6, "ignore_eog": True}, (2, 3, 4, 0, 1, 2), "cdabc", "length"),
        ({"max_new_tokens": 0}, (), "", "length"),
        # one stop string, not one per letter
        (
            {"stop": "da", "ignore_eog": True},
            (2, 3, 4, 0),
            "c",
            "stop_string",
        ),
        ({"stop": ("zz", "da"), "ignore_eog": True}, (2, 3, 4, 0), "c", "stop_string"),
    ],
)
def test_ids_and_text_end_at_eog_a_stop_string_or_the_maximum_length(settings, ids, text, reason):
    generation = generate(
        with_vocab(eog=frozenset({4})), "ab", drafter=ModelDrafter(toy.cyclic(5)), k=6, **settings
    )
    assert (generation.token_ids, generation.text, generation.stop_reason) == (ids, text, reason)


LOOKUP = "lookup(n=1..6,x4)"


@pytest.mark.parametrize(
    ("drafter", "temperature", "rule", "recorded"),
    [
        (None, 1.0, "typical", ("", "", 0, True)),  # nothing was verified
        (LookupDrafter(), 0.0, "block", (LOOKUP, "greedy", 3, True)),
        (LookupDrafter(), 1.0, "block", (LOOKUP, "block", 3, True)),
        (LookupDrafter(), 1.0, "typical", (LOOKUP, "typical", 3, False)),
    ],
)
def test_the_record_has_the_settings_of_the_run(drafter, temperature, rule, recorded):
    target = toy.markov(5, seed=1)
    g = generate(
        target,
        [0],
        drafter=drafter,
        k=3,
        temperature=temperature,
        seed=9,
        max_new_tokens=4,
        rule=rule,
    )
    assert (g.drafter, g.rule, g.k, g.lossless) == recorded
    assert (g.target, g.temperature, g.seed, g.fallback) == (target.name, temperature, 9, None)
    assert 0 < g.prefill_s < g.wall_s


def test_models_opened_by_name_are_closed_and_a_fallback_is_recorded(monkeypatch):
    closed = []
    target = toy.cyclic(5)
    drafter = LookupDrafter()
    target.close = lambda: closed.append("target")
    drafter.close = lambda: closed.append("drafter")
    loaded = iter(
        [LoadedDrafter(drafter), LoadedDrafter(drafter), LoadedDrafter(None, "LoadError: damaged")]
    )
    monkeypatch.setattr(load_room, "checked_name", lambda name: None)
    monkeypatch.setattr(load_room, "load", lambda name: target)
    monkeypatch.setattr(load_room, "load_drafter", lambda *_, **__: next(loaded))
    assert generate("t", "abc", drafter="d", max_new_tokens=4, strict=True).token_ids == (
        3,
        4,
        0,
        1,
    )
    with pytest.raises(SpecnbError):
        generate("t", "!", drafter="d")
    assert sorted(closed) == ["drafter"] * 2 + ["target"] * 2
    generate(toy.cyclic(5), "abc", drafter=drafter, max_new_tokens=4)
    assert len(closed) == 4, "what was opened elsewhere stays open"
    alone = generate("t", "abc", drafter="d", k=5, max_new_tokens=4)
    assert (
        alone.fallback == "LoadError: damaged" == alone.summary().fallback
        and alone.token_ids == (3, 4, 0, 1)
    )
    assert (alone.drafter, alone.k, alone.rule) == ("", 0, "")


def test_a_stream_gives_the_text_and_marks_the_drafted_pieces():
    """Some pieces are half a character."""
    pieces = (b"a", b"b\xc3", b"\xa9", b"c", b"")
    target = toy.ToyLM(toy.cyclic(5)._logits_of, Vocabulary(pieces, bos=0))
    stream = TextStream(target.vocab)
    shown = []
    made = generate(
        target,
        [0],
        drafter=ModelDrafter(toy.ToyLM(toy.cyclic(5)._logits_of, target.vocab)),
        k=3,
        max_new_tokens=12,
        on_round=lambda r: shown.extend(stream.pieces(r)),
    )
    assert made.text == "".join(piece for piece, _ in shown)
    assert [drafted for _, drafted in shown][:4] == [True, True, True, False]
