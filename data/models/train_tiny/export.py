"""From checkpoints to `data/models`: two folders, GGUFs, passages, logs, and a card with scores.

What is scored is what ships: the float16 weights, read back from the written folders by the
library's own loader.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specnb.errors import InputError

from ..convert import write_gguf
from . import shapes
from .card import card
from .corpus import is_held_out
from .data import TOKENIZER_FILE, Data, open_data, write_text
from .loop import held_out_loss, read_checkpoint, trained
from .recipe import Recipe

PASSAGES_FILE = "held_out.jsonl"
FACTS_FILE = "training.json"
PASSAGES_A_KIND = 16
PASSAGE_CHARS = 1500
PROMPT_TOKENS, NEW_TOKENS = 96, 64
SCORED_WINDOWS = 64


def export(work: Path, out: Path) -> dict[str, Any]:
    """Write both models, their GGUFs, passages, logs, facts and card to `out`; returns the facts.

    The draft is the distilled one, or before there is one the one trained on plain text. InputError
    if a stage is missing.
    """
    data = open_data(work / "data")
    stages = _stages(work)
    last = "distil" if "distil" in stages else "draft"
    write_model(trained(work / "target"), data, out / shapes.TARGET, log=_log(stages, "target"))
    write_model(trained(work / last), data, out / shapes.DRAFT, log=_log(stages, "draft", "distil"))
    for name in (shapes.TARGET, shapes.DRAFT):
        write_gguf(out / name, out / f"{name}.f16.gguf")
    write_text(
        out / PASSAGES_FILE, "".join(json.dumps(passage) + "\n" for passage in passages(data))
    )
    target, draft = (read_model(out / name) for name in (shapes.TARGET, shapes.DRAFT))
    facts = {
        "corpus": data.facts
        | {"tokens": {"train": data.train.size, "held_out": data.held_out.size}},
        "stages": {
            stage: {"recipe": saved["recipe"], **saved["log"][-1]}
            for stage, saved in stages.items()
        },
        "parameters": {
            shapes.TARGET: target.num_parameters(),
            shapes.DRAFT: draft.num_parameters(),
        },
        "held_out_loss": _losses(data, target, draft),
        "alpha_1": acceptance(out, target, {"draft": trained(work / "draft"), last: draft}),
        "torch": torch.__version__.split("+")[0],
    }
    write_text(out / FACTS_FILE, json.dumps(facts, indent=1) + "\n")
    write_text(out / "README.md", card(facts))
    return facts


def write_model(model: PreTrainedModel, data: Data, folder: Path, *, log: Sequence[dict]) -> None:
    """A transformers folder: float16 weights, config, tokenizer, generation config, training log.

    Files are written beside the folder and moved in one by one, so that a reader never meets half a
    file.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model = model.to(torch.float16)
    model.generation_config = GenerationConfig(
        bos_token_id=shapes.END_ID, eos_token_id=shapes.END_ID, do_sample=False
    )
    model.save_pretrained(part)
    PreTrainedTokenizerFast(
        tokenizer_file=str(data.folder / TOKENIZER_FILE),
        bos_token=shapes.END_TEXT,
        eos_token=shapes.END_TEXT,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(part)
    write_text(part / "training_log.jsonl", "".join(json.dumps(line) + "\n" for line in log))
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.iterdir():
        file.chmod(0o644)  # the weights are written for their owner only
        file.replace(folder / file.name)
    part.rmdir()


def read_model(folder: Path) -> PreTrainedModel:
    """The exported model in float32. InputError unless every weight is found and none left over."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    problems = {kind: names for kind, names in report.items() if names}
    if problems:
        raise InputError(
            f"{folder} does not hold the model that its config.json describes: {problems}"
        )
    return model.eval()


def passages(data: Data) -> list[dict[str, str]]:
    """Pieces of held-out files, as many of each kind, in an order independent of their source."""
    lines = (data.folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line) for line in lines]
    chosen = []
    for kind in ("code", "prose"):
        of_kind = [
            text for text in texts if text["kind"] == kind and len(text["text"]) > 3 * PASSAGE_CHARS
        ]
        order = np.random.default_rng(1).permutation(len(of_kind))[:PASSAGES_A_KIND]
        chosen += [of_kind[i] | {"text": _piece(of_kind[i]["text"])} for i in sorted(order)]
    leaked = [text["name"] for text in chosen if not is_held_out(text["name"])]
    if leaked:
        raise InputError(
            f"{data.folder} calls {leaked[0]} held out, but it belongs to the training texts: "
            "prepare it anew"
        )
    return chosen


def prompts(out: Path, kind: str = "") -> list[np.ndarray]:
    """Each passage's first PROMPT_TOKENS ids, of one kind ("": all), by the exported tokenizer."""
    tokenizer = tokenizer_of(out)
    lines = (out / PASSAGES_FILE).read_text(encoding="utf-8").splitlines()
    texts = [text["text"] for text in map(json.loads, lines) if text["kind"].startswith(kind)]
    return [np.array(tokenizer.encode(text).ids[:PROMPT_TOKENS]) for text in texts]


def tokenizer_of(out: Path) -> Tokenizer:
    """The exported tokenizer, without transformers around it."""
    return Tokenizer.from_file(str(out / shapes.TARGET / TOKENIZER_FILE))


def acceptance(
    out: Path, target: PreTrainedModel, drafts: dict[str, PreTrainedModel]
) -> dict[str, Any]:
    """alpha_1, greedy, on the target's own texts: [accepted, positions] of each draft and kind."""
    scores: dict[str, Any] = {stage: {} for stage in drafts}
    for kind in ("code", "prose"):
        continued = [greedy(target, prompt, NEW_TOKENS) for prompt in prompts(out, kind)]
        for stage, draft in drafts.items():
            hits = sum(accepted(draft, ids, NEW_TOKENS) for ids in continued)
            scores[stage][kind] = [hits, len(continued) * NEW_TOKENS]
    return scores


def _losses(data: Data, target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, float]:
    length = 512
    return {
        "unigram": unigram_loss(data.train, data.held_out, shapes.VOCAB_SIZE),
        shapes.TARGET: held_out_loss(target, data, length, SCORED_WINDOWS),
        shapes.DRAFT: held_out_loss(draft, data, length, SCORED_WINDOWS),
    }


def _stages(work: Path) -> dict[str, dict[str, Any]]:
    checkpoints = {stage: read_checkpoint(work / stage) for stage in ("target", "draft", "distil")}
    for stage in ("target", "draft"):
        if checkpoints[stage] is None:
            raise InputError(
                f"no checkpoint in {work / stage}: train that stage first (--stage {stage})"
            )
    return {
        stage: {"recipe": vars(Recipe(**saved["recipe"])), "log": saved["log"]}
        for stage, saved in checkpoints.items()
        if saved
    }


def _log(stages: dict[str, dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [
        {"stage": name, **line} for name in names if name in stages for line in stages[name]["log"]
    ]


def _piece(text: str) -> str:
    """PASSAGE_CHARS from the second third of a text, from the beginning of a line."""
    start = text.index("\n", len(text) // 3) + 1
    return text[start : start + PASSAGE_CHARS]


def unigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy of `held_out` in nats a token under token counts of `train`, each plus one."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.log(counts / counts.sum())[held_out].mean())


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: np.ndarray, n_new: int) -> np.ndarray:
    """The prompt and `n_new` tokens by the model, each its row's argmax; no token stops it."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(model.device)
    kept, last, past = ids, ids, None
    for _ in range(n_new):
        answer = model(last, past_key_values=past, use_cache=True)
        past = answer.past_key_values
        last = answer.logits[:, -1:].argmax(-1)
        kept = torch.cat([kept, last], dim=1)
    return kept[0].cpu().numpy()


@torch.no_grad()
def accepted(draft: PreTrainedModel, ids: np.ndarray, n_new: int) -> int:
    """How many of the last `n_new` of `ids`, the target's choices, are the draft's top token too.

    The draft reads the target's tokens, as it does at the first position of a round: over all of
    them this is alpha_1 at temperature 0.
    """
    if not 0 < n_new < len(ids):
        raise InputError(f"{len(ids)} tokens have no {n_new} continued ones behind a prompt")
    tokens = torch.from_numpy(ids.astype(np.int64)).to(draft.device)
    predicted = draft(tokens[None, :-1], use_cache=False).logits[0].argmax(-1)
    return int((predicted == tokens[1:])[-n_new:].sum())
