"""The content detector: accuracy on labelled cases, and its inputs."""

import json

from specnb.decode import content
from specnb.decode.content import REPORT_K, ContentK, detect
from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.io import project_dir
from specnb.lm import toy
from specnb.prompts import prompts


def text_of(prompt):
    turns = "".join(
        f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in prompt.messages or ()
    )
    return f"{turns}<|im_start|>assistant\n" if turns else prompt.text


def test_the_detectors_accuracy_matches_its_card():
    lines = (
        (project_dir() / "data" / "content" / "snippets.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    cases = [(case["prompt"], case["generated"], case["kind"]) for case in map(json.loads, lines)]
    cases += [(text_of(prompt), "", kind) for kind in REPORT_K for prompt in prompts(kind)]
    right = [detect(prompt, generated) == kind for prompt, generated, kind in cases]
    card = (project_dir() / "data" / "content" / "README.md").read_text(encoding="utf-8")
    assert f"{sum(right[:114])} of 114 |" in card and f"{sum(right[114:])} of 56 |" in card


def test_the_controller_gets_the_prompt_with_its_turns(monkeypatch):
    """With control tokens, which the detector needs for chats."""
    seen = []
    monkeypatch.setattr(content, "detect", lambda *texts: seen.append(texts) or "code")
    target = toy.markov(4, seed=1)
    target.vocab = type(target.vocab)(
        pieces=(b"<|user|>", b"a", b"b", b"c"), special=frozenset({0})
    )
    generate(target, [0, 1, 2], drafter=LookupDrafter(), k=ContentK(), max_new_tokens=3)
    assert seen[0] == ("<|user|>ab", "") and seen[-1][1] != ""
