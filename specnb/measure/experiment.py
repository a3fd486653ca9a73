"""What every experiment does alike: choose prompts, report progress, and put what was made into a record."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
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
from specnb.measure.baseline import time_baseline
from specnb.measure.cost import CURVE_REPEATS, Cost, crosses_engines, verify_costs
from specnb.params import Params
from specnb.prompts import PACKS, Prompt, digest_prompts, prompts
from specnb.provenance import provenance
from specnb.records import Generation, RunRecord
from specnb.store import run_id, save

Progress = Callable[[int, int, str], None]
"""Called before each step, such as a generation, with (steps done, steps in all, the step that begins)."""
LINE_S = 30.0
"""Seconds between two lines of progress where stderr is a file or a pipe."""
FEW = 5
"""Up to this number of steps, each step gets a line."""
Opened = TypeVar("Opened", LanguageModel, Drafter)


def silent(_done: int, _total: int, _what: str) -> None:
    """A progress callback that does nothing."""


class ProgressBar(tqdm):
    """A progress bar on stderr, removed at the end: `with ProgressBar() as progress: run(params, progress=progress)`.

    In a file or a pipe it writes a line for each of FEW steps, else one every LINE_S seconds. In a notebook it is
    plain text rather than a widget: an executed notebook then carries no widget state.
    """

    def __init__(self) -> None:
        in_kernel = "ipykernel" in type(sys.stderr).__module__  # a notebook draws bars, but is no terminal
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
    """The first `prompts_per_category` prompts of each of these categories, of where `params.prompts` says.

    Then the first `of_each_pack` of each pack, whose name is their category.
    """
    chosen = [p for name in names for p in prompts(name, limit=params.prompts_per_category, source=params.prompts)]
    for pack in PACKS if of_each_pack else ():
        chosen += [p.model_copy(update={"category": pack}) for p in prompts(source=pack, limit=of_each_pack)]
    return chosen


def first_of_each(chosen: Sequence[Prompt], n: int) -> list[Prompt]:
    """The first `n` prompts of each category."""
    categories = [prompt.category for prompt in chosen]
    return [prompt for i, prompt in enumerate(chosen) if categories[:i].count(prompt.category) < n]


def turns_of(talk: Prompt) -> list[Prompt]:
    """A conversation cut behind each question of the user, in order."""
    return [talk.model_copy(update={"messages": talk.messages[:end]}) for end in range(1, len(talk.messages) + 1, 2)]


def check_prompts(target: LanguageModel, chosen: Sequence[Prompt], max_new_tokens: int) -> None:
    """Refuse a prompt that cannot be encoded or does not fit with its answer: before the run, not an hour into it."""
    room = target.caps.n_ctx - max_new_tokens
    for prompt in chosen:
        try:
            n = len(prompt_ids(target, prompt))
        except InputError as error:
            raise InputError(f"prompt {prompt.id} cannot be used with {target.name}: {error}") from error
        if n > room:
            raise CapacityError(f"prompt {prompt.id} has {n} tokens, {target.name} room for {room}: raise n_ctx")


def models_of(target: LanguageModel, drafters: Sequence[Drafter]) -> list[dict[str, Any]]:
    """Role, name and file digest of what was run; the digest is None for what is not one file on this machine."""
    models = []
    for role, name in [("target", target.name), *(("drafter", d.name) for d in drafters if d.model)]:
        file = None
        with suppress(InputError):  # made in memory: its name opens nothing
            file = local_file(parse(name))
        models.append({"role": role, "id": name, "sha256": file and file_digest(file)})
    return models


class Experiment:
    """A running experiment: its parameters, its models, and the results so far.

    As a context it closes what it opened, and saves what was generated before an error as the record of a failed run;
    the error goes on.
    """

    models: list[dict[str, Any]] | None = None
    """As of `models_of`, where these are others than the target and the drafters'."""

    def __init__(
        self,
        name: str,
        params: Params,
        chosen: Sequence[Prompt],
        target: LanguageModel | None = None,
        drafters: Sequence[Drafter] = (),
    ) -> None:
        """`target` stays None where no model of the package runs."""
        self.name, self.params, self.chosen = name, params, chosen
        self.target, self.drafters = target, list(drafters)
        self.generations: list[Generation] = []
        self.measured: dict[str, Any] = {}
        self._started, self._opened = Neighbours(), ExitStack()

    def opened(self, model: Opened) -> Opened:
        """Return a model or drafter that is closed when the experiment ends, and whose number of threads is steady."""
        self._opened.enter_context(steady_threads(model, getattr(model, "model", None)))
        return self._opened.enter_context(closing(model))

    def open_target(self, name: str, **options: Any) -> LanguageModel:
        """Open the target as `load` does."""
        self.target = self.opened(load(name, **options))
        return self.target

    def open_drafter(self, name: str) -> Drafter:
        """Open a drafter for the target. Raises what `load_drafter` does."""
        return self.opened(load_drafter(name, self.target, strict=True).drafter)

    def time_forwards(self, k_max: int) -> dict[str, Cost]:
        """Return what rounds with each drafter cost; note the curve, the baseline, and whose c compares engines."""
        target, repeats = self.target, CURVE_REPEATS[self.params.budget]
        curve, c = verify_costs(target, self.drafters, k_max, repeats=repeats)
        self.measured |= {
            "cs": c,
            "verify_curve": curve.model_dump(mode="json"),
            "c_across_engines": [d.name for d in self.drafters if crosses_engines(target, d)],
            "baseline": time_baseline(target, self.chosen[:5]).model_dump(),
        }
        return {d.name: Cost(curve, c[d.name], of_target=d.model is None) for d in self.drafters}

    @contextmanager
    def leave_out(self, name: str) -> Iterator[None]:
        """Go on behind the block without a drafter that does not fit, and note in `left_out` why."""
        try:
            yield
        except SpecnbError as error:
            self.measured.setdefault("left_out", {})[name] = str(error)

    def decode(self, prompt: Prompt, **settings: Any) -> Generation:
        """Generate with the target, as long and from the seed that the parameters say."""
        usual = {"max_new_tokens": self.params.max_new_tokens, "seed": self.params.seed, "strict": True}
        return generate(self.target, prompt, **(usual | settings))

    def record(self, error: BaseException | None = None) -> RunRecord:
        """The record of a run that ends now with what was made up to here; `error` is what ended it."""
        params, extra, target = self.params.model_dump(mode="json"), None, self.target
        if target is not None:
            contention = self._started.during(target.caps, self.generations)._asdict()
            origin = {"weights": weights_origin(target.name)}
            caps = asdict(target.caps) | {"certificate": target.caps.certificate} | origin
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
                except SpecnbError as unsaved:  # must not hide what ended the run
                    error.add_note(f"what was generated before is lost: {unsaved}")
