"""Chat templates: messages to the text that a chat model was trained on. One renderer for both engines."""

import sys
import time
from collections.abc import Mapping, Sequence

from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary

MAX_S = 5
"""Seconds of CPU time that a template may take; those of models take milliseconds."""


def render_chat(vocab: Vocabulary, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the text to encode for `messages` (role and content), ending where the assistant's answer begins.

    A template comes with a downloaded model: it runs in transformers' sandbox. Raises InputError when the model has
    no chat template, and when the template fails, refuses the messages or takes more than MAX_S.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if not vocab.chat_template:
        raise InputError("this model has no chat template: pass plain text instead of messages")
    text_of = {"bos_token": vocab.bos, "eos_token": vocab.eos}
    tokens = {name: "" if i is None else vocab.pieces[i].decode("utf-8", "replace") for name, i in text_of.items()}
    options = {"chat_template": vocab.chat_template, "add_generation_prompt": True, **tokens}
    end = time.thread_time() + MAX_S

    def check(frame, *_event):
        """Python calls it in this thread alone, at each call and each line of a template.

        An operation that does not come back to Python, such as `9 ** 9 ** 9`, is not ended.
        """
        if time.thread_time() > end:
            raise TimeoutError(f"it takes more than {MAX_S} s")
        return check if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    try:
        sys.settrace(check)
        return render_jinja_template([[*map(dict, messages)]], **options)[0][0]
    except Exception as error:  # a template is a program: it may divide by zero or recurse without end
        reason = f"cannot be rendered ({str(error) or type(error).__name__})"
        raise InputError(f"the chat template of this model {reason}: pass plain text") from error
    finally:
        sys.settrace(before)
