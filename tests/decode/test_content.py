"""Content: what the detectors promise for any text, and how often they are right on the labelled cases."""

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specnb.decode import content
from specnb.decode.content import ENOUGH, REQUEST, TAIL, detect, report_rule
from specnb.errors import InputError
from specnb.measure.contents import KINDS, accuracy, confusion, from_prompts, load_snippets, prompt_text
from specnb.prompts import MAX_FILE_BYTES, MAX_PROMPT_BYTES, Prompt, prompts

CHAT = "<|im_start|>user\nHow does this work?<|im_end|>\n<|im_start|>assistant\n"
STORY = "She put her hand into her pocket and felt the key, still warm. He looked at her and said nothing. "
PYTHON = "def area(width, height):\n    return width * height\n\n\nprint(area(2, 3))\n"
OBJECT = '{\n  "name": "north gate",\n  "open": true,\n  "width": 3.5,\n'
TALK = "The function multiplies its two arguments and returns the result, which is printed. You can change the numbers."

weighted = content._weighted_lines  # as it is, before a test plants a fault

pieces = st.sampled_from(
    [
        "```",
        "```json\n",
        "\n",
        "\n\n",
        '"a": 1,',
        "{",
        "}",
        "[1,",
        "def f(x):",
        "    x = 1",
        "- b",
        "She said",
        ".",
        " ",
    ]
)
texts = st.text() | st.lists(pieces | st.text(max_size=8), max_size=60).map("".join)


def line(**changes: Any) -> dict[str, Any]:
    return {"id": "a", "kind": "code", "prompt": "", "generated": "x = 1", "note": ""} | changes


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def _write(*lines: dict[str, Any] | bytes) -> Path:
        path = tmp_path / "cases.jsonl"
        path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
        return path

    return _write


# --- any text


@given(texts, texts)
def test_any_text_has_one_of_the_four_kinds(prompt, generated):
    assert detect(prompt, generated) in KINDS
    assert report_rule(prompt, generated) in KINDS


@given(st.sampled_from(["", CHAT, "Write a poem."]), texts)
def test_a_growing_text_always_has_a_kind(prompt, generated):
    assert all(detect(prompt, generated[:end]) in KINDS for end in range(len(generated) + 1))


@given(texts, texts, st.text(min_size=1), st.sampled_from(["", CHAT]))
def test_only_the_end_matters_when_no_fence_stands_before_it(one, other, end, prompt):
    assume("`" not in one + other + end and "<|" not in one + other + end)
    end = (end * TAIL)[:TAIL]
    assume(len(end.strip()) >= ENOUGH)
    assert detect(prompt, one + end) == detect(prompt, other + end)


def test_many_lines_of_code_beyond_the_end_do_not_matter():
    sentence = (STORY * 10)[:TAIL]
    assert detect(CHAT, PYTHON * 40 + sentence) == detect(CHAT, sentence) == "prose"


def test_a_request_beyond_the_bound_is_not_looked_for():
    long_ago = "<|im_start|>user\nWrite a Python script.<|im_end|>\n"
    assert detect(long_ago + "<|im_start|>assistant\n", "") == "code"
    far = long_ago.replace("script.", "script. " + "x " * REQUEST)
    assert detect(far + "<|im_start|>assistant\n", "") == "general"


@pytest.mark.parametrize(
    "unit",
    ["(", "a.", " = ", '"', '":', '"a": 1', " ", "a ", "-a ", "a,", "def ", "[", "```\n", "join ", "where x ", "<|"],
)
def test_no_text_makes_a_pattern_explode(unit):
    text = unit * (10_000 // len(unit))
    took = []
    for prompt in ("", text, CHAT) * 2:
        began = perf_counter()
        detect(prompt, text)
        took.append(perf_counter() - began)
    assert min(took[:3]) < 0.2 and min(took[3:]) < 0.2  # measured: below 1 ms; a pattern that explodes takes minutes


# --- fences and switches


def test_an_open_fence_decides_and_a_closed_one_is_left_out():
    opened = f"{TALK}\n\n```python\n"
    assert detect(CHAT, opened) == "code"
    assert detect(CHAT, opened + STORY) == "code"  # whatever stands in it
    assert detect(CHAT, opened + PYTHON) == "code"
    assert detect(CHAT, opened + PYTHON + "```\n") == "general"
    assert detect(CHAT, opened + PYTHON + "```\n" + TALK) == "general"
    assert detect(CHAT, opened + PYTHON + "```\n" + STORY * 2) == "prose"
    assert detect(CHAT, opened + PYTHON + "```\n" + TALK + "\n```json\n") == "json"


def test_a_fence_without_a_language_is_json_when_it_looks_like_it():
    assert detect(CHAT, f"{TALK}\n```\n{OBJECT}") == "json"
    assert detect(CHAT, f"{TALK}\n```\n{PYTHON}") == "code"


def test_backticks_inside_a_line_open_no_fence():
    assert detect(CHAT, "Three backticks, ``` that is, open a block. " + TALK) == "general"


def test_a_plain_prompt_may_end_inside_a_fence():
    assert detect(f"{TALK}\n\n```json\n", "") == "json"
    assert detect(f"{TALK}\n\n```json\n", OBJECT + "}\n```\n" + TALK) == "general"


@pytest.mark.parametrize(("before", "after", "kind"), [(STORY, PYTHON, "code"), (PYTHON, OBJECT, "json")])
def test_a_switch_without_a_fence_is_seen_within_a_few_lines(before, after, kind):
    assert detect("", f"{before}\n\n{after}") == kind
    assert detect("", f"{before}\n\n{after}\n\n{STORY * 3}") == "prose"


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ("Write a Go program that prints JSON.", "code"),
        ("Return JSON that describes a Python function.", "json"),
        ("Write a story about a script.", "prose"),
        ("What is a volcano?", "general"),
    ],
)
def test_while_little_is_written_the_first_thing_asked_for_decides(request_, kind):
    chat = CHAT.replace("How does this work?", request_)
    assert detect(chat, "") == detect(chat, "Sure:\n") == kind


