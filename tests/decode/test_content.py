"""The content detector: accuracy on labelled cases, and its inputs."""

import json
from unittest.mock import Mock

from specnb.decode import content
from specnb.decode.content import REPORT_K, ContentK, detect
from specnb.decode.generate import generate
from specnb.io import project_dir
from specnb.lm import toy
from specnb.lm.vocab import Vocabulary
from specnb.prompts import prompts


def text_of(prompt):
    turns = "".join(
        f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in prompt.messages or ()
    )
    return f"{turns}<|im_start|>assistant\n" if turns else prompt.text


def test_the_detectors_accuracy_matches_its_card():
    folder = project_dir() / "data" / "content"
    snippets = [*map(json.loads, (folder / "snippets.jsonl").open(encoding="utf-8"))]
    right = sum(detect(case["prompt"], case["generated"]) == case["kind"] for case in snippets)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{right} of {len(snippets)} |" in card
    shipped = [(detect(text_of(prompt), ""), kind) for kind in REPORT_K for prompt in prompts(kind)]
    assert f"{sum(found == kind for found, kind in shipped)} of {len(shipped)} |" in card


def test_the_controller_gets_the_prompt_with_its_turns(monkeypatch):
    """With control tokens, which the detector needs for chats."""
    seen = Mock(return_value="code")
    monkeypatch.setattr(content, "detect", seen)
    target = toy.markov(4, seed=1)
    target.vocab = Vocabulary((b"<|user|>", b"a", b"b", b"c"), special=frozenset({0}))
    generate(target, [0, 1, 2], drafter="lookup", k=ContentK(), max_new_tokens=3)
    assert seen.call_args_list[0].args == ("<|user|>ab", "") and seen.call_args.args[1]
