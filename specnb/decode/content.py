"""What kind of text is being written: code, json, prose or general. Cheap enough to ask before every round.

`detect` looks at how the last lines are built (an open Markdown fence, the share of lines that read like code or JSON,
lists and headings, narration) and, while little has been written, at what the prompt asks for. It reads a bounded
tail, so a round costs the same at any length. `report_rule` is the heuristic of the field report, kept beside it.
"""

import re
from collections.abc import Callable
from typing import Literal

Kind = Literal["code", "json", "prose", "general"]
Detector = Callable[[str, str], str]
"""(prompt, text generated so far) -> kind."""

TAIL = 480
"""Characters of generated text that are looked at: about ten lines."""
ENOUGH = 40
"""With fewer characters than this the prompt decides."""

_REPORT_CHARACTERS = frozenset("{}();[]def class import return")

_JSON_LINE = re.compile(
    r"""\s*(?:
      "[^"]*"\s*:\s*\S?.* | [\[\]{}]+,? | [}\]]+\s*,?\s*[{\[]? | "[^"]*",? | -?[\d.]+,? | [\[{]\s*["{\[\d].*
    )\s*""",
    re.VERBOSE,
)
_CODE_LINE = re.compile(
    r"""\s*(?:
      (?:def|class|return|import|from\s\S+\simport|for|while|if|elif|else|try|except|with|async|await|raise|yield|assert
        |pub|fn|let|const|var|func|package|use|struct|impl|match|public|private|static|void|int|export|function|switch
        |case|break|continue|type|interface|local|echo|then|do|done|fi|end|begin|\#include|\#define)\b
        (?:(?![.?!]$).)*[^.?!\w\s]\S*$
      |(?:return|break|continue|pass|end|fi|done|try|else|begin|do)\s*[\w.]*$
      |(?:import|from|use|package)\s[\w.:*]+(?:\s+(?:import|as)\s+[\w*, ]+)?$
      |(?:SELECT|FROM|WHERE|GROUP\sBY|ORDER\sBY|INSERT|UPDATE|CREATE|JOIN|LEFT\sJOIN|VALUES|WITH)\b.*
      |[\w.\[\]"'*]+(?:,\s*[\w.\[\]*]+)*\s*(?::\s*[\w\[\], |.]+\s*)?(?:[-+*/%|&^]|<<|>>|:)?=\s*\S.*
      |[\w.$]+\(.*\)[;,]?\s*(?:[{:]|=>.*)?
      |.*[;{}]\s*|.*\)\s*:\s*|.*=>\s*|[)\]}]+[;,.]*.*|\#\s?\w.*|//.*|/?\*+.*\*/|--\s.*|@\w+.*|>>>\s.*|\$\s\w.*
    )\s*""",
    re.VERBOSE,
)
_LIST_LINE = re.compile(r"\s*(?:[-*+•]\s|\d+[.)]\s|#{1,6}\s|\|.*\||\*\*[^*]+\*\*:?\s*$|[A-Z][\w ]{2,40}:\s*$)")
_NARRATION = re.compile(
    r"\b(?:he|she|him|her|his|hers|I|me|my|we|us|our|said|asked|was|were|had|felt|looked|stood|went|came|knew|thought)\b"
)
_WORD = re.compile(r"\w+")

_ASKS_JSON = re.compile(r"\b(?:JSON|GeoJSON)\b")
_ASKS_CODE = re.compile(
    r"""\b(?:functions?\b(?!\sof)|implement|unit\stests?|Python|JavaScript|TypeScript|SQL|PostgreSQL|Bash|script|Rust|Go
    |Java|C\+\+|regex|algorithm|refactor|compile[rs]?|docstrings?|standard\slibrary|HTML|CSS|API\sclient|program)\b""",
    re.VERBOSE,
)
_ASKS_PROSE = re.compile(
    r"""\b(?:story|stories|poem|essay|novel|fable|tale|letter\sfrom|dialogue|chapter|vivid|narrat\w+|monologue|scene
    |sonnet|stanzas?|Describe\sa)\b""",
    re.VERBOSE | re.IGNORECASE,
)


def detect(prompt: str, generated: str) -> Kind:
    """The kind of what is being written now."""
    fenced = _open_fence(generated)
    if fenced is not None:
        return fenced
    if len(generated.strip()) < ENOUGH:
        asked = _asked_for(prompt)
        return asked if asked else _by_lines(prompt[-TAIL:] + generated)
    written = generated[-TAIL:].rpartition("```")[2]  # what comes after a closed fence is no part of it
    return _by_lines(written if len(written.strip()) >= ENOUGH else generated[-TAIL:])


def report_rule(prompt: str, generated: str) -> Kind:
    """The field report's heuristic (its section 4), to the letter, on the text of prompt and generation.

    Its `code_chars` is a set of single characters, most of them plain letters, so nearly any text is "code".
    """
    text = prompt + generated
    score = sum(1 for c in text if c in _REPORT_CHARACTERS) / len(text) if text else 0.0
    if score > 0.05 or "    " in text:
        return "code"
    if '"' in text and ":" in text:
        return "json"
    return "prose"


def _open_fence(text: str) -> Kind | None:
    """The kind inside a Markdown fence that is still open, else None."""
    if text.count("```") % 2 == 0:
        return None
    language, _, body = text.rpartition("```")[2].partition("\n")
    language = language.strip().lower()
    if language in ("json", "jsonc", "json5", "geojson"):
        return "json"
    if language in ("text", "txt", "markdown", "md"):
        return _by_lines(body[-TAIL:])
    if not language and _share(_JSON_LINE, body[-TAIL:]) > 0.6:
        return "json"
    return "code"


def _asked_for(prompt: str) -> Kind | None:
    """What the last request of a prompt asks for; None when the prompt is a text to be continued."""
    request = prompt.rstrip()[-1500:]
    turns = re.split(r"<\|im_start\|>\w+\n|\[INST\]|\nUser:|\nHuman:", request)
    request = next((t for t in reversed(turns) if len(t.strip()) > 3), request).lstrip()
    first = request.partition("\n")[0][:400]
    if not re.match(r"[A-Z`\"(]", first) or not re.search(r"[.?!:]", first):
        return None
    for kind, pattern in (("json", _ASKS_JSON), ("code", _ASKS_CODE), ("prose", _ASKS_PROSE)):
        if pattern.search(first):
            return kind
    return None


def _by_lines(text: str) -> Kind:
    json, code = _share(_JSON_LINE, text), _share(_CODE_LINE, text)
    if json >= 0.5 and json >= 0.8 * code:
        return "json"
    if code >= 0.5:
        return "code"
    if _share(_LIST_LINE, text) >= 0.3:
        return "general"
    words = len(_WORD.findall(text))
    return "prose" if words and len(_NARRATION.findall(text)) / words >= 0.06 else "general"


def _share(line: re.Pattern[str], text: str) -> float:
    """Share of the lines that are of a kind, weighted by length: of complete ones, where there are any."""
    lines = [piece for piece in text.splitlines() if piece.strip()]
    total = sum(len(piece.strip()) for piece in lines)
    return sum(len(piece.strip()) for piece in lines if line.fullmatch(piece)) / total if total else 0.0
