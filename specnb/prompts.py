"""Prompts: the six categories shipped in `data/prompts/`, and JSONL files of the user's own.

A line is `{"id": …, "category": …, "text": …}` or `{"id": …, "category": …, "messages": [{"role", "content"}, …]}`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specnb import io
from specnb.errors import InputError
from specnb.io import json_lines, project_dir, validated

Category = Literal["code", "json", "prose", "general", "chat", "edit"]
CATEGORIES: tuple[str, ...] = get_args(Category)

MAX_PROMPT_BYTES = 64 * 1024


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class Prompt(BaseModel):
    """One prompt: either `text`, continued as it stands, or `messages`, put through the model's chat template.

    The last message is the user's. The texts come to at most 64 KiB of UTF-8 together, and none of them is blank.

    >>> Prompt(id="mine-1", category="chat", messages=[{"role": "user", "content": "Hello"}]).messages[0].content
    'Hello'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    category: Category
    text: str | None = None
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_usable_form(self) -> "Prompt":
        if (self.text is None) == (self.messages is None):
            raise ValueError("give exactly one of text and messages")
        texts = [self.text] if self.text is not None else [message.content for message in self.messages]
        if not all(map(str.strip, texts)):
            raise ValueError("blank text; write a prompt or leave the line out")
        if (n_bytes := sum(len(text.encode()) for text in texts)) > MAX_PROMPT_BYTES:
            raise ValueError(f"{n_bytes} bytes of text, at most {MAX_PROMPT_BYTES} are allowed; shorten the prompt")
        if self.messages is not None and self.messages[-1].role != "user":
            raise ValueError(f"the last message must be the user's, not the {self.messages[-1].role}'s")
        return self


def prompts(category: str | None = None, *, limit: int | None = None, folder: Path | None = None) -> tuple[Prompt, ...]:
    """Return the shipped prompts of one category in file order; None: of all, in the order of `CATEGORIES`.

    `limit` keeps the first so many of the result. `folder` (default `data/prompts` of the checkout) holds one file
    `<category>.jsonl` for each category. Raises InputError for an unknown category, and as `read_jsonl` does.

    >>> [prompt.id for prompt in prompts("code", limit=2)]
    ['code-01', 'code-02']
    """
    if category is not None and category not in CATEGORIES:
        raise InputError(f"no prompt category {category!r}; there are {', '.join(CATEGORIES)}")
    base = project_dir() / "data" / "prompts" if folder is None else Path(folder)
    names = CATEGORIES if category is None else (category,)
    return tuple(prompt for name in names for prompt in read_jsonl(base / f"{name}.jsonl"))[:limit]


def read_jsonl(path: str | Path) -> tuple[Prompt, ...]:
    """Return the prompts of a JSONL file, one object a line, in file order.

    Raises InputError, with file, line and reason, if the file cannot be read, is larger than 16 MiB, holds no prompt,
    repeats an id, or has a line that is not a valid `Prompt`.
    """
    result: dict[str, Prompt] = {}
    for number, value in json_lines(path):
        prompt = validated(Prompt, value, f"{path}:{number}")
        if prompt.id in result:
            raise InputError(f"{path}:{number}: id {prompt.id!r} was used before; rename one")
        result[prompt.id] = prompt
    if not result:
        raise InputError(f"{path}: no prompts in it; write one JSON object a line")
    return tuple(result.values())


def digest(prompts: Iterable[Prompt]) -> str:
    """Return the sha256 (hex) of the prompts' JSON; it depends on their order, not on how the file was laid out."""
    values = [prompt.model_dump(exclude_none=True) for prompt in prompts]
    return io.digest(json.dumps(values, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode())
