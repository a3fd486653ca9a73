"""The two loops: plain decoding, and speculative decoding.

Both work on ids, yield one `Round` a cycle, and keep one invariant between cycles: the target's state holds every
token so far but the newest, which the next forward feeds. Only the first cycle finds the newest token fed as well:
`prefill` takes the whole prompt and hands over the logits after it, so that a generation of n tokens costs n - 1
plain steps. They know nothing of backends, text or drafters' kinds.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from time import perf_counter

import numpy as np

from specnb.decode import accept
from specnb.decode.accept import Acceptance
from specnb.decode.control import Belief, Controller, Outcome
from specnb.decode.sampling import Chooser, Sampling
from specnb.decode.stopping import Stopping
from specnb.draft.base import Drafter, Picker, Proposal, TokenView
from specnb.errors import CapacityError, InputError, NonFiniteLogits, StateError
from specnb.lm.base import LanguageModel
from specnb.records import Round

Rule = Callable[[np.ndarray, Proposal, Chooser], Acceptance]
"""Target logits `(k + 1, vocab)`, the proposal, the chooser -> what is kept."""


class _LazyRows:
    """Probability rows of the target, each computed when it is first asked for."""

    def __init__(self, logits: np.ndarray, sampling: Sampling) -> None:
        self._logits, self._sampling = logits, sampling
        self._rows: dict[int, np.ndarray] = {}

    def __getitem__(self, index: int) -> np.ndarray:
        if index not in self._rows:
            self._rows[index] = self._sampling.probabilities(self._logits[index])
        return self._rows[index]


def _verify_tokens(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    rows = _LazyRows(logits, chooser.sampling)
    if proposal.q_draft is None:
        return accept.point_mass(rows, proposal.ids, chooser.draws)
    return accept.token_verification(rows, proposal.q_draft, proposal.ids, chooser.draws)


def _verify_block(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    rows = _LazyRows(logits, chooser.sampling)
    if proposal.q_draft is None:  # for point masses the block rule is no better: it keeps each x with p(x) as well
        return accept.point_mass(rows, proposal.ids, chooser.draws)
    return accept.block_verification(rows, proposal.q_draft, proposal.ids, chooser.draws)


def _typical(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    return accept.typical(_LazyRows(logits, chooser.sampling), proposal.ids, chooser.draws)


def _greedy(logits: np.ndarray, proposal: Proposal, _chooser: Chooser) -> Acceptance:
    return accept.greedy(logits, proposal.ids)


RULES: dict[str, Rule] = {"token": _verify_tokens, "block": _verify_block, "typical": _typical}
"""Verification rules at temperature > 0, by name. At temperature 0 `token` and `block` are the greedy rule."""

LOSSY = frozenset({"typical"})


def rule_named(name: str, sampling: Sampling) -> Rule:
    """The rule that `name` means under these settings. Raises InputError for an unknown name."""
    if name not in RULES:
        raise InputError(f"unknown verification rule {name!r}; known: {', '.join(RULES)}")
    if name in LOSSY and sampling.greedy:
        raise InputError(f"the rule {name!r} needs a temperature above 0: at 0 the greedy rule is used")
    return _greedy if sampling.greedy else RULES[name]


def prefill(target: LanguageModel, prompt_ids: Sequence[int], drafter: Drafter | None = None) -> np.ndarray:
    """Put the whole prompt into the target's state, show it to the drafter; the logits after it, `(1, vocab)`.

    Raises InputError (empty prompt), CapacityError (prompt longer than the context).
    """
    if len(prompt_ids) == 0:
        raise InputError("the prompt has no tokens, and the model no BOS token to begin with: give at least one token")
    if len(prompt_ids) > target.caps.n_ctx:
        raise CapacityError(
            f"the prompt has {len(prompt_ids)} tokens, but {target.name} holds {target.caps.n_ctx}: "
            "shorten it or load the model with a larger n_ctx"
        )
    target.reset()
    after_prompt = target.forward(prompt_ids, n_logits=1)
    if drafter is not None:
        drafter.start(TokenView(list(prompt_ids)))
    return after_prompt


def autoregressive(
    target: LanguageModel, prompt_ids: Sequence[int], after_prompt: np.ndarray, *, chooser: Chooser, stopping: Stopping
) -> Iterator[Round]:
    """Plain decoding, one token a forward, from what `prefill` returned. Every round has k = 0."""
    tokens = list(prompt_ids)
    for index in count():
        if stopping.reason or _out_of_context(target, tokens, stopping):
            return
        ahead = after_prompt if index == 0 else None
        _require_state(target, tokens, ahead)
        began = perf_counter()
        logits = _logits(target, tokens, (), ahead)
        verified = perf_counter()
        with _located(target, tokens, logits):
            token, _ = chooser.pick(logits[0])
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
    stopping: Stopping,
    rule: Rule,
) -> Iterator[Round]:
    """Speculative decoding: draft as many tokens as `control` says, verify in ONE forward, commit, rewind.

    Leviathan et al. 2211.17192. `after_prompt` is what `prefill` returned. With a lossless rule the tokens are those
    of `autoregressive` (greedy), or follow the same distribution.
    """
    tokens = list(prompt_ids)  # ours: the caller's list is never touched, and drafters see it read-only
    view = TokenView(tokens)
    control.start(target.vocab.raw_bytes(tokens))
    for index in count():
        if stopping.reason or _out_of_context(target, tokens, stopping):
            return
        began = perf_counter()
        # a round commits up to k + 1 tokens: no drafts beyond the length limit, the context or the widest forward
        k = control.draft_length()
        limit = min(k, stopping.remaining - 1, target.caps.n_ctx - len(tokens), target.caps.max_width - 1)
        picker = _StoppingPicker(chooser, control) if control.reads_drafts else chooser
        with _located(target, tokens):
            proposal = _proposed(drafter, view, limit, picker)
        drafted = perf_counter()
        ahead = after_prompt if index == 0 else None
        _require_state(target, tokens, ahead)
        logits = _logits(target, tokens, proposal.ids, ahead)
        verified = perf_counter()
        with _located(target, [*tokens, *proposal.ids], logits):
            n_accepted, next_id, accept_prob = rule(logits, proposal, chooser)
        committed = stopping.admit((*proposal.ids[:n_accepted], next_id))
        tokens.extend(committed)
        n_accepted = min(n_accepted, len(committed))  # fewer when generation ended inside the accepted drafts
        control.update(Outcome(len(proposal.ids), n_accepted, target.vocab.decode_bytes(committed)))
        accepted_at = perf_counter()
        # The target holds the old tokens and all drafts. Keep the committed ones but the newest, so that its state
        # is again "tokens so far, less one"; the drafter does the same with its own.
        target.rewind(target.n_past - (len(tokens) - 1))
        drafter.commit(view)
        rewound = perf_counter()
        yield Round(
            index=index,
            k=len(proposal.ids),
            n_accepted=n_accepted,
            draft_ids=proposal.ids,
            committed_ids=committed,
            accept_prob=accept_prob[: len(committed)],  # those that the generation reached
            draft_s=drafted - began,
            verify_s=verified - drafted,
            rewind_s=rewound - accepted_at,
            other_s=accepted_at - verified,
            forward_s=verified - drafted + proposal.forward_s,
            width=len(proposal.ids) + (ahead is None),
        )


class _StoppingPicker:
    """Picks for a drafter until the controller has seen enough of its rows in this round."""

    def __init__(self, chooser: Chooser, control: Controller) -> None:
        self._chooser, self._control, self._position = chooser, control, 0
        self.enough = False

    def pick(self, logits: np.ndarray) -> tuple[int, np.ndarray | None] | None:
        picked = self._chooser.pick(logits)  # first, so that a row that is not finite is refused
        return picked if self._goes_on(logits) else None

    def best(self, logits: np.ndarray) -> int | None:
        token = self._chooser.best(logits)
        return token if self._goes_on(logits) else None

    def _goes_on(self, logits: np.ndarray) -> bool:
        if not self._control.goes_on(self._position, Belief.of(logits)):
            return False
        self.enough = self._control.enough(self._position)
        self._position += 1
        return True

    def copies(self, support: int, k: int) -> int:
        return self._control.worth_copying(support, k)


def _proposed(drafter: Drafter, view: TokenView, limit: int, picker: Picker) -> Proposal:
    """Up to `limit` drafts; more than that would be recorded under a wrong K, or overrun the context."""
    proposal = drafter.propose(view, limit, picker) if limit > 0 else Proposal(())
    if len(proposal.ids) > max(limit, 0):
        raise InputError(f"drafter {drafter.name} proposed {len(proposal.ids)} tokens, but was asked for {limit}")
    return proposal


def _out_of_context(target: LanguageModel, tokens: list[int], stopping: Stopping) -> bool:
    """End the generation when the next forward would not fit; says so in `stopping.reason`."""
    if len(tokens) > target.caps.n_ctx:
        stopping.reason = "context"
    return stopping.reason is not None


def _logits(target: LanguageModel, tokens: list[int], drafts: tuple[int, ...], ahead: np.ndarray | None) -> np.ndarray:
    """Logits after the newest token and after each draft, `(len(drafts) + 1, vocab)`, in one forward.

    `ahead` is the first of these rows, where the newest token is in the state already.
    """
    if ahead is None:
        return target.forward([tokens[-1], *drafts])
    return np.concatenate([ahead, target.forward(drafts)]) if drafts else ahead


def _require_state(target: LanguageModel, tokens: list[int], ahead: np.ndarray | None) -> None:
    """The loops' invariant, checked each round: another user of the model would silently change the output."""
    held = len(tokens) - (ahead is None)
    if target.n_past != held:
        raise StateError(
            f"the state of {target.name} holds {target.n_past} tokens, but this generation left {held} "
            "there: the model was used by another generation, or by the drafter. Load it once for each"
        )


class _located:
    """Adds position and layer to a NonFiniteLogits that passes through (a class: cheaper than a generator).

    `fed` are the tokens whose last forward gave `logits`, a row for each of the last of them; without logits the
    drafter was at work.
    """

    def __init__(self, target: LanguageModel, fed: list[int], logits: np.ndarray | None = None) -> None:
        self._target, self._fed, self._logits = target, fed, logits

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, NonFiniteLogits):
            return
        if self._logits is None:
            where = f"while drafting, after {len(self._fed)} tokens"
            raise NonFiniteLogits(f"{where}: {error}. The draft model is broken or overflows") from error
        bad = ~np.isfinite(self._logits.max(axis=1))
        tokens = self._fed[: len(self._fed) - len(bad) + int(np.argmax(bad)) + 1]
        layer = self._target.locate_nonfinite(tokens)
        source = f"the first module with a non-finite output is {layer}" if layer else "no module can be named here"
        raise NonFiniteLogits(
            f"{self._target.name}, after {len(tokens)} tokens: {error}; {source}. "
            "Try dtype=float32 or check the weights"
        ) from error
