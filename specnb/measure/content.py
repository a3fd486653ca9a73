"""What kind of text is being written: code, json, prose or general. Cheap enough to ask before every round.

`detect` looks for an open Markdown fence, then at the shapes of the last lines, of which the newest count most. Running
text is prose or general by its words and by what the prompt asks for, which also decides while little has been written.
`ContentK` is the controller that asks it; `data/content` says how well it does.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from specnb.decode.control import Controller, RoundOutcome

Kind = Literal["code", "json", "prose", "general"]

TAIL = 480  # characters whose lines are looked at: about ten lines
ENOUGH = 40  # with fewer characters than this the prompt decides
REQUEST = 8192  # characters of the prompt's end in which the last request is looked for

# Shapes of a whole line, tried in this order; "bracket", "hash" and "indented" go with their neighbours.
_SHAPES = {
    "bracket": re.compile(r"\s*[\[\]{}]+\s?,?\s?[\[{]?"),
    "json": re.compile(r"""(?x)\s*(?: "[^"]*"\s*:.* | "[^"]*", | (?<=\s)"[^"]*"    # a key; an element, or the last one
            | -?[\d.]+(?:[eE]-?\d+)?, | [\[{]\s*["{\[\d-].*     # a number in an array; an array or object begins
            | (?![^"]*[=(]).*?(?:"[^"]{1,60}"\s*:\s*[-"\[{\dtfn][^":]*){2}.*    # keys in a long line, wherever cut
        )"""),
    "list": re.compile(r"""(?x)(?!\s\*\s)\s*(?: [-*+•]\s(?![\w-]+:(?:\s|$)) | \d+[.)]\s    # bullets, numbers
            | \#{2,6}(?:\s|$) | \|.*\| | \*\*[^*]+\*\*:?$ ).*           # headings, a row of a table, a bold title"""),
    "hash": re.compile(r"\s*#(?:\s.*)?"),  # a comment of Python or shell, or a heading of Markdown
    "code": re.compile(r"""(?x)\s*(?:    # a block or signature; a bare keyword; a statement; an import
            (?:def|class|for|while|if|elif|else|try|except|with|async|switch|case|match|pub|fn|impl|struct|func|export
                |public|private|static|typedef)\b.*[:{(]
            | (?:return|break|continue|pass|raise|yield|where|end|fi|done|esac|try|else|begin|do|then)(?:\s[\w.]+)?;?
            | (?:return|raise|assert|yield|await|let|const|var|use|package|\#include|\#define|\#!)\b.*[^.?!,\s]
            | (?:import|from)\s[\w.*"'/:]+(?:\s(?:import|as)\s[\w*, ()]+)?;?
              # an assignment; a call, or the head of a function; a Haskell signature
            | [\w.$\[\]"'*&]+(?:,\s*[\w.*]+)*\s*(?::\s*[\w\[\], |.&<>]+)?(?:[-+*/%|&^:]|<<|>>)?=[^=].*
            | [\w.$:!]+\(.*\)[;,?]?\s*(?:\s[{:]|:|{|=>.*|->.*)? | \w+\s::\s.*
              # line ends, line beginnings, markup
            | </?[a-zA-Z!][^<>]*>.* | .*[=()\[\]<>{}"'].*[;{}] | (?:\S+\s){0,2}\S+; | .*(?:[{}\\]|\)\s*:|=>|->|&&|\|\|)
            | [)\]}]+[;,.:]*.* | //.* | /\*.* | \*/.* | --\s.* | @\w[\w.]*(?:\(.*)? | >>>\s.* | \$\s\w.* | \"\"\".*
              # YAML keys in small letters; shell options, variables and pipes; Docker
            | (?:-\s)?[a-z_][\w.-]*:(?:\s.*[^.?!,\s])?
            | [a-z][\w./-]*\s(?:.*\s)?(?:-{1,2}[a-zA-Z0-9]|["']?\$[\w{(]|[|>]\s).*
            | (?:FROM|RUN|COPY|WORKDIR|EXPOSE|ENV|CMD|ENTRYPOINT|USER)\s.*[^.?!,\s]
              # SQL, not a sentence that begins with a capital
            | (?![A-Z][a-z])(?i:select\s.*[\w)*,] | from\s[\w."]+(?:\s(?:as\s)?\w{1,12})?[,;]?
                | (?:(?:left|right|inner|outer|cross)\s)*join\s\S+\s(?:(?:as\s)?\w+\s)?(?:on|using)\b.*
                | (?:where|and|or|on|having)\s\S+\s*(?:[=<>!]|is\s(?:not\s)?null|like\s'|between\s\S+\sand\s).*
                | (?:group|order)\sby\s.* | insert\sinto\s.* | create\s(?:table|index|view)\s.* | values\s*\(.*
                | update\s\S+\sset\b.* | limit\s\d+;?)
        )"""),
    "indented": re.compile(r"(?:\s\s|\s\*(?:\s|$)).*"),  # a docstring, a block comment, or a verse
}
_TELLS = re.compile(r"""(?x)    # narration and direct speech
        \b(?:s?he|him|hers?|his|I|me|my|we|us|our|said|asked|was|were|had|felt|looked|stood|went|came|knew|thought)\b
        |[,.?!]["”]""")
_EXPLAINS = re.compile(r"""(?x)    # explanation: speaks to the reader, defines, gives reasons, counts
        \b(?:you|your|is|are|can|should|means?|called|because|therefore|however|example|such|uses?|used|which|also)\b
        |[\d`%]+""")
# Where the chat templates of common model families begin a turn.
_TURN = re.compile(r"<\|im_start\|>\w+\s?|\[/?INST\]|<\|start_header_id\|>\w+<[^>]*>|<start_of_turn>\w+\s?|<\|\w+\|>\n")
_FENCE = re.compile(r"(?m)(?:^|(?<=```))[^\S\n]*```")
_INSTRUCTION = re.compile(r"\s*(?:Write|Implement|Create|Return|Generate|Give|Make|Convert|Describe|Tell|Explain)\s")
_ASKS = re.compile(r"""(?x)    # what a request names; the first one named is what the answer begins with
        \b(?: (?P<json>JSON|GeoJSON)
        | (?P<code>functions?\b(?!\sof)|[Ii]mplement|unit\stests?|Python|JavaScript|TypeScript|SQL|PostgreSQL|[Bb]ash
            |[Ss]cript|Rust|in\sGo|Java|C\+\+(?!\w)|regex|algorithm|refactor|docstrings?|HTML|CSS|program)
        | (?P<prose>Describe\sa|(?i:stor(?:y|ies)|poem|essay|novel|fable|tale|letter\sfrom|dialogue|chapter|vivid
            |narrat\w+|monologue|scene|sonnet|stanzas?)) )(?!\w)""")


def detect(prompt: str, generated: str) -> Kind:
    """The kind of what is being written now, after `prompt` (plain, or rendered by a chat template)."""
    *turns, opening = _TURN.split(prompt[-REQUEST:])
    request = next((turn.strip().partition("\n")[0] for turn in reversed(turns) if turn.strip()), "")
    if not turns:  # plain text: an order of one line, or a text that is continued
        request, opening = (prompt, "") if _INSTRUCTION.match(prompt) and "\n" not in prompt else ("", prompt)
    asked = [match.lastgroup for match in _ASKS.finditer(request[: ENOUGH * 10])]
    *before, body = _FENCE.split(opening + generated)
    if len(before) % 2:  # a fence is open
        language, _, body = body.partition("\n")
        language = language.strip().lower()
        if language not in ("text", "txt", "markdown", "md"):
            is_json = language.startswith(("json", "geojson")) if language else _by_lines(body, 0.0) == "json"
            return "json" if is_json else "code"
    else:
        body = "\n\n".join((*before[::2], body))
    if request and len((opening + generated).strip()) < ENOUGH:
        return asked[0] if asked else "general"
    by_asked = -0.1 if set(asked) == {"prose"} else 0.02 if "prose" in asked else 0.06
    return _by_lines(body, by_asked if request else -0.02)


def _by_lines(text: str, enough: float) -> Kind:
    """The kind by the shapes of the last lines; running text is prose if its words tell by more than `enough`.

    Older lines weigh less, and less again beyond a blank line.
    """
    text = text[-TAIL:]
    lines = text.splitlines()
    if len(lines) > 1 and text[-1] not in "\r\n" and len(lines[-1]) < ENOUGH // 2 and lines[-2].strip():
        lines.pop()  # hardly begun: its shape cannot be seen yet
    shares, telling, age = Counter[str](), 0.0, 1.0
    for line in reversed(lines):
        if words := " ".join(line.split()):
            # long runs of blanks would make the patterns slow; two of an indentation are enough to see it
            shown = ("  " if line[:2].isspace() or line[0] == "\t" else " " if line[0].isspace() else "") + words
            shape = next((name for name, pattern in _SHAPES.items() if pattern.fullmatch(shown)), "text")
            weight = age * min(len(words), 80)
            shares[shape] += weight
            if shape in ("text", "indented"):
                telling += weight * (len(_TELLS.findall(words)) - len(_EXPLAINS.findall(words))) / len(words.split())
        age *= 0.9 if words else 0.6
    running, total = shares["text"] + shares["indented"], shares.total()
    shares["code"] += shares["indented"] if shares["code"] else 0
    shares["code" if shares["code"] else "list"] += shares["hash"]
    structured = "code" if shares["code"] > shares["json"] else "json"
    if shares[structured] and shares["code"] + shares["json"] + shares["bracket"] >= 0.5 * total:
        return structured
    listing = shares["list"] >= 0.3 * total
    return "prose" if running and not listing and telling / running > enough else "general"


REPORT_K: Mapping[Kind, int] = {"code": 22, "json": 10, "general": 10, "prose": 6}
"""Middle of the report's range for each content: 20-24, 8-12, 8-12, 4-8."""


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
