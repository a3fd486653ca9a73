"""Chat templates: messages to the text that a chat model was trained on. One renderer for both engines."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from time import monotonic
from typing import TypedDict

from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary


class Message(TypedDict):
    """One turn: role is system, user or assistant."""

    role: str
    content: str


LIMIT_S = 5.0
MAX_SIZE = 10_000_000
"""Characters of a text, items of a list or bits of a number that a template may make."""


def _require_size(size: int) -> None:
    if size > MAX_SIZE:
        raise InputError(f"the chat template of this model makes a value of size {size}, more than {MAX_SIZE}")


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


@contextmanager
def _time_limit() -> Iterator[None]:
    """InputError from the first line of Python that runs after LIMIT_S; one call of C is not interrupted."""
    end, before = monotonic() + LIMIT_S, sys.gettrace()

    def trace(*_event):
        if monotonic() > end:
            raise InputError(f"the chat template of this model runs for more than {LIMIT_S:g} s")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@lru_cache(maxsize=16)
def _compiled(template: str):
    # A template comes with a downloaded model: it runs in jinja's sandbox, as in transformers.
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generator(CodeGenerator):
        def visit_Concat(self, node, frame):  # `~`
            self.write("environment.concat(map(str, (")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write(")))")

    class Environment(ImmutableSandboxedEnvironment):
        code_generator_class = Generator
        intercepted_binops = frozenset({"*", "**", "+"})

        @staticmethod
        def concat(parts):
            kept, size = [], 0
            for part in parts:  # the text as it is written: a loop may write without end
                size += len(part)
                _require_size(size)
                kept.append(part)
            return "".join(kept)

        def call_binop(self, context, operator, left, right):
            match operator, left, right:
                case "+", _, _:
                    _require_size(_size(left) + _size(right))
                case "**", int(), int():
                    _require_size(left.bit_length() * abs(right))
                case "*", int(), int():
                    _require_size(left.bit_length() + right.bit_length())
                case "*", _, int():
                    _require_size(_size(left) * right)
                case "*", int(), _:
                    _require_size(left * _size(right))
            return super().call_binop(context, operator, left, right)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def raise_exception(message: str) -> None:
        raise InputError(f"the chat template refuses these messages: {message}")

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def render(vocab: Vocabulary, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """The text to encode for `messages`, ending where the assistant's answer begins.

    Raises InputError when the model has no chat template, the template refuses the messages, runs for more than LIMIT_S
    or makes a value of more than MAX_SIZE.
    """
    if not vocab.chat_template:
        raise InputError("this model has no chat template: pass plain text instead of messages")
    text_of = {"bos_token": vocab.bos, "eos_token": vocab.eos}
    tokens = {name: "" if i is None else vocab.pieces[i].decode("utf-8", "replace") for name, i in text_of.items()}
    try:
        with _time_limit():
            return _compiled(vocab.chat_template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **tokens
            )
    except InputError:
        raise
    except Exception as error:  # a template is a program: it may divide by zero or recurse without end
        reason = str(error) or type(error).__name__
        raise InputError(f"the chat template of this model cannot be rendered: {reason}") from error
