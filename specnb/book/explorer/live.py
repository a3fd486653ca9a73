"""The trace and the models of the explorer: open or record a trace, and run a setting live."""

import threading
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import product

from specnb.book.explorer.tables import ALL, SHIPPED, TRACE, Setting, TracedRun, stored
from specnb.decode.generate import generate
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.machine import Neighbours
from specnb.measure.auto import route_between
from specnb.measure.experiment import Experiment, Progress, prompts_of, silent
from specnb.measure.follow import record, require_followed
from specnb.measure.policies import AUTO
from specnb.measure.recording import Trace
from specnb.params import ExplorerParams
from specnb.prompts import Prompt
from specnb.records import Generation, RunRecord
from specnb.store import run_id, save

EXPERIMENT = "09_explorer"
LIVE_PROMPTS = 3
"""Prompts of one live run: each is generated plainly and with drafts."""


class Workbench:
    """The models and prompts of notebook 09; models are opened on first use.

    Only one thread at a time may use a model, so `record_trace` and `run_live` wait for each other.
    """

    def __init__(self, params: ExplorerParams) -> None:
        self.params = params
        self._in_use = threading.Lock()

    @cached_property
    def chosen(self) -> list[Prompt]:
        return prompts_of(self.params, self.params.contents)

    @cached_property
    def target(self) -> LanguageModel:
        return load(self.params.target)

    @cached_property
    def drafters(self) -> list[Drafter]:
        drafters = [load_drafter(name, self.target, strict=True).drafter for name in self.params.drafters]
        require_followed(drafters)
        return drafters

    def open_trace(self, progress: Progress = silent) -> TracedRun:
        """Return the trace that `params.trace` asks for, with a record of this run, and save both.

        If the trace is that of an earlier run, the record names it in `provenance["source"]`, and
        `params` become those of the earlier run. Raises the errors of `stored`, `save`, `load` and
        `load_drafter`.
        """
        asked = self.params.model_dump(mode="json")
        source = self.params.trace
        if source == "auto":  # any parameter that is not the default needs a new trace
            source = SHIPPED if self.params == ExplorerParams(budget="quick") else "new"
        run = self.record_trace(progress) if source == "new" else stored(source)
        record = origin = run.record
        when = "recorded now"
        if source != "new":
            origin = RunRecord(**dict(record) | record.provenance.get("source", {}))
            self.params = ExplorerParams.model_construct(**origin.params)
            when = f"of {origin.ended:%Y-%m-%d %H:%M} UTC, taken again"
            now = datetime.now(UTC)
            name = run_id(EXPERIMENT, asked)
            fields = {"experiment": EXPERIMENT, "run_id": name, "params": asked, "started": now, "ended": now}
            named = origin.model_dump(mode="json", include={*fields})
            # the generations belong to the earlier run: no query counts them twice
            fields |= {"generations": (), "provenance": origin.provenance | {"source": named}}
            record = origin.model_copy(update=fields)
        run.trace.save(save(record) / TRACE)
        took = origin.ended - origin.started
        cpu = record.provenance["cpu"]["model"]
        line = f"run {origin.run_id} {when}: {len(run.trace.recordings)} recordings of {origin.params['target']}"
        line += f" in {took.total_seconds():.0f} s on {cpu}"
        if run.curve.busy:
            line += "; the machine was busy while forward passes were timed"
        return run._replace(record=record, origin=line)

    def record_trace(self, progress: Progress = silent) -> TracedRun:
        """Generate every prompt plainly with every sampling, record every drafter along it, measure costs.

        The record's `measurements` hold T(n), each drafter's c, and the baseline.
        """
        p = self.params
        models = (self.target, self.drafters)
        study = Experiment(EXPERIMENT, p, self.chosen, *models)
        recordings = []
        settings = p.model_dump(include={"seed", "k_max", "max_new_tokens"})
        with self._in_use:
            costs = study.time_forwards(p.k_max)
            for t, top_p in p.samplings:
                for generation, followed in record(*models, self.chosen, temperature=t, top_p=top_p, **settings):
                    study.generations.append(generation)
                    recordings += followed
                    place = f"temperature {t:g}, top-p {top_p:g}, after {generation.prompt_id}"
                    progress(len(study.generations), len(p.samplings) * len(self.chosen), place)
        c = study.measured["c"] = study.measured["cs"]
        return TracedRun(study.record(), Trace(tuple(recordings)), next(iter(costs.values())).curve, c)

    def run_live(self, setting: Setting, progress: Progress = silent) -> tuple[list[Generation], bool]:
        """Generate prompts of the setting's content plainly and with drafts, alternating, after a warm-up.

        The second result is whether the machine was busy. Raises the errors of `load`, `load_drafter`
        and `generate`.
        """
        chosen = [p for p in self.chosen if setting.content in (ALL, p.category)]
        chosen = chosen[:: max(1, len(chosen) // LIVE_PROMPTS)][:LIVE_PROMPTS]  # from different contents
        generations = []
        with self._in_use:
            drafter = next(d for d in self.drafters if d.name == setting.drafter)
            p = self.params
            plain = partial(
                generate,
                self.target,
                temperature=setting.temperature,
                top_p=setting.top_p,
                seed=p.seed,
                max_new_tokens=p.max_new_tokens,
            )
            if setting.policy == AUTO:  # with costs that are measured now
                drafted = partial(plain, drafter=route_between(self.target, [drafter]))
            else:
                drafted = partial(plain, drafter=drafter, k=setting.controller(p.k_max))
            for warm_up in (plain, partial(plain, drafter=drafter, k=1)):
                warm_up(chosen[0], max_new_tokens=4)
            started = Neighbours()
            for prompt, run in product(chosen, (plain, drafted)):
                progress(len(generations), 2 * len(chosen), prompt.id)
                generations.append(run(prompt))
            return generations, started.during(self.target.caps, generations).busy
