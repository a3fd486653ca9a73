"""The explorer's models: records its trace, measures what forwards cost, and runs a setting for real."""

import threading
from collections.abc import Sequence
from typing import Self

from specnb.book.explorer.tables import ALL, POLICIES, Setting
from specnb.decode.generate import generate
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.lm.base import LanguageModel
from specnb.lm.busy import Neighbours
from specnb.lm.load import load
from specnb.measure.cost import CostCurve, verify_costs
from specnb.measure.experiment import Progress, models_of, prompts_of, record_of, silent
from specnb.measure.recording import Recording, Trace, record, require_followed
from specnb.params import ExplorerParams
from specnb.prompts import Prompt
from specnb.records import Generation, RunRecord

LIVE_PROMPTS = 3
"""Prompts of one live run: each is generated plainly and with drafts."""


class Workbench:
    """Opened models. Only one thread at a time may use a model, so `record` and `run_live` wait for each other."""

    def __init__(
        self, target: LanguageModel, drafters: Sequence[Drafter], chosen: Sequence[Prompt], params: ExplorerParams
    ) -> None:
        self.target, self.drafters, self.chosen, self.params = target, list(drafters), list(chosen), params
        self._in_use = threading.Lock()

    @classmethod
    def open(cls, params: ExplorerParams) -> Self:
        """Load target and drafters. Raises what `specnb.load` and `load_drafter` raise."""
        chosen = prompts_of(params, params.contents)
        target = load(params.target)
        drafters = [load_drafter(name, target, strict=True).drafter for name in params.drafters]
        require_followed(drafters)
        return cls(target, drafters, chosen, params)

    def record(self, progress: Progress = silent) -> tuple[RunRecord, Trace, CostCurve, dict[str, float]]:
        """Generate every prompt plainly at every temperature, follow every drafter along it, and time forwards.

        The last of the results holds c, T_draft(1)/T_target(1), for every drafter of the trace.
        """
        p, started = self.params, Neighbours()
        generations: list[Generation] = []
        recordings: list[Recording] = []
        todo = [(temperature, prompt) for temperature in p.temperatures for prompt in self.chosen]
        with self._in_use:
            curve, c = verify_costs(self.target, self.drafters, p.k_max)
            for temperature, prompt in todo:
                progress(len(generations), len(todo), f"{prompt.id}, temperature {temperature:g}")
                ((generation, followed),) = record(
                    self.target, self.drafters, [prompt], temperature=temperature, k_max=p.k_max,
                    max_new_tokens=p.max_new_tokens, seed=p.seed,
                )  # fmt: skip
                generations.append(generation)
                recordings += followed
        progress(len(todo), len(todo), "done")
        measured = {"verify_curve": curve.model_dump(mode="json"), "c": c}
        models = models_of(self.target, self.drafters)
        kept = record_of("09_explorer", p, self.chosen, self.target, models, started, generations, measured)
        return kept, Trace(tuple(recordings)), curve, c

    def run_live(self, setting: Setting, progress: Progress = silent) -> list[Generation]:
        """Each prompt of the setting's content plainly and with drafts, in turn; a warm-up is not kept.

        Raises what `generate` raises.
        """
        chosen = [p for p in self.chosen if setting.content in (ALL, p.category)]
        chosen = chosen[:: max(1, len(chosen) // LIVE_PROMPTS)][:LIVE_PROMPTS]  # from different contents
        drafter = next(d for d in self.drafters if d.name == setting.drafter)
        drafting = {"drafter": drafter, "k": POLICIES[setting.policy].controller(setting)}
        common = {"temperature": setting.temperature, "seed": self.params.seed}
        todo = [(prompt, extra) for prompt in chosen for extra in ({}, drafting)]
        generations: list[Generation] = []
        with self._in_use:
            for extra in ({}, {"drafter": drafter, "k": 1}):
                generate(self.target, chosen[0], max_new_tokens=4, **common, **extra)
            for prompt, extra in todo:
                progress(len(generations), len(todo), f"{prompt.id}, {'with drafts' if extra else 'plainly'}")
                tokens = self.params.max_new_tokens
                generations.append(generate(self.target, prompt, max_new_tokens=tokens, **common, **extra))
        return generations
