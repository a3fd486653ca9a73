"""The two loops, plain and speculative decoding, and when they stop.

Both loops work on token ids and yield one `Round` per cycle. They maintain one invariant between
cycles: the target's state contains every token so far except the newest, which the next forward
pass processes. The first cycle is the exception: `prefill` processes the whole prompt, including
the newest token, and returns the logits after it. Plain decoding of n tokens therefore takes n - 1
steps. The loops do not depend on the engine or the kind of drafter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from time import perf_counter

import numpy as np

from specnb.decode import accept
from specnb.decode.control import Controller, RoundOutcome, StoppingPicker
from specnb.decode.sampling import Chooser, DraftChooser
from specnb.draft.base import Drafter, Picker, Proposal, TokenView
from specnb.errors import InputError, NonFiniteLogits, StateError, require_number
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import Vocabulary
from specnb.records import Round, StopReason

NOTHING = Proposal(())
"""The proposal of a round without draft tokens."""

ROW_TOLERANCE = 1e-3
"""Largest deviation of the sum of a q_draft row from 1, for rounding in half precision."""


def prefill(
    target: LanguageModel, prompt_ids: Sequence[int], drafter: Drafter | None = None
) -> np.ndarray:
    """Process the prompt, start the drafter, and return the logits after the prompt, `(1, vocab)`.

    Resets the target. Raises InputError (empty prompt), CapacityError (longer than the context).
    """
    if len(prompt_ids) == 0:
        raise InputError(
            "got a prompt without tokens, expected at least one token: give a longer prompt"
        )
    target.reset()
    after_prompt = target.forward(prompt_ids, n_logits=1)
    if drafter is not None:
        drafter.start(TokenView(list(prompt_ids)))
    return after_prompt


def autoregressive(
    target: LanguageModel,
    prompt_ids: Sequence[int],
    after_prompt: np.ndarray,
    *,
    chooser: Chooser,
    stopping: "Stopping",
) -> Iterator[Round]:
    """Decode plainly, one token per forward pass. Every round has k = 0.

    `after_prompt (1, vocab)` are the logits from `prefill`. Raises NonFiniteLogits, and StateError
    if something else used the target.
    """
    tokens = list(prompt_ids)
    for index in count():
        if stopping.ended(len(tokens), target.caps.n_ctx):
            return
        ahead = after_prompt if index == 0 else None
        began = perf_counter()
        logits = _logits(target, tokens, NOTHING, ahead)
        verified = perf_counter()
        try:
            token, _ = chooser.pick(logits[0])
        except NonFiniteLogits as error:
            raise _located(error, target, tokens) from error
        committed = stopping.admit((token,))
        tokens.extend(committed)
        verify_s = verified - began
        other_s = perf_counter() - verified
        yield Round(
            index,
            0,
            0,
            (),
            committed,
            (),
            0.0,
            verify_s,
            0.0,
            other_s,
            verify_s,
            int(ahead is None),
        )


def speculative(
    target: LanguageModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    after_prompt: np.ndarray,
    *,
    control: Controller,
    chooser: Chooser,
    stopping: "Stopping",
    strict: bool = True,
) -> Iterator[Round]:
    """Decode speculatively: draft up to K tokens, verify them in ONE forward pass, commit, rewind.

    A round with K = 3. The state contains tokens 0..5, and token 6 is the newest. The target
    accepts x7 and x8, but not x9:

        draft     x7  x8  x9
        forward   6   x7  x8  x9     ONE pass, logits (4, vocab): row i follows i draft tokens
        verify        ok  ok  no     n_accepted = 2; row 2 gives the correction y9
        commit    x7  x8  y9         three tokens for one forward pass of the target
        rewind    1                  the state contains 0..8, y9 is the newest

    Leviathan et al. 2211.17192, algorithm 1. `control` chooses K, `after_prompt (1, vocab)` are the
    logits from `prefill`, and `chooser.sampling` has the acceptance rule. With a lossless rule,
    greedy tokens equal those of `autoregressive`, and sampled tokens have the same distribution.
    The drafter decides whether its tokens form a chain or a tree.

    Raises NonFiniteLogits for rows of the target, and with `strict` also for rows of the drafter.
    Without `strict`, such a row ends drafting for the rest of the text, and
    `stopping.drafting_failed` is the reason. Raises InputError for an invalid proposal, and
    StateError as `autoregressive`.
    """
    rule = accept.rule_of(chooser.sampling)
    tokens = list(prompt_ids)  # a copy of the caller's list; drafters get a read-only view
    view = TokenView(tokens)
    control.start(target.vocab.raw_bytes(tokens))
    for index in count():
        if stopping.ended(len(tokens), target.caps.n_ctx):
            return
        began = perf_counter()
        # 1. Draft, within the limits of the context, of the forward pass, and of the generation.
        limit = min(
            control.draft_length(), target.caps.n_ctx - len(tokens), target.caps.max_width - 1
        )
        if stopping.drafting_failed:
            limit = 0
        drafting = DraftChooser(chooser.sampling, chooser.draws)
        picker = StoppingPicker(drafting, control) if control.reads_drafts else drafting
        proposal = NOTHING
        try:
            proposal = _proposed(target, drafter, view, limit, stopping.remaining - 1, picker)
        except NonFiniteLogits as error:
            drafting.failure = error
        if drafting.failure:
            error = _located(drafting.failure, drafter, [*tokens, *proposal.ids])
            stopping.drafting_failed = f"while drafting, {error}"
            if strict:
                raise NonFiniteLogits(stopping.drafting_failed) from drafting.failure
        drafted = perf_counter()
        # 2. Verify all draft tokens in one forward pass.
        ahead = after_prompt if index == 0 else None
        logits = _logits(target, tokens, proposal, ahead)
        verified = perf_counter()
        # 3. Accept some of them, add one token from the target, and commit.
        try:
            verdict = rule(logits, proposal, chooser)
        except NonFiniteLogits as error:
            raise _located(error, target, [*tokens, *_before_bad(logits, proposal)]) from error
        committed = stopping.admit(
            (*(proposal.ids[node] for node in verdict.path), verdict.next_id)
        )
        tokens.extend(committed)
        n_accepted = min(len(verdict.path), len(committed))  # fewer if generation ends within them
        control.update(
            RoundOutcome(len(proposal.ids), n_accepted, target.vocab.decode_bytes(committed))
        )
        accepted_at = perf_counter()
        # 4. Roll back target and drafter: remove the draft tokens that were not committed, so that
        # the target's state again contains every token except the newest.
        _keep(target, proposal, verdict.path[: len(committed) - 1], ahead)
        if not stopping.drafting_failed:
            drafter.commit(view)
        rewound = perf_counter()
        yield Round(
            index=index,
            k=len(proposal.ids),
            n_accepted=n_accepted,
            draft_ids=proposal.ids,
            committed_ids=committed,
            accept_prob=verdict.accept_prob[: len(committed)],  # of the positions reached
            draft_s=drafted - began,
            verify_s=verified - drafted,
            rewind_s=rewound - accepted_at,
            other_s=accepted_at - verified,
            forward_s=verified - drafted + proposal.forward_s,
            width=len(proposal.ids) + (ahead is None),
            parents=proposal.tree.parents if proposal.tree else (),
        )


def _proposed(
    target: LanguageModel, drafter: Drafter, view: TokenView, limit: int, depth: int, picker: Picker
) -> Proposal:
    """Return a proposal of up to `limit` draft tokens, at most `depth` positions deep.

    Deeper nodes of a tree are dropped, because they could not be committed. Raises InputError if
    the drafter proposes more, which would be recorded under a wrong K, or exceed the context.
    """
    asked = limit if drafter.tree_nodes else min(limit, depth)
    proposal = drafter.propose(view, asked, picker) if min(asked, depth) > 0 else NOTHING
    if len(proposal.ids) > max(asked, 0):
        raise InputError(
            f"drafter {drafter.name} proposed {len(proposal.ids)} tokens, expected at most {asked}"
        )
    if proposal.tree is not None:
        accept.require_trees(target)
        return accept.checked(proposal, depth)
    if proposal.q_draft is not None:
        _require_rows(target, drafter, proposal)
    return proposal


def _require_rows(target: LanguageModel, drafter: Drafter, proposal: Proposal) -> None:
    """Raise InputError for invalid `q_draft`: a token with q = 0 would always be accepted."""
    rows = proposal.q_draft
    expected = (len(proposal.ids), target.vocab.size)
    if rows.shape != expected:
        raise InputError(
            f"drafter {drafter.name} reports q_draft of shape {rows.shape}, expected {expected}"
        )
    sums = rows.sum(axis=1)
    chances = rows[range(len(rows)), proposal.ids]
    if not ((abs(sums - 1.0) < ROW_TOLERANCE).all() and (chances > 0.0).all()):
        raise InputError(
            f"got q = {chances} and row sums {sums} from {drafter.name}, "
            "expected q > 0 and sums of 1"
        )


def _logits(
    target: LanguageModel, tokens: list[int], proposal: Proposal, ahead: np.ndarray | None
) -> np.ndarray:
    """Return the logits after the newest token and after each draft token, `(k + 1, vocab)`.

    Runs one forward pass. `ahead` is the first row if the newest token is already in the state.
    Raises StateError if something else used the target, which would change the output.
    """
    held = len(tokens) - (ahead is None)
    if target.n_past != held:
        raise StateError(
            f"got {target.n_past} tokens in the state of {target.name}, expected {held}: another "
            "generation or the drafter used it. Load the model once for each of them"
        )
    ids = proposal.ids
    tree = proposal.tree
    if ahead is None:
        ids = (tokens[-1], *ids)
        tree = tree and tree.rooted()
    elif not ids:
        return ahead
    rows = target.forward(ids) if tree is None else target.forward_tree(ids, tree)
    return rows if ahead is None else np.concatenate([ahead, rows])


def _keep(
    target: LanguageModel, proposal: Proposal, path: Sequence[int], ahead: np.ndarray | None
) -> None:
    """Keep the newest token and the draft tokens on `path` in the state; remove the others."""
    if proposal.tree is None:
        target.rewind(len(proposal.ids) - len(path))
    elif ahead is None:  # the tree that was fed is rooted in the newest token
        target.keep_path((0, *(node + 1 for node in path)))
    else:
        target.keep_path(path)


def _before_bad(logits: np.ndarray, proposal: Proposal) -> list[int]:
    """Return the draft tokens before the first non-finite row of `logits`."""
    bad = int(np.argmax(~np.isfinite(logits.max(axis=1))))
    path = range(bad) if proposal.tree is None else proposal.tree.path(bad - 1)
    return [proposal.ids[node] for node in path]


def _located(
    error: NonFiniteLogits, model: LanguageModel | Drafter, fed: Sequence[int]
) -> NonFiniteLogits:
    """Return the error of a non-finite row after `fed`, with its position and the module added."""
    layer = model.locate_nonfinite(fed) or "unknown"
    return NonFiniteLogits(
        f"{model.name}, after {len(fed)} tokens: {error}; the first module with a non-finite "
        f"output is {layer}. Try dtype=float32 or check the weights"
    )


# --- when a generation ends -----------------------------------------------------------------------


@dataclass(frozen=True)
class StopRules:
    """Generation ends at an end-of-generation token, after `max_new_tokens`, or at a stop string.

    With `ignore_eog`, it does not end at that token. The end-of-generation token is part of the
    generated ids; a stop string is not part of the text. Raises InputError for invalid values.
    """

    max_new_tokens: int = 128
    stop_strings: tuple[str, ...] = ()
    ignore_eog: bool = False

    def __post_init__(self) -> None:
        require_number("max_new_tokens", self.max_new_tokens, Integral, 0)
        # Command-line bytes that are not UTF-8 become lone surrogates, which cannot be encoded.
        if bad := [
            s for s in self.stop_strings if not s or str(s).encode(errors="ignore").decode() != s
        ]:
            raise InputError(
                f"got the stop string {bad[0]!a}, expected a text in UTF-8 that is not empty"
            )


class Stopping:
    """Decides token by token when to stop, so that a round ends where single steps would.

    `reason` is set at the end, and `drafting_failed` if drafting ends earlier (see `speculative`).
    """

    def __init__(self, rules: StopRules, vocab: Vocabulary) -> None:
        self._rules = rules
        self._vocab = vocab
        self._strings = tuple(s.encode() for s in rules.stop_strings)
        self._text = bytearray()
        self._count = 0
        self.reason: StopReason | None = "length" if rules.max_new_tokens == 0 else None
        self.drafting_failed: str | None = None

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self._rules.max_new_tokens - self._count

    def ended(self, n_tokens: int, n_ctx: int) -> bool:
        """Return whether generation has ended; it also ends if `n_tokens` exceed the context."""
        if self.reason is None and n_tokens > n_ctx:
            self.reason = "context"
        return self.reason is not None

    def admit(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return `ids` up to the end of the generation; set `reason` if it ends among them."""
        for n, token in enumerate(ids, start=1):
            self._count += 1
            self.reason = self._reason_after(token)
            if self.reason:
                return tuple(ids[:n])
        return tuple(ids)

    def _reason_after(self, token: int) -> StopReason | None:
        if token in self._vocab.eog and not self._rules.ignore_eog:
            return "eog"
        if self._strings:
            # an ignored end-of-generation token has no text
            piece = b"" if token in self._vocab.eog else self._vocab.piece(token)
            self._text += piece
            newest = self._text[-len(piece) - max(map(len, self._strings)) :]
            if any(s in newest for s in self._strings):
                return "stop_string"
        return "length" if self.remaining <= 0 else None

    def cut(self, text: str) -> str:
        """Return `text` up to the first stop string."""
        return min((text.partition(s)[0] for s in self._rules.stop_strings), key=len, default=text)
