"""Prompts: the six categories shipped in `data/prompts/`, JSONL files of the user's own, and packs of benchmarks.

A line is `{"id": …, "category": …, "text": …}` or `{"id": …, "category": …, "messages": [{"role", "content"}, …]}`.
Lines of MT-bench and Spec-Bench (`question_id`, `category`, `turns`) and of HumanEval (`task_id`, `prompt`) are read as
well. Of turns the first is asked: the next would need its answer.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from specnb.errors import InputError
from specnb.fetch import PinnedFile, fetch_pinned
from specnb.io import cache_dir, digest, json_lines, project_dir, read_toml, validated

CATEGORIES = ("code", "json", "prose", "general", "chat", "edit")


PACKS = {name: PinnedFile(**facts) for name, facts in read_toml(Path(__file__).with_name("packs.toml")).items()}
"""The benchmarks whose prompts are fetched, by name."""


class Message(BaseModel, frozen=True, extra="forbid"):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Prompt(BaseModel, frozen=True, extra="forbid"):
    """One prompt: either `text`, continued as it stands, or `messages`, put through the model's chat template.

    The last message is the user's, and no text is blank.

    >>> Prompt(id="mine-1", category="chat", messages=[{"role": "user", "content": "Hello"}]).messages[0].content
    'Hello'
    """

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    category: str = Field(pattern=r"^[^\s,]([^\r\n,]{0,62}[^\s,])?$")  # commas separate the names of several
    text: str | None = None
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_usable_form(self) -> "Prompt":
        if (self.text is None) == (self.messages is None):
            raise ValueError("give exactly one of text and messages")
        if self.category == "all":
            raise ValueError("the category all stands for every other in tables; name it otherwise")
        messages = self.messages or [Message(role="user", content=self.text)]
        if not all(message.content.strip() for message in messages):
            raise ValueError("blank text; write a prompt or leave the line out")
        if (role := messages[-1].role) != "user":
            raise ValueError(f"the last message must be the user's, not the {role}'s")
        return self

    @property
    def without_template(self) -> str:
        """The text, or the last question alone: for models that know no chat template."""
        return self.text or self.messages[-1].content


def prompts(category: str | None = None, *, limit: int | None = None, source: str = "") -> tuple[Prompt, ...]:
    """Return the shipped prompts of one category in file order; None: of all, in the order of `CATEGORIES`.

    `limit` keeps the first so many of the result; `source` is a JSONL file or a pack in place of the shipped ones.
    Raises InputError for an unknown category, and as `read_jsonl` does.

    >>> [prompt.id for prompt in prompts("code", limit=2)]
    ['code-01', 'code-02']
    """
    files = [source] if source else [project_dir() / "data" / "prompts" / f"{name}.jsonl" for name in CATEGORIES]
    chosen = [prompt for file in files for prompt in read_jsonl(file) if category in (None, prompt.category)]
    if not chosen:
        raise InputError(f"no prompt category {category!r}; there are {', '.join(categories(source))}")
    return tuple(chosen[:limit])


def categories(source: str = "") -> tuple[str, ...]:
    """Return the categories of the shipped prompts, or those of a JSONL file or pack in the order they come in."""
    return tuple(dict.fromkeys(prompt.category for prompt in read_jsonl(source))) if source else CATEGORIES


def read_jsonl(path: str | Path) -> tuple[Prompt, ...]:
    """Return the prompts of a JSONL file, one object a line, in file order; of a pack by its name.

    Raises InputError, with file, line and reason, if the file cannot be read, is larger than 16 MiB, holds no prompt,
    repeats an id, or has a line that is not a valid `Prompt`.
    """
    if pack := PACKS.get(str(path)):
        path = fetch_pinned(pack, cache_dir() / "prompts" / str(path) / Path(pack.member).name.removesuffix(".gz"))
    result = {}
    for number, value in json_lines(path):
        prompt = validated(Prompt, _as_prompt(value), f"{path}:{number}")
        if prompt.id in result:
            raise InputError(f"{path}:{number}: id {prompt.id!r} was used before; rename one")
        result[prompt.id] = prompt
    if not result:
        raise InputError(f"{path}: no prompts in it; write one JSON object a line")
    return tuple(result.values())


def _as_prompt(value: Any) -> Any:
    """A benchmark's line in the fields of `Prompt`; any other as it is, for `Prompt` to judge."""
    match value:
        case {"question_id": name, "category": category, "turns": [first, *_]}:
            return {"id": str(name), "category": category, "messages": [{"role": "user", "content": first}]}
        case {"task_id": name, "prompt": text}:
            pack = str(name).rpartition("/")[0].lower()
            return {"id": str(name).replace("/", "-"), "category": pack or "code", "text": text}
    return value


def digest_prompts(prompts: Iterable[Prompt]) -> str:
    """Return the sha256 (hex) of the prompts' JSON; it depends on their order, not on how the file was laid out."""
    values = [prompt.model_dump(exclude_none=True) for prompt in prompts]
    return digest(json.dumps(values, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode())
