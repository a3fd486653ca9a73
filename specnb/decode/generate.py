"""Generate from one prompt. Notebooks and the command line call `generate`."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from specnb.decode import loop
from specnb.decode.accept import LOSSY, RULES, Rule, require_trees, rule_of
from specnb.decode.control import Controller, FixedK
from specnb.decode.loop import Stopping, StopRules
from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import Drafter
from specnb.draft.load import open_pair
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import Vocabulary, require_same
from specnb.records import Generation, Round

if TYPE_CHECKING:
    from specnb.prompts import Prompt

DRAFT_LENGTH = 4
"""Default K for drafters of chains."""

PromptLike: TypeAlias = "str | Prompt | Sequence[int] | Sequence[Mapping[str, str]]"
"""Text, a prompt of `specnb.prompts`, token ids, or chat messages with role and content."""


def checked_prompt(prompt: PromptLike) -> str | list[Any] | tuple[int, ...]:
    """Return a prompt as text, messages or token ids. Raises InputError for anything else."""
    if hasattr(prompt, "messages"):
        prompt = [m.model_dump() for m in prompt.messages] if prompt.messages else prompt.text
    if isinstance(prompt, str):
        return prompt
    try:
        parts = [*prompt]
        is_chat = parts and all(isinstance(part, Mapping) for part in parts)
        return parts if is_chat else tuple(map(index, parts))
    except TypeError as error:
        raise InputError(
            f"got the prompt {prompt!r:.200}, expected text, messages or token ids (int)"
        ) from error


def encode_open(model: LanguageModel, text: str) -> list[int]:
    """Return the token ids of a text to continue, without the EOS that some tokenizers append."""
    ids = model.encode(text)
    after = model.encode("")[model.vocab.add_bos :]  # what the tokenizer appends to any text
    return ids[: -len(after)] if ids[-len(after) :] == after else ids


def prompt_ids(target: LanguageModel, prompt: PromptLike) -> tuple[int, ...]:
    """Return the token ids of a prompt.

    Messages are rendered by the chat template, and ids are unchanged. Text starts with BOS if the
    tokenizer adds it; empty text becomes BOS if the model has one. No EOS is appended. Raises
    InputError for an invalid prompt, and for messages without a chat template.
    """
    prompt = checked_prompt(prompt)
    vocab = target.vocab
    if isinstance(prompt, tuple):
        return prompt
    if isinstance(prompt, str):
        return tuple(encode_open(target, prompt)) or ((vocab.bos,) if vocab.bos is not None else ())
    from specnb.lm import chat

    ids = encode_open(target, chat.render_chat(vocab, prompt))
    # Many templates write the BOS token, and `encode` adds it again. Models are trained with one.
    if vocab.add_bos and ids[:2] == [vocab.bos] * 2:
        del ids[0]
    return tuple(ids)


class TextStream:
    """Decodes tokens during generation to pieces `(text, whether it is an accepted draft token)`.

    An incomplete character waits for its remaining bytes. Stop strings are not removed.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._characters = getincrementaldecoder("utf-8")("replace")

    def pieces(self, newest: Round) -> Iterator[tuple[str, bool]]:
        for at, token in enumerate(newest.committed_ids):
            piece = b"" if token in self._vocab.eog else self._vocab.piece(token)
            yield self._characters.decode(piece), at < newest.n_accepted


def checked_settings(
    k: int | Controller | None = None,
    max_new_tokens: int = StopRules.max_new_tokens,
    stop: str | Sequence[str] = (),
    ignore_eog: bool = False,
    **sampling: Any,
) -> tuple[Sampling, StopRules, Controller | None]:
    """Check the settings of `generate` before a model is opened.

    The returned controller is None if `k` is None. Raises InputError.
    """
    settings = Sampling(**sampling)
    rule_of(settings)
    control = k if isinstance(k, Controller) or k is None else FixedK(k)
    strings = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    return settings, StopRules(max_new_tokens, strings, ignore_eog), control


