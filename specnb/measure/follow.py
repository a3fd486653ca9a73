"""Record a drafter: follow it once along the tokens that the target generated plainly.

A draft model takes ONE teacher-forced pass, trained heads take one pass of the target, and a
deterministic drafter takes one proposal per position.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from specnb.decode.control import WatchingPicker, top_probability
from specnb.decode.sampling import Sampling, argmax
from specnb.draft.base import Drafter, TokenView
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm.base import Capabilities, LanguageModel
from specnb.measure.recording import Recording
from specnb.records import Generation

PASS_WIDTH = 64
"""Number of rows of logits that a teacher-forced pass holds in memory at once."""


def require_followed(drafters: Sequence[Drafter]) -> None:
    """Raise InputError for drafters that cannot be followed, and for two with the same name."""
    names = [drafter.name for drafter in drafters]
    for drafter in drafters:
        name = drafter.name
        if (n := names.count(name)) > 1:
            raise InputError(f"{name} is the name of {n} drafters: pass each drafter once")
        if drafter.chooses_k:
            raise InputError(
                f"{name} chooses its drafter and K: it is replayed along the recordings of its arms"
            )
        if drafter.tree_nodes:
            raise InputError(f"{name} drafts trees: only chains are replayed")
        if not drafter.nested:
            raise InputError(
                f"{name} drafts different tokens for each K: only nested draft tokens are replayed"
            )


def follow(
    target: LanguageModel,
    drafters: Sequence[Drafter],
    generation: Generation,
    *,
    k_max: int = 24,
    max_new_tokens: int,
) -> list[Recording]:
    """Return a recording of each drafter along `generation`, a plain generation by `target`.

    If wide forward passes of a draft model round differently from single steps, narrower passes are
    used. Live, the model processes two tokens in one pass after a fully accepted round; only there
    may it draft another token at a near-tie.

    Raises InputError for drafters that cannot be followed, and for a generation with draft tokens,
    by another target, or with another `max_new_tokens`.
    """
    if (
        generation.k
        or generation.target != target.name
        or generation.max_new_tokens not in (None, max_new_tokens)
    ):
        raise InputError(
            f"got K = {generation.k}, {generation.max_new_tokens} tokens at most, "
            f"by {generation.target}, "
            f"expected a plain generation by {target.name} with {max_new_tokens}"
        )
    require_followed(drafters)
    text = _Text(target, generation, k_max, max_new_tokens)
    sampled = not text.sampling.greedy
    if sampled and any(isinstance(drafter, ModelDrafter) or drafter.target for drafter in drafters):
        text.read_chances()
    recordings = []
    for drafter in drafters:
        if isinstance(drafter, ModelDrafter):
            recording = text.follow_model(drafter.model)
        elif drafter.target and sampled:
            recording = text.follow_heads(drafter)
        else:
            recording = text.follow_proposals(drafter)
        round_steps = drafter.at_once * drafter.n_heads
        recordings.append(recording._replace(drafter=drafter.name, round_steps=round_steps))
    return recordings


class _Text:
    """A plain generation. Each `follow_…` method returns a recording, without name and steps."""

    def __init__(
        self, target: LanguageModel, generation: Generation, k_max: int, max_new_tokens: int
    ) -> None:
        self.target = target
        self.generation = generation
        self.token_ids = generation.token_ids
        self.sampling = Sampling(generation.temperature, generation.top_k, generation.top_p)
        n_prompt = len(generation.prompt_ids)
        widest = min(k_max, target.caps.max_width - 1)
        last = min(max_new_tokens - 1, target.caps.n_ctx - n_prompt)
        self.limits = [max(0, min(widest, last - at)) for at in range(len(self.token_ids))]
        """Largest draft length of a round that starts after i generated tokens, for each i."""
        shared = {"prompt_id", "category", "target", "temperature", "top_p", "seed", "token_ids"}
        self.blank = Recording(
            **generation.model_dump(include=shared),
            drafter="",
            k_max=k_max,
            max_new_tokens=max_new_tokens,
            prompt=target.vocab.raw_bytes(generation.prompt_ids),
            pieces=tuple(map(target.vocab.piece, self.token_ids)),
            keep=(),
            offered=(),
        )

    def read_chances(self) -> None:
        """Record p_target of each sampled token."""
        rows = _rows_along(self.target, self.generation, PASS_WIDTH)
        chances = [_chance(self.sampling, row, self.token_ids[at]) for at, row in rows]
        self.blank = self.blank._replace(p_target=tuple(chances))

    def follow_heads(self, drafter: Drafter) -> Recording:
        """Record trained heads that sample a chain, from their rows at every position."""
        rounds = []
        for at, tokens in self._along(drafter):
            # heads draft nothing in the first round
            offered = min(self.limits[at], drafter.n_heads) if at else 0
            true_ids = self.token_ids[at : at + offered]
            rows = drafter.rows(tokens, true_ids) if true_ids else []
            keep = tuple(
                _kept(_chance(self.sampling, row, token), p_target)
                for row, token, p_target in zip(
                    rows, true_ids, self.blank.p_target[at:], strict=False
                )
            )
            rounds.append((keep, offered, tuple(map(top_probability, rows))))
        return self._recording(rounds, "keep", "offered", "head_beliefs")

    def follow_proposals(self, drafter: Drafter) -> Recording:
        """Record the proposal of a deterministic drafter at every position."""
        fields = ["keep", "offered", "drafts"]
        if drafter.target:
            fields.append("head_beliefs")
        elif not drafter.model:  # with a model, there are no matches, which some controllers read
            fields.append("support")
        rounds = []
        for at, tokens in self._along(drafter):
            watch = WatchingPicker()
            limit = self.limits[at]
            ids = drafter.propose(tokens, limit, watch).ids if limit else ()
            if watch.beliefs and not drafter.target:
                raise InputError(
                    f"{drafter.name} picks tokens from logits: "
                    "only draft models and heads may do so here"
                )
            keep = tuple(float(d == x) for d, x in zip(ids, self.token_ids[at:], strict=False))
            drafts = tuple(map(self.target.vocab.piece, ids))
            evidence = tuple(watch.beliefs) if drafter.target else watch.support
            rounds.append((keep, len(ids), drafts, evidence))
        return self._recording(rounds, *fields)

    def _recording(self, rounds: Sequence[tuple], *fields: str) -> Recording:
        """Return a recording with `fields`, from their values at every position."""
        columns = zip(*rounds, strict=True)  # empty for a text without tokens
        return self.blank._replace(**dict(zip(fields, columns, strict=False)))

    def _along(self, drafter: Drafter) -> Iterator[tuple[int, TokenView]]:
        """Yield the position of each generated token, and the tokens before it.

        Heads read hidden states of wide passes. Live, the passes are narrower, and the states are
        the same if the engine is bit-identical at all widths.
        """
        tokens = list(self.generation.prompt_ids)
        view = TokenView(tokens)
        fed = self.token_ids[:-2]
        width = _pass_width(self.target.caps)
        drafter.start(view)
        if drafter.target:
            self.target.reset()
            self.target.forward(tokens, n_logits=1)
        for at, token in enumerate(self.token_ids):
            n_fed = at - 2  # heads read the hidden state of the token before the newest
            if drafter.target and n_fed >= 0 and n_fed % width == 0:
                self.target.forward(fed[n_fed : n_fed + width], n_logits=0)
            yield at, view
            tokens.append(token)
            if not drafter.target:
                drafter.commit(view)

    def follow_model(self, model: LanguageModel) -> Recording:
        """Record a draft model by its rows along the text."""
        greedy = self.sampling.greedy
        scale = Sampling(1.0) if greedy else self.sampling
        chances = []  # P(accepted) of each token
        beliefs = []
        best_ids = []
        likely = []
        for at, row in _rows_along(model, self.generation, _pass_width(model.caps)):
            token = self.token_ids[at]
            best_id = argmax(row)
            q_draft = _chance(scale, row, token)
            chances.append(
                float(best_id == token) if greedy else _kept(q_draft, self.blank.p_target[at])
            )
            beliefs.append(top_probability(row))
            best_ids.append(best_id)
            likely.append(q_draft)
        # if the model's context is full, it drafts nothing
        room = model.caps.n_ctx + 1 - len(self.generation.prompt_ids)
        offered = tuple(max(0, min(limit, room - at)) for at, limit in enumerate(self.limits))
        keep = tuple(tuple(chances[at : at + n]) for at, n in enumerate(offered))
        drafts = []
        for at, row in enumerate(keep if greedy else ()):
            n = row.index(0.0) + 1 if 0.0 in row else len(row)  # up to the first rejected one
            drafts.append(tuple(map(self.target.vocab.piece, best_ids[at : at + n])))
        return self.blank._replace(
            keep=keep,
            offered=offered,
            beliefs=tuple(beliefs),
            q_draft=tuple(likely),
            drafts=tuple(drafts),
        )


def _chance(sampling: Sampling, row: np.ndarray, token: int) -> float:
    """Return the probability of a token, given a row of logits."""
    return float(sampling.probabilities(row)[token])


def _kept(q_draft: float, p_target: float) -> float:
    """Return P(the draft token is accepted | the true token is committed); see `measure.replay`."""
    # p_target may be 0 if a wide pass rounds differently from the step in which the token was drawn
    return min(1.0, q_draft / p_target) if p_target > 0 else float(q_draft > 0)


def _pass_width(caps: Capabilities) -> int:
    """Return the largest pass width, up to PASS_WIDTH, that gives the rows of single steps."""
    return PASS_WIDTH if caps.lossless_dtype else max(1, min(PASS_WIDTH, caps.same_bits_up_to))


def _rows_along(
    model: LanguageModel, generation: Generation, width: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (position, row of logits) for every generated token that fits, by teacher forcing."""
    model.reset()
    room = model.caps.n_ctx - len(generation.prompt_ids)
    if room < 0 or not generation.token_ids:
        return
    if generation.prompt_ids[:-1]:
        model.forward(generation.prompt_ids[:-1], n_logits=0)
    fed = [generation.prompt_ids[-1], *generation.token_ids[:-1][:room]]
    for start in range(0, len(fed), width):
        yield from enumerate(model.forward(fed[start : start + width]), start)
