"""Prompts: what a prompt may be, how a user's file is read, and what the shipped set promises."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specnb.errors import InputError
from specnb.io import project_dir
from specnb.prompts import CATEGORIES, MAX_FILE_BYTES, MAX_PROMPT_BYTES, Prompt, digest, prompts, read_jsonl

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hello! What is it about?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def record(**changes: Any) -> dict[str, Any]:
    """A valid line, changed; None leaves a field out."""
    line = {"id": "code-01", "category": "code", "text": "def f(x):"} | changes
    return {name: value for name, value in line.items() if value is not None}


def dialogue(*messages: dict[str, str]) -> dict[str, Any]:
    return record(text=None, messages=list(messages))


def words(prompt: Prompt) -> int:
    return sum(len(text.split()) for text in texts(prompt))


def texts(prompt: Prompt) -> list[str]:
    return [prompt.text] if prompt.text is not None else [message.content for message in prompt.messages]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines (objects, or raw bytes) to a JSONL file and returns its path."""

    def _write(*lines: dict[str, Any] | bytes, name: str = "mine.jsonl", end: bytes = b"\n") -> Path:
        path = tmp_path / name
        path.write_bytes(
            b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + end for line in lines)
        )
        return path

    return _write


# --- reading


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (record(text=None), "text"),
        (record(messages=[USER]), "text"),
        (record(text=" \n\t"), "text"),
        (dialogue(USER, ASSISTANT, USER | {"content": " "}), "text"),
        (dialogue(), "messages"),
        (dialogue(USER, ASSISTANT), "assistant"),
        (dialogue(USER | {"role": "tool"}), "'tool'"),
        (record(id="../up"), r"'\.\./up'"),
        (record(id="x" * 65), "xxx"),
        (record(category="poem"), "'poem'"),
        (record(category="x" * 10_000), "'xxx"),
        (record(category=None), "category"),
        (record(txt="x"), "txt"),
        (record(text="a\ud800b"), "surrogate"),
        (record(text="é" * (MAX_PROMPT_BYTES // 2) + "x"), str(MAX_PROMPT_BYTES + 1)),
        (b"{", "JSON"),
        (b"[1]", "1"),
        (b"null", "None"),
        (b'{"id": "a", "category": "code", "text": "x\xe9"}', "UTF-8"),
        (b"[" * 200_000, "recursion"),
    ],
    ids=range(20),
)
def test_a_line_that_is_no_prompt_is_refused_with_file_line_and_value(write, line, value):
    path = write(record(id="fine"), b"\r", line)
    with pytest.raises(InputError, match=value) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}:3: ") and len(str(caught.value)) < 1000


def test_a_prompt_is_frozen_and_hashable():
    prompt = Prompt.model_validate(dialogue(USER, ASSISTANT, USER))
    with pytest.raises(ValidationError):
        prompt.messages[0].content = "other"
    assert len({prompt, Prompt.model_validate(dialogue(USER, ASSISTANT, USER))}) == 1


def test_order_and_content_are_kept(write):
    found = read_jsonl(write(record(id="b", text=" x\n"), dialogue(SYSTEM, USER) | {"id": "a", "category": "chat"}))
    assert [prompt.id for prompt in found] == ["b", "a"]
    assert found[0].text == " x\n" and found[0].messages is None
    assert [message.role for message in found[1].messages] == ["system", "user"]


