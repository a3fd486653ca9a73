"""The card of the embedded pair, written from facts of its training: no number typed by hand."""

from collections.abc import Mapping
from typing import Any

from . import shapes
from .recipe import Recipe, command

STAGE_TEXT = {
    "target": "the target, on plain text",
    "draft": "the draft, on plain text",
    "distil": "the draft, on the target's rows (KL, nats)",
}
DRAFT_TEXT = {"draft": "plain text only", "distil": "distilled: what ships"}


def card(facts: Mapping[str, Any]) -> str:
    """Markdown: what it is, its scores, making and texts. `facts` as in `training.json`."""
    return (
        "\n".join([*_head(facts), *_scores(facts), *_making(facts), *_texts(facts["corpus"])])
        + "\n"
    )


def _head(facts: Mapping[str, Any]) -> list[str]:
    target, draft = (
        f"{facts['parameters'][name] / 1e6:.1f} M parameters"
        for name in (shapes.TARGET, shapes.DRAFT)
    )
    return [
        "# The embedded pair of hybrids",
        "",
        f"`{shapes.TARGET}` ({target}) and `{shapes.DRAFT}` ({draft}): "
        "language models in the Qwen3-Next pattern (three gated delta rule layers, then one full "
        "attention layer; dense MLPs), trained for this project so that speculation on recurrent "
        "state can be run and measured with nothing fetched. transformers opens them as "
        "`Qwen3_5ForCausalLM`, llama.cpp as `qwen35`. They continue code and its documentation; "
        "they know nothing and answer nothing.",
        "",
        "Both share one tokenizer: byte-level BPE with GPT-2's word splitting, "
        f"{shapes.VOCAB_SIZE:,} tokens, of which `{shapes.END_TEXT}` (id {shapes.END_ID}) starts "
        "and ends a text. Weights are float16. Licence of weights and tokenizer: Apache-2.0, as "
        "the project; the texts they were trained on are listed below with theirs.",
        "",
        "| file | what |",
        "|---|---|",
        "| `NAME/` | transformers folder, with `training_log.jsonl`: "
        "stage, step, tokens, losses, seconds |",
        "| `NAME.f16.gguf` | the same weights for llama.cpp, written by `convert.py` |",
        "| `held_out.jsonl` | passages of files that training never saw, with file and licence |",
        "| `training.json` | every number of this card, and the versions of all sources |",
        "",
    ]


def _scores(facts: Mapping[str, Any]) -> list[str]:
    losses = facts["held_out_loss"]
    return [
        "## How well they do",
        "",
        "Held-out loss in nats a token, contexts of up to 512 tokens:",
        "",
        "| model | loss |",
        "|---|---|",
        f"| token frequencies of the training text | {losses['unigram']:.3f} |",
        f"| `{shapes.TARGET}` | {losses[shapes.TARGET]:.3f} |",
        f"| `{shapes.DRAFT}` | {losses[shapes.DRAFT]:.3f} |",
        "",
        "alpha_1, greedy: on the target's own continuations of the held-out passages, how often "
        "the draft's most likely token is the target's (accepted / positions):",
        "",
        "| draft | code | prose |",
        "|---|---|---|",
        *(
            f"| {DRAFT_TEXT[stage]} | {_ratio(kinds['code'])} | {_ratio(kinds['prose'])} |"
            for stage, kinds in facts["alpha_1"].items()
        ),
        "",
    ]


def _making(facts: Mapping[str, Any]) -> list[str]:
    lines = [
        "## How they were made",
        "",
        f"`data/models/train_tiny`, torch {facts['torch']}, AdamW, one seed for weights and order "
        "of the text. A CPU of another kind rounds otherwise and gets other weights of the same "
        "quality.",
        "",
        "| stage | steps | tokens | loss | held out | hours |",
        "|---|---|---|---|---|---|",
    ]
    for stage, training in facts["stages"].items():
        steps = training["recipe"]["steps"]
        unfinished = "" if training["step"] == steps else f" of {steps:,}, not finished"
        lines.append(
            f"| {STAGE_TEXT[stage]} | {training['step']:,}{unfinished} | {training['tokens']:,} "
            f"| {training['loss']:.3f} | {training['held_out_loss']:.3f} "
            f"| {training['seconds'] / 3600:.1f} |"
        )
    commands = (
        command(stage, Recipe(**training["recipe"])) for stage, training in facts["stages"].items()
    )
    steps = [
        "python -m data.models.train_tiny --stage data",
        *commands,
        "python -m data.models.train_tiny --stage export",
    ]
    return [*lines, "", "```", *steps, "```", ""]


def _texts(corpus: Mapping[str, Any]) -> list[str]:
    return [
        "## What they were trained on",
        "",
        f"{corpus['characters']['train'] / 1e6:.1f} M characters "
        f"({corpus['tokens']['train'] / 1e6:.1f} M tokens) of {corpus['documents']['train']:,} "
        "texts that ship with Python and permissively licensed packages; "
        f"{corpus['documents']['held_out']:,} more, chosen by the hash of their file's name, were "
        "held out. Code, the longer docstrings, the language reference and package descriptions; "
        "tests, generated, bundled, minified and repeated files left out (`train_tiny/corpus.py`). "
        f"sha256 of the training texts: `{corpus['digest']}`.",
        "",
        "| package | version | licence | characters |",
        "|---|---|---|---|",
        *(
            f"| {source['package']} | {source['version']} | {source['licence']} "
            f"| {source['characters']:,} |"
            for source in corpus["sources"]
        ),
    ]


def _ratio(counts: list[int]) -> str:
    accepted, positions = counts
    return f"{accepted / positions:.3f} ({accepted} / {positions})"
