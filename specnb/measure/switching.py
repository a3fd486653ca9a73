"""One conversation whose answers switch between prose, code and JSON: what a controller has to follow.

Every question is answered by the target with the written history before it (`data/switching`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from specnb.decode.content import detect
from specnb.decode.generate import generate
from specnb.lm.base import LanguageModel
from specnb.measure.recording import Recording
from specnb.paths import project_dir
from specnb.prompts import Prompt, read_jsonl
from specnb.records import Generation

SWITCHING = "switching conversation"
PREFIX = "turns."
"""Of the ids of questions, so that their recordings can be told from those of prompts."""


def questions(limit: int, path: Path | None = None) -> tuple[Prompt, ...]:
    """The first `limit` conversations, cut behind each question of the user: one prompt a question, in order.

    Raises InputError for a file that `prompts.read_jsonl` refuses.
    """
    path = project_dir() / "data" / "switching" / "conversations.jsonl" if path is None else Path(path)
    return tuple(
        Prompt(id=f"{PREFIX}{talk.id}-{turn}", category=talk.category, messages=talk.messages[:upto])
        for talk in (read_jsonl(path)[:limit] if limit else ())
        for turn, upto in enumerate(range(1, len(talk.messages) + 1, 2), start=1)
    )


def answered(
    target: LanguageModel, asked: Sequence[Prompt], *, max_new_tokens: int, seed: int = 0
) -> Iterator[Generation]:
    """Each question answered greedily; the category is what the answer turned out to be.

    Raises what `generate` raises.
    """
    for prompt in asked:
        made = generate(target, prompt, max_new_tokens=max_new_tokens, seed=seed)
        yield made.model_copy(update={"category": detect(prompt.messages[-1].content, made.text)})


def switches(recording: Recording) -> bool:
    """Whether the recording is of a conversation's question."""
    return recording.prompt_id.startswith(PREFIX)
