"""Prompts: the six categories shipped in `data/prompts/`, users' JSONL files, and benchmark packs.

A line is `{"id": …, "category": …, "text": …}` or `{"id": …, "category": …, "messages": [{"role",
"content"}, …]}`. Lines of MT-bench and Spec-Bench (`question_id`, `category`, `turns`) and of
HumanEval (`task_id`, `prompt`) are supported, too. Only the first turn is used, because later turns
depend on its answer.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from specnb.errors import InputError, require_known
from specnb.fetch import PinnedFile, fetch_pinned
from specnb.io import cache_dir, digest, json_lines, project_dir, read_toml, validated

CATEGORIES = ("code", "json", "prose", "general", "chat", "edit")


PACKS = {
    name: PinnedFile(**facts)
    for name, facts in read_toml(Path(__file__).with_name("packs.toml")).items()
}
"""Benchmarks whose prompts are downloaded, by name."""


class Message(BaseModel, frozen=True, extra="forbid"):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Prompt(BaseModel, frozen=True, extra="forbid"):
    """A prompt: either `text`, continued as is, or `messages` for the model's chat template.

    The last message must have the role `user`. Blank texts are rejected.

    >>> question = {"role": "user", "content": "Hello"}
    >>> Prompt(id="mine-1", category="chat", messages=[question]).without_template
    'Hello'
    """

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    # no commas: they separate names
    category: str = Field(pattern=r"^[^\s,]([^\r\n,]{0,62}[^\s,])?$")
    text: str | None = None
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_usable_form(self) -> "Prompt":
        if (self.text is None) == (self.messages is None):
            raise ValueError("set exactly one of text and messages")
        if self.category == "all":
            raise ValueError("the category name 'all' is reserved for tables; rename it")
        messages = self.messages or [Message(role="user", content=self.text)]
        if not all(message.content.strip() for message in messages):
            raise ValueError("blank text; write a prompt or remove the line")
        if (role := messages[-1].role) != "user":
            raise ValueError(f"the last message has the role {role}, expected user")
        return self

    @property
    def without_template(self) -> str:
        """The prompt for models without a chat template: the text, or only the last message."""
        return self.text or self.messages[-1].content


def prompts(
    category: str | None = None, *, limit: int | None = None, source: str = ""
) -> tuple[Prompt, ...]:
    """Return the prompts of a category in file order; by default of all, ordered as `CATEGORIES`.

    Args:
        category: name of a category.
        limit: maximum number of prompts.
        source: a JSONL file or the name of a pack; by default the shipped prompts.

    Raises InputError for an unknown category, and as `read_jsonl` does.

    >>> [prompt.id for prompt in prompts("code", limit=2)]
    ['code-01', 'code-02']
    """
    folder = project_dir() / "data" / "prompts"
    files = [source] if source else [folder / f"{name}.jsonl" for name in CATEGORIES]
    read = [prompt for file in files for prompt in read_jsonl(file)]
    if category is not None:
        require_known(
            "prompt category", category, dict.fromkeys(prompt.category for prompt in read)
        )
    return tuple(prompt for prompt in read if category in (None, prompt.category))[:limit]


def categories(source: str = "") -> tuple[str, ...]:
    """Return the categories of the shipped prompts, or of a JSONL file or pack in file order."""
    if not source:
        return CATEGORIES
    return tuple(dict.fromkeys(prompt.category for prompt in read_jsonl(source)))


def read_jsonl(path: str | Path) -> tuple[Prompt, ...]:
    """Read the prompts of a JSONL file, one object per line, or of the pack with this name.

    Raises InputError with file, line and reason if the file cannot be read, is larger than 16 MiB,
    contains no prompt, repeats an id, or has a line that is not a valid `Prompt`.
    """
    if pack := PACKS.get(str(path)):
        file = Path(pack.member).name.removesuffix(".gz")
        path = fetch_pinned(pack, cache_dir() / "prompts" / str(path) / file)
    result = {}
    for number, value in json_lines(path):
        prompt = validated(Prompt, _as_prompt(value), f"{path}:{number}")
        if prompt.id in result:
            raise InputError(f"{path}:{number}: id {prompt.id!r} occurs twice; rename one")
        result[prompt.id] = prompt
    if not result:
        raise InputError(f"{path} contains no prompts; write one JSON object per line")
    return tuple(result.values())


def _as_prompt(value: Any) -> Any:
    """Convert a benchmark's line to the fields of `Prompt`; return other values unchanged."""
    match value:
        case {"question_id": name, "category": category, "turns": [first, *_]}:
            return {
                "id": str(name),
                "category": category,
                "messages": [{"role": "user", "content": first}],
            }
        case {"task_id": name, "prompt": text}:
            pack = str(name).rpartition("/")[0].lower()
            return {"id": str(name).replace("/", "-"), "category": pack or "code", "text": text}
    return value


def digest_prompts(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 (hex) of the prompts' JSON, which depends on their order."""
    values = [prompt.model_dump(exclude_none=True) for prompt in prompts]
    document = json.dumps(values, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return digest(document.encode())
