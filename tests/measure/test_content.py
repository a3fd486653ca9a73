"""Content: what the detectors promise for any text, and how often they are right on the labelled cases."""

from time import perf_counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specnb.measure import content
from specnb.measure.content import (
    ENOUGH,
    KINDS,
    REQUEST,
    TAIL,
    accuracy,
    confusion,
    detect,
    from_prompts,
    load_snippets,
    report_rule,
)

CHAT = "<|im_start|>user\nHow does this work?<|im_end|>\n<|im_start|>assistant\n"
STORY = "She put her hand into her pocket and felt the key, still warm. He looked at her and said nothing. "
PYTHON = "def area(width, height):\n    return width * height\n\n\nprint(area(2, 3))\n"
OBJECT = '{\n  "name": "north gate",\n  "open": true,\n  "width": 3.5,\n'
TALK = "The function multiplies its two arguments and returns the result, which is printed. You can change the numbers."
OPEN = f"{TALK}\n\n```python\n"

weighted = content._weighted_lines  # as it is, before a test plants a fault

pieces = st.sampled_from(
    ["```", "```json\n", "\n\n", '"a": 1,', "{", "[1,", "def f(x):", "    x = 1", "- b", "She said", "."]
)
texts = st.text() | st.lists(pieces | st.text(max_size=8), max_size=60).map("".join)


@given(st.sampled_from(["", CHAT, "Write a poem."]), texts)
def test_any_growing_text_has_one_of_the_four_kinds(prompt, generated):
    assert all(detect(prompt, generated[:end]) in KINDS for end in range(0, len(generated) + 1, 7))
    assert report_rule(prompt, generated) in KINDS


@given(texts, texts, st.text(min_size=1), st.sampled_from(["", CHAT]))
def test_only_the_end_matters_when_no_fence_stands_before_it(one, other, end, prompt):
    assume("`" not in one + other + end and "<|" not in one + other + end)
    end = (end * TAIL)[:TAIL]
    assume(len(end.strip()) >= ENOUGH)
    assert detect(prompt, one + end) == detect(prompt, other + end)


@pytest.mark.parametrize("unit", ["(", "a.", " = ", '"', '"a": 1', " ", "-a ", "def ", "```\n", "where x ", "<|"])
def test_no_text_makes_a_pattern_explode(unit):
    text = unit * (10_000 // len(unit))
    began = perf_counter()
    for prompt in ("", text, CHAT):
        detect(prompt, text)
    assert perf_counter() - began < 1.0  # measured: below 1 ms; a pattern that explodes takes minutes


CASES = [
    (CHAT, PYTHON * 40 + (STORY * 10)[:TAIL], "prose"),  # code beyond the end does not matter
    (CHAT, OPEN + STORY, "code"),  # an open fence decides, whatever stands in it
    (CHAT, OPEN + PYTHON + "```\n" + TALK, "general"),
    (CHAT, OPEN + PYTHON + "```\n" + STORY * 2, "prose"),
    (CHAT, OPEN + PYTHON + "```\n" + TALK + "\n```json\n", "json"),
    (CHAT, f"{TALK}\n```\n{OBJECT}", "json"),
    (CHAT, f"{TALK}\n```\n{PYTHON}", "code"),
    (CHAT, "Three backticks, ``` that is, open a block. " + TALK, "general"),
    (f"{TALK}\n\n```json\n", "", "json"),
    (f"{TALK}\n\n```json\n", OBJECT + "}\n```\n" + TALK, "general"),
    ("", f"{STORY}\n\n{PYTHON}", "code"),
    ("", f"{PYTHON}\n\n{OBJECT}", "json"),
    ("", f"{PYTHON}\n\n{OBJECT}\n\n{STORY * 3}", "prose"),
    (CHAT.replace("How does this work?", "Write a Go program that prints JSON."), "Sure:\n", "code"),
    (CHAT.replace("How does this work?", "Return JSON that describes a Python function."), "", "json"),
    (CHAT.replace("How does this work?", "Write a story about a script."), "", "prose"),
    (CHAT.replace("How does this work?", "Write a script. " + "x " * REQUEST), "", "general"),  # beyond the bound
]


@pytest.mark.parametrize(("prompt", "generated", "kind"), CASES)
def test_fences_switches_and_requests(prompt, generated, kind):
    assert detect(prompt, generated) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [("she sat", "code"), ("", "prose"), ("WHY", "prose"), ('WHY: "OH"' + "O" * 20, "json"),
     ("O" * 100 + "    " + "O" * 100, "code"), ("O" * 19 + ";", "prose"), ("O" * 18 + ";", "code")],
)  # fmt: skip
def test_the_reports_rule_counts_single_letters(text, kind):
    assert report_rule("", text) == kind


@pytest.mark.parametrize(
    ("detector", "cases", "right"),
    [(report_rule, from_prompts, (14, 56)), (report_rule, load_snippets, (34, 114)),
     (detect, from_prompts, (56, 56)), (detect, load_snippets, (114, 114))],
)  # fmt: skip
def test_detectors_are_right_as_often_as_measured(detector, cases, right):
    table = confusion(detector, cases())
    assert accuracy(table) == right
    assert detector is detect or table["code"].sum() == right[1]


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
