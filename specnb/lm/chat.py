"""Chat templates: messages to the text that a chat model was trained on. One renderer for both engines."""

from collections.abc import Mapping, Sequence

from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary


def render_chat(vocab: Vocabulary, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the text to encode for `messages` (role and content), ending where the assistant's answer begins.

    A template comes with a downloaded model: it runs in transformers' sandbox. Raises InputError when the model has
    no chat template, and when the template fails or refuses the messages.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if not vocab.chat_template:
        raise InputError("this model has no chat template: pass plain text instead of messages")
    text_of = {"bos_token": vocab.bos, "eos_token": vocab.eos}
    tokens = {name: "" if i is None else vocab.pieces[i].decode("utf-8", "replace") for name, i in text_of.items()}
    options = {"chat_template": vocab.chat_template, "add_generation_prompt": True, **tokens}
    try:
        return render_jinja_template([[*map(dict, messages)]], **options)[0][0]
    except Exception as error:  # a template is a program: it may divide by zero or recurse without end
        reason = str(error) or type(error).__name__
        raise InputError(f"the chat template of this model cannot be rendered: {reason}") from error
