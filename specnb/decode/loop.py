"""The two loops: plain decoding, and speculative decoding; and where they end.

Both work on ids, yield one `Round` a cycle, and keep one invariant between cycles: the target's state holds every
token so far but the newest, which the next forward feeds. Only the first cycle finds the newest token fed as well:
`prefill` takes the whole prompt and hands over the logits after it, so that a generation of n tokens costs n - 1
plain steps. They know nothing of backends, text or drafters' kinds.
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
"""A round without drafts."""

ROW_TOLERANCE = 1e-3
"""How far a row of q_draft may sum from 1: rounding of half precision, no more."""


def prefill(target: LanguageModel, prompt_ids: Sequence[int], drafter: Drafter | None = None) -> np.ndarray:
    """Put the whole prompt into the target's state, show it to the drafter; the logits after it, `(1, vocab)`.

    Raises InputError (empty prompt), CapacityError (prompt longer than the context).
    """
    if len(prompt_ids) == 0:
        raise InputError("the prompt has no tokens, and the model no BOS token to begin with: give at least one token")
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
    """Plain decoding, one token a forward, from what `prefill` returned. Every round has k = 0."""
    tokens = list(prompt_ids)
    for index in count():
        if stopping.ended(len(tokens), target.caps.n_ctx):
            return
        ahead = after_prompt if index == 0 else None
        _require_state(target, tokens, ahead)
        began = perf_counter()
        logits = _logits(target, tokens, NOTHING, ahead)
        verified = perf_counter()
        try:
            token, _ = chooser.pick(logits[0])
        except NonFiniteLogits as error:
            raise _located(error, target, tokens) from error
        committed = stopping.admit((token,))
        tokens.extend(committed)
        verify_s, other_s = verified - began, perf_counter() - verified
        yield Round(index, 0, 0, (), committed, (), 0.0, verify_s, 0.0, other_s, verify_s, int(ahead is None))


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
    """Speculative decoding: draft as many tokens as `control` says, verify in ONE forward, commit, rewind.

    A round with K = 3, where the state holds tokens 0..5 and token 6 is the newest, x7 and x8 are right, x9 is not:

        draft     x7  x8  x9
        forward   6   x7  x8  x9     ONE call, logits (4, vocab): row i is the target's after i drafts
        verdict       ok  ok  no     n_accepted = 2; row 2 gives the correction y9
        commit    x7  x8  y9         three tokens for one call of the target
        rewind    1                  the state holds 0..8, y9 is the newest

    Leviathan et al. 2211.17192, algorithm 1. `after_prompt` is what `prefill` returned; the rule is that of
    `chooser.sampling`. With a lossless rule the tokens are those of `autoregressive` (greedy), or follow the same
    distribution. Drafts are a chain or a tree, as the drafter likes.

    Raises NonFiniteLogits for rows of the target, and for those of the drafter where `strict`. Else drafting ends at
    such a row for the rest of the text, and `stopping.drafting_failed` has the reason.
    """
    rule = accept.rule_of(chooser.sampling)
    tokens = list(prompt_ids)  # the caller's list is never touched, and drafters see this one read-only
    view = TokenView(tokens)
    control.start(target.vocab.raw_bytes(tokens))
    for index in count():
        if stopping.ended(len(tokens), target.caps.n_ctx):
            return
        began = perf_counter()
        # no drafts beyond the context or the widest forward; nor, of a path, beyond the length limit
        limit = min(control.draft_length(), target.caps.n_ctx - len(tokens), target.caps.max_width - 1)
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
        ahead = after_prompt if index == 0 else None
        _require_state(target, tokens, ahead)
        logits = _logits(target, tokens, proposal, ahead)
        verified = perf_counter()
        try:
            verdict = rule(logits, proposal, chooser)
        except NonFiniteLogits as error:
            raise _located(error, target, [*tokens, *_before_bad(logits, proposal)]) from error
        committed = stopping.admit((*(proposal.ids[node] for node in verdict.path), verdict.next_id))
        tokens.extend(committed)
        n_accepted = min(len(verdict.path), len(committed))  # fewer when generation ended inside the accepted drafts
        control.update(RoundOutcome(len(proposal.ids), n_accepted, target.vocab.decode_bytes(committed)))
        accepted_at = perf_counter()
        # The target holds the old tokens and all drafts. Keep the committed ones but the newest, so that its state
        # is again "tokens so far, less one"; the drafter does the same with its own.
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
            accept_prob=verdict.accept_prob[: len(committed)],  # those that the generation reached
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
    """Up to `limit` drafts, none more than `depth` places ahead.

    More of them would be recorded under a wrong K, or overrun the context; deeper ones could not be committed.
    """
    asked = limit if drafter.tree_nodes else min(limit, depth)
    proposal = drafter.propose(view, asked, picker) if min(asked, depth) > 0 else NOTHING
    if len(proposal.ids) > max(asked, 0):
        raise InputError(f"drafter {drafter.name} proposed {len(proposal.ids)} tokens, but was asked for {asked}")
    if proposal.tree is not None:
        accept.require_trees(target)
        return accept.checked(proposal, depth)
    if proposal.q_draft is not None:
        _require_rows(target, drafter, proposal)
    return proposal


def _require_rows(target: LanguageModel, drafter: Drafter, proposal: Proposal) -> None:
    """Refuse rows that the drafts were not drawn from: the rules would keep such drafts with certainty."""
    rows, expected = proposal.q_draft, (len(proposal.ids), target.vocab.size)
    if rows.shape != expected:
        raise InputError(f"drafter {drafter.name} reports q_draft of shape {rows.shape}, expected {expected}")
    sums, chances = rows.sum(axis=1), rows[range(len(rows)), proposal.ids]
    if not ((abs(sums - 1.0) < ROW_TOLERANCE).all() and (chances > 0.0).all()):
        raise InputError(f"drafter {drafter.name} reports rows with q = {chances} at its drafts, which sum to {sums}")


def _logits(target: LanguageModel, tokens: list[int], proposal: Proposal, ahead: np.ndarray | None) -> np.ndarray:
    """Logits after the newest token and after each draft, `(len(drafts) + 1, vocab)`, in one forward.

    `ahead` is the first of these rows, where the newest token is in the state already.
    """
    ids, tree = proposal.ids, proposal.tree
    if ahead is None:
        ids, tree = (tokens[-1], *ids), tree and tree.rooted()
    elif not ids:
        return ahead
    rows = target.forward(ids) if tree is None else target.forward_tree(ids, tree)
    return rows if ahead is None else np.concatenate([ahead, rows])


def _keep(target: LanguageModel, proposal: Proposal, path: Sequence[int], ahead: np.ndarray | None) -> None:
    """Of what `_logits` fed keep the newest token and the drafts on `path`; forget the other drafts."""
    if proposal.tree is None:
        target.rewind(len(proposal.ids) - len(path))
    elif ahead is None:  # the tree that was fed is rooted in the newest token
        target.keep_path((0, *(node + 1 for node in path)))
    else:
        target.keep_path(path)


def _require_state(target: LanguageModel, tokens: list[int], ahead: np.ndarray | None) -> None:
    """The loops' invariant, checked each round: another user of the model would silently change the output."""
    held = len(tokens) - (ahead is None)
    if target.n_past != held:
        used = f"{target.name} holds {target.n_past} tokens, but this generation left {held} there"
        raise StateError(f"{used}: another generation or the drafter used it. Load it once for each")


