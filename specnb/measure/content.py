"""What kind of text is being written: code, json, prose or general. Cheap enough to ask before every round.

`detect` looks for an open Markdown fence, then at the shapes of the last lines, then at the words. While little has
been written it looks at what the prompt asks for. `ContentK` is the controller that asks it.
"""

import re
from collections.abc import Mapping
from typing import Literal

from specnb.decode.control import Controller, RoundOutcome

Kind = Literal["code", "json", "prose", "general"]
REPORT_K: Mapping[Kind, int] = {"code": 22, "json": 10, "general": 10, "prose": 6}
"""Middle of the report's range for each content: 20-24, 8-12, 8-12, 4-8."""

REQUEST, TAIL, LAST_LINES = 8192, 480, 6
"""Characters of the prompt and of the text that are looked at, and lines of the text."""
ENOUGH = 40
"""Characters of text before which the prompt alone decides."""

_TURN = re.compile(r"<\|im_start\|>\w+\s?|\[/?INST\]|<\|start_header_id\|>\w+<[^>]*>|<start_of_turn>\w+\s?|<\|\w+\|>\n")
"""Where the chat templates of common model families begin a turn."""
_FENCE = re.compile(r"^[ \t]*```(.*)\n?", re.MULTILINE)
_ASKS = re.compile(r"""(?x)\b(?: (?P<json>(?:Geo)?JSON)
    | (?P<code>(?i:functions?\b(?!\sof)|implement|unit\stests?|python|(?:java|type)script|\w*sql|bash|script|rust|java
        |c\+\+|regex|algorithm|refactor|docstrings?|html|css|program)|in\sGo)
    | (?P<prose>Describe\sa|(?i:stor(?:y|ies)|poem|essay|novel|fable|tale|letter\sfrom|dialogue|chapter|vivid
        |narrat\w+|monologue|scene|sonnet|stanzas?)) )(?!\w)""")
"""What a request names; the first one named is what the answer begins with."""
_SHAPES = {
    "json": re.compile(r'\s*(?:"[^"]*"\s*[:,]|-?[\d.]+,$|[\[{]\s*["{\[\d-]|[\[\]{}]+,?$)'),
    "general": re.compile(r"\s*(?:[-*+•]\s(?![\w-]+:)|\d+[.)]\s|#{2,6}\s|\|.*\|$|\*\*[^*]+\*\*:?$)"),
    "code": re.compile(r"""(?x)\s*(?:
        .*(?:[(){}<>\[\]"'=].*[;{}]|[{};\\]|\)\s*:|=>|->)$    # ends of lines, brackets, comments, markup
        | [)\]}]|//|/\*|\*\s@|\*/|--\s|\#\s|@\w|>>>|\$\s|\"\"\"|</?\w[^<>]*>|\#(?:include|define|!)
        | (?:def|class|for|while|if|elif|else|try|except|with|pub|fun|fn|impl|func|export|public|private)\b.*[:{(]
        | (?:return|raise|assert|yield|await|let|const|va[lr]|import|use|package)\b.*[^.?!,\s]$
        | (?:return|break|continue|pass|end|fi|done|else|begin|do|then)$
        | [\w.$@\[\]"'*&]+(?:,\s*[\w.*]+)*\s*(?::\s*[\w\[\], |.&<>]+)?[-+*/%|&^:]?=[^=]    # assignment, call, YAML
        | [\w.$:!]+\(.*\)[;,?]?(?:\s[-=+{].*)?$ | [a-z_][\w.-]*:(?:\s.*[^.?!,\s])?$ | [-]\s\w+:\s
        | [a-z][\w./-]*\s(?:.*\s)?(?:--?[a-zA-Z0-9]|["']?\$[\w{(]|[|>]\s)    # shell, SQL, Docker
        | (?i:from|where|join|left\sjoin|and|having|group|order|limit)\s\S+(?:\s\S+){0,5}[^.?!]$
        | [A-Z]{3,}\s.*[^.?!,]$ )"""),
    "indented": re.compile(r"\s"),
}
"""Shapes of a line, tried in this order."""
_NARRATES = re.compile(
    r"\b(?:s?he|him|hers?|his|I|me|my|we|us|our|said|asked|was|were|had|felt|looked|stood|went|came|knew|thought)\b"
    r'|[,.?!]["”]'
)
_EXPLAINS = re.compile(
    r"\b(?:you|your|is|are|can|should|means?|called|because|therefore|however|example|such|uses?|used|which|also)\b"
    r"|[\d`%]+"
)


def detect(prompt: str, generated: str) -> Kind:
    """The kind of what is being written now, after `prompt` (plain, or rendered by a chat template)."""
    *turns, opening = _TURN.split(prompt[-REQUEST:])
    request = next((turn for turn in reversed(turns) if turn.strip()), "" if turns else prompt)
    asked = _ASKS.search(request.strip().partition("\n")[0])
    text = (opening if turns else prompt) + generated
    fences = list(_FENCE.finditer(text))
    if len(fences) % 2 and (language := fences[-1][1].strip().lower()) not in ("text", "markdown"):
        body = text[fences[-1].end() :]
        return "json" if "json" in language or (not language and _SHAPES["json"].match(body)) else "code"
    if len(generated.strip()) < ENOUGH and asked:
        return asked.lastgroup
    tail = text[fences[-1].end() if fences else 0 :][-TAIL:]
    lines = [line for line in tail.splitlines() if line.strip()][-LAST_LINES:]
    shapes = [next((kind for kind, shape in _SHAPES.items() if shape.match(line)), "prose") for line in lines]
    if "code" in shapes:
        shapes = ["code" if shape == "indented" else shape for shape in shapes]
    for kind in ("json", "code", "general"):
        if shapes.count(kind) * 2 >= len(lines) > 0:
            return kind
    narrates, explains = len(_NARRATES.findall(tail)), len(_EXPLAINS.findall(tail))
    return "prose" if narrates > explains / (2 if asked and asked.lastgroup == "prose" else 1) else "general"


class ContentK(Controller):
    """K by the kind of text that is being written: the report's table."""

    name = "content K"
    k_max = max(REPORT_K.values())

    def start(self, prompt: bytes) -> None:
        self._prompt, self._text = prompt.decode("utf-8", errors="ignore"), bytearray()

    def draft_length(self) -> int:
        return REPORT_K[detect(self._prompt, self._text.decode("utf-8", errors="ignore"))]

    def update(self, outcome: RoundOutcome) -> None:
        self._text += outcome.text
