"""One batch of rows of training text, written by the backbone token by token.

A row is a seed, a few tokens drawn, the backbone's greedy answer, and, where the answer ends early, a request that the
backbone draws itself and answers again: every row of a batch is busy to the end, and nothing is padded. Greedy text of
small models runs into loops, from which there is nothing more to learn: there the answer ends.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb.errors import InputError
from specnb.lm import hf_state
from specnb.lm.hf_cache import new_cache
from specnb.lm.hf_grouped import grouped
from specnb.lm.hf_hidden import pre_norm_states
from specnb.medusa.seeds import ASKED, Seed, Turns, lead_of

DRAWING_TEMPERATURE = 0.8
"""Of requests and of the first tokens of texts; the rest is greedy."""
LONGEST_LOOP, LOOP_CHECK = 48, 8
"""Tokens of the longest loop that is recognised, and how often one is looked for."""


@dataclass(frozen=True)
class Writing:
    """How the text is made: rows of `length` tokens in batches of `batch_size`, after seeds of at most `longest_seed`.

    An answer is at most `longest_answer` tokens, a request that the backbone writes `longest_request`.
    """

    length: int = 256
    batch_size: int = 64
    longest_seed: int = 96
    longest_answer: int = 144
    longest_request: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.length - self.longest_seed, self.batch_size, self.longest_answer, self.longest_request) < 1:
            raise InputError(f"rows must be longer than their seeds and every length at least 1, got {self}")


class Written(NamedTuple):
    """`tokens (rows, length)` int32, `own (rows, length)` bool: the backbone's greedy choices, and
    `states (rows, length, hidden)` bfloat16, in front of the final norm."""

    tokens: np.ndarray
    own: np.ndarray
    states: torch.Tensor


class _Row:
    """Where one row stands: what it must write next, or whose turn it is and for how many tokens more."""

    def __init__(self, seed: Seed, made: Writing, rng: np.random.Generator) -> None:
        self.forced = list(seed.ids)
        self._made, self._rng = made, rng
        self._begin(seed.kind != ASKED, seed.lead)

    def _begin(self, answering: bool, lead: int) -> None:
        self.answering = answering
        self.lead = min(lead, self._made.longest_answer // 2) if answering else 0
        self.left = self._made.longest_answer if answering else self._made.longest_request
        self.answer: list[int] = []

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn."""
        return not self.answering or len(self.answer) < self.lead

    def write(self, token: int) -> None:
        """Count a token of the one whose turn it is."""
        self.left -= 1
        if self.answering:
            self.answer.append(token)

    @property
    def done(self) -> bool:
        """Whether the turn is over without an end token."""
        if self.left <= 0:
            return True
        return self.answering and len(self.answer) % LOOP_CHECK == 0 and loops(self.answer)

    def hand_over(self, forced: list[int]) -> None:
        """The other's turn, after the tokens that the template puts between."""
        self.forced = forced
        self._begin(not self.answering, lead_of(ASKED, self._rng))


def loops(tokens: Sequence[int], longest: int = LONGEST_LOOP) -> bool:
    """Whether the text ends in a loop of at most `longest` tokens: one that came twice and a little more."""
    text = np.asarray(tokens)
    for period in range(1, min(longest, (len(text) - 8) // 2) + 1):
        seen = period + 8
        if np.array_equal(text[-seen:], text[-seen - period : -period]):
            return True
    return False


class Stream:
    """One batch of rows. `key` is what its random numbers come from."""

    def __init__(
        self, net: PreTrainedModel, ends: frozenset[int], turns: Turns | None, made: Writing, key: list[int]
    ) -> None:
        self._net, self._ends, self._turns, self._made = net, sorted(ends), turns, made
        known = inspect.signature(net.forward).parameters
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._generator = torch.Generator().manual_seed(number_of([*key, 1]))
        self._rng = np.random.default_rng([*key, 2])

    @torch.inference_mode()
    def run(self, chosen: list[Seed], on_tokens: Callable[[int], None]) -> Written:
        """Rows after `chosen` seeds. `on_tokens` gets the tokens of each step."""
        length = self._made.length
        rows = [_Row(seed, self._made, self._rng) for seed in chosen]
        tokens = np.zeros((len(rows), length), dtype=np.int32)
        own = np.zeros((len(rows), length), dtype=bool)
        known = min(len(row.forced) for row in rows)
        for row, line in zip(rows, tokens, strict=True):
            line[:known] = row.forced[:known]
            row.forced = row.forced[known:]
        state = {hf_state.argument(self._net): new_cache(self._net)}
        with grouped(self._net), pre_norm_states(self._net) as caught:
            for at in range(known, length):
                logits = self._feed(tokens, slice(0 if at == known else at - 1, at), state)
                self._write(rows, at, logits, tokens, own)
                on_tokens(len(rows))
            self._feed(tokens, slice(length - 1, length), state)  # nothing follows: for its state alone
        return Written(tokens, own, torch.cat(caught, dim=1).to(torch.bfloat16).cpu())

    def _feed(self, tokens: np.ndarray, fed: slice, state: dict[str, object]) -> torch.Tensor:
        """Logits `(rows, vocab)` behind the last token fed."""
        device = self._net.device
        return self._net(
            input_ids=torch.from_numpy(tokens[:, fed]).long().to(device),
            position_ids=torch.arange(fed.start, fed.stop, device=device)[None].expand(len(tokens), -1),
            use_cache=True,
            **state,
            **self._keep,
        ).logits[:, -1]

    def _write(self, rows: list[_Row], at: int, logits: torch.Tensor, tokens: np.ndarray, own: np.ndarray) -> None:
        """The token of every row at position `at`: forced, the best, or drawn."""
        best = logits.argmax(-1).tolist()
        drawing = [i for i, row in enumerate(rows) if not row.forced and row.draws]
        drawn = dict(zip(drawing, self._draw(logits[drawing]), strict=True)) if drawing else {}
        for i, row in enumerate(rows):
            if row.forced:
                tokens[i, at] = row.forced.pop(0)
                continue
            own[i, at] = not row.draws
            tokens[i, at] = drawn.get(i, best[i])
            row.write(int(tokens[i, at]))
            self._turn(row, tokens[i, at] in self._ends)

    def _draw(self, logits: torch.Tensor) -> list[int]:
        chances = (logits.float() / DRAWING_TEMPERATURE).softmax(-1).cpu()
        return torch.multinomial(chances, 1, generator=self._generator)[:, 0].tolist()

    def _turn(self, row: _Row, ended: bool) -> None:
        """Hand over where the answer or the request has ended; without a chat template there is nobody else."""
        if self._turns is None or not (ended or row.done):
            return
        after = self._turns.to_request if row.answering else self._turns.to_answer
        # the end token that was just written is the first of what the template puts behind a message
        row.hand_over(list(after[1:] if ended and after and after[0] in self._ends else after))


def number_of(key: list[int]) -> int:
    """A seed that is as good as random and the same for the same key."""
    return int(np.random.default_rng(key).bit_generator.seed_seq.generate_state(1)[0])
