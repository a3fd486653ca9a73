"""Following drafters along a generation: one pass each, from which `measure.replay` answers every K.

The tokens are generated once, plainly. A draft model is then followed in ONE teacher-forced pass, a deterministic
drafter with one proposal a position.

Live, drafts behind a wrong one are made and thrown away. A replay needs them only to know how many a controller that
reads drafts would have made, and they are the dearest part of a recording: single steps, on a path that no other round
shares. So they are followed no further than somebody asks (`Astray`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heapreplace

import numpy as np

from specnb.decode.control import Belief, Controller
from specnb.decode.generate import PromptLike, generate
from specnb.decode.loop import NOTHING
from specnb.decode.sampling import Sampling, argmax
from specnb.draft.base import Drafter, TokenView, tree_nodes
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm.base import Capabilities, LanguageModel
from specnb.measure.recording import Recording
from specnb.measure.replay import Step, rounds
from specnb.records import Generation

PASS_WIDTH = 64
"""Rows of logits held at once in a teacher-forced pass."""


def pass_width(caps: Capabilities) -> int:
    """How many tokens a forward may hold and still give the rows of single steps, which live drafts come from."""
    return PASS_WIDTH if caps.lossless_dtype else max(1, min(PASS_WIDTH, caps.same_bits_up_to))


def record(
    target: LanguageModel,
    drafters: Sequence[Drafter],
    prompts: Sequence[PromptLike],
    *,
    temperature: float = 0.0,
    k_max: int = 24,
    max_new_tokens: int = 128,
    seed: int = 0,
    ignore_eog: bool = False,
    astray: bool = False,
) -> Iterator[tuple[Generation, list[Recording]]]:
    """Generate each prompt once with the target alone and follow every drafter along it.

    Yields the plain generation and a Recording per drafter. `astray` follows wrong greedy drafts of a draft model as
    well, as far as any controller may read (so it takes far longer): only how much controllers that stop within a
    block would waste depends on it. Raises what `generate` raises.
    """
    for prompt in prompts:
        generation = generate(
            target, prompt, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, ignore_eog=ignore_eog
        )
        yield (
            generation,
            follow(target, drafters, generation, k_max=k_max, max_new_tokens=max_new_tokens, astray=astray),
        )


def require_followed(drafters: Sequence[Drafter], *, only_k_max: bool = False) -> None:
    """Refuse, before any work, drafters that `follow` would get wrong, and two of one name. Raises InputError."""
    names = [drafter.name for drafter in drafters]
    for drafter in drafters:
        if names.count(drafter.name) > 1:
            raise InputError(f"{names.count(drafter.name)} of the drafters are called {drafter.name}: give each once")
        if tree_nodes(drafter):
            raise InputError(
                f"{drafter.name} drafts trees of {tree_nodes(drafter)} nodes, and only chains are replayed"
            )
        if getattr(drafter, "reads_hidden", False):
            raise InputError(
                f"{drafter.name} reads the target's hidden states, which no recording holds yet: measure it live "
                "(specnb generate, specnb bench medusa)"
            )
        if not (only_k_max or getattr(drafter, "nested", True)):
            raise InputError(
                f"{drafter.name} drafts text: its drafts for a smaller K are not the first of those for a larger one. "
                "Translate by tokens, or follow it with only_k_max, K by K"
            )


def follow(
    target: LanguageModel,
    drafters: Sequence[Drafter],
    generation: Generation,
    *,
    k_max: int = 24,
    max_new_tokens: int,
    astray: bool = False,
    walking: Mapping[str, Sequence[Controller]] | None = None,
    only_k_max: bool = False,
) -> list[Recording]:
    """A recording of each drafter along `generation`, which `target` generated plainly with `max_new_tokens` at most.

    A draft model is followed in single steps where wide forwards round otherwise (`pass_width`). Live it feeds two
    tokens at once after a fully accepted round; only there, in such a model, may a near-tie turn out otherwise.

    Wrong greedy drafts of a draft model are followed as far as any controller may read (`astray`), or only as far as
    those do that are `walking` along the recording, by the drafter's name; they learn from it. The recording then
    holds for every controller that reads no further, such as fresh ones that go the same way.

    What `StringMatch` proposes for a smaller K is not the beginning of what it proposes for `k_max` (its last token may
    be the beginning of a longer one), so it is followed only where no smaller K is asked of the recording:
    `only_k_max` says so.

    Raises InputError for drafters that cannot be followed, and for a generation that drafted, or that another target
    or another `max_new_tokens` made.
    """
    if generation.k or generation.target != target.name or generation.max_new_tokens not in (None, max_new_tokens):
        raise InputError(
            f"{generation.target} generated {generation.prompt_id!r} with K = {generation.k} and "
            f"max_new_tokens = {generation.max_new_tokens}: "
            f"expected a plain generation of {target.name} with max_new_tokens = {max_new_tokens}"
        )
    require_followed(drafters, only_k_max=only_k_max)
    sampling = Sampling(generation.temperature, generation.top_k, generation.top_p)
    p_true = None if sampling.greedy else _true_probabilities(target, generation, sampling)
    recordings = []
    for drafter in drafters:
        recording, paths = _follow(target, drafter, generation, sampling, p_true, k_max, max_new_tokens)
        walkers = (walking or {}).get(drafter.name, ())
        if paths is not None and (astray or walkers):
            if astray:
                paths.follow_all(recording.offered)
            together(rounds(recording, control, behind=paths.belief) for control in walkers)
            recording = recording._replace(astray=paths.beliefs)
        recordings.append(recording)
    return recordings


def _follow(
    target: LanguageModel,
    drafter: Drafter,
    generation: Generation,
    sampling: Sampling,
    p_true: np.ndarray | None,
    k_max: int,
    max_new_tokens: int,
) -> "tuple[Recording, Astray | None]":
    """A recording along the true tokens; for a greedy draft model also what can follow its wrong drafts."""
    n, true = len(generation.token_ids), generation.token_ids
    widest = min(k_max, target.caps.max_width - 1)
    most = [
        max(0, min(widest, max_new_tokens - i - 1, target.caps.n_ctx - len(generation.prompt_ids) - i))
        for i in range(n)
    ]
    support: tuple[int, ...] = ()
    beliefs: tuple[Belief, ...] = ()
    paths = None
    if isinstance(drafter, ModelDrafter):
        room = (
            drafter.model.caps.n_ctx + 1 - len(generation.prompt_ids)
        )  # a draft model's smaller context ends drafting
        offered = tuple(max(0, min(limit, room - i)) for i, limit in enumerate(most))
        kept, beliefs, wrong = _along(drafter.model, generation, sampling, p_true)
        keep = tuple(tuple(kept[i : i + offered[i]]) for i in range(n))
        if sampling.greedy:
            paths = Astray(drafter.model, generation, wrong, pass_width(drafter.model.caps))
    else:
        drafts = list(_proposals(drafter, generation, most))
        proposals = [ids for ids, _ in drafts]
        # without support and beliefs no controller that reads drafts is replayed
        support = () if any(n is None for _, n in drafts) else tuple(n for _, n in drafts)
        keep = tuple(tuple(map(float, map(int.__eq__, ids, true[i:]))) for i, ids in enumerate(proposals))
        offered = tuple(len(ids) for ids in proposals)
    recording = Recording(
        generation.prompt_id, generation.category, generation.target, drafter.name, sampling.temperature,
        generation.seed, k_max,
        max_new_tokens, target.vocab.raw_bytes(generation.prompt_ids), true, tuple(map(target.vocab.piece, true)),
        keep, offered, support, beliefs,
    )  # fmt: skip
    return recording, paths


def _proposals(
    drafter: Drafter, generation: Generation, most: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], int | None]]:
    """What a deterministic drafter proposes at every position, and how long its match was; None if it read rows."""
    tokens = list(generation.prompt_ids)
    view = TokenView(tokens)
    drafter.start(view)
    for limit, token in zip(most, generation.token_ids, strict=True):
        watch = _NoChoice()
        proposal = drafter.propose(view, limit, watch) if limit else NOTHING
        yield proposal.ids, watch.support
        tokens.append(token)
        drafter.commit(view)


class _NoChoice:
    """A deterministic drafter draws nothing; one that does would need a recording of its own kind."""

    enough = False

    def __init__(self) -> None:
        self.support: int | None = 0

    def copies(self, support: int, k: int) -> int:
        self.support = support
        return k

    def best(self, logits: np.ndarray) -> int:
        self.support = None
        return argmax(logits)

    def pick(self, logits: np.ndarray) -> tuple[int, np.ndarray | None] | None:
        raise InputError("this drafter chooses from logits: only draft models and deterministic drafters are replayed")


def _along(
    model: LanguageModel, generation: Generation, sampling: Sampling, p_true: np.ndarray | None
) -> tuple[list[float], tuple[Belief, ...], list[int | None]]:
    """For each generated token: the chance that the draft for it is kept, the row's belief, the wrong greedy draft."""
    kept, beliefs, wrong = [], [], []
    for at, row in rows_along(model, generation, pass_width(model.caps)):
        token = generation.token_ids[at]
        if sampling.greedy:
            draft = argmax(row)
            kept.append(float(draft == token))
            wrong.append(None if draft == token else draft)
        else:
            q_draft = float(sampling.probabilities(row)[token])
            # p_target may be 0 where a block rounds otherwise than the step that drew the token: then q/p is above 1
            kept.append(min(1.0, q_draft / float(p_true[at])) if p_true[at] > 0 else float(q_draft > 0))
        beliefs.append(Belief.of(row))
    return kept, tuple(beliefs), wrong


