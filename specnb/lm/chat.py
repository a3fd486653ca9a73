"""Chat templates: messages to the text that a chat model was trained on. One renderer for both engines."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache

from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary


@lru_cache(maxsize=16)
def _compiled(template: str):
    # A template comes with a downloaded model: it runs in jinja's sandbox, as in transformers.
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise InputError(f"the chat template refuses these messages: {message}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def render(vocab: Vocabulary, messages: Sequence[Mapping[str, str]]) -> str:
    """The text to encode for `messages` (role and content), ending where the assistant's answer begins.

    Raises InputError when the model has no chat template, and when the template fails or refuses the messages.
    """
    if not vocab.chat_template:
        raise InputError("this model has no chat template: pass plain text instead of messages")
    text_of = {"bos_token": vocab.bos, "eos_token": vocab.eos}
    tokens = {name: "" if i is None else vocab.pieces[i].decode("utf-8", "replace") for name, i in text_of.items()}
    try:
        return _compiled(vocab.chat_template).render(messages=list(messages), add_generation_prompt=True, **tokens)
    except InputError:
        raise
    except Exception as error:  # a template is a program: it may divide by zero or recurse without end
        reason = str(error) or type(error).__name__
        raise InputError(f"the chat template of this model cannot be rendered: {reason}") from error
