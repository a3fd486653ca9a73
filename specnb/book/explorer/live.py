"""The explorer's models: records its trace, measures what forwards cost, and runs a setting for real."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import NamedTuple, Self

from specnb.book.explorer.tables import POLICIES, Setting
from specnb.decode.generate import generate
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.bench import Interval, bootstrap, rate_ratio
from specnb.measure.cost import CostCurve, verify_costs
from specnb.measure.experiment import Progress, models_of, record_of, silent
from specnb.measure.ksweep import baseline_of
from specnb.measure.recording import Recording, Trace, record, require_followed
from specnb.params import ExplorerParams
from specnb.prompts import Prompt, prompts
from specnb.records import Generation, RunRecord

EXPERIMENT = "09_explorer"
LIVE_PROMPTS = 3
"""Prompts of one live run: each is generated plainly and with drafts."""


class Recorded(NamedTuple):
    """What `Workbench.record` found. `c` holds T_draft(1)/T_target(1) for every drafter of the trace."""

    record: RunRecord
    trace: Trace
    curve: CostCurve
    c: dict[str, float]


class Workbench:
    """Opened models. Only one thread at a time may use a model, so `record` and `run_live` wait for each other."""

    def __init__(
        self, target: LanguageModel, drafters: Sequence[Drafter], chosen: Sequence[Prompt], params: ExplorerParams
    ) -> None:
        self.target, self.chosen, self.params = target, tuple(chosen), params
        self.drafters = {d.name: d for d in drafters}
        self._in_use = threading.Lock()

    @classmethod
    def open(cls, params: ExplorerParams) -> Self:
        """Load target and drafters. Raises what `specnb.load` and `load_drafter` raise; then nothing stays open."""
        chosen = [p for content in params.contents for p in prompts(content, limit=params.prompts_per_category)]
        with ExitStack() as opened:
            target = load(params.target)
            opened.callback(target.close)
            drafters = []
            for name in params.drafters:
                drafters.append(load_drafter(name, target, strict=True).drafter)
                opened.callback(drafters[-1].close)
            require_followed(drafters)
            opened.pop_all()
            return cls(target, drafters, chosen, params)

    def record(self, progress: Progress | None = None) -> Recorded:
        """Generate every prompt plainly at every temperature, follow every drafter along it, and time forwards."""
        p, started = self.params, datetime.now(UTC)
        generations: list[Generation] = []
        recordings_of_all: list[Recording] = []
        total = len(self.chosen) * len(p.temperatures)
        with self._in_use:
            curve, c = verify_costs(self.target, list(self.drafters.values()), p.k_max, seed=p.seed)
            for temperature in p.temperatures:
                for prompt in self.chosen:
                    (progress or silent)(len(generations), total, f"{prompt.id}, temperature {temperature:g}")
                    recorded = record(
                        self.target, list(self.drafters.values()), [prompt], temperature=temperature, k_max=p.k_max,
                        max_new_tokens=p.max_new_tokens, seed=p.seed,
                    )  # fmt: skip
                    for generation, recordings in recorded:
                        generations.append(generation)
                        recordings_of_all += recordings
        (progress or silent)(total, total, "done")
        measured = {"verify_curve": curve.model_dump(mode="json"), "c": c}
        models = models_of(self.target, list(self.drafters.values()))
        kept = record_of(EXPERIMENT, p, self.chosen, self.target, models, started, generations, measured)
        return Recorded(kept, Trace(tuple(recordings_of_all)), curve, c)

    def run_live(
        self, setting: Setting, progress: Progress = silent, cancelled: Callable[[], bool] = lambda: False
    ) -> list[Generation]:
        """Each prompt of the setting's content plainly and with drafts, in turn; stops between generations if asked.

        A warm-up is not kept. Raises what `generate` raises.
        """
        mine = [p for p in self.chosen if setting.content in ("all", p.category)]
        mine = mine[:: max(1, len(mine) // LIVE_PROMPTS)][:LIVE_PROMPTS]  # from different contents
        common = {"temperature": setting.temperature, "seed": self.params.seed}
        drafter = self.drafters[setting.drafter]
        drafting = {"drafter": drafter, "k": POLICIES[setting.policy](setting)}
        generations: list[Generation] = []
        with self._in_use:
            for extra in ({}, {"drafter": drafter, "k": 1}):
                generate(self.target, mine[0], max_new_tokens=4, **common, **extra)
            runs = [(p, extra) for p in mine for extra in ({}, drafting)]
            for prompt, extra in runs:
                if cancelled():
                    break
                progress(len(generations), len(runs), f"{prompt.id}, {'with drafts' if extra else 'plainly'}")
                generations.append(
                    generate(self.target, prompt, max_new_tokens=self.params.max_new_tokens, **common, **extra)
                )
        return generations

    def close(self) -> None:
        """Free target and drafters."""
        with self._in_use:
            for thing in (*self.drafters.values(), self.target):
                thing.close()


def live_speedup(generations: Sequence[Generation]) -> Interval:
    """Decoding speed-up of the drafted generations over their plain ones, with a bootstrap over prompts.

    Raises InputError when nothing was decoded.
    """
    drafted = [g for g in generations if g.drafter]
    bases = [baseline_of(tuple(g for g in generations if not g.drafter), g) for g in drafted]
    rows = [(g.n_decoded, g.decode_s, b.n_decoded, b.decode_s) for g, b in zip(drafted, bases, strict=True)]
    if not any(row[0] for row in rows) or not any(row[2] for row in rows):
        raise InputError(
            f"{len(generations)} live generations hold no decoded token after the first: ask for longer ones"
        )
    return bootstrap(rows, rate_ratio)
