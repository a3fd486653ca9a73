"""The kind of text that is being written: code, json, prose or general. Cheap enough to ask before every round.

`detect` looks for an open Markdown fence, then at the shapes of the last lines; running text is prose or general by its
words. While little has been written, what the prompt asks for decides. `ContentK` is the controller that asks it;
`data/content` says how well it does.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from specnb.decode.control import Controller

Kind = Literal["code", "json", "prose", "general"]

TAIL = 700  # characters whose lines are looked at: about fifteen lines
ENOUGH = 40  # with fewer characters than this the prompt decides

# Shapes of a whole line, tried in this order; "indented" goes with its neighbours.
_SHAPES = re.compile(r"""(?x)
    \s*(?:(?P<json> [{}\[\]]+,? | "[^"]*"\s*:.* | "[^"]*",? | -?[\d.]+, | [\[{]\s*["{\[\d-].*
        | (?![^"]*[=(]).*?(?:"[^"]{1,60}"\s*:\s*[-"\[{\dtfn][^":]*){2}.*)
    | (?P<general> [-*+•]\s(?![\w-]+:(?:\s|$)).* | \d+[.)]\s.* | \#{2,6}\s.* | \|.*\| | \*\*[^*]+\*\*:?)
    | (?P<code> .*[{};\\] | [)\]}].* | //.* | /\*.* | --\s.* | \#.* | @\w.* | \$\s.* | </?[a-zA-Z!].*
        | (?:def|class|for|while|if|elif|else|try|except|with|return|import|from|const|let|var|end|pub|fn)\b.*[:)\w]
        | [\w.$\[\]"'*]+(?:,\s[\w.*]+)*\s*(?::\s*[\w\[\], |.&<>]+)?[-+*/|&:]?=.* | [\w.$:!]+\(.*\).{0,12}
        | (?:-\s)?[a-z_][\w.-]*:(?:\s.*[^.?!,\s])?
        | [a-z][\w./-]*\s(?:.*\s)?(?:-{1,2}[a-zA-Z0-9]|["']?\$[\w{(]|[|>]\s).*
        | (?![A-Z][a-z])(?i:(?:select|from|where|and|join|left\sjoin|inner\sjoin|group\sby|order\sby|limit|values
            |insert\sinto|create|update|run|copy)\s.*[\w)*,;])) | (?P<indented>(?<=\s\s).*))""")
_NARRATES = re.compile(r"""(?x)\b(?:s?he|him|hers?|his|I|me|my|we|us|our|said|asked|was|were|had|felt|looked|stood|went
    |came|knew|thought)\b|[,.?!]["”]""")
_EXPLAINS = re.compile(r"""(?x)\b(?:you|your|is|are|can|should|means?|called|because|therefore|however|example|such
    |uses?|used|which|also)\b|[\d`%]+""")
# Where the chat templates of common model families begin a turn.
_TURN = re.compile(r"<\|im_start\|>\w+\s?|\[/?INST\]|<\|start_header_id\|>\w+<[^>]*>|<start_of_turn>\w+\s?|<\|\w+\|>\n")
_FENCE = re.compile(r"(?m)(?:^|(?<=```))[^\S\n]*```")
# What a request names; the first one named is what the answer begins with.
_ASKS = re.compile(r"""(?x)\b(?: (?P<json>(?:Geo)?JSON)
    | (?P<code>functions?\b(?!\sof)|[Ii]mplement|unit\stests?|Python|JavaScript|TypeScript|SQL|PostgreSQL|[Bb]ash
        |[Ss]cript|Rust|in\sGo|Java|C\+\+(?!\w)|regex|algorithm|refactor|docstrings?|HTML|CSS|program)
    | (?P<prose>Describe\sa|(?i:stor(?:y|ies)|poem|essay|novel|fable|tale|letter\sfrom|dialogue|chapter|vivid
        |narrat\w+|monologue|scene|sonnet|stanzas?)) )(?!\w)""")


def detect(prompt: str, generated: str) -> Kind:
    """The kind of what is being written now, after `prompt` (plain, or rendered by a chat template)."""
    *turns, opening = _TURN.split(prompt)
    request = next((turn for turn in reversed(turns) if turn.strip()), prompt)
    asked = next((match.lastgroup for match in _ASKS.finditer(request[:400])), "general")
    *before, body = _FENCE.split(opening + generated)
    if len(before) % 2:  # a fence is open
        return "json" if re.match(r"\s*(?i:geo)?json|\n\s*[\[{]", body) else "code"
    if len(opening + generated) < ENOUGH:
        return asked
    shapes, tail = Counter[str](), "\n".join((*before[::2], body))[-TAIL:]
    for age, line in enumerate(reversed(tail.splitlines())):  # older lines weigh less
        match = _SHAPES.fullmatch(line[:1].isspace() * "  " + " ".join(line.split()))
        shapes[match.lastgroup if match else "text"] += 0.8**age * min(len(line), 80)
    shapes["code" if shapes["code"] else "text"] += shapes.pop("indented", 0)
    shape = max(shapes, key=shapes.get, default="text")
    if shape != "text":
        return shape
    telling = len(_NARRATES.findall(tail)) - len(_EXPLAINS.findall(tail)) + 4 * (asked == "prose")
    return "prose" if telling > 0 else "general"


REPORT_K: Mapping[Kind, int] = {"code": 22, "json": 10, "general": 10, "prose": 6}
"""Middle of the report's range for each content: 20-24, 8-12, 8-12, 4-8."""


class ContentK(Controller):
    """K by the kind of text that is being written: the report's table."""

    name = "content K"
    k_max = max(REPORT_K.values())

    def start(self, prompt):
        self._prompt, self._text = prompt.decode("utf-8", errors="ignore"), bytearray()

    def draft_length(self):
        return REPORT_K[detect(self._prompt, self._text.decode("utf-8", errors="ignore"))]

    def update(self, outcome):
        self._text += outcome.text
