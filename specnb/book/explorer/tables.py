"""The numbers of the explorer, computed from a trace: exact counts once, then costs for them.

The counts of every recording at every K form one array, so a new cost curve takes one matrix
product. A policy with memory is simulated along its recordings. This module uses no widget and no
model.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.book.tables import ALL, check_table
from specnb.decode.control import Controller
from specnb.errors import InputError
from specnb.io import JsonObject, project_dir
from specnb.measure.cost import NAMED, Cost, CostCurve
from specnb.measure.intervals import FEWEST, ends
from specnb.measure.machines import machines
from specnb.measure.policies import AUTO, FIXED, MOST, POLICIES
from specnb.measure.recording import Trace
from specnb.measure.replay import (
    ReplayStep,
    expected_counts,
    route,
    seconds_of,
    split,
    tally,
    walk_recording,
)
from specnb.records import RunRecord
from specnb.store import load_record

THIS_MACHINE = "machine of the trace, measured"
CUSTOM = "custom"
FREE = Cost.straight(CUSTOM, 1, 0)
"""A machine on which draft tokens and wider forward passes take no extra time."""
WALKS = 40
"""Number of simulations: at temperature > 0, each of a few recordings is simulated repeatedly."""
TRACE = "trace.parquet"
"""The file of the trace, in the folder of its run."""
SHIPPED = "smollm2-135m"
"""The trace in `data/traces` that notebook 09 and the page of `specnb publish` open."""


class Setting(NamedTuple):
    """The position of all controls. `k` is the draft length, or a policy's maximum.

    A setting selects the recordings with its temperature and top_p; `speedup` and the page
    interpolate between two temperatures.
    """

    drafter: str
    temperature: float
    content: str
    policy: str
    k: int
    machine: Cost
    top_p: float = 1.0

    @property
    def place(self) -> JsonObject:
        """The fields that the page compares: all but `k` and `machine`."""
        fields = self._asdict()
        del fields["k"], fields["machine"]
        return fields

    def controller(self, k_max: int) -> Controller:
        """Return a new controller of the policy, with the maximum `k_max` if it ignores `k`."""
        policy = POLICIES[self.policy]
        return policy.make(self.machine, self.k if "k" in policy.depends else k_max)


class Tables:
    """A trace with its exact counts. Building it takes about a second for a thousand recordings.

    Counts are arrays `(…, 3 k_max + 6)`: see `replay.split`. Recordings with fewer than two tokens
    are dropped, because they contain no decoding. Raises InputError if none is left.
    """

    def __init__(self, trace: Trace) -> None:
        self.recordings = tuple(r for r in trace.recordings if r.n_tokens > 1)
        if not self.recordings:
            raise InputError(
                f"none of {len(trace.recordings)} recordings has two tokens: "
                "record longer generations"
            )
        self.k_max = min(r.k_max for r in self.recordings)
        self.drafters = tuple(dict.fromkeys(r.drafter for r in self.recordings))
        # only draft models have beliefs
        self.models = {r.drafter for r in self.recordings if r.beliefs}
        self.contents = tuple(dict.fromkeys(r.category for r in self.recordings))
        self.samplings = tuple(
            sorted({(r.temperature, r.top_p) for r in self.recordings}, key=lambda s: (s[0], -s[1]))
        )
        self.n_tokens = np.array([r.n_tokens for r in self.recordings])
        self.exact = expected_counts(self.recordings, range(self.k_max + 1))

    def seconds(self, counts: np.ndarray, machine: Cost) -> np.ndarray:
        """Return the predicted decoding time in plain steps."""
        return seconds_of(counts, machine) / machine.step_s

    def chosen(self, setting: Setting) -> list[int]:
        """Return the indices of the recordings that a setting selects."""
        return [
            i
            for i, r in enumerate(self.recordings)
            if (r.drafter, r.temperature, r.top_p)
            == (setting.drafter, setting.temperature, setting.top_p)
            and setting.content in (ALL, r.category)
        ]

    def policies(self, drafter: str) -> list[str]:
        """Return the policies that can be replayed from the K and the inputs in the recordings."""
        recordings = [r for r in self.recordings if r.drafter == drafter]
        reads = any(r.beliefs or r.head_beliefs for r in recordings)
        copies = any(r.support for r in recordings)
        fits = [
            name
            for name, policy in POLICIES.items()
            if policy.make(FREE, self.k_max).k_max <= self.k_max
            and (reads or not policy.reads_beliefs)
        ]
        return fits + [AUTO] * (reads or copies)

    def sweep(self, setting: Setting) -> pd.DataFrame:
        """Return one row per fixed K from 0, without simulation, in the columns of `predict`."""
        at = self.chosen(setting)
        return self._predicted(at, self.exact[at], setting.machine)

    def predict(self, setting: Setting, prompt_ids: Sequence[str] = ()) -> pd.Series:
        """Return the prediction for a setting's policy on all or some prompts: a row of `sweep`.

        Raises InputError if nothing was recorded.
        """
        walks = self.walks(setting)
        if prompt_ids:
            walks = [walk for walk in walks if self.recordings[walk[0]].prompt_id in prompt_ids]
        if not walks:
            raise InputError(f"none of the prompts {', '.join(prompt_ids)} is in the trace")
        at, counts, _ = zip(*walks, strict=True)
        return self._predicted(at, np.array(counts)[:, None], setting.machine).iloc[0]

    def speedup(self, setting: Setting, prompt_ids: Sequence[str]) -> float:
        """Return the speedup of `predict`, interpolated between temperatures as on the page.

        NaN outside of the recorded temperatures. Raises InputError if nothing was recorded.
        """
        recorded = [temperature for temperature, top_p in self.samplings if top_p == setting.top_p]
        speeds = [
            self.predict(setting._replace(temperature=t), prompt_ids).speedup for t in recorded
        ]
        return np.exp(np.interp(setting.temperature, recorded, np.log(speeds), np.nan, np.nan))

    def walks(self, setting: Setting) -> list[tuple[int, np.ndarray, list[ReplayStep]]]:
        """Return index, counts and rounds of each recording that a setting selects.

        Counts are exact for a fixed K and otherwise means over simulations; the rounds are those of
        the first simulation. Raises InputError if nothing was recorded.
        """
        at = self.chosen(setting)
        if not at:
            raise InputError(
                f"no recording of {setting.drafter}, {setting.content}, at {setting.temperature:g}"
            )
        group = [self.recordings[i] for i in at]
        runs = []
        for seed in range(max(1, WALKS // len(at)) if setting.temperature else 1):
            # policies learn from one generation to the next, so each simulation starts anew
            if setting.policy == AUTO:
                costs = {setting.drafter: setting.machine}
                runs.append(
                    [
                        text.steps
                        for text in route(group, costs, k_max=min(MOST, self.k_max), seed=seed)
                    ]
                )
            else:
                controller = setting.controller(self.k_max)
                rng = np.random.default_rng([0, seed])
                runs.append([walk_recording(recording, controller, rng) for recording in group])
        if setting.policy == FIXED:
            counts = self.exact[at, setting.k]
        else:
            walks = zip(group, *runs, strict=True)
            counts = [
                np.mean([tally(text, steps, self.k_max) for steps in drawn], axis=0)
                for text, *drawn in walks
            ]
        return [*zip(at, counts, runs[0], strict=True)]

    def _predicted(self, at: Sequence[int], counts: np.ndarray, machine: Cost) -> pd.DataFrame:
        """Return totals over the prompts `at` of counts `(prompts, K, …)`, with `bench.ends`."""
        n_tokens = self.n_tokens[[*at], None]
        plain = n_tokens - 1.0  # the prefill computes the first token
        seconds = self.seconds(counts, machine)
        value = plain.sum() / seconds.sum(0)
        low = high = value * np.nan
        if len(at) >= FEWEST:
            low, high = ends(value, (plain.sum() - plain) / (seconds.sum(0) - seconds))
        rounds, drafted, accepted, _ = split(counts.sum(0))[1].T
        return pd.DataFrame(
            {
                "drafted": drafted,
                "accepted": accepted,
                "tau": n_tokens.sum() / rounds,
                "speedup": value,
                "low": low,
                "high": high,
                "n_prompts": len(at),
                "n_tokens": n_tokens.sum(),
                "rounds": rounds,
            }
        )


class TracedRun(NamedTuple):
    """A run with its trace, its machine's T(n), and c of each drafter; `origin` describes it."""

    record: RunRecord
    trace: Trace
    curve: CostCurve
    c: Mapping[str, float]
    origin: str = ""


