"""The kind of text that is being written: code, json, prose or general.

Two rules: an open Markdown fence decides; without one, the words of the request do. `ContentK` is
the controller that uses them; `data/content` measures their accuracy.
"""

import re
from collections.abc import Mapping
from typing import Literal

from specnb.decode.control import Controller

Kind = Literal["code", "json", "prose", "general"]

FENCE = "```"
REQUEST = 400
"""Characters at the start of a request that are searched for a kind."""

# Markers that begin a turn in the chat templates of common model families.
_TURN = re.compile(
    r"<\|im_start\|>\w+\s?|\[/?INST\]|<\|start_header_id\|>\w+<[^>]*>"
    r"|<start_of_turn>\w+\s?|<\|\w+\|>\n"
)
# Words of a request that name a kind; the first match decides.
_ASKS = re.compile(r"""(?x)\b(?: (?P<json>(?:Geo)?JSON)
    | (?P<code>functions?\b(?!\sof)|[Ii]mplement|unit\stests?|Python|JavaScript|TypeScript|SQL
        |PostgreSQL|[Bb]ash|[Ss]cript|Rust|in\sGo|Java|C\+\+(?!\w)|regex|algorithm|refactor
        |docstrings?|HTML|CSS|program)
    | (?P<prose>Describe\sa|(?i:stor(?:y|ies)|poem|essay|novel|fable|tale|letter\sfrom|dialogue
        |chapter|vivid|narrat\w+|monologue|scene|sonnet|stanzas?)) )(?!\w)""")


def detect(prompt: str, generated: str) -> Kind:
    """Return the kind of the text after `prompt`, which is plain or rendered by a chat template.

    >>> detect("Write a poem about rain.", ""), detect("Write a poem.", "```python")
    ('prose', 'code')
    """
    *closed, body = generated.split(FENCE)
    if len(closed) % 2:  # a fence is open
        return "json" if body.lstrip().lower().startswith(("json", "{", "[")) else "code"
    turns = [turn for turn in _TURN.split(prompt) if turn.strip()]
    request = turns[-1] if turns else ""
    named = _ASKS.search(request[:REQUEST])
    return named.lastgroup if named else "general"


REPORT_K: Mapping[Kind, int] = {"code": 22, "json": 10, "general": 10, "prose": 6}
"""Middle of the field report's range of K for each kind: 20-24, 8-12, 8-12, 4-8."""


class ContentK(Controller):
    """Chooses K by the kind of text that is being written, from the field report's table."""

    name = "content K"
    k_max = max(REPORT_K.values())

    def start(self, prompt):
        self._prompt = prompt.decode("utf-8", errors="ignore")
        self._text = bytearray()

    def draft_length(self):
        return REPORT_K[detect(self._prompt, self._text.decode("utf-8", errors="ignore"))]

    def update(self, outcome):
        self._text += outcome.text