# --- the report's rule


def test_the_reports_rule_counts_single_letters():
    assert report_rule("", "she sat") == "code"  # s, e, a, t and the blank are in its set
    assert report_rule("", "") == "prose"
    assert report_rule("", "WHY") == "prose"
    assert report_rule("", 'WHY: "OH"' + "O" * 20) == "json"
    assert report_rule("", "O" * 100 + "    " + "O" * 100) == "code"  # 2 % blanks, but an indentation


def test_a_share_of_five_per_cent_is_not_yet_code():
    assert report_rule("O" * 10, "O" * 9 + ";") == "prose"
    assert report_rule("O" * 9, "O" * 9 + ";") == "code"


# --- labelled cases


@pytest.mark.parametrize(
    ("detector", "cases", "right"),
    [(report_rule, from_prompts, (14, 56)), (report_rule, load_snippets, (34, 114))],
)
def test_the_reports_rule_calls_everything_code(detector, cases, right):
    table = confusion(detector, cases())
    assert accuracy(table) == right
    assert table["code"].sum() == right[1]


@pytest.mark.parametrize(("cases", "floor", "n"), [(from_prompts, 56, 56), (load_snippets, 114, 114)])
def test_detect_is_right_at_least_as_often_as_measured(cases, floor, n):
    right, judged = accuracy(confusion(detect, cases()))
    assert judged == n and right >= floor


def test_the_snippets_cover_every_kind_and_what_is_hard():
    cases = load_snippets()
    assert len(cases) >= 32
    assert all(sum(case.kind == kind for case in cases) >= 12 for kind in KINDS)
    assert all(80 <= len(case.generated) <= 800 and case.note for case in cases)
    assert {case.kind for case in cases if "switches" in case.note} == set(KINDS)
    assert {case.kind for case in cases if case.generated.count("```") % 2} == {"code", "json"}
    assert {case.kind for case in cases if case.generated.count("```") == 2} >= {"prose", "general"}


@pytest.mark.parametrize(
    "fault",
    [
        {"_fences": lambda text: (None, text[-TAIL:])},
        {"_weighted_lines": lambda text: ((s, 1.0, x) for s, _, x in weighted(text))},
        {"ENOUGH": 0},
    ],
    ids=["blind to fences", "every line weighs the same", "the prompt is never asked"],
)
def test_a_planted_fault_costs_cases(monkeypatch, fault):
    cases = load_snippets() + from_prompts()
    best, _ = accuracy(confusion(detect, cases))
    for name, value in fault.items():
        monkeypatch.setattr(content, name, value)
    assert accuracy(confusion(detect, cases))[0] <= best - 3


# --- the table


def test_rows_are_true_and_columns_detected():
    table = confusion(lambda prompt, generated: "json", load_snippets())
    assert list(table.index) == list(table.columns) == list(KINDS)
    assert table["json"].sum() == len(load_snippets()) and table.drop(columns="json").to_numpy().sum() == 0
    assert accuracy(table) == (sum(case.kind == "json" for case in load_snippets()), len(load_snippets()))


def test_a_table_of_nothing_and_an_unknown_kind_are_refused():
    with pytest.raises(InputError, match="no cases"):
        confusion(detect, [])
    with pytest.raises(InputError, match=r"'poem'.*code, json"):
        confusion(lambda prompt, generated: "poem", load_snippets())
    with pytest.raises(InputError, match="'chat'"):
        from_prompts(prompts("chat"))


def test_messages_become_turns_and_text_stays():
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "A"},
    ]
    assert prompt_text(Prompt(id="a", category="chat", messages=turns)) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_text(Prompt(id="a", category="code", text="x =")) == "x ="


# --- the file


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (line(kind="poem"), "'poem'"),
        (line(id="../up"), "pattern"),
        (line(generated=7), "string"),
        (line(more=1), "more"),
        (line(), "earlier line"),
        (line(prompt="é" * (MAX_PROMPT_BYTES // 2) + "x"), f"{MAX_PROMPT_BYTES + 1} bytes"),
        (line(prompt="a\ud800"), "surrogate"),
        (b"{", "not valid JSON"),
        (b"[]", "dictionary"),
        (b"[" * 100_000, "not valid JSON"),
        (b'"\xff"', "not UTF-8"),
        (b'{"id": "b", "id": "c"}', "'id' occurs twice"),
    ],
)
def test_a_bad_line_is_refused_with_file_line_and_reason(write, bad, reason):
    path = write(line(), b"", bad)
    with pytest.raises(InputError, match=reason) as caught:
        load_snippets(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_files_that_are_missing_empty_or_too_large_are_refused(write, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_snippets(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no cases"):
        load_snippets(write(b""))
    with pytest.raises(InputError, match="larger than"):
        load_snippets(write(b" " * MAX_FILE_BYTES))


def test_a_line_separator_inside_a_string_ends_no_line(write):
    [case] = load_snippets(write(json.dumps(line(generated="a\u2028b"), ensure_ascii=False).encode()))
    assert case.generated == "a\u2028b"