def test_byte_order_mark_crlf_blank_lines_and_a_missing_last_newline_are_tolerated(write):
    raw = (
        b"\xef\xbb\xbf" + json.dumps(record(id="a")).encode() + b"\r\n\r\n  \r\n" + json.dumps(record(id="b")).encode()
    )
    assert [prompt.id for prompt in read_jsonl(write(raw, end=b""))] == ["a", "b"]


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip))
def test_any_text_comes_back_unchanged_even_with_unicode_line_separators(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(json.dumps(record(text=f"\u2028{text}"), ensure_ascii=False).encode())
    assert read_jsonl(path)[0].text == f"\u2028{text}"


def test_a_repeated_id_is_refused_with_both_lines(write):
    path = write(record(id="a"), record(id="b"), record(id="a", text="other"))
    with pytest.raises(InputError, match=r"mine\.jsonl:3: id 'a' was used on line 1"):
        read_jsonl(path)


def test_a_file_without_prompts_too_large_or_absent_is_refused(write, tmp_path):
    with pytest.raises(InputError, match=r"mine\.jsonl"):
        read_jsonl(write(b"\n\r\n  \n", end=b""))
    with pytest.raises(InputError, match=str(MAX_FILE_BYTES)):
        read_jsonl(write(b" " * (MAX_FILE_BYTES + 1), end=b""))
    with pytest.raises(InputError, match=r"absent\.jsonl"):
        read_jsonl(tmp_path / "absent.jsonl")


# --- prompts, digest


@pytest.fixture
def folder(write, tmp_path) -> Path:
    """A prompt folder with two prompts in each category, in an order of ids that is not the alphabet's."""
    for name in CATEGORIES:
        write(*[record(id=f"{name}-{i}", category=name) for i in (2, 1)], name=f"{name}.jsonl")
    return tmp_path


def test_prompts_come_in_category_order_then_file_order(folder):
    assert [p.id for p in prompts("edit", folder=folder)] == ["edit-2", "edit-1"]
    assert [p.id for p in prompts(folder=folder)] == [f"{name}-{i}" for name in CATEGORIES for i in (2, 1)]


def test_limit_keeps_the_first_of_the_result(folder):
    assert prompts(folder=folder, limit=3) == prompts(folder=folder)[:3]
    assert [p.id for p in prompts("json", folder=folder, limit=1)] == ["json-2"]
    assert len(prompts("json", folder=folder, limit=99)) == 2


@pytest.mark.parametrize("category", ["poem", "", "Code", "../code"])
def test_an_unknown_category_is_refused_with_the_known_ones(category):
    with pytest.raises(InputError) as caught:
        prompts(category)
    assert repr(category) in str(caught.value) and all(name in str(caught.value) for name in CATEGORIES)


def test_a_missing_category_file_is_refused_and_not_skipped(folder):
    (folder / "prose.jsonl").unlink()
    with pytest.raises(InputError, match=r"prose\.jsonl"):
        prompts(folder=folder)


def test_the_digest_sees_content_and_order_and_not_layout(write):
    one, two = record(id="a", text="é"), dialogue(USER) | {"id": "b"}
    there = read_jsonl(write(one, two))
    turned = json.dumps(dict(reversed(one.items())), ensure_ascii=False, indent=None, separators=(" ,", " : ")).encode()
    again = read_jsonl(write(b"\xef\xbb\xbf" + turned, b"", two, end=b"\r\n"))
    assert digest(there) == digest(again) and len(digest(there)) == 64
    others = [
        there[::-1],
        there[:1],
        read_jsonl(write(one | {"text": "é "}, two)),
        read_jsonl(write(one | {"category": "prose"}, two)),
        read_jsonl(write(one, dialogue(SYSTEM, USER) | {"id": "b"})),
    ]
    assert len({digest(there), *map(digest, others)}) == 1 + len(others)


# --- the shipped set


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_shipped_category_has_a_dozen_prompts_under_its_own_name(category):
    found = prompts(category)
    assert len(found) >= 12
    assert all(prompt.id.rpartition("-")[0] == category for prompt in found)
    assert len({tuple(texts(prompt)) for prompt in found}) == len(found)


def test_shipped_ids_are_unique_and_lengths_vary_within_a_small_context():
    found = prompts()
    assert len({prompt.id for prompt in found}) == len(found)
    lengths = sorted(words(prompt) for prompt in found)
    assert 10 <= lengths[0] <= 40 and 300 <= lengths[-1] <= 400
    # A token is rarely shorter than two bytes; 4 KiB leave room for the answer in 2048 tokens.
    assert all(sum(len(text.encode()) for text in texts(prompt)) <= 4096 for prompt in found)


def test_shipped_conversations_alternate_so_that_every_chat_template_takes_them():
    for prompt in prompts():
        if prompt.messages is not None:
            roles = [message.role for message in prompt.messages]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], prompt.id


def test_the_card_names_the_digest_so_that_no_prompt_changes_unnoticed():
    card = (project_dir() / "data" / "prompts" / "README.md").read_text(encoding="utf-8")
    assert f"    {digest(prompts())}\n" in card
