"""The trace and the models of the explorer: open or record a trace, and run a setting live."""

import threading
from datetime import UTC, datetime
from functools import cached_property

from specnb.book.explorer.tables import ALL, SHIPPED, TRACE, Setting, TracedRun, stored
from specnb.book.style import readable
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.machine import Neighbours
from specnb.measure.auto import route_between
from specnb.measure.experiment import Progress, prompts_of, silent
from specnb.measure.follow import require_followed
from specnb.measure.policies import AUTO
from specnb.measure.recording import Trace
from specnb.measure.sweep import Sweep
from specnb.params import ExplorerParams
from specnb.prompts import Prompt
from specnb.records import Generation, RunRecord
from specnb.store import run_id, save

EXPERIMENT = "09_explorer"
LIVE_PROMPTS = 3
"""Number of prompts in a live run; each runs with plain and with speculative decoding."""


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
        drafters = [
            load_drafter(name, self.target, strict=True).drafter for name in self.params.drafters
        ]
        require_followed(drafters)
        return drafters

    def open_trace(self, progress: Progress = silent) -> TracedRun:
        """Return the trace that `params.trace` selects, with a record of this run, and save both.

        If the trace is from an earlier run, the record names that run in `provenance["source"]`,
        and `params` become those of that run. Raises the errors of `stored`, `save`, `load` and
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
            when = f"of {origin.ended:%Y-%m-%d %H:%M} UTC, reopened"
            now = datetime.now(UTC)
            name = run_id(EXPERIMENT, asked)
            fields = {
                "experiment": EXPERIMENT,
                "run_id": name,
                "params": asked,
                "started": now,
                "ended": now,
            }
            named = origin.model_dump(mode="json", include={*fields})
            # the generations belong to the earlier run; queries must not count them twice
            fields |= {"generations": (), "provenance": origin.provenance | {"source": named}}
            record = origin.model_copy(update=fields)
        run.trace.save(save(record) / TRACE)
        line = f"run {origin.run_id} {when}: {len(run.trace.recordings)} recordings of "
        line += f"{readable(origin.params['target'])} on {record.provenance['cpu']['model']}"
        if run.curve.busy:
            line += "; the machine was busy while forward passes were timed"
        return run._replace(record=record, origin=line)

    def record_trace(self, progress: Progress = silent) -> TracedRun:
        """Time forward passes, run plain decoding, and record every drafter along the texts.

        The record's `measurements` contain T(n), each drafter's c, and the baseline.
        """
        params = self.params
        study = Sweep(EXPERIMENT, params, self.chosen, self.target, self.drafters)
        with self._in_use, study:
            study.time_forwards(params.k_max)
            study.generate_plainly(self.chosen, params.samplings, progress)
            study.follow_drafters(params.k_max, progress)
        c = study.measured["c"] = study.measured["cs"]
        curve = study.costs[self.drafters[0].name].curve
        return TracedRun(study.record(), Trace(tuple(study.recordings)), curve, c)

    def run_live(
        self, setting: Setting, progress: Progress = silent, prompt: str = ""
    ) -> tuple[list[Generation], bool]:
        """Run prompts of the setting's content, plain and speculative interleaved, after a warm-up.

        A `prompt` runs in their place, in the chat template if they use it.

        Returns the generations (for each prompt the plain, then the speculative one), and whether
        the machine was busy. Raises the errors of `load`, `load_drafter` and `generate`.
        """
        chosen = [p for p in self.chosen if setting.content in (ALL, p.category)]
        # from different contents
        chosen = chosen[:: max(1, len(chosen) // LIVE_PROMPTS)][:LIVE_PROMPTS]
        if prompt.strip():
            messages = [{"role": "user", "content": prompt}]
            form = {"messages": messages} if chosen[0].messages else {"text": prompt}
            chosen = [Prompt(id="yours", category="yours", **form)]
        with self._in_use:
            drafter = next(d for d in self.drafters if d.name == setting.drafter)
            if setting.policy == AUTO:  # with newly measured costs
                drafted = {"drafter": route_between(self.target, [drafter])}
            else:
                drafted = {"drafter": drafter, "k": setting.controller(self.params.k_max)}
            study = Sweep(EXPERIMENT, self.params, chosen, self.target, [drafter])
            started = Neighbours()
            sampling = (setting.temperature, setting.top_p)
            study.run_live(lambda _temperature: {"drafted": drafted}, chosen, [sampling], progress)
            busy = started.during(self.target.caps, study.generations).busy
        ids = [prompt.id for prompt in chosen]
        return sorted(study.generations, key=lambda g: (ids.index(g.prompt_id), g.drafter)), busy
