"""Prompts: valid prompts, users' files, and properties of the shipped set."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.errors import InputError
from specnb.io import MAX_JSONL_BYTES, project_dir
from specnb.prompts import CATEGORIES, Prompt, categories, digest_prompts, prompts, read_jsonl

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hello! What is it about?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def record(**changes: Any) -> dict[str, Any]:
    """Return a valid line with changes; None removes a field."""
    line = {"id": "code-01", "category": "code", "text": "def f(x):"} | changes
    return {name: value for name, value in line.items() if value is not None}


def dialogue(*messages: dict[str, str]) -> dict[str, Any]:
    return record(text=None, messages=list(messages))


def texts(prompt: Prompt) -> list[str]:
    return (
        [prompt.text]
        if prompt.text is not None
        else [message.content for message in prompt.messages]
    )


@pytest.fixture
def write(tmp_path):
    """Write lines (objects, or raw bytes) to a JSONL file and return its path."""

    def write(*lines: dict[str, Any] | bytes, name: str = "mine.jsonl") -> Path:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (tmp_path / name).write_bytes(b"\n".join(raw))
        return tmp_path / name

    return write


def test_an_invalid_prompt_is_refused_with_file_line_and_value(write):
    for line, value in (
        (record(text=None), "text"),
        (record(messages=[USER]), "text"),
        (dialogue(USER, ASSISTANT), "assistant"),
        (dialogue(USER | {"role": "tool"}), "'tool'"),
        (record(id="../up"), r"'\.\./up'"),
        (record(txt="x"), "txt"),
        (record(category="x" * 10_000), "'xxx"),
        (record(category="all"), "'all'"),
        (b"{", "JSON"),
        (b"[1]", "1"),
        ({"question_id": 1, "category": "qa", "turns": []}, "turns"),
        (b"[" * 200_000, "recursion"),
        (b'{"id": "a", "category": "code", "text": "x\xe9"}', "utf-8"),
        (record(id="fine", text="other"), "'fine'"),
    ):
        path = write(record(id="fine"), b"\r", line)
        with pytest.raises(InputError, match=value) as caught:
            read_jsonl(path)
        assert str(caught.value).startswith(f"{path}:3: ") and len(str(caught.value)) < 1000
    for content in (b"\r\n  \n", b" " * (MAX_JSONL_BYTES + 1)):
        with pytest.raises(InputError, match=r"mine\.jsonl"):
            read_jsonl(write(content))


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip))
def test_texts_and_their_order_are_unchanged_with_any_line_separator(tmp_path_factory, text):
    """Byte order mark, CRLF and blank lines are ignored; Unicode line separators end no line."""
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    chat = dialogue(SYSTEM, USER) | {"id": "a", "category": "chat"}
    first = json.dumps(record(id="b", text=f"\u2028{text}"), ensure_ascii=False).encode()
    path.write_bytes(b"\xef\xbb\xbf" + first + b"\r\n\r\n  \r\n" + json.dumps(chat).encode())
    read = read_jsonl(path)
    assert [prompt.id for prompt in read] == ["b", "a"] and read[0].text == f"\u2028{text}"
    assert [message.role for message in read[1].messages] == ["system", "user"]


def test_benchmark_files_are_read_with_any_category_and_only_their_first_turn(write):
    asked = {"question_id": 81, "category": "open QA", "turns": ["First?", "Then?"]}
    code = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "…"}
    other = {"task_id": 11, "prompt": "def g():\n"}
    source = str(
        write(asked | {"reference": ["x"]}, code, other, record(category="math_reasoning"))
    )
    read = prompts(source=source)
    assert [prompt.id for prompt in read] == ["81", "HumanEval-0", "11", "code-01"]
    assert [texts(prompt) for prompt in read[:2]] == [["First?"], ["def f():\n"]]
    assert categories(source) == ("open QA", "humaneval", "code", "math_reasoning")
    assert prompts("code", source=source) == read[2:3]
    assert prompts(source=source, limit=2) == read[:2]
    for category, there in (("edit", source), ("poem", "")):
        with pytest.raises(InputError, match=category):
            prompts(category, source=there)


def test_shipped_prompts_are_distinct_and_short_with_alternating_roles():
    shipped = prompts()
    assert len({prompt.id for prompt in shipped}) == len(shipped)
    assert len({tuple(texts(prompt)) for prompt in shipped}) == len(shipped)
    for category in CATEGORIES:
        assert len(prompts(category)) == 20
    for prompt in shipped:
        # Few tokens are shorter than two bytes: with 4 KiB, the answer fits in 2048 tokens, too.
        assert sum(len(text.encode()) for text in texts(prompt)) <= 4096
        roles = [message.role for message in prompt.messages or ()]
        assert not roles or roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], prompt.id
    card = (project_dir() / "data" / "prompts" / "README.md").read_text(encoding="utf-8")
    assert f"    {digest_prompts(shipped)}\n" in card
