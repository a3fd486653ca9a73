"""Common parts of all experiments: choosing prompts, reporting progress, and recording results."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from math import inf
from time import perf_counter
from typing import Any, Self, TypeVar

from tqdm import tqdm

from specnb.decode.generate import generate, prompt_ids
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.errors import CapacityError, InputError, SpecnbError
from specnb.io import file_digest
from specnb.lm.base import LanguageModel
from specnb.lm.files import local_file, parse, weights_origin
from specnb.lm.load import load
from specnb.machine import Neighbours, steady_threads
from specnb.params import Params
from specnb.prompts import PACKS, Prompt, digest_prompts, prompts
from specnb.provenance import provenance
from specnb.records import Generation, RunRecord
from specnb.store import run_id, save

Progress = Callable[[int, int, str], None]
"""Called before each step, such as a generation, with (steps done, total steps, next step)."""
LINE_S = 30.0
"""Seconds between two lines of progress if stderr is a file or a pipe."""
FEW = 5
"""With at most this many steps, every step has a line."""
Opened = TypeVar("Opened", LanguageModel, Drafter)


def silent(_done: int, _total: int, _what: str) -> None:
    """Report no progress."""


class ProgressBar(tqdm):
    """A progress bar on stderr, removed at the end.

    Use it as `with ProgressBar() as progress: run(params, progress=progress)`.

    To a file or a pipe, it writes one line per step, or one every LINE_S seconds if there are more
    than FEW steps. In a notebook, it is plain text, because a widget would store its state there.
    """

    def __init__(self) -> None:
        in_kernel = "ipykernel" in type(sys.stderr).__module__  # no terminal, but bars work
        self._by_lines = not (in_kernel or sys.stderr.isatty())
        self._line_s = -inf
        bar = "{percentage:3.0f}% {bar:30} {n_fmt}/{total_fmt} {desc}"
        super().__init__(leave=False, disable=self._by_lines, bar_format=bar)

    def __call__(self, done: int, total: int, step: str) -> None:
        self.total, self.n = total, done
        self.set_description_str(step)
        if self._by_lines and (total <= FEW or perf_counter() - self._line_s >= LINE_S):
            self._line_s = perf_counter()
            sys.stderr.write(f"{done}/{total} {step}\n")

    def __exit__(self, kind, error, trace) -> None:
        if self._by_lines and not error:
            sys.stderr.write("done\n")
        super().__exit__(kind, error, trace)


def prompts_of(params: Params, names: Sequence[str], of_each_pack: int = 0) -> list[Prompt]:
    """Return the first `prompts_per_category` prompts of each category in `names`.

    They come from `params.prompts`. Adds the first `of_each_pack` prompts of each pack, with the
    pack's name as category.
    """
    chosen = []
    for name in names:
        chosen += prompts(name, limit=params.prompts_per_category, source=params.prompts)
    for pack in PACKS if of_each_pack else ():
        for prompt in prompts(source=pack, limit=of_each_pack):
            chosen.append(prompt.model_copy(update={"category": pack}))
    return chosen


def first_of_each(chosen: Sequence[Prompt], n: int) -> list[Prompt]:
    """Return the first `n` prompts of each category."""
    categories = [prompt.category for prompt in chosen]
    return [prompt for i, prompt in enumerate(chosen) if categories[:i].count(prompt.category) < n]


def turns_of(conversation: Prompt) -> list[Prompt]:
    """Return one prompt per message of the user, with the conversation up to it."""
    messages = conversation.messages
    ends = range(1, len(messages) + 1, 2)
    return [conversation.model_copy(update={"messages": messages[:end]}) for end in ends]


def check_prompts(target: LanguageModel, chosen: Sequence[Prompt], max_new_tokens: int) -> None:
    """Check before a run that all prompts can be encoded and fit the context with their answers.

    Raises InputError and CapacityError with the prompt's id.
    """
    limit = target.caps.n_ctx - max_new_tokens
    for prompt in chosen:
        try:
            n = len(prompt_ids(target, prompt))
        except InputError as error:
            raise InputError(
                f"prompt {prompt.id} cannot be used with {target.name}: {error}"
            ) from error
        if n > limit:
            raise CapacityError(
                f"prompt {prompt.id} has {n} tokens, "
                f"{target.name} takes at most {limit}: raise n_ctx"
            )


def models_of(target: LanguageModel, drafters: Sequence[Drafter]) -> list[dict[str, Any]]:
    """Return role, name and file digest of the models; the digest is None without a local file."""
    named = [("target", target.name)]
    named += [("drafter", drafter.name) for drafter in drafters if drafter.model]
    models = []
    for role, name in named:
        file = None
        with suppress(InputError):  # a model in memory has no file
            file = local_file(parse(name))
        models.append({"role": role, "id": name, "sha256": file and file_digest(file)})
    return models


@dataclass(eq=False)
class Experiment:
    """A running experiment: its parameters, its models, and the results so far.

    A context manager: on exit it closes the models. If an error ends the run, the results so far
    are saved as the record of a failed run. `target` is None if no model of the package runs.
    """

    name: str
    params: Params
    chosen: Sequence[Prompt]
    target: LanguageModel | None = None
    drafters: list[Drafter] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    models: list[dict[str, Any]] | None = None
    """Replaces `models_of(target, drafters)` in the provenance."""

    def __post_init__(self) -> None:
        self._started = Neighbours()
        self._opened = ExitStack()

    def opened(self, model: Opened) -> Opened:
        """Keep the number of threads of `model` constant, close it at the end, and return it."""
        self._opened.enter_context(steady_threads(model, getattr(model, "model", None)))
        return self._opened.enter_context(closing(model))

    def open_target(self, name: str, **options: Any) -> LanguageModel:
        """Open the target with `load`."""
        self.target = self.opened(load(name, **options))
        return self.target

    def open_drafter(self, name: str) -> Drafter:
        """Open a drafter for the target. Raises what `load_drafter` does."""
        return self.opened(load_drafter(name, self.target, strict=True).drafter)

    def decode(self, prompt: Prompt, **settings: Any) -> Generation:
        """Generate with the target, by default with the parameters' length and seed."""
        defaults = {
            "max_new_tokens": self.params.max_new_tokens,
            "seed": self.params.seed,
            "strict": True,
        }
        return generate(self.target, prompt, **(defaults | settings))

    def record(self, error: BaseException | None = None) -> RunRecord:
        """Return the record of the results so far; `error` is the error that ended the run."""
        params = self.params.model_dump(mode="json")
        target = self.target
        extra = None
        if target is not None:
            caps = asdict(target.caps)
            caps["certificate"] = target.caps.certificate
            caps["weights"] = weights_origin(target.name)
            contention = self._started.during(target.caps, self.generations)._asdict()
            extra = {"target": caps, "vocab_size": target.vocab.size, "contention": contention}
        return RunRecord(
            run_id=run_id(self.name, params),
            experiment=self.name,
            params=params,
            provenance=provenance(
                seeds={"seed": self.params.seed},
                models=self.models or models_of(target, self.drafters),
                prompts_digest=digest_prompts(self.chosen) if self.chosen else None,
                extra=extra,
            ),
            started=self._started.utc,
            ended=self._started.utc + timedelta(seconds=self._started.age_s()),
            generations=tuple(self.generations),
            measurements=self.measured,
            status="failed" if error else "completed",
            error=f"{type(error).__name__}: {error}" if error else None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind, error, _trace) -> None:
        with self._opened:
            if error and self.generations:
                try:
                    save(self.record(error))
                except SpecnbError as unsaved:  # must not hide the error that ended the run
                    error.add_note(f"The generations before it were not saved: {unsaved}")