def _before_bad(logits: np.ndarray, proposal: Proposal) -> list[int]:
    """The drafts before the first bad row of `logits`: those after the newest token and after each draft."""
    bad = int(np.argmax(~np.isfinite(logits.max(axis=1))))
    path = range(bad) if proposal.tree is None else proposal.tree.path(bad - 1)
    return [proposal.ids[node] for node in path]


def _located(error: NonFiniteLogits, model: LanguageModel | Drafter, fed: Sequence[int]) -> NonFiniteLogits:
    """The error with position and layer, of a bad row after `fed`."""
    layer = model.locate_nonfinite(fed) or "none that can be named here"
    where = f"{model.name}, after {len(fed)} tokens: {error}; the first module with a non-finite output is {layer}"
    return NonFiniteLogits(f"{where}. Try dtype=float32 or check the weights")


# --- where a generation ends ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StopRules:
    """End at an end-of-generation token (unless `ignore_eog`), after `max_new_tokens`, or once a stop string appears.

    The end-of-generation token is part of the generated ids; a stop string is not part of the text.
    """

    max_new_tokens: int = 128
    stop_strings: tuple[str, ...] = ()
    ignore_eog: bool = False

    def __post_init__(self) -> None:
        require_number("max_new_tokens", self.max_new_tokens, Integral, 0)
        # half a surrogate pair has no bytes; a command line gives it for bytes that are no UTF-8
        if bad := [s for s in self.stop_strings if not s or str(s).encode(errors="ignore").decode() != s]:
            raise InputError(f"a stop string must be text in UTF-8 and not empty, got {bad[0]!a}")


class Stopping:
    """Decides token by token, so that a block ends where single steps would; `reason` is set at the end.

    `drafting_failed` is set where drafting ended before the text (see `speculative`).
    """

    def __init__(self, rules: StopRules, vocab: Vocabulary) -> None:
        self._rules, self._vocab = rules, vocab
        self._strings = tuple(s.encode() for s in rules.stop_strings)
        self._text = bytearray()
        self._count = 0
        self.reason: StopReason | None = "length" if rules.max_new_tokens == 0 else None
        self.drafting_failed: str | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._rules.max_new_tokens - self._count

    def ended(self, n_tokens: int, n_ctx: int) -> bool:
        """Whether generation is over, also for want of room for a forward after `n_tokens`."""
        if self.reason is None and n_tokens > n_ctx:
            self.reason = "context"
        return self.reason is not None

    def admit(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The leading part of `ids` that belongs to the generation; sets `reason` when it ends inside or after it."""
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
            piece = b"" if token in self._vocab.eog else self._vocab.piece(token)  # an ignored end is not shown
            self._text += piece
            newest = self._text[-len(piece) - max(map(len, self._strings)) :]
            if any(s in newest for s in self._strings):
                return "stop_string"
        return "length" if self.remaining <= 0 else None

    def cut(self, text: str) -> str:
        """`text` up to the first stop string."""
        return min((text.partition(s)[0] for s in self._rules.stop_strings), key=len, default=text)
