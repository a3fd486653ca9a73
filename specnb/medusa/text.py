"""Text by the backbone itself: what it is asked to write from, and rows of it, written token by token.

Seeds are of the kinds that people send: code and prose to go on with, and chat requests to explain, edit, summarise
or extract, from the permissively licensed texts of `corpus`; and next to nothing, an opening of a few words or an
empty request, from which the backbone draws the rest itself. Nothing of `data/prompts` is among them.

A row is a seed, a few tokens drawn, the backbone's greedy answer, and, where the answer ends early or runs into a loop,
a request that the backbone draws itself and answers again: nothing is padded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specnb.errors import InputError
from specnb.lm import chat
from specnb.lm.base import LanguageModel
from specnb.lm.hf.engine import cache_argument, new_cache
from specnb.medusa.corpus import Document

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


class Turns(NamedTuple):
    """The tokens a chat template puts before the first request, and behind each request and each answer."""

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


class Seed(NamedTuple):
    """Token ids to begin with, behind which `lead` tokens are drawn, not greedy.

    The backbone goes on with a request where the kind is `asked`, else with an answer.
    """

    kind: str
    ids: tuple[int, ...]
    lead: int = 0


def seeds(
    model: LanguageModel, documents: Sequence[Document], *, longest: int, key: list[int], turns: Turns | None
) -> Iterator[Seed]:
    """Endless seeds of at most `longest` tokens, drawn with `key`, in shares of SHARES; texts only without `turns`."""
    texts = {kind: [d.text for d in documents if d.kind == kind] for kind in REQUESTS}
    rng = np.random.default_rng(key)
    shares = np.asarray(SHARES if turns else (*SHARES[:3], 0, 0))
    while True:
        kind = KINDS[rng.choice(len(KINDS), p=shares / shares.sum())]
        lead = _lead_of(kind, rng)
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


def _lead_of(kind: str, rng: np.random.Generator) -> int:
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


DRAWING_TEMPERATURE = 0.8
"""Of requests and of the first tokens of texts; the rest is greedy."""
LONGEST_LOOP, LOOP_CHECK = 48, 8
"""Tokens of the longest loop that is recognised, and how often one is looked for."""
OnTokens = Callable[[int], None]


@dataclass(frozen=True)
class Writing:
    """How the text is written: rows of `length` tokens in batches of `batch_size`, seeds of at most `longest_seed`.

    An answer is at most `longest_answer` tokens, a request that the backbone writes `longest_request`.
    """

    length: int = 256
    batch_size: int = 64
    longest_seed: int = 96
    longest_answer: int = 144
    longest_request: int = 40
    seed: int = 0


class _Row:
    """Where one row stands: what must come next (`forced`), or whose turn it is and for how many tokens more."""

    def __init__(self, seed: Seed, writing: Writing, rng: np.random.Generator) -> None:
        self._writing, self._rng = writing, rng
        self.forced = list(seed.ids)
        self._begin(seed.kind != ASKED, seed.lead)

    def _begin(self, answering: bool, lead: int) -> None:
        self.answering, self._answer = answering, []
        self._lead = min(lead, self._writing.longest_answer // 2)
        self._left = self._writing.longest_answer if answering else self._writing.longest_request

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn."""
        return not self.answering or len(self._answer) < self._lead

    def write(self, token: int) -> None:
        self._left -= 1
        if self.answering:
            self._answer.append(token)

    @property
    def over(self) -> bool:
        """Whether the turn is over without an end token."""
        looped = self.answering and len(self._answer) % LOOP_CHECK == 0 and loops(self._answer)
        return self._left <= 0 or looped

    def hand_over(self, forced: Iterable[int]) -> None:
        """The other's turn, after the tokens that the template puts between."""
        self.forced = list(forced)
        self._begin(not self.answering, _lead_of(ASKED, self._rng))


def loops(tokens: Sequence[int]) -> bool:
    """Whether the text ends in a loop of at most LONGEST_LOOP tokens: one that came twice and a little more."""
    text = np.asarray(tokens)
    for period in range(1, min(LONGEST_LOOP, (len(text) - 8) // 2) + 1):
        seen = period + 8
        if np.array_equal(text[-seen:], text[-seen - period : -period]):
            return True
    return False


class Writer:
    """Writes one batch of rows; its random numbers come from `key`."""

    def __init__(self, model: LanguageModel, turns: Turns | None, writing: Writing, key: list[int]) -> None:
        self._net, self._ends, self._turns, self._writing = model.network, model.vocab.eog, turns, writing
        self._rng = np.random.default_rng([*key, 2])
        self._generator = torch.Generator().manual_seed(int(self._rng.integers(1 << 62)))

    @torch.inference_mode()
    def run(self, seeds: Sequence[Seed], on_tokens: OnTokens) -> tuple[np.ndarray, np.ndarray]:
        """Rows after `seeds`; `on_tokens` gets the number of tokens of each step.

        Returns tokens `(rows, length)` int32, and whether each is the backbone's greedy choice `(rows, length)` bool.
        """
        length = self._writing.length
        rows = [_Row(seed, self._writing, self._rng) for seed in seeds]
        tokens, is_own = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
        known = min(len(row.forced) for row in rows)
        for row, line in zip(rows, tokens, strict=True):
            line[:known], row.forced = row.forced[:known], row.forced[known:]
        state = {cache_argument(self._net): new_cache(self._net)}
        for at in range(known, length):
            logits = self._feed(tokens, slice(0 if at == known else at - 1, at), state)
            self._step(rows, at, logits, tokens, is_own)
            on_tokens(len(rows))
        return tokens, is_own

    def _feed(self, tokens: np.ndarray, fed: slice, state: dict[str, object]) -> Tensor:
        """Logits `(rows, vocab)` behind the last token fed."""
        device = self._net.device
        return self._net(
            input_ids=torch.from_numpy(tokens[:, fed]).long().to(device),
            position_ids=torch.arange(fed.start, fed.stop, device=device)[None].expand(len(tokens), -1),
            use_cache=True, logits_to_keep=1, **state,
        ).logits[:, -1]  # fmt: skip

    def _step(self, rows: list[_Row], at: int, logits: Tensor, tokens: np.ndarray, is_own: np.ndarray) -> None:
        """The token of every row at position `at`: forced, the best, or drawn; and whose turn it is then."""
        best = logits.argmax(-1).tolist()
        drawing = [i for i, row in enumerate(rows) if not row.forced and row.draws]
        drawn = dict(zip(drawing, self._draw(logits[drawing]), strict=True)) if drawing else {}
        for i, row in enumerate(rows):
            if row.forced:
                tokens[i, at] = row.forced.pop(0)
                continue
            is_own[i, at] = not row.draws
            tokens[i, at] = token = drawn.get(i, best[i])
            row.write(token)
            if self._turns and (token in self._ends or row.over):  # without a chat template there is nobody else
                after = self._turns.to_request if row.answering else self._turns.to_answer
                # the end token that was just written is the first of what the template puts behind a message
                ended = token in self._ends and after and after[0] in self._ends
                row.hand_over(after[1:] if ended else after)

    def _draw(self, logits: Tensor) -> list[int]:
        chances = (logits.float() / DRAWING_TEMPERATURE).softmax(-1).cpu()
        return torch.multinomial(chances, 1, generator=self._generator)[:, 0].tolist()
