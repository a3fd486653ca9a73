"""Chat templates: convert messages to the text format of a chat model, for both engines."""

import sys
import time
from collections.abc import Mapping, Sequence

from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary

MAX_S = 5
"""Maximum CPU time of a template, in seconds; typical templates take milliseconds."""


def render_chat(vocab: Vocabulary, messages: Sequence[Mapping[str, str]]) -> str:
    """Render `messages` (role and content) as text, up to the start of the assistant's answer.

    A template is part of a downloaded model, so it runs in transformers' sandbox. Raises InputError
    if the model has no chat template, and if the template fails, rejects the messages or exceeds
    MAX_S.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if not vocab.chat_template:
        raise InputError("this model has no chat template: pass plain text instead of messages")
    bos, eos = (
        "" if token is None else vocab.pieces[token].decode("utf-8", "replace")
        for token in (vocab.bos, vocab.eos)
    )
    end = time.thread_time() + MAX_S

    def check(frame, *_event):
        """Trace function, which Python calls in this thread at each call and template line.

        A single long operation, such as `9 ** 9 ** 9`, is not interrupted.
        """
        if time.thread_time() > end:
            raise TimeoutError(f"it takes more than {MAX_S} s")
        return check if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    try:
        sys.settrace(check)
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
    finally:
        sys.settrace(before)
