"""The card of a set of trained heads, written from the facts of its training: no number in it is typed by hand."""

from collections.abc import Mapping
from typing import Any


def card(name: str, facts: Mapping[str, Any]) -> str:
    """Markdown: what it is, how well it does on held-out text, how it was made, from what. `facts`: `training.json`."""
    parts = [*_head(name, facts), *_accuracy(facts), *_making(facts), *_text(facts)]
    return "\n".join(parts) + "\n"


def _head(name: str, facts: Mapping[str, Any]) -> list[str]:
    heads = facts["heads"]
    lm_head = {"shared": "the backbone's own lm_head", "low_rank": f"its lm_head and rank {heads['rank']} of their own",
               "private": "lm_heads of their own"}[heads["lm_head"]]  # fmt: skip
    share = f"{heads['draft_vocab']:,} most frequent tokens" if heads["draft_vocab"] else "whole vocabulary"
    return [
        f"# {name}",
        "",
        f"{heads['n_heads']} {heads['kind'].capitalize()} heads for `{heads['backbone_name']}` "
        f"({facts['parameters'] / 1e6:.2f} M parameters of their own, bfloat16), trained for this project. They are "
        f"fed the hidden state `{heads['input']}` and draft from the {share} through {lm_head}.",
        "",
        f"`specnb generate --target '{heads['backbone_name'].partition('&exact')[0]}' --drafter medusa "
        f"--heads-checkpoint {name} --baseline --prompt …`",
        "",
        "They speak no better than the backbone: verified drafts are its own text. For use its licence holds, too.",
        "",
    ]


def _accuracy(facts: Mapping[str, Any]) -> list[str]:
    last = facts["log"][-1]
    rows = zip(last["top1"], last["top5"], last["head_loss"], strict=True)
    return [
        "## How well they do",
        "",
        "On held-out text by the backbone, given what stands before (the loss in nats, unweighted; head k drafts the "
        f"token k + 1 places behind the newest). {facts['text']['coverage']:.1%} of its tokens can be drafted at all.",
        "",
        "| head | right at once | among five | loss |",
        "|---|---|---|---|",
        *(f"| {i + 1} | {one:.3f} | {five:.3f} | {loss:.2f} |" for i, (one, five, loss) in enumerate(rows)),
        "",
    ]


def _making(facts: Mapping[str, Any]) -> list[str]:
    recipe, last = facts["recipe"], facts["log"][-1]
    return [
        "## How they were made",
        "",
        f"`{facts['command']}` (torch {facts['torch']}; a CPU of another kind rounds otherwise and gets other "
        "weights of the same quality). All numbers of the curves are in `training.json`.",
        "",
        "| steps | batch | peak rate, falling to | on embeddings | teacher | examples | hours |",
        "|---|---|---|---|---|---|---|",
        f"| {last['step']:,} of {recipe['steps']:,} | {recipe['batch_size']:,} | {recipe['peak_lr']:g}, "
        f"{recipe['eta_min']:g} | {recipe['embedding_rate']:g} times | {recipe['teacher']:g} | {last['examples']:,} | "
        f"{last['seconds'] / 3600:.2f} |",
        "",
    ]


def _text(facts: Mapping[str, Any]) -> list[str]:
    text, own = facts["text"], f"{facts['text']['own']['train']:,}"
    if "texts" in text:
        made = f"labels are the tokens of a given file (sha256 `{text['texts']}`), not what the backbone would say"
    else:
        made = (
            f"{own} are the backbone's own greedy choice and labels. Seeds and requests are made from the permissively "
            "licensed texts of `specnb/corpus.py`, or by the backbone itself; none is of `data/prompts`"
        )
    counts = f"{text['tokens']['train']:,} tokens, and {text['tokens']['held_out']:,} held out"
    return ["## The text", "", f"{counts}: {made}."]
