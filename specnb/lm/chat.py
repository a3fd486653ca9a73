"""Chat templates: convert messages to the text format of a chat model, for both engines."""

from collections.abc import Mapping, Sequence

from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary


def render_chat(vocab: Vocabulary, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the text of `messages` (role and content) up to the start of the assistant's answer.

    A template is part of a downloaded model, so it runs in transformers' sandbox. Raises InputError
    if the model has no chat template, and if the template fails or rejects the messages.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if not vocab.chat_template:
        raise InputError("this model has no chat template: pass plain text instead of messages")
    text_of = {"bos_token": vocab.bos, "eos_token": vocab.eos}
    tokens = {name: "" if i is None else vocab.pieces[i].decode("utf-8", "replace") for name, i in text_of.items()}
    options = {"chat_template": vocab.chat_template, "add_generation_prompt": True, **tokens}
    try:
        return render_jinja_template([[*map(dict, messages)]], **options)[0][0]
    except Exception as error:  # a template is a program: it may divide by zero or recurse
        reason = f"cannot be rendered ({str(error) or type(error).__name__})"
        raise InputError(f"the chat template of this model {reason}: pass plain text") from error