def _true_probabilities(target: LanguageModel, generation: Generation, sampling: Sampling) -> np.ndarray:
    """p_target of each generated token, `(n_tokens,)`."""
    return np.array(
        [
            sampling.probabilities(row)[generation.token_ids[at]]
            for at, row in rows_along(target, generation, PASS_WIDTH)
        ]
    )


def rows_along(model: LanguageModel, generation: Generation, width: int) -> Iterator[tuple[int, np.ndarray]]:
    """(position, logits row) for every generated token that fits, teacher-forced in blocks, from an empty state."""
    model.reset()
    room = model.caps.n_ctx - len(generation.prompt_ids)
    if room < 0 or not generation.token_ids:
        return
    if generation.prompt_ids[:-1]:
        model.forward(generation.prompt_ids[:-1], n_logits=0)
    fed = [generation.prompt_ids[-1], *generation.token_ids[: min(room, len(generation.token_ids) - 1)]]
    for start in range(0, len(fed), width):
        yield from enumerate(model.forward(fed[start : start + width]), start)


class Astray:
    """Paths of greedy drafts that leave `generation`: path i starts with the wrong draft for token i, if there is one.

    `model` holds true tokens of `generation` alone, and nobody else uses it meanwhile: where a path starts is found by
    rewinding. The last path, one more than there are tokens, is behind the last token. Asking from the front to the
    end feeds every true token once.
    """

    def __init__(self, model: LanguageModel, generation: Generation, wrong: Sequence[int | None], width: int) -> None:
        """`wrong[i]` is the draft for token i where it is wrong; true tokens are fed `width` at once, as live."""
        self._model, self._made, self._width = model, generation, width
        self._drafts = [[] if draft is None else [draft] for draft in wrong]
        self._starts = list(range(len(wrong)))  # generated tokens in front of each path
        if 0 < len(wrong) == len(generation.token_ids):
            self._drafts.append(
                [generation.token_ids[-1]] if wrong[-1] is None else []
            )  # a kept draft, and more behind it
            self._starts.append(len(wrong) - 1)
        self._beliefs: list[list[Belief]] = [[] for _ in self._drafts]
        self._on, self._fed = -1, 0  # the path that the state is on, and how many of its drafts it holds

    @property
    def beliefs(self) -> tuple[tuple[Belief, ...], ...]:
        """What was asked for: one row a draft, for every path."""
        return tuple(map(tuple, self._beliefs))

    def follow_all(self, offered: Sequence[int]) -> None:
        """Follow every path as far as any round goes: one that starts after i tokens has up to `offered[i]` drafts."""
        for path, (start, drafts) in enumerate(zip(self._starts, self._drafts, strict=True)):
            if drafts and offered[start] > 1:  # of two drafts, the first wrong, one row is behind it
                self.belief(path, offered[start] - 2)

    def belief(self, path: int, depth: int) -> Belief:
        """What the row says that follows `depth` + 1 drafts of a path. Raises what a forward raises."""
        drafts, beliefs = self._drafts[path], self._beliefs[path]
        if depth >= len(beliefs) and path != self._on:
            self._go_to(path)
        while depth >= len(beliefs):
            row = self._model.forward((drafts[self._fed],))[0]
            self._fed += 1
            if self._fed > len(beliefs):  # else the state only catches up
                beliefs.append(Belief.of(row))
                drafts.append(argmax(row))
        return beliefs[depth]

    def _go_to(self, path: int) -> None:
        """True tokens up to the start of the path in the state, and nothing else."""
        true = (*self._made.prompt_ids, *self._made.token_ids[: self._starts[path]])
        self._model.rewind(max(self._fed, self._model.n_past - len(true)))
        self._on, self._fed = path, 0
        for start in range(self._model.n_past, len(true), self._width):
            self._model.forward(true[start : start + self._width], n_logits=1)


def together(walks: Iterable[Iterator[Step]]) -> None:
    """Walk all to their ends, always the one that is furthest behind: what they ask comes in the order of the text."""
    waiting = [(0, index, walk) for index, walk in enumerate(walks)]  # a heap, by where the next round starts
    while waiting:
        _, index, walk = waiting[0]
        step = next(walk, None)
        if step is None:
            heappop(waiting)
        else:
            heapreplace(waiting, (step.at + step.n_accepted + 1, index, walk))