def stored(folder: str | Path) -> TracedRun:
    """Read a run of notebook 09 with its trace.

    `folder` is the name of a shipped trace, or a folder (relative to the checkout). Raises
    InputError for a folder without such a run.
    """
    shipped = project_dir() / "data" / "traces" / folder
    folder = shipped if shipped.is_dir() else project_dir() / folder
    record = load_record(folder)
    if not {"verify_curve", "c"} <= record.measurements.keys():
        raise InputError(
            f"{folder} is a run of {record.experiment}, "
            "which has no cost curve: give a 09_explorer run"
        )
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    return TracedRun(record, Trace.load(folder / TRACE), curve, record.measurements["c"])


def check_explorer(tables: Tables) -> pd.DataFrame:
    """Check facts that hold on every machine and for every model; columns check, of, hold, ok."""
    totals = split(tables.exact)[1]
    greedy = totals[[not r.temperature for r in tables.recordings]]
    rounds, drafted, accepted, _ = np.moveaxis(totals, -1, 0)
    # the last round adds no token of the target, or one
    over = rounds + accepted - tables.n_tokens[:, None]
    costs = (1.1, 0.1), (4.0, 0.5)
    cheap, expensive = (
        tables.seconds(tables.exact, Cost.straight(CUSTOM, *cost)) for cost in costs
    )
    rows = [
        ("greedy counts are whole numbers, for every K", np.isclose(greedy, np.round(greedy))),
        (
            "rounds and accepted drafts make up the tokens, for every K",
            (over > -1e-9) & (over < 1 + 1e-9),
        ),
        ("no more drafts are accepted than drafted, for every K", accepted <= drafted + 1e-9),
        ("without drafts every round commits one token", rounds[:, 0] == tables.n_tokens),
        ("more expensive forward passes never make a prediction faster", expensive >= cheap - 1e-9),
    ]
    return check_table([(name, held.size, held.sum()) for name, held in rows])


