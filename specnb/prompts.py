"""Prompts: the six categories shipped in `data/prompts/`, and JSONL files of the user's own.

A line is `{"id": …, "category": …, "text": …}` or `{"id": …, "category": …, "messages": [{"role", "content"}, …]}`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specnb.errors import InputError
from specnb.paths import project_dir

Category = Literal["code", "json", "prose", "general", "chat", "edit"]
CATEGORIES: tuple[str, ...] = get_args(Category)

Model = TypeVar("Model", bound=BaseModel)

MAX_PROMPT_BYTES = 64 * 1024
MAX_MESSAGES = 256
MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_PROMPTS = 10_000


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class Prompt(BaseModel):
    """One prompt: either `text`, continued as it stands, or `messages`, put through the model's chat template.

    The last message is the user's. The texts come to at most 64 KiB of UTF-8 together, and none of them is blank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    category: Category
    text: str | None = None
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)

    @model_validator(mode="after")
    def _one_usable_form(self) -> "Prompt":
        if (self.text is None) == (self.messages is None):
            raise ValueError("give exactly one of text and messages")
        texts = [self.text] if self.text is not None else [message.content for message in self.messages]
        if not all(text.strip() for text in texts):
            raise ValueError("blank text; write a prompt or leave the line out")
        try:
            n_bytes = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(f"{half} is half a surrogate pair, not a character; write the whole character") from error
        if n_bytes > MAX_PROMPT_BYTES:
            raise ValueError(f"{n_bytes} bytes of text, at most {MAX_PROMPT_BYTES} are allowed; shorten the prompt")
        if self.messages is not None and self.messages[-1].role != "user":
            raise ValueError(f"the last message must be the user's, not the {self.messages[-1].role}'s")
        return self


def prompts(category: str | None = None, *, limit: int | None = None, folder: Path | None = None) -> tuple[Prompt, ...]:
    """The shipped prompts of one category in file order; None: of all categories, in the order of `CATEGORIES`.

    `limit` keeps the first so many of the result. `folder` (default `data/prompts` of the checkout) holds one file
    `<category>.jsonl` for each category.

    Raises InputError for an unknown category, a limit below 1, and files that `read_jsonl` refuses or whose prompts
    have another category than the file's name, or an id of another file.
    """
    if category is not None and category not in CATEGORIES:
        raise InputError(f"no prompt category {category!r}; there are {', '.join(CATEGORIES)}")
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; give at least 1, or None for all prompts")
    base = project_dir() / "data" / "prompts" if folder is None else Path(folder)
    wanted = CATEGORIES if category is None else (category,)
    found = [prompt for name in wanted for prompt in _category_file(base / f"{name}.jsonl", name)]
    seen: dict[str, str] = {}
    for prompt in found:
        if prompt.id in seen:
            raise InputError(
                f"{base}: id {prompt.id!r} occurs in {seen[prompt.id]}.jsonl and in {prompt.category}.jsonl; rename one"
            )
        seen[prompt.id] = prompt.category
    return tuple(found[:limit])


def read_jsonl(path: str | Path) -> tuple[Prompt, ...]:
    """The prompts of a JSONL file, one object a line, in file order.

    A byte order mark, CRLF line ends and blank lines are allowed. Raises InputError, with file, line and reason, if
    the file cannot be read, is not UTF-8, is larger than 16 MiB, holds no prompt or more than 10,000, repeats an id,
    or has a line that is not a valid `Prompt`.
    """
    path = Path(path)
    first_line: dict[str, int] = {}
    found: list[Prompt] = []
    for number, value in json_lines(path):
        where = f"{path}:{number}"
        if not isinstance(value, dict):
            raise InputError(f"{where}: a {type(value).__name__}, not a JSON object; write one object a line")
        prompt = validated(Prompt, value, where)
        if prompt.id in first_line:
            raise InputError(f"{where}: id {prompt.id!r} was used on line {first_line[prompt.id]} already; rename one")
        if len(found) == MAX_PROMPTS:
            raise InputError(f"{where}: more than {MAX_PROMPTS} prompts; split the file")
        first_line[prompt.id] = number
        found.append(prompt)
    if not found:
        raise InputError(f"{path}: no prompts in it; write one JSON object a line")
    return tuple(found)


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, value) of each line that is not blank; bounded as `read_jsonl` says. InputError with file and line."""
    # Only \n ends a line: str.splitlines would also cut at U+2028 and others, which JSON allows inside a string.
    for number, line in enumerate(_read_bounded(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line.decode(), object_pairs_hook=_object_without_repeats)
        except UnicodeDecodeError as error:
            byte = error.start + 1
            raise InputError(f"{where}: not UTF-8 (byte {byte} of the line); save the file as UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not valid JSON: {error}; write one object a line") from error
        yield number, value


def validated(model: type[Model], value: Any, where: str) -> Model:
    """`value` as a `model`; InputError with the place and the first reasons."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{where}: {_reasons(error)}") from error


def digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256 (hex) of the prompts' canonical JSON; it depends on their order and not on how the file was laid out."""
    canonical = json.dumps(
        [prompt.model_dump(exclude_none=True) for prompt in prompts],
        ensure_ascii=False,
        sort_keys=True,
        separators=(",", ":"),
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def _category_file(path: Path, category: str) -> tuple[Prompt, ...]:
    found = read_jsonl(path)
    for prompt in found:
        if prompt.category != category:
            raise InputError(f"{path}: prompt {prompt.id!r} has the category {prompt.category!r}, not the file's")
    return found


def _read_bounded(path: Path) -> bytes:
    """The file's bytes without a byte order mark; never more than the bound is read, whatever the size claims."""
    try:
        # A pipe or a device would block or never end.
        if not path.is_file():
            raise InputError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}; give a JSONL file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its name and permissions") from error
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than {MAX_FILE_BYTES} bytes; split the file")
    return data.removeprefix(b"\xef\xbb\xbf")


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary; a repeated key is refused, since keeping one of its values would lose the other silently."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated[:40]!r} occurs twice")
    return result


def _reasons(error: ValidationError) -> str:
    """The first three complaints, each with its place and the value that was given, cut to a readable length."""
    parts = []
    for detail in error.errors(include_url=False, include_context=False)[:3]:
        # A key of the file may hold characters that no terminal can show.
        place = ascii(".".join(str(step) for step in detail["loc"]))[1:-1][:80]
        message = detail["msg"].removeprefix("Value error, ")
        given = "" if detail["type"] in ("value_error", "missing") else f" (given: {_short(detail['input'])})"
        parts.append(f"{place}: {message}{given}" if place else message)
    return "; ".join(parts)


def _short(value: Any) -> str:
    """At most 60 characters of a scalar, or the kind of a container; a nested one may be too deep to print."""
    return type(value).__name__ if isinstance(value, dict | list | tuple) else repr(value)[:60]
