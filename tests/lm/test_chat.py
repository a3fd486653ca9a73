"""Chat templates come with downloaded models: they are rendered as transformers does, and in a sandbox."""

import pytest

from specnb.errors import InputError
from specnb.lm.chat import render
from specnb.lm.vocab import Vocabulary

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&</b> 日本"}]
CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary(template: str | None, **ids: int) -> Vocabulary:
    return Vocabulary((b"<s>", b"</s>", b"\xff"), chat_template=template, **ids)


def test_messages_become_the_text_that_ends_where_the_answer_begins_and_special_tokens_are_text():
    asked = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&</b> 日本<|im_end|>\n"
    assert render(vocabulary(CHATML), MESSAGES) == asked + "<|im_start|>assistant\n"
    assert render(vocabulary("[{{ bos_token }}|{{ eos_token }}]", bos=2), MESSAGES) == "[\ufffd|]"


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{%- for m in messages -%}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m.content | trim }}\n{% endfor %}",
        "{{ eos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}",
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% endif %}{{ rest | length }}",
    ],
)
def test_rendering_is_that_of_transformers(template):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert render(vocabulary(template, bos=0, eos=1), MESSAGES) == expected[0]


REFUSED = {
    None: "no chat template",
    "{{ raise_exception('System role not supported') }}": "refuses these messages: System role not supported",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "cannot be rendered",
    "{{ messages.append({'role': 'user', 'content': 'more'}) }}": "cannot be rendered",
    "{% include '/etc/passwd' %}": "cannot be rendered",
    "{{ 1 / 0 }}": "cannot be rendered",
    "{{ range(10 ** 9) | list }}": "cannot be rendered",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "cannot be rendered",
}


@pytest.mark.parametrize("template", REFUSED)
def test_a_hostile_or_broken_template_is_one_clear_error_and_changes_nothing(template):
    before = [dict(message) for message in MESSAGES]
    with pytest.raises(InputError, match=REFUSED[template]):
        render(vocabulary(template), MESSAGES)
    assert before == MESSAGES
