"""How often a detector of content is right: labelled cases, its confusion table, its accuracy."""

from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, field_validator

from specnb.decode.content import Detector, Kind
from specnb.errors import InputError
from specnb.paths import project_dir
from specnb.prompts import MAX_PROMPT_BYTES, Prompt, json_lines, prompts, validated

KINDS: tuple[str, ...] = get_args(Kind)
MAX_SNIPPETS = 10_000


class Snippet(BaseModel):
    """One labelled case: the prompt as the model reads it, what was generated so far, the kind of what is written now.

    Both texts have at most 64 KiB of UTF-8; either may be empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    kind: Kind
    prompt: str
    generated: str
    note: str = ""

    @field_validator("prompt", "generated")
    @classmethod
    def _bounded(cls, text: str) -> str:
        try:
            n_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(f"{half} is half a surrogate pair, not a character; write the whole character") from error
        if n_bytes > MAX_PROMPT_BYTES:
            raise ValueError(f"{n_bytes} bytes of text, at most {MAX_PROMPT_BYTES} are allowed; shorten it")
        return text


def load_snippets(path: str | Path | None = None) -> tuple[Snippet, ...]:
    """The cases of a JSONL file in file order; by default the shipped `data/content/snippets.jsonl`.

    Raises InputError, with file, line and reason, as `specnb.prompts.read_jsonl` does.
    """
    path = project_dir() / "data" / "content" / "snippets.jsonl" if path is None else Path(path)
    found: dict[str, Snippet] = {}
    for number, value in json_lines(path):
        where = f"{path}:{number}"
        snippet = validated(Snippet, value, where)
        if snippet.id in found:
            raise InputError(f"{where}: id {snippet.id!r} was used on an earlier line already; rename one")
        if len(found) == MAX_SNIPPETS:
            raise InputError(f"{where}: more than {MAX_SNIPPETS} cases; split the file")
        found[snippet.id] = snippet
    if not found:
        raise InputError(f"{path}: no cases in it; write one JSON object a line")
    return tuple(found.values())


def from_prompts(labelled: Iterable[Prompt] | None = None) -> tuple[Snippet, ...]:
    """Cases in which nothing is generated yet; by default the shipped prompts whose category is a kind of content."""
    chosen = [p for kind in KINDS for p in prompts(kind)] if labelled is None else list(labelled)
    for prompt in chosen:
        if prompt.category not in KINDS:
            raise InputError(f"prompt {prompt.id!r}: category {prompt.category!r} is no kind; take {', '.join(KINDS)}")
    return tuple(Snippet(id=p.id, kind=p.category, prompt=prompt_text(p), generated="") for p in chosen)


def prompt_text(prompt: Prompt) -> str:
    """What a ChatML model reads: the text as it is, messages as turns, up to where the answer begins."""
    if prompt.messages is None:
        return prompt.text
    turns = (f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in prompt.messages)
    return "".join(turns) + "<|im_start|>assistant\n"


def confusion(detector: Detector, cases: Iterable[Snippet]) -> pd.DataFrame:
    """Counts, shape (4, 4): rows the true kind, columns the detected one, both in the order of `KINDS`.

    Raises InputError if there is no case, or the detector answers with something else than a kind.
    """
    counts = pd.DataFrame(0, index=pd.Index(KINDS, name="true"), columns=pd.Index(KINDS, name="detected"))
    for case in cases:
        found = detector(case.prompt, case.generated)
        if found not in KINDS:
            raise InputError(f"case {case.id!r}: the detector found {found!r}; a detector says {', '.join(KINDS)}")
        counts.loc[case.kind, found] += 1
    if not counts.to_numpy().sum():
        raise InputError("no cases to judge the detector by; give at least one")
    return counts


def accuracy(counts: pd.DataFrame) -> tuple[int, int]:
    """(right, all) of a confusion table: the counts, since a share alone hides how few cases there are."""
    return int(sum(counts.loc[kind, kind] for kind in KINDS)), int(counts.to_numpy().sum())