def sweep_k(tables: Tables, curve: CostCurve, c: Mapping[str, float]) -> pd.DataFrame:
    """Return one row per machine, drafter, content, temperature and fixed K from 0 (plain).

    The machine of the trace comes first, the others are simulated; settings with a top_p below 1
    are omitted. Columns: machine, busy, drafter, and those of `tables.k_sweep` that a replay
    provides. Speeds are predicted from T(1).
    """
    frames = []
    temperatures = [temperature for temperature, top_p in tables.samplings if top_p == 1]
    for drafter, temperature, content in product(
        tables.drafters, temperatures, (*tables.contents, ALL)
    ):
        here = Cost(curve, c[drafter], drafter not in tables.models, THIS_MACHINE)
        for machine in machines(here, NAMED).values():
            rows = tables.sweep(Setting(drafter, temperature, content, FIXED, 1, machine))
            frames.append(
                rows.drop(columns=["n_tokens", "rounds"]).assign(
                    machine=machine.name + " (simulated)" * (machine is not here),
                    busy=bool(machine.curve.busy),
                    drafter=drafter,
                    category=content,
                    temperature=temperature,
                    k=rows.index,
                    tokens_per_s=rows["speedup"] / curve.seconds(1),
                )
            )
    return pd.concat(frames, ignore_index=True)
