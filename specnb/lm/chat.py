"""Chat templates: convert messages to the text format of a chat model, for both engines."""

from collections.abc import Mapping, Sequence

from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary


def render_chat(vocab: Vocabulary, messages: Sequence[Mapping[str, str]]) -> str:
    """Render `messages` (role and content) as text, up to the start of the assistant's answer.

    A template is part of a downloaded model, so it runs in transformers' sandbox. Raises InputError
    if the model has no chat template, and if the template fails or rejects the messages.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if not vocab.chat_template:
        raise InputError("this model has no chat template: pass plain text instead of messages")
    bos, eos = (
        "" if token is None else vocab.pieces[token].decode("utf-8", "replace")
        for token in (vocab.bos, vocab.eos)
    )
    try:
        rendered, _ = render_jinja_template(
            [[*map(dict, messages)]],
            chat_template=vocab.chat_template,
            add_generation_prompt=True,
            bos_token=bos,
            eos_token=eos,
        )
        return rendered[0]
    except Exception as error:  # a template is a program: it may divide by zero or recurse
        raise InputError(
            "the chat template of this model cannot be rendered "
            f"({str(error) or type(error).__name__}): pass plain text"
        ) from error
