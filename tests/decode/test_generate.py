"""One prompt to one record: kinds of prompts, limits, rules, what is opened and closed, and the times in it."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from specnb.decode import generate as module
from specnb.decode import loop
from specnb.decode.generate import generate, prompt_ids
from specnb.draft import model as model_drafter
from specnb.draft.load import LoadedDrafter
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, SpecnbError
from specnb.lm import toy
from specnb.prompts import Prompt

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def with_vocab(**changes):
    model = toy.cyclic(5)
    model.vocab = replace(model.vocab, **changes)
    return model


def lookup_or_lm(size=5):
    return [LookupDrafter(), ModelDrafter(toy.cyclic(size))]


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["bcd", [1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), range(1, 4)], ids=str)
def test_text_and_ids_are_the_same_prompt(prompt):
    made = generate(toy.cyclic(5), prompt, max_new_tokens=3)
    assert made.prompt_ids == (1, 2, 3) and made.token_ids == (4, 0, 1) and made.text == "eab"
    assert all(type(i) is int for i in made.prompt_ids)


@pytest.mark.parametrize("prompt", ["", [], ()])
@pytest.mark.parametrize("drafter", [None, LookupDrafter()])
def test_without_bos_an_empty_prompt_is_refused(prompt, drafter):
    with pytest.raises(InputError, match="no tokens"):
        generate(with_vocab(bos=None), prompt, drafter=drafter)


def test_a_prompt_of_the_collection_lends_its_name_and_category():
    made = generate(toy.cyclic(5), Prompt(id="p-1", category="code", text="ab"), max_new_tokens=1)
    assert (made.prompt_id, made.category, made.prompt_ids) == ("p-1", "code", (0, 1))
    assert generate(toy.cyclic(5), "ab", max_new_tokens=1).prompt_id == ""


def test_messages_go_through_the_chat_template():
    model = with_vocab(chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "cd"}, {"role": "user", "content": "e"}]
    assert prompt_ids(model, messages) == (0, 2, 3, 4)
    assert prompt_ids(model, Prompt(id="p", category="chat", messages=messages)) == (0, 2, 3, 4)


def test_bos_written_by_the_template_is_not_added_again():
    class Adding(toy.ToyLM):
        def encode(self, text, *, special=True):
            return [0] * special + super().encode(text)

    model = with_vocab(chat_template=TEMPLATE, add_bos=True)
    model.__class__ = Adding
    messages = [{"role": "user", "content": "ac"}]
    assert prompt_ids(model, messages) == (0, 0, 2)  # BOS, then the a of the message
    assert prompt_ids(model, "aac") == (0, 0, 0, 2)  # text is taken as it stands


def test_messages_need_a_template():
    for prompt in [
        [{"role": "user", "content": "ab"}],
        Prompt(id="p", category="chat", messages=({"role": "user", "content": "ab"},)),
    ]:
        with pytest.raises(InputError, match="no chat template: pass plain text"):
            generate(toy.cyclic(5), prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["ab", "cd"], r"token ids \(int\), got \['ab', 'cd'\]"),
        ([1.5, 2.0], r"got \[1.5, 2.0\]"),
        ([0, None], r"got \[0, None\]"),
        ("a\udcffb", r"the prompt holds '\\udcff'"),
        ("a!", "no token for '!'"),
        ([0, 5], "token id 5 is outside the vocabulary"),
        ([-1, 0], "token id -1 is outside the vocabulary"),
        ([7], "token id 7 is outside the vocabulary"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_value(prompt, message):
    with pytest.raises(InputError, match=message):
        generate(toy.cyclic(5), prompt)


def test_the_callers_list_is_untouched():
    for drafter in (None, *lookup_or_lm()):
        prompt = [0, 1, 2]
        generate(toy.cyclic(5), prompt, drafter=drafter, max_new_tokens=12)
        assert prompt == [0, 1, 2]


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, *lookup_or_lm()], ids=["plain", "lookup", "lm"])
@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_or_no_tokens(drafter, n):
    made = generate(toy.cyclic(5), [0, 1, 2, 3, 4, 0], drafter=drafter, k=8, max_new_tokens=n)
    assert made.token_ids == (1, 2)[:n] and made.stop_reason == "length" and made.text == "bc"[:n]
    assert made.summary().n_tokens == n and made.total_draft_tokens <= max(0, n - 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": -1}, "k must be 0 or more, got -1"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
        ({"max_new_tokens": -2}, "max_new_tokens must be 0 or more, got -2"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"rule": "tree"}, "unknown verification rule 'tree'"),
        ({"rule": "typical"}, "'typical' needs a temperature above 0"),
        ({"stop": ("",)}, "stop string must not be empty"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(settings, message, monkeypatch):
    monkeypatch.setattr(module, "load", lambda name: pytest.fail("a model was loaded"))
    with pytest.raises(InputError, match=message):
        generate("no-such-model", "ab", drafter="lookup", **settings)


# --- text and reason ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, *lookup_or_lm()], ids=["plain", "lookup", "lm"])
def test_the_end_token_is_kept_as_id_and_not_shown(drafter):
    target = with_vocab(eog=frozenset({4}))
    made = generate(target, [0, 1, 2, 3, 4, 0], drafter=drafter)
    assert made.token_ids == (1, 2, 3, 4) and made.text == "bcd" and made.stop_reason == "eog"
    on = generate(target, [0, 1, 2, 3, 4, 0], drafter=drafter, max_new_tokens=6, ignore_eog=True)
    assert on.token_ids == (1, 2, 3, 4, 0, 1) and on.text == "bcdab" and on.stop_reason == "length"


@pytest.mark.parametrize("drafter", [None, *lookup_or_lm()], ids=["plain", "lookup", "lm"])
@pytest.mark.parametrize("stop", ["ea", ("zz", "ea")], ids=str)
def test_text_ends_before_the_stop_string_and_ids_with_the_token_that_completes_it(drafter, stop):
    """A single text is one stop string, not one for each of its letters."""
    made = generate(toy.cyclic(5), "ab", drafter=drafter, k=6, stop=stop)
    assert made.token_ids == (2, 3, 4, 0) and made.text == "cd" and made.stop_reason == "stop_string"


# --- the record -----------------------------------------------------------------------------------------------------


def test_the_record_says_what_was_run():
    target = toy.markov(5, seed=1)
    plain = generate(target, [0], temperature=0.5, seed=9, max_new_tokens=4, rule="block")
    assert (plain.target, plain.drafter, plain.rule, plain.k) == (target.name, "", "", 0)
    assert (plain.temperature, plain.seed, plain.lossless, plain.fallback) == (0.5, 9, True, None)
    greedy = generate(target, [0], drafter=LookupDrafter(), k=3, max_new_tokens=4, rule="block")
    assert (greedy.drafter, greedy.rule, greedy.k, greedy.lossless) == ("lookup(n=1..6,x4)", "greedy", 3, True)
    block = generate(target, [0], drafter=LookupDrafter(), temperature=1.0, max_new_tokens=4, rule="block")
    assert (block.rule, block.lossless) == ("block", True)
    typical = generate(target, [0], drafter=LookupDrafter(), temperature=1.0, max_new_tokens=4, rule="typical")
    assert (typical.rule, typical.lossless) == ("typical", False)
    assert generate(target, [0], temperature=1.0, max_new_tokens=4, rule="typical").lossless  # nothing was verified


# --- names: what is opened here is closed here ----------------------------------------------------------------------


class Watched:
    """Toy models by name that remember whether they were closed."""

    def __init__(self, monkeypatch, drafter=None, fallback=None):
        self.closed = []
        self.target, self.drafter = self._watch(toy.cyclic(5), "target"), drafter and self._watch(drafter, "drafter")
        self.asked = []
        monkeypatch.setattr(module, "load", lambda name: self.target)
        monkeypatch.setattr(module, "load_drafter", lambda *a, **k: self._give(a, k, fallback))

    def _watch(self, thing, name):
        thing.close = lambda: self.closed.append(name)
        return thing

    def _give(self, args, options, fallback):
        self.asked.append((args[0], options))
        return LoadedDrafter(self.drafter, fallback)


def test_models_given_by_name_are_closed_also_after_an_error(monkeypatch):
    watched = Watched(monkeypatch, LookupDrafter())
    made = generate("t", "abc", drafter="d", max_new_tokens=4, strict=True)
    assert made.token_ids == (3, 4, 0, 1) and sorted(watched.closed) == ["drafter", "target"]
    assert watched.asked == [("d", {"strict": True})]
    watched.closed.clear()
    with pytest.raises(SpecnbError):
        generate("t", "!", drafter="d")
    assert sorted(watched.closed) == ["drafter", "target"]


def test_opened_models_stay_open(monkeypatch):
    watched = Watched(monkeypatch, LookupDrafter())
    generate(watched.target, "abc", drafter=watched.drafter, max_new_tokens=4)
    assert watched.closed == [] and watched.asked == []


def test_a_fallback_is_recorded_and_equals_plain_decoding(monkeypatch):
    Watched(monkeypatch, None, "LoadError: the file is damaged")
    made = generate("t", "abc", drafter="d", k=5, max_new_tokens=9)
    assert made.fallback == "LoadError: the file is damaged" == made.summary().fallback
    assert (made.drafter, made.k, made.rule) == ("", 0, "") and all(r.k == 0 for r in made.rounds)
    assert made.token_ids == generate(toy.cyclic(5), "abc", max_new_tokens=9).token_ids


# --- time -----------------------------------------------------------------------------------------------------------


def test_decoding_time_is_the_sum_of_the_rounds(monkeypatch):
    """On a clock that moves only in forwards, by one second a token: nothing is booked twice or left out."""
    now = [0.0]
    for each in (module, loop, model_drafter):
        monkeypatch.setattr(each, "perf_counter", lambda: now[0])

    class Slow(toy.ToyLM):
        def forward(self, ids, n_logits=None):
            now[0] += len(ids)
            return super().forward(ids, n_logits)

    target, draft = toy.cyclic(5), toy.cyclic(5)
    target.__class__ = draft.__class__ = Slow
    made = generate(target, [0, 1, 2], drafter=ModelDrafter(draft), k=3, max_new_tokens=10)
    s = made.summary()
    assert made.prefill_s == 3 + 2  # the drafter feeds the last token of the prompt with its first draft
    assert (
        s.draft_s + s.verify_s + s.rewind_s + s.other_s
        == s.wall_s - s.prefill_s
        == sum(r.forward_s for r in made.rounds)
    )
    assert s.overhead_share == 0 and s.verify_s == sum(r.width for r in made.rounds)


# --- what a call loads ----------------------------------------------------------------------------------------------

COUNT = """
import sys, specnb
specnb.generate(sys.argv[1], "a b a b", drafter="lookup", max_new_tokens=2)
print(*sorted(m for m in sys.modules if m.split(".")[0] == "specnb"))
"""
MOST_MODULES = 40


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m?backend=hf"])
def test_a_generation_with_lookup_loads_few_modules(name):
    shown = subprocess.run([sys.executable, "-c", COUNT, name], check=True, capture_output=True, text=True).stdout
    loaded = shown.splitlines()[-1].split()
    assert len(loaded) <= MOST_MODULES, loaded
