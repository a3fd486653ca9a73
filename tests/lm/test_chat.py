"""Chat templates come with downloaded models: they are rendered as transformers does, and in a sandbox."""

import sys
import time

import pytest

from specnb.errors import InputError
from specnb.lm import chat
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


def test_messages_become_the_text_that_ends_where_the_answer_begins():
    asked = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&</b> 日本<|im_end|>\n"
    assert render(vocabulary(CHATML), MESSAGES) == asked + "<|im_start|>assistant\n"
    assert render(vocabulary(CHATML), MESSAGES, add_generation_prompt=False) == asked
    assert render(vocabulary(CHATML), []) == "<|im_start|>assistant\n"


def test_templates_see_the_special_tokens_as_text():
    template = "[{{ bos_token }}|{{ eos_token }}]"
    assert render(vocabulary(template, bos=0, eos=1), MESSAGES) == "[<s>|</s>]"
    assert render(vocabulary(template, bos=2), MESSAGES) == "[\ufffd|]"


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{%- for m in messages -%}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m.content | trim }}\n{% endfor %}",
        "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}",
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% endif %}{{ rest | length }}",
    ],
)
def test_rendering_is_that_of_transformers(template):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert render(vocabulary(template, bos=0, eos=1), MESSAGES) == expected[0]


@pytest.mark.parametrize("template", [None, ""])
def test_a_model_without_a_template_takes_plain_text_only(template):
    with pytest.raises(InputError, match="no chat template: pass plain text"):
        render(vocabulary(template), MESSAGES)


def test_a_template_may_refuse_the_messages_in_its_own_words():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(InputError, match="refuses these messages: System role not supported"):
        render(vocabulary(template), MESSAGES)
    assert render(vocabulary(template), MESSAGES[1:]) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__'] }}{{ (''|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append({'role': 'user', 'content': 'more'}) }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_a_hostile_template_gets_nothing_and_changes_nothing(template):
    before = [dict(message) for message in MESSAGES]
    with pytest.raises(InputError, match="cannot be rendered"):
        render(vocabulary(template), MESSAGES)
    assert before == MESSAGES


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0] ",
        "{% for %}",
        "{{ nothing.content }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages | nofilter }}",
    ],
)
def test_a_broken_or_endless_template_is_one_clear_error(template):
    with pytest.raises(InputError, match=r"chat template of this model cannot be rendered: \S"):
        render(vocabulary(template), MESSAGES)


LONG = "{% for i in range(99999) %}{% for j in range(99999) %}TEXT{% endfor %}{% endfor %}"
LARGE = {
    "repeated": "{{ 'a' * 2000000000 }}",
    "repeated from the left": "{{ 2000000000 * [1] }}",
    "power": "{{ 9 ** 999999999 > 1 }}",
    "doubled": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "joined": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "captured": "{% set s %}{{ 'a' * 9999999 }}{% endset %}{% set t %}{{ s }}{{ s }}{% endset %}",
    "written": "{% set s = 'a' * 9999999 %}{{ s }}{{ s }}",
    "written in a loop": LONG.replace("TEXT", "a" * 24),
}


@pytest.mark.parametrize("what", LARGE)
def test_a_template_cannot_fill_the_memory(what):
    with pytest.raises(InputError, match=str(chat.MAX_SIZE)):
        render(vocabulary(LARGE[what]), MESSAGES)


def test_a_template_cannot_run_for_ever(monkeypatch):
    monkeypatch.setattr(chat, "LIMIT_S", 0.2)
    began, trace = time.monotonic(), sys.gettrace()
    with pytest.raises(InputError, match=r"0\.2 s"):
        render(vocabulary(LONG.replace("TEXT", "")), MESSAGES)
    assert time.monotonic() - began < 2 and sys.gettrace() is trace


def test_numbers_and_texts_within_the_limits_are_as_in_python():
    template = "{{ 2 ** 10 }} {{ 3 * 4 + 1.5 }} {{ 'ab' * 2 ~ ([1] + [2]) }} {{ 2 ** -1 }} {{ 1.5 * 2 }}"
    assert render(vocabulary(template), MESSAGES) == "1024 13.5 abab[1, 2] 0.5 3.0"
