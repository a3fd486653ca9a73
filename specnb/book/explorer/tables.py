"""What the explorer shows, computed from a trace: exact counts once, then only costs are put on them.

The counts of every recording at every K are one array, so a new cost curve is one matrix product. A policy that looks
back is walked along its recordings once for each thing that it depends on. No widget and no model is known here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.decode.control import ConfidenceStop, Controller, EntropyStop, FixedK, RollingAcceptance
from specnb.decode.costaware import CostAware
from specnb.errors import InputError
from specnb.io import project_dir
from specnb.measure.bench import FEWEST, ends
from specnb.measure.content import ContentK
from specnb.measure.cost import NAMED, CostCurve, straight_curve
from specnb.measure.probe import known_machines
from specnb.measure.recording import Recording, Trace
from specnb.measure.replay import Counts, Step, counts_of, walk
from specnb.records import RunRecord
from specnb.registry import DRAFTERS
from specnb.store import load

ALL = "all"
FIXED = "fixed K"
THIS_MACHINE, CUSTOM = "machine of the trace, measured", "custom"
NUMBERS = ("drafted", "accepted", "tau", "speedup", "low", "high")
"""What tables show of a prediction."""
AT = 8
"""The width whose cost T(8)/T(1) stands for a curve."""
WALKS = 40
"""Recordings walked for one number: where a policy meets chance, few recordings are walked several times."""
SEED = 0
TRACE = "trace.parquet"
"""The file of the trace, beside the record of its run."""
SHIPPED = "smollm2-135m"
"""The trace in `data/traces` that notebook 09 opens on, and the page of `specnb publish` too."""


class Machine(NamedTuple):
    """What forwards cost, in plain steps: `ratios[n]` is T(n)/T(1), n = 0 to k_max + 1; c is T_draft(1)/T_target(1).

    `busy`: other processes disturbed the measurement.
    """

    name: str
    ratios: tuple[float, ...]
    at8: float
    c: float
    busy: bool = False

    @classmethod
    def measured(cls, curve: CostCurve, c: float, k_max: int, name: str = THIS_MACHINE) -> "Machine":
        return cls(name, tuple(curve.ratio(n) for n in range(k_max + 2)), curve.ratio(AT), c, bool(curve.busy))

    @classmethod
    def straight(cls, name: str, at8: float, c: float, k_max: int) -> "Machine":
        """T(n) on a line through T(1) and T(8)."""
        return cls.measured(straight_curve(name, at8), c, k_max, name)

    def bent(self, at8: float, c: float) -> "Machine":
        """A custom machine: the shape of this curve, stretched to pass through `at8` at width 8, with another c."""
        rise = self.at8 - 1
        if rise < 0.05 or min(self.ratios[1:]) < 1:  # stretching a flat curve would stretch its noise
            return Machine.straight(CUSTOM, at8, c, len(self.ratios) - 2)
        return Machine(CUSTOM, (0.0, *(1 + (r - 1) * (at8 - 1) / rise for r in self.ratios[1:])), at8, c, self.busy)


def machines(curve: CostCurve, c: float, k_max: int, *, is_model: bool) -> dict[str, Machine]:
    """That of the trace and the known ones, for one drafter; only a draft model costs what they say it does.

    What trained heads cost is a share of the target's own step, the same on any machine; a lookup costs nothing.
    """
    costs = {name: (at8, draft_c if is_model else c) for name, (at8, draft_c) in known_machines().items()}
    named = {name: Machine.straight(name, *cost, k_max) for name, cost in costs.items()}
    return {THIS_MACHINE: Machine.measured(curve, c, k_max), **named}


class Setting(NamedTuple):
    """A position of all sliders. `k` is the draft length, or the most that a policy which ends drafting may draft.

    Its temperature and top_p are those of recordings: between them nothing is interpolated.
    """

    drafter: str
    temperature: float
    content: str
    policy: str
    k: int
    machine: Machine
    top_p: float = 1.0

    @property
    def recorded(self) -> tuple[str, float, float]:
        """Drafter, temperature and top_p, which a recording has one of each."""
        return self.drafter, self.temperature, self.top_p

    @property
    def sampling(self) -> str:
        return sampling_label(self.temperature, self.top_p)


class Policy(NamedTuple):
    """A controller, and its name as an option of `specnb generate`.

    `depends` are the fields of a Setting that change its rounds, beside what is replayed.
    """

    controller: Callable[[Setting], Controller]
    option: str = ""
    depends: tuple[str, ...] = ()
    reads_beliefs: bool = False


POLICIES = {
    FIXED: Policy(lambda s: FixedK(s.k), depends=("k",)),
    "rolling acceptance": Policy(lambda s: RollingAcceptance(), "rolling"),
    "content K": Policy(lambda s: ContentK(), "content"),
    "cost-aware": Policy(lambda s: CostAware(s.machine.ratios, s.machine.c), "cost-aware", ("machine",)),
    "confidence": Policy(lambda s: ConfidenceStop(s.k, 0.5), "confidence", ("k",), reads_beliefs=True),
    "entropy": Policy(lambda s: EntropyStop(s.k), "entropy", ("k",), reads_beliefs=True),
}


def sampling_label(temperature: float, top_p: float) -> str:
    """A recorded setting in words."""
    return f"{temperature:g}" + " (greedy)" * (not temperature) + f", top-p {top_p:g}" * (top_p < 1)


class Predicted(NamedTuple):
    """What a setting, or each fixed K from 0, comes to over its prompts; numbers, or arrays `(k_max + 1,)`.

    The speed-up is over plain decoding; its interval is NaN for fewer than FEWEST prompts. `tested[…, j]` rounds
    reached draft j, `kept[…, j]` kept it.
    """

    speedup: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n_prompts: int
    n_tokens: int
    rounds: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    tested: np.ndarray
    kept: np.ndarray

    @property
    def tau(self) -> np.ndarray:
        return self.n_tokens / self.rounds


class Tables:
    """The trace, prepared. Building it takes a second for a thousand recordings; looking up costs next to nothing.

    Counts are arrays `(…, 3 k_max + 6)`: see `parts`. Recordings with fewer than two tokens hold no decoding and are
    left out. Raises InputError when nothing is left.
    """

    def __init__(self, trace: Trace) -> None:
        self.recordings = tuple(r for r in trace.recordings if r.n_tokens > 1)
        if not self.recordings:
            raise InputError(f"none of {len(trace.recordings)} recordings has two tokens: record longer generations")
        if trees := {r.drafter for r in self.recordings if r.parents}:
            raise InputError(f"{', '.join(trees)} drafted trees, which no policy walks along: record chains")
        self.k_max = min(r.k_max for r in self.recordings)
        self.drafters = tuple(dict.fromkeys(r.drafter for r in self.recordings))
        self.contents = tuple(dict.fromkeys(r.category for r in self.recordings))
        self.samplings = tuple(sorted({(r.temperature, r.top_p) for r in self.recordings}, key=lambda s: (s[0], -s[1])))
        self.n_tokens = np.array([r.n_tokens for r in self.recordings])
        self.exact = every_k(self.recordings, self.k_max)
        self._walked = lru_cache(512)(self._walk)  # bounded: dragging a cost slider asks for ever new ones

    def _row(self, counts: Counts) -> np.ndarray:
        widths = [counts.by_width.get(n, 0.0) for n in range(self.k_max + 2)]
        tested, kept = (np.pad(drafts, (0, self.k_max - len(drafts))) for drafts in (counts.tested, counts.kept))
        return np.array([*widths, counts.rounds, counts.drafted, counts.accepted, counts.steps, *tested, *kept])

    def parts(self, counts: np.ndarray) -> list[np.ndarray]:
        """Target calls by width `(…, k_max + 2)`; rounds, drafted, accepted, drafting steps; tested, kept by draft."""
        return np.split(counts, [self.k_max + 2, self.k_max + 6, 2 * self.k_max + 6], axis=-1)

    def seconds(self, counts: np.ndarray, machine: Machine) -> np.ndarray:
        """Predicted decoding time in plain steps."""
        widths, totals, _, _ = self.parts(counts)
        return widths @ np.asarray(machine.ratios) + totals[..., 3] * machine.c

    def chosen(self, setting: Setting, prompt_ids: Sequence[str] | None = None) -> list[int]:
        """Indices of the recordings that a setting is about. Raises InputError when there are none."""
        indices = [
            i
            for i, r in enumerate(self.recordings)
            if (r.drafter, r.temperature, r.top_p) == setting.recorded
            and setting.content in (ALL, r.category)
            and (prompt_ids is None or r.prompt_id in prompt_ids)
        ]
        if not indices:
            raise InputError(f"the trace holds no recording of {setting.content} with {setting.recorded}")
        return indices

    def is_model(self, drafter: str) -> bool:
        """Whether it is a draft model: only these have beliefs."""
        return any(r.beliefs for r in self.recordings if r.drafter == drafter)

    def policies(self, drafter: str) -> tuple[str, ...]:
        """Those that can be replayed: their K is recorded and, where they read beliefs, these are too."""
        reads = any(r.beliefs or r.head_beliefs for r in self.recordings if r.drafter == drafter)
        some = Setting(drafter, 0.0, ALL, FIXED, 1, Machine.straight(CUSTOM, 1.0, 0.0, self.k_max))
        fits = {name: p for name, p in POLICIES.items() if p.controller(some).k_max <= self.k_max}
        return tuple(name for name, p in fits.items() if reads or not p.reads_beliefs)

    def sweep(self, setting: Setting) -> Predicted:
        """Every fixed K from 0, exactly."""
        at = self.chosen(setting)
        return self._predicted(at, self.exact[at], setting.machine)

    def predict(self, setting: Setting, prompt_ids: Sequence[str] | None = None) -> Predicted:
        """What the setting's policy comes to, on some prompts or all."""
        at = self.chosen(setting, prompt_ids)
        return self._predicted(at, np.array([self.counts(setting, i) for i in at]), setting.machine)

    def counts(self, setting: Setting, index: int) -> np.ndarray:
        """What a recording comes to with the setting's policy: exact for a fixed K, else the mean of walks."""
        return self.exact[index, setting.k] if setting.policy == FIXED else self._walks(setting)[index][0]

    def steps(self, setting: Setting, index: int) -> list[Step]:
        """The rounds along one recording; where drafts are kept by chance, those of one seeded draw."""
        if setting.policy == FIXED:
            return walk(self.recordings[index], FixedK(setting.k), np.random.default_rng([SEED, index]))
        return self._walks(setting)[index][1]

    def _walks(self, setting: Setting) -> dict[int, tuple[np.ndarray, list[Step]]]:
        """`_walk`, remembered by what the rounds of the setting's policy depend on."""
        depends = POLICIES[setting.policy].depends
        return self._walked(setting._replace(**{f: None for f in ("k", "machine") if f not in depends}))

    def _walk(self, setting: Setting) -> dict[int, tuple[np.ndarray, list[Step]]]:
        """The mean counts and the first walk of every recording that a setting is about, by index."""
        at = self.chosen(setting)
        runs = []
        for seed in range(max(1, WALKS // len(at)) if setting.temperature else 1):
            # policies learn from one generation to the next, so each run begins anew
            controller, rng = POLICIES[setting.policy].controller(setting), np.random.default_rng([SEED, seed])
            runs.append([walk(self.recordings[i], controller, rng) for i in at])
        counts = [[self._row(counts_of(self.recordings[i], run[n])) for run in runs] for n, i in enumerate(at)]
        return {i: (np.mean(counts[n], axis=0), runs[0][n]) for n, i in enumerate(at)}

    def _predicted(self, at: Sequence[int], counts: np.ndarray, machine: Machine) -> Predicted:
        """Totals over the prompts `at`; the interval is over them, as `bench.ends` has it."""
        plain, seconds = self.n_tokens[at] - 1.0, self.seconds(counts, machine)  # the first token is the prefill's
        value, n = plain.sum() / seconds.sum(0), len(plain)
        low = high = value * np.nan
        if n >= FEWEST:
            low, high = ends(value, ((plain.sum() - plain) / (seconds.sum(0) - seconds).T).T)
        _, totals, tested, kept = self.parts(counts.sum(0))
        rounds, drafted, accepted, _ = np.moveaxis(totals, -1, 0)
        return Predicted(value, low, high, n, self.n_tokens[at].sum(), rounds, drafted, accepted, tested, kept)


def every_k(recordings: Sequence[Recording], k_max: int) -> np.ndarray:
    """What `fixed_k` counts, for all recordings and every K from 0 at once: `(recordings, k_max + 1, 3 k_max + 6)`.

    The last axis is as `Tables.parts` splits it. All recordings are gone along together, position by position.
    """
    n, ks, depths = np.array([r.n_tokens for r in recordings]), np.arange(k_max + 1), np.arange(k_max)
    shape = len(recordings), k_max + 1
    offered = np.zeros((len(n), n.max()), int)
    chances, n_chances = np.zeros((*offered.shape, k_max)), np.zeros_like(offered)
    for at, recording in enumerate(recordings):
        offered[at, : n[at]] = recording.offered
        for i, row in enumerate(recording.keep):
            row = row[: recording.offered[i]][:k_max]
            chances[at, i, : len(row)], n_chances[at, i] = row, len(row)
    starts = np.zeros((*shape, n.max() + k_max + 1))  # expected rounds that begin after i tokens
    starts[..., 0] = 1.0
    rows = np.arange(len(n))[:, None]
    once = np.array([[r.round_steps] for r in recordings])  # steps of every round that drafts, 0: each draft is one
    widths, totals, tested, kept = (np.zeros((*shape, size)) for size in (k_max + 2, 4, k_max, k_max))
    for i in range(n.max()):
        begun = starts[..., i] * (i < n[:, None])
        drafted, limit = np.minimum(ks, offered[:, i, None]), np.minimum(ks, n_chances[:, i, None])
        reached = np.cumprod(np.insert(chances[:, i], 0, 1.0, axis=1), axis=1)  # the first j drafts are kept
        rounds = begun[..., None] * (depths < limit[..., None])
        here, through = rounds * reached[:, None, :-1], rounds * reached[:, None, 1:]
        tested += here
        kept += through
        starts[..., i + 1 : i + k_max + 1] += here - through  # the correction is committed
        after = np.minimum(i + limit + 1, n[:, None])  # all kept: the bonus token, or the end
        starts[rows, ks, after] += begun * np.take_along_axis(reached, limit, axis=1)
        widths[rows, ks, drafted + (i > 0)] += begun  # the first round finds the prompt's last token fed
        steps = np.where(once, once * (drafted > 0), drafted)
        totals += np.stack([begun, begun * drafted, np.zeros(shape), begun * steps], axis=-1)
    totals[..., 2] = kept.sum(-1)
    return np.concatenate([widths, totals, tested, kept], axis=-1)


def stored(folder: str | Path) -> tuple[RunRecord, Trace, CostCurve, dict[str, float]]:
    """What notebook 09 left in the folder of a run: its record and trace, T(n) and c of each drafter.

    `folder` is the name of a shipped trace, or a folder, a relative one of the checkout. Raises InputError for one that
    holds no such run.
    """
    shipped = project_dir() / "data" / "traces" / folder
    folder = shipped if shipped.is_dir() else project_dir() / folder
    record = load(folder)
    if not {"verify_curve", "c"} <= record.measurements.keys():
        raise InputError(f"{folder} is a run of {record.experiment}, which timed no forwards: give one of 09_explorer")
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    return record, Trace.load(folder / TRACE), curve, record.measurements["c"]


def checks(tables: Tables) -> pd.DataFrame:
    """What must hold on every machine and for every model: check, of, hold, ok."""
    totals = tables.parts(tables.exact)[1]
    greedy = totals[[i for i, r in enumerate(tables.recordings) if not r.temperature]]
    rounds, drafted, accepted, _ = np.moveaxis(totals, -1, 0)
    over = rounds + accepted - tables.n_tokens[:, None]  # the last round has no token after its drafts, or one
    costs = [Machine.straight(CUSTOM, at8, c, tables.k_max) for at8, c in ((1.1, 0.1), (4.0, 0.5))]
    cheap, dear = (tables.seconds(tables.exact, machine) for machine in costs)
    rows = [
        ("greedy counts are whole numbers, for every K", np.isclose(greedy, np.round(greedy))),
        ("rounds and accepted drafts make up the tokens, for every K", (over > -1e-9) & (over < 1 + 1e-9)),
        ("no more drafts are accepted than drafted, for every K", accepted <= drafted + 1e-9),
        ("without drafts every round commits one token", rounds[:, 0] == tables.n_tokens),
        ("dearer forwards never make a prediction faster", dear >= cheap - 1e-9),
    ]
    frame = pd.DataFrame([(name, held.size, int(held.sum())) for name, held in rows], columns=["check", "of", "hold"])
    return frame.assign(ok=frame["of"] == frame["hold"])


def sweep(tables: Tables, curve: CostCurve, c: Mapping[str, float]) -> pd.DataFrame:
    """Every fixed K from 0 (plain decoding) on the trace's machine and the named ones, for each drafter and content.

    Settings with a top_p are left out. Columns: machine, busy, drafter, and those of `tables.k_sweep` that a replay
    knows. Speeds are predicted from T(1).
    """
    frames = []
    temperatures = [temperature for temperature, top_p in tables.samplings if top_p == 1]
    for drafter, temperature, content in product(tables.drafters, temperatures, (*tables.contents, ALL)):
        known = machines(curve, c[drafter], tables.k_max, is_model=tables.is_model(drafter))
        for machine in (known[name] for name in (THIS_MACHINE, *NAMED)):
            setting = Setting(drafter, temperature, content, FIXED, 1, machine)
            frame, n_prompts = fixed_ks(tables, setting), tables.sweep(setting).n_prompts
            frames.append(frame.assign(tokens_per_s=frame["speedup"] / curve.seconds(1), n_prompts=n_prompts))
    return pd.concat(frames, ignore_index=True)


def fixed_ks(tables: Tables, setting: Setting) -> pd.DataFrame:
    """Every fixed K from 0 for the setting's recordings and machine: a row each."""
    return _rows(setting, tables.sweep(setting), range(tables.k_max + 1))


def _rows(setting: Setting, p: Predicted, k: Sequence[float]) -> pd.DataFrame:
    place = {"machine": setting.machine.name, "busy": setting.machine.busy, "drafter": setting.drafter}
    place |= {"category": setting.content, "temperature": setting.temperature, "k": k}
    return pd.DataFrame(place | {name: np.atleast_1d(getattr(p, name)) for name in NUMBERS})


def csv(tables: Tables, setting: Setting) -> str:
    """What is shown of a setting as a file: `fixed_ks`, a row for another policy, and the machine in numbers."""
    frame, p, machine = fixed_ks(tables, setting).assign(policy=FIXED), tables.predict(setting), setting.machine
    if setting.policy != FIXED:
        frame = pd.concat([frame, _rows(setting, p, [p.drafted / p.rounds]).assign(policy=setting.policy)])
    return frame.assign(top_p=setting.top_p, at8=machine.at8, c=machine.c).to_csv(index=False, float_format="%.6g")


def command(tables: Tables, setting: Setting) -> str:
    """The command that measures a setting live: notebook 01 on its content, or a prompt for what 01 does not vary."""
    recording, kind = tables.recordings[tables.chosen(setting)[0]], setting.drafter.partition("(")[0]
    drafter, policy = kind if kind in DRAFTERS else setting.drafter, POLICIES[setting.policy]
    if setting.policy == FIXED and setting.top_p == 1:
        contents = ",".join(tables.contents) if setting.content == ALL else setting.content
        values = [
            f"target={recording.target}", "backend=", "dtype=",  # engine and type are in the target's name
            f"drafter={drafter}", "replayed=[]", f"ks=[{setting.k}]", f"temperatures=[{setting.temperature}]",
            f"categories={contents}", f"max_new_tokens={recording.max_new_tokens}", f"seed={recording.seed}",
        ]  # fmt: skip
        return " ".join([".venv/bin/specnb run 01_k_sweep", *(f"-p {quote(value)}" for value in values)])
    models = f"--target {quote(recording.target)} --{'drafter' if kind in DRAFTERS else 'draft'} {quote(drafter)}"
    chosen = f" --controller {policy.option}" * bool(policy.option) + f" --k {setting.k}" * ("k" in policy.depends)
    sampling = f"--temperature {setting.temperature:g} --top-p {setting.top_p:g} --seed {recording.seed}"
    limits = f"--max-new-tokens {recording.max_new_tokens}"
    return f'.venv/bin/specnb generate "Your prompt" --baseline {models}{chosen} {sampling} {limits}'