def generate(
    target: LanguageModel | str | Path,
    prompt: PromptLike,
    *,
    drafter: Drafter | LanguageModel | str | None = None,
    k: int | Controller | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    rule: str | Rule = "token",
    stop: str | Sequence[str] = (),
    ignore_eog: bool = False,
    strict: bool = False,
    on_round: Callable[[Round], object] | None = None,
) -> Generation:
    """Continue `prompt` with `target`, speculatively if there is a `drafter`.

    `k` is the number of draft tokens per round, or a controller that chooses it in each round
    (`decode.control`). The default is 4. A drafter of trees drafts its whole tree by default, or
    its best `k` nodes; the drafter `auto` chooses K itself, at most `k`.

    `target` and `drafter` are opened models or names (see `specnb.load`). A drafter may also be a
    name in `registry.DRAFTERS`, such as "lookup", "self" or "medusa". Models opened here are closed
    here. If a drafter cannot be loaded, or its logits are not finite, generation continues without
    it, and `fallback` contains the reason; with `strict`, both are errors. `rule` is "token",
    "block" or "typical" (lossy), or an `accept.Rule`. `on_round` is called after each round; its
    time is not counted.

    Raises InputError, CapacityError, VocabularyMismatch, NonFiniteLogits, and what `load` raises
    for the target.

    >>> from specnb.lm import toy
    >>> target = toy.markov(8, seed=1)  # a model with 8 tokens; or a name such as "smollm2-135m"
    >>> drafted = generate(target, [0], drafter="lookup", k=4, max_new_tokens=16)
    >>> [r.n_accepted for r in drafted.rounds], round(drafted.tau, 2)
    ([0, 0, 0, 4, 4, 2], 2.67)
    >>> drafted.token_ids == generate(target, [0], max_new_tokens=16).token_ids
    True
    """
    sampling, limits, control = checked_settings(
        k,
        max_new_tokens,
        stop,
        ignore_eog,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        rule=rule,
        seed=seed,
    )
    if not hasattr(prompt, "messages"):
        prompt = checked_prompt(prompt)
    rule = sampling.rule
    rule_name = rule if isinstance(rule, str) else getattr(rule, "__name__", type(rule).__name__)
    named = rule_name in RULES
    with open_pair(target, drafter, strict=strict) as (target, drafter, fallback):
        drafter = _fitting(target, drafter)
        nodes = drafter.tree_nodes if drafter else 0
        if control is None:
            control = FixedK(nodes or (drafter.chooses_k if drafter else 0) or DRAFT_LENGTH)
        elif control is k and nodes:  # controllers only choose the length of chains
            raise InputError(
                f"{control.name!r} is for chains, and {drafter.name} drafts trees: "
                "give k, or tree=chain"
            )
        ids = prompt_ids(target, prompt)
        stopping = Stopping(limits, target.vocab)
        ends = {"chooser": Chooser(sampling), "stopping": stopping}
        began = perf_counter()
        after_prompt = loop.prefill(target, ids, drafter)
        prefill_s = perf_counter() - began
        if drafter is None:
            running = loop.autoregressive(target, ids, after_prompt, **ends)
        else:
            running = loop.speculative(
                target, drafter, ids, after_prompt, control=control, strict=strict, **ends
            )
        rounds = []
        shown_s = 0.0
        for newest in running:
            rounds.append(newest)
            if on_round is not None:
                paused = perf_counter()
                on_round(newest)
                shown_s += perf_counter() - paused
        wall_s = perf_counter() - began - shown_s
        tokens = tuple(token for r in rounds for token in r.committed_ids)
        return Generation(
            prompt_id=getattr(prompt, "id", ""),
            category=getattr(prompt, "category", ""),
            target=target.name,
            drafter=drafter.name if drafter else "",
            k=control.k_max if drafter else 0,
            controller=control.name if drafter and control is k else "",
            translation=str(drafter.translation or "") if drafter else "",
            **vars(sampling)
            | {"rule": ("greedy" if sampling.greedy and named else rule_name) if drafter else ""},
            max_new_tokens=limits.max_new_tokens,
            lossless=not drafter or (named and rule_name not in LOSSY),
            prompt_ids=ids,
            token_ids=tokens,
            text=stopping.cut(target.vocab.decode(t for t in tokens if t not in target.vocab.eog)),
            rounds=tuple(rounds),
            wall_s=wall_s,
            prefill_s=prefill_s,
            stop_reason=stopping.reason,
            fallback=fallback or stopping.drafting_failed,
        )


def _fitting(target: LanguageModel, drafter: Drafter | LanguageModel | None) -> Drafter | None:
    """Check that the drafter fits the target, and return it; an opened model becomes a drafter."""
    if drafter is None:
        return None
    if isinstance(drafter, LanguageModel):
        from specnb.draft.model import ModelDrafter  # other drafters do not need it

        drafter = ModelDrafter(drafter)
    if not isinstance(drafter, Drafter):
        raise InputError(
            f"got a {type(drafter).__name__}, "
            "expected a DrafterBase (draft.base), a model or a name"
        )
    if drafter.model is target:
        raise InputError(
            f"{target.name} cannot be its own drafter, because it has one state: "
            "load it a second time"
        )
    if drafter.target not in (None, target):
        raise InputError(
            f"{drafter.name} reads hidden states of another opened {drafter.target.name}: "
            "open the target only once"
        )
    if drafter.tree_nodes:
        require_trees(target)
    if drafter.vocab is not None:
        require_same(target.vocab, drafter.vocab, names=(target.name, drafter.name))
    return drafter
