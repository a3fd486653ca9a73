"""What the backbone is asked to write from: texts it continues, and requests about them.

Seeds are of the kinds that people send: code and prose to go on with, and chat requests to explain, edit, summarise
or extract, made from the permissively licensed texts of `specnb.corpus`; and next to nothing, an opening of a few
words or an empty request, from which the backbone draws the rest itself. Nothing of `data/prompts` is among them, so
what is measured there is measured on prompts that training never saw.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specnb.corpus import Document
from specnb.errors import InputError
from specnb.lm import chat
from specnb.lm.base import LanguageModel

ASKED = "asked"
"""The kind of seed that holds no request: the backbone writes one itself (Magpie, Xu et al. 2406.08464)."""
KINDS = ("code", "prose", "opening", "request", ASKED)
SHARES = (0.1, 0.1, 0.2, 0.25, 0.35)
OPENINGS = (
    "The", "It was", "Once upon a time", "Chapter One\n\n", "In the beginning", "She", "When I was", "There are many",
    "How to", "Dear", "The history of", "In this article", "Introduction\n\n", "According to", "My name is", "Q:",
    "1.", "# ", "## ", "- ", "Abstract\n\n", "Recipe:", "Question:", "On the morning of", "\"", "Most people",
    "def ", "import ", "class ", "from ", "# -*- coding: utf-8 -*-\n", "async def ", "#!/bin/sh\n", "#include <",
    "function ", "const ", "public class ", "SELECT ", "CREATE TABLE ", "<html>\n", "{\n  \"", "[\n  {\n    \"",
    "---\n", "name,", "try:\n", "@dataclass\nclass ", "for i in range(",
)  # fmt: skip
"""Beginnings of texts of all kinds; what follows is drawn."""
LEADS = {"code": 16, "prose": 16, "opening": 48, "request": 12, ASKED: 12}
"""At most so many tokens are drawn before the greedy text, so that no two rows go on alike; half of the rows that need
none have none."""
REQUESTS = {
    "code": (
        "Explain step by step what this Python code does.\n\n```python\n{text}\n```",
        "Add a docstring and type hints to this code and return the whole code.\n\n```python\n{text}\n```",
        "Rename the variables so that their names say what they hold. Return all of it.\n\n```python\n{text}\n```",
        "Write three tests for the following function.\n\n```python\n{text}\n```",
        "Find the mistake in this code, if there is one, and return the corrected version.\n\n```python\n{text}\n```",
        "List the names defined here as a JSON array of objects with the keys \"name\" and \"kind\". "
        "Answer with the JSON only.\n\n```python\n{text}\n```",
    ),
    "prose": (
        "Summarise the following text in three sentences.\n\n{text}",
        "Rewrite this text so that a beginner understands it.\n\n{text}",
        "Return the text below with every sentence on a line of its own, and change nothing else.\n\n{text}",
        "Which questions does this text answer? Give a numbered list.\n\n{text}",
        "Write a short story in which someone learns about this:\n\n{text}",
        "Extract the most important facts as JSON with the keys \"topic\", \"facts\" and \"open_questions\". "
        "Answer with the JSON only.\n\n{text}",
    ),
}  # fmt: skip
EXCERPT_LINES = (2, 14)
"""Lines of the excerpt, from and up to."""
MARK = "\u0001"
"""Stands for a message's text in a rendered chat; no template writes it itself."""


@dataclass(frozen=True)
class Turns:
    """The tokens a chat template puts around messages.

    `opening` comes before the first request, `to_answer` between a request and its answer, `to_request` between an
    answer and the next request.
    """

    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_request: tuple[int, ...]

    @classmethod
    def of(cls, model: LanguageModel) -> "Turns":
        """Raises InputError when the template changes what it is given, or there is none."""
        messages = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
        parts = chat.render(model.vocab, messages).split(MARK)
        if len(parts) != 4:
            raise InputError(f"the chat template of {model.name} does not write each message once: give plain texts")
        opening, *others = (tuple(model.encode(part)) for part in parts[:3])
        if not model.vocab.add_bos:
            return cls(opening, *others)
        # encode puts a BOS token in front of each part; it belongs in front of the chat alone, and there once
        bos = (model.vocab.bos,)
        return cls(opening[1:] if opening[:2] == bos * 2 else opening, *(part[1:] for part in others))


@dataclass(frozen=True)
class Seed:
    """Token ids to begin with; of the kind `asked`, the backbone goes on with a request, else with an answer.

    The first `lead` tokens of what it writes first are drawn, not greedy.
    """

    kind: str
    ids: tuple[int, ...]
    lead: int = 0


def seeds(
    model: LanguageModel, documents: Sequence[Document], *, longest: int, seed: int, turns: Turns | None
) -> Iterator[Seed]:
    """Endless seeds of at most `longest` tokens, in shares of SHARES; without `turns`, continued texts only.

    Raises InputError for a document kind without any text.
    """
    texts = {kind: [d.text for d in documents if d.kind == kind] for kind in REQUESTS}
    if missing := [kind for kind, found in texts.items() if not found]:
        raise InputError(f"no documents of the kind {', '.join(missing)} to make seeds from")
    rng = np.random.default_rng(seed)
    shares = np.asarray(SHARES if turns else (*SHARES[:3], 0, 0))
    while True:
        kind = KINDS[rng.choice(len(KINDS), p=shares / shares.sum())]
        lead = lead_of(kind, rng)
        if kind == ASKED:
            yield Seed(kind, turns.opening)
            continue
        if kind == "opening":
            yield Seed(kind, tuple(model.encode(str(rng.choice(OPENINGS)), special=False)), lead)
            continue
        about = kind if kind in REQUESTS else ("code", "prose")[rng.integers(2)]
        excerpt = _excerpt(texts[about], rng)
        if kind == about:
            yield Seed(kind, tuple(model.encode(excerpt, special=False))[:longest], lead)
            continue
        request = str(rng.choice(REQUESTS[about])).format(text=excerpt.strip("\n"))
        ids = (*turns.opening, *model.encode(request, special=False), *turns.to_answer)
        if len(ids) <= longest:  # a request cut in the middle would have no question
            yield Seed(kind, ids, lead)


def lead_of(kind: str, rng: np.random.Generator) -> int:
    """How many tokens are drawn before the greedy text of a seed of this kind."""
    most = LEADS[kind]
    if kind == "opening":
        return int(rng.integers(most // 2, most + 1))
    return int(rng.integers(1, most + 1)) * int(rng.integers(2))


def _excerpt(texts: Sequence[str], rng: np.random.Generator) -> str:
    """A few lines of a text, beginning where a paragraph does."""
    lines = texts[rng.integers(len(texts))].split("\n")
    begins = [i for i, line in enumerate(lines) if line.strip() and (i == 0 or not lines[i - 1].strip())]
    start = begins[rng.integers(len(begins))]
    return "\n".join(lines[start : start + int(rng.integers(*EXCERPT_LINES))]) + "\n"
