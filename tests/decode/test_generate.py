"""From a prompt to its record: kinds of prompts, settings, opened models, and times."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from specnb.decode.generate import TextStream, generate, prompt_ids
from specnb.draft import load as load_room
from specnb.draft.load import LoadedDrafter
from specnb.draft.lookup import LookupDrafter
from specnb.errors import InputError, SpecnbError
from specnb.lm import toy
from specnb.prompts import Prompt

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def with_vocab(**changes):
    model = toy.cyclic(5)
    model.vocab = replace(model.vocab, **changes)
    return model


@pytest.mark.parametrize(
    "prompt",
    ["bcd", np.array([1, 2, 3]), iter([1, 2, 3]), Prompt(id="p-1", category="code", text="bcd")],
    ids=lambda p: type(p).__name__,
)
def test_text_and_ids_are_equivalent_and_the_id_of_a_prompt_is_recorded(prompt):
    made = generate(toy.cyclic(5), prompt, max_new_tokens=3)
    assert (made.prompt_ids, made.token_ids, made.text) == ((1, 2, 3), (4, 0, 1), "eab")
    assert all(type(i) is int for i in made.prompt_ids)
    named = isinstance(prompt, Prompt)
    assert (made.prompt_id, made.category) == (("p-1", "code") if named else ("", ""))


class Adding(toy.ToyLM):
    """A model whose tokenizer adds tokens before and after a text."""

    def encode(self, text, *, special=True):
        ids = super().encode(text)
        return [*self.before, *ids, *self.after] if special else ids


@pytest.mark.parametrize("after", [[], [4], [4, 4]])
@pytest.mark.parametrize("before", [[], [0]])
def test_a_chat_prompt_has_one_bos_and_no_eos_is_appended_to_prompts(before, after):
    """A tokenizer may append EOS, but a prompt is continued. A chat template may write BOS."""
    model = with_vocab(chat_template=TEMPLATE, add_bos=bool(before))
    model.__class__ = Adding
    model.before, model.after = before, after
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
        ([0, 5], "5"),
        ([-1, 0], "-1"),
        ([{"role": "user", "content": "ab"}], "chat template"),
    ],
)
def test_an_invalid_prompt_is_rejected_with_its_value(prompt, named):
    with pytest.raises(InputError, match=named):
        generate(with_vocab(bos=None), prompt)


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("k", -1, "k must be .*-1"),
        ("max_new_tokens", -2, "max_new_tokens .*-2"),
        ("top_p", 0, "top_p .*0"),
        ("rule", "tree", "'tree'"),
        ("rule", "typical", "'typical'"),
        ("stop", ["a", b"b"], "stop string .*b'b'"),
        ("stop", ("",), "stop string"),
        ("k", 2.5, "k .*2.5"),
        ("k", True, "k .*True"),
        ("top_k", 1.5, "top_k .*1.5"),
        ("temperature", "x", "temperature .*'x'"),
        ("temperature", 101, "101"),
        ("top_p", np.nan, "top_p .*nan"),
        ("seed", -1, "-1"),
        ("prompt", None, "prompt .*None"),
        ("prompt", [{"role": "user"}, 5], "prompt .*'user'"),
    ],
)
def test_invalid_settings_are_rejected_before_a_model_is_loaded(setting, value, named, monkeypatch):
    monkeypatch.setattr(load_room, "load", lambda name: pytest.fail("a model was loaded"))
    with pytest.raises(InputError, match=named):
        generate("no-such-model", **({"prompt": "ab", "drafter": "lookup"} | {setting: value}))


def test_numbers_may_be_from_numpy():
    def made(**options):
        generation = generate(toy.markov(5, seed=1), [0], drafter="lookup", **options)
        return generation.model_dump(exclude={"wall_s", "prefill_s", "rounds"})

    numbers = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "k": 2, "max_new_tokens": 9, "seed": 3}
    numpys = {name: np.array(value)[()] for name, value in numbers.items()}
    assert made(**numpys) == made(**numbers)


@pytest.mark.parametrize(
    ("settings", "ids", "text", "reason"),
    [
        ({}, (2, 3, 4), "cd", "eog"),  # EOG is in the ids, but not in the text
        ({"max_new_tokens": 6, "ignore_eog": True}, (2, 3, 4, 0, 1, 2), "cdabc", "length"),
        ({"max_new_tokens": 0}, (), "", "length"),
        # one stop string, not one per letter
        ({"stop": "da", "ignore_eog": True}, (2, 3, 4, 0), "c", "stop_string"),
        ({"stop": ("zz", "da"), "ignore_eog": True}, (2, 3, 4, 0), "c", "stop_string"),
    ],
)
def test_ids_and_text_end_at_eog_a_stop_string_or_the_maximum_length(settings, ids, text, reason):
    target = with_vocab(eog=frozenset({4}))
    made = generate(target, "ab", drafter=toy.cyclic(5), k=6, **settings)
    assert (made.token_ids, made.text, made.stop_reason) == (ids, text, reason)


@pytest.mark.parametrize(
    ("drafter", "temperature", "rule", "recorded"),
    [
        (None, 1.0, "typical", ("", "", 0, True)),  # nothing was verified
        ("lookup", 0.0, "block", ("lookup(n=1..6,x4)", "greedy", 3, True)),
    ],
)
def test_the_record_has_the_settings_of_the_run(drafter, temperature, rule, recorded):
    settings = {"temperature": temperature, "seed": 9, "max_new_tokens": 4}
    g = generate(toy.markov(5), [0], drafter=drafter, k=3, rule=rule, **settings)
    assert (g.drafter, g.rule, g.k, g.lossless) == recorded
    assert g.model_dump(include={*settings}) == settings
    assert g.target == toy.markov(5).name and g.fallback is None and 0 < g.prefill_s < g.wall_s


def test_models_opened_by_name_are_closed_and_a_fallback_is_recorded(monkeypatch):
    target = toy.cyclic(5)
    drafter = LookupDrafter()
    target.close, drafter.close = Mock(), Mock()
    load_drafter = Mock(return_value=LoadedDrafter(drafter))
    monkeypatch.setattr(load_room, "checked_name", lambda name: None)
    monkeypatch.setattr(load_room, "load", lambda name: target)
    monkeypatch.setattr(load_room, "load_drafter", load_drafter)
    generate("t", "abc", drafter="d", max_new_tokens=4, strict=True)
    with pytest.raises(SpecnbError):
        generate("t", "!", drafter="d")
    generate(toy.cyclic(5), "abc", drafter=drafter, max_new_tokens=4)  # was opened elsewhere
    assert target.close.call_count == drafter.close.call_count == 2
    load_drafter.return_value = LoadedDrafter(None, "LoadError: damaged")
    alone = generate("t", "abc", drafter="d", k=5, max_new_tokens=4)
    assert alone.fallback == alone.summary().fallback == "LoadError: damaged"
    assert (alone.drafter, alone.k, alone.token_ids) == ("", 0, (3, 4, 0, 1))


def test_a_stream_gives_the_text_and_marks_the_drafted_pieces():
    """Some pieces are half a character."""
    target = with_vocab(pieces=(b"a", b"b\xc3", b"\xa9", b"c", b""))
    stream = TextStream(target.vocab)
    shown = []
    made = generate(
        target,
        [0],
        drafter=with_vocab(pieces=target.vocab.pieces),
        k=3,
        max_new_tokens=12,
        on_round=lambda r: shown.extend(stream.pieces(r)),
    )
    texts, drafted = zip(*shown, strict=True)
    assert made.text == "".join(texts) and drafted[:4] == (True, True, True, False)
