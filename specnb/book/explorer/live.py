"""The explorer's trace and models: opens a trace or records one, and runs a setting for real."""

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
from specnb.measure.experiment import Experiment, Progress, prompts_of, silent
from specnb.measure.follow import record, require_followed
from specnb.measure.pair import route_between
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
    """What the parameters of notebook 09 name; models are opened when they are first needed.

    Only one thread at a time may use a model, so `record` and `run_live` wait for each other.
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

    def trace(self, progress: Progress = silent) -> TracedRun:
        """Return the trace that `params.trace` asks for, with a record of this run.

        Trace and record lie in the results afterwards. The record of a run that takes the trace of another one names it
        in `provenance["source"]`, and `params` become those of the other. Raises what `stored`, `save`, `load` and
        `load_drafter` raise.
        """
        asked, source = self.params.model_dump(mode="json"), self.params.trace
        if source == "auto":  # whoever asks for anything wants their own
            source = SHIPPED if self.params == ExplorerParams(budget="quick") else "new"
        run = self.record(progress) if source == "new" else stored(source)
        record = origin = run.record
        when = "recorded now"
        if source != "new":
            origin = RunRecord(**dict(record) | record.provenance.get("source", {}))
            self.params = ExplorerParams.model_construct(**origin.params)
            when = f"of {origin.ended:%Y-%m-%d %H:%M} UTC, taken again"
            now, name = datetime.now(UTC), run_id(EXPERIMENT, asked)
            fields = {"experiment": EXPERIMENT, "run_id": name, "params": asked, "started": now, "ended": now}
            named = origin.model_dump(mode="json", include={*fields})
            # its generations are the other run's: no query counts them twice
            fields |= {"generations": (), "provenance": origin.provenance | {"source": named}}
            record = origin.model_copy(update=fields)
        run.trace.save(save(record) / TRACE)
        took, cpu = origin.ended - origin.started, record.provenance["cpu"]["model"]
        line = f"run {origin.run_id} {when}: {len(run.trace.recordings)} recordings of {origin.params['target']}"
        line += f" in {took.total_seconds():.0f} s on {cpu}"
        line += "; the machine was busy while forwards were timed" * bool(run.curve.busy)
        return run._replace(record=record, origin=line)

    def record(self, progress: Progress = silent) -> TracedRun:
        """Generate every prompt plainly with every sampling, follow every drafter along it, and measure costs.

        The record's `measurements` hold T(n), each drafter's c, and the baseline.
        """
        p, models = self.params, (self.target, self.drafters)
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
        """Some prompts of the setting's content plainly and with drafts, in turn; a warm-up is not kept.

        The second result says whether the machine was busy. Raises what `load`, `load_drafter` and `generate` raise.
        """
        chosen = [p for p in self.chosen if setting.content in (ALL, p.category)]
        chosen = chosen[:: max(1, len(chosen) // LIVE_PROMPTS)][:LIVE_PROMPTS]  # from different contents
        generations = []
        with self._in_use:
            drafter, p = next(d for d in self.drafters if d.name == setting.drafter), self.params
            plain = partial(
                generate, self.target, temperature=setting.temperature, top_p=setting.top_p, seed=p.seed,
                max_new_tokens=p.max_new_tokens,
            )  # fmt: skip
            if setting.policy == AUTO:  # by costs that are measured now
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
