"""Rounds as text: a generation as HTML with the fate of each token, and one round as a table.

Each HTML tag has its own style and inherits the colors of the page. Where styles are stripped
(GitHub), the tags remain: accepted draft tokens are underlined, rejected ones struck through,
corrections bold, bonus tokens marked.
"""

import html
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.decode.control import FixedK
from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary
from specnb.measure.recording import Trace
from specnb.measure.replay import walk_recording
from specnb.records import Generation

ACCEPTED = "accepted draft"
REJECTED = "rejected draft"
CORRECTION = "correction"
BONUS = "bonus token"
PLAIN = "plain step"
FATES = {
    ACCEPTED: ("ins", "background:rgba(0,158,115,.24);text-decoration-color:rgb(0,158,115)"),
    REJECTED: ("del", "background:rgba(128,128,128,.16);opacity:.75"),
    CORRECTION: ("strong", "background:rgba(230,110,0,.4)"),
    BONUS: ("mark", "background:rgba(250,204,21,.5);color:inherit"),
    PLAIN: ("span", ""),
}
"""Tag and style by the fate of a token."""
STRIP = (
    "max-height:360px;max-width:960px;overflow-y:auto;"
    "line-height:1.9;font-family:monospace;white-space:pre-wrap"
)


class RoundText(NamedTuple):
    """A round as text: `n_accepted` of `drafted` draft tokens, then the target's token, if any.

    The target adds no token if the text ended. `drafts` may end after the first rejected token if
    no more was recorded. `chances` are texts with p_target and q_draft of each committed token, if
    known.
    """

    drafts: tuple[bytes, ...]
    drafted: int
    n_accepted: int
    committed: tuple[bytes, ...]
    chances: tuple[str, ...] = ()

    @property
    def ending(self) -> str:
        """The fate of the target's token; "" if the text ended within the drafts."""
        if len(self.committed) <= self.n_accepted:
            return ""
        if not self.drafted:
            return PLAIN
        return BONUS if self.n_accepted == self.drafted else CORRECTION

    @property
    def fates(self) -> list[str]:
        """The fate of each committed token."""
        return [*[ACCEPTED] * self.n_accepted, self.ending][: len(self.committed)]

    @property
    def line(self) -> str:
        """The round in words."""
        counts = (
            f"{self.drafted} drafted, {self.n_accepted} accepted, "
            f"{self.drafted - self.n_accepted} rejected"
        )
        text = "".join(map(shown_text, self.committed))
        return f"{counts}, then {self.ending or 'the end'}: “{text[:80]}”."


def of_trace(trace: Trace, k: int, **wanted: object) -> list[RoundText]:
    """Return the rounds at draft length k of the first recording with the fields `wanted`.

    Raises InputError if there is none.
    """
    recording = trace.select(**wanted).recordings[0]
    rounds = []
    p = map(", p {:.2f}".format, recording.p_target)
    q = map(", q {:.2f}".format, recording.q_draft)
    chances = tuple(map("".join, zip_longest(p, q, fillvalue="")))
    for step in walk_recording(recording, FixedK(k), np.random.default_rng(recording.seed)):
        here = slice(step.at, step.at + step.n_accepted + 1)
        committed = recording.pieces[here]
        drafts = (
            recording.drafts[step.at][: step.drafted]
            if recording.drafts
            else committed[: step.n_accepted]
        )
        rounds.append(RoundText(drafts, step.drafted, step.n_accepted, committed, chances[here]))
    return rounds


def generated(generation: Generation, vocab: Vocabulary) -> list[RoundText]:
    """Return the rounds of a generation with a chain drafter."""
    rounds = []
    for r in generation.rounds:
        drafts, committed = (tuple(map(vocab.piece, ids)) for ids in (r.draft_ids, r.committed_ids))
        rounds.append(RoundText(drafts, r.k, r.n_accepted, committed))
    return rounds


def strip(rounds: Iterable[RoundText]) -> str:
    """Return the text as HTML with rejected draft tokens; each token has the style of its fate."""
    legend = " &ensp;".join(_tagged(fate, fate, fate) for fate in FATES)
    parts = []
    at = 0
    for number, each in enumerate(rounds, 1):
        spans = []
        for piece, fate, chance in zip_longest(
            each.committed, each.fates, each.chances, fillvalue=""
        ):
            at += 1
            if fate == CORRECTION:  # the rejected draft tokens come before it
                spans += [
                    _tagged(REJECTED, text, f"round {number}: {REJECTED}")
                    for text in _rejected(each)
                ]
            text = html.escape(shown_text(piece, blank=" ")).replace("⏎", "⏎<br>")
            spans.append(_tagged(fate, text, f"token {at}, round {number}: {fate}{chance}"))
        parts.append(f'<span style="margin-right:3px">{"".join(spans)}</span>')
    return (
        f'<div style="{STRIP}"><p style="font-family:sans-serif">{legend}</p>{"".join(parts)}</div>'
    )


def _rejected(each: RoundText) -> list[str]:
    texts = [html.escape(shown_text(piece, blank=" ")) for piece in each.drafts[each.n_accepted :]]
    unknown = each.drafted - each.n_accepted - len(texts)
    return [*texts, f" +{unknown} "] if unknown else texts


def _tagged(fate: str, text: str, title: str) -> str:
    tag, style = FATES[fate]
    return f'<{tag} style="{style}" title="{title}">{text}</{tag}>'


def round_table(rounds: Sequence[RoundText], number: int) -> pd.DataFrame:
    """Return round `number` (from 1) as a table: position, draft, target_choice, accepted.

    The target's choices after a rejected draft token are not used, because they continue a text
    that was not generated. Raises InputError for a round that does not exist.
    """
    if not 1 <= number <= len(rounds):
        raise InputError(f"got round {number}, expected 1 to {len(rounds)}: give one of these")
    each = rounds[number - 1]
    drafts = [
        *map(shown_text, each.drafts),
        *["(not recorded)"] * (each.drafted - len(each.drafts)),
    ]
    accepted = ["yes"] * each.n_accepted + [
        "no" if each.ending == CORRECTION else each.ending
    ] * bool(each.ending)
    rows = zip_longest(drafts, map(shown_text, each.committed), accepted)
    table = pd.DataFrame(rows, columns=["draft", "target_choice", "accepted"])
    table.insert(0, "position", table.index + 1)
    rest = "after the rejection" if each.ending else "after the end"
    # a bonus token has no draft
    return table.fillna({"draft": "", "target_choice": "(not used)", "accepted": rest})


def shown_text(piece: bytes, blank: str = "·") -> str:
    """Return the text of a token with visible blanks and line breaks, or ∎ for an empty token."""
    text = (
        piece.decode("utf-8", errors="replace")
        .replace("\n", "⏎")
        .replace("\t", "⇥")
        .replace(" ", blank)
    )
    return "".join(c if c.isprintable() else "�" for c in text) or "∎"
