"""Prompts: what a prompt may be, how a user's file is read, and what the shipped set promises."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specnb.errors import InputError
from specnb.paths import project_dir
from specnb.prompts import (
    CATEGORIES,
    MAX_FILE_BYTES,
    MAX_PROMPT_BYTES,
    MAX_PROMPTS,
    Prompt,
    digest,
    prompts,
    read_jsonl,
)

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


# --- Prompt


def test_a_prompt_is_frozen_and_hashable():
    prompt = Prompt.model_validate(dialogue(USER, ASSISTANT, USER))
    with pytest.raises(ValidationError):
        prompt.text = "other"
    with pytest.raises(ValidationError):
        prompt.messages[0].content = "other"
    assert len({prompt, Prompt.model_validate(dialogue(USER, ASSISTANT, USER))}) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (record(text=None), "exactly one"),
        (record(messages=[USER]), "exactly one"),
        (record(text=""), "blank"),
        (record(text=" \n\t"), "blank"),
        (dialogue(USER, ASSISTANT, USER | {"content": " "}), "blank"),
        (dialogue(), "at least 1 item"),
        (dialogue(USER, ASSISTANT), "the last message must be the user's, not the assistant's"),
        (dialogue(USER, SYSTEM), "the last message must be the user's, not the system's"),
        (dialogue(USER | {"role": "tool"}), "role"),
        (dialogue(USER | {"name": "Ann"}), "name"),
        (dialogue(*[USER] * 257), "at most 256"),
        (record(id=""), "pattern"),
        (record(id="-1"), "pattern"),
        (record(id="../up"), "pattern"),
        (record(id="code-01\n"), "pattern"),
        (record(id="x" * 65), "pattern"),
        (record(id=7), "string"),
        (record(category="poem"), "'poem'"),
        (record(category=None), "required"),
        (record(txt="x"), "txt"),
        (record(text=7), "string"),
        (record(text="a\ud800b"), "surrogate"),
    ],
)
def test_what_is_not_a_prompt_is_refused_with_file_line_and_reason(write, line, reason):
    with pytest.raises(ValidationError):
        Prompt.model_validate(line)
    path = write(record(id="fine"), line)
    with pytest.raises(InputError, match=reason) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_the_bound_counts_bytes_over_all_messages():
    half = "é" * (MAX_PROMPT_BYTES // 4)
    assert Prompt.model_validate(record(text=half * 2))
    assert Prompt.model_validate(dialogue(USER | {"content": half}, USER | {"content": half}))
    with pytest.raises(ValidationError, match=f"{MAX_PROMPT_BYTES + 1} bytes"):
        Prompt.model_validate(record(text=half * 2 + "x"))
    with pytest.raises(ValidationError, match=f"{MAX_PROMPT_BYTES + 1} bytes"):
        Prompt.model_validate(dialogue(USER | {"content": half}, USER | {"content": half + "x"}))


# --- read_jsonl


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


def test_lines_are_counted_with_the_blank_ones(write):
    path = write(record(), b"", b"\r", b"{")
    with pytest.raises(InputError, match=r"mine\.jsonl:4: not valid JSON"):
        read_jsonl(path)


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip))
def test_any_text_comes_back_unchanged_even_with_unicode_line_separators(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_bytes(json.dumps(record(text=text), ensure_ascii=False).encode())
    assert read_jsonl(path)[0].text == text


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_unicode_line_separator_inside_a_string_does_not_end_the_line(write, separator):
    line = json.dumps(record(text=f"one{separator}two"), ensure_ascii=False).encode()
    assert read_jsonl(write(line))[0].text == f"one{separator}two"


def test_a_repeated_id_is_refused_with_both_lines(write):
    path = write(record(id="a"), record(id="b"), record(id="a", text="other"))
    with pytest.raises(InputError, match=r"mine\.jsonl:3: id 'a' was used on line 1"):
        read_jsonl(path)


@pytest.mark.parametrize("raw", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_a_file_without_prompts_is_refused(write, raw):
    with pytest.raises(InputError, match="no prompts"):
        read_jsonl(write(raw, end=b""))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "a list, not a JSON object"),
        (b"null", "a NoneType, not a JSON object"),
        (b"NaN", "a float, not a JSON object"),
        (b"\xff\xfe{\x00", "not UTF-8"),
        (b'{"id": "a", "category": "code", "text": "x\xe9"}', "not UTF-8"),
        (b'{"id": "a", "category": "code", "text": "x", "text": "y"}', "key 'text' occurs twice"),
        (b'{"id": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b"[" * 200_000, "recursion"),
        (b'{"id": "a", "category": "code", "messages": ' + b"[" * 900 + b"]" * 900 + b"}", "messages"),
        (b'{"id": "a", "category": "code", "text": "x", "\\u001b[31m": 1}', r"\\x1b\[31m: Extra"),
    ],
    ids=["cut", "list", "null", "nan", "utf16", "latin1", "key-twice", "huge-int", "deep", "deep-field", "escape-code"],
)
def test_hostile_bytes_give_one_input_error(write, raw, reason):
    with pytest.raises(InputError, match=reason) as caught:
        read_jsonl(write(raw))
    assert "mine.jsonl:1: " in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_an_error_shows_the_offending_value_shortened(write):
    with pytest.raises(InputError) as caught:
        read_jsonl(write(record(category="x" * 10_000)))
    assert "'xxxx" in str(caught.value) and len(str(caught.value)) < 1000


def test_the_size_of_the_file_is_bounded(write):
    line = json.dumps(record()).encode()
    padded = line + b" " * (MAX_FILE_BYTES - len(line))
    assert len(read_jsonl(write(padded, end=b""))) == 1
    with pytest.raises(InputError, match="larger than"):
        read_jsonl(write(padded + b" ", end=b""))


def test_the_number_of_prompts_is_bounded(write):
    lines = [f'{{"id":"p{i}","category":"code","text":"x"}}'.encode() for i in range(MAX_PROMPTS + 1)]
    assert len(read_jsonl(write(*lines[:-1]))) == MAX_PROMPTS
    with pytest.raises(InputError, match=rf":{MAX_PROMPTS + 1}: more than {MAX_PROMPTS} prompts"):
        read_jsonl(write(*lines))


def test_what_is_not_a_regular_file_is_refused_without_being_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")  # opening it would block for ever
    with pytest.raises(InputError, match="not a regular file"):
        read_jsonl(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        read_jsonl(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read_jsonl(tmp_path / ("x" * 300))


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
    for limit in (0, -1):
        with pytest.raises(InputError, match=f"limit is {limit}"):
            prompts("json", folder=folder, limit=limit)


@pytest.mark.parametrize("category", ["poem", "", "Code", "../code"])
def test_an_unknown_category_is_refused_with_the_known_ones(category):
    with pytest.raises(InputError) as caught:
        prompts(category)
    assert repr(category) in str(caught.value) and all(name in str(caught.value) for name in CATEGORIES)


def test_a_prompt_in_the_file_of_another_category_is_refused(folder, write):
    write(record(id="x", category="prose"), name="json.jsonl")
    with pytest.raises(InputError, match=r"json\.jsonl: prompt 'x' has the category 'prose'"):
        prompts("json", folder=folder)


def test_an_id_in_two_files_is_refused(folder, write):
    write(record(id="code-1", category="json"), name="json.jsonl")
    with pytest.raises(InputError, match=r"'code-1' occurs in code\.jsonl and in json\.jsonl"):
        prompts(folder=folder)


def test_a_missing_category_file_is_refused_and_not_skipped(folder):
    (folder / "prose.jsonl").unlink()
    with pytest.raises(InputError, match=r"prose\.jsonl: no such file"):
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


def test_shipped_chat_is_multi_turn():
    for prompt in prompts("chat"):
        assert prompt.messages is not None and 4 <= len(prompt.messages) <= 8, prompt.id
        assert words(prompt) >= 100, prompt.id


def test_shipped_edits_hand_over_a_long_text_to_copy():
    for prompt in prompts("edit"):
        assert len(prompt.messages) == 1, prompt.id
        instruction, _, material = prompt.messages[0].content.partition("\n\n")
        assert 80 <= len(material.split()) <= 250 and len(instruction.split()) <= 60, prompt.id


def test_the_card_names_the_digest_so_that_no_prompt_changes_unnoticed():
    card = (project_dir() / "data" / "prompts" / "README.md").read_text(encoding="utf-8")
    assert f"    {digest(prompts())}\n" in card


def test_half_of_code_and_some_prose_are_raw_continuations():
    raw = {name: sum(prompt.text is not None for prompt in prompts(name)) for name in CATEGORIES}
    assert 2 * raw["code"] == len(prompts("code")) and raw["prose"] >= 3
    assert not any(raw[name] for name in ("json", "general", "chat", "edit"))
    first = prompts("code", limit=1)[0]
    assert first.id == "code-01"
    assert first.text == "Implement a binary search algorithm in Python with proper error handling:"
