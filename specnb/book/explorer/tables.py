"""What the explorer shows, computed from a trace: tables made once, then only costs are put on them.

For every recording and every K the exact counts are held as arrays, so a new cost curve is one matrix product. A
policy that looks back is walked along its recordings once for each thing that it depends on, and kept. No widget
and no model is known here.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.decode.control import ConfidenceStop, Controller, EntropyStop, FixedK, RollingAcceptance
from specnb.decode.costaware import CostAware
from specnb.errors import InputError
from specnb.measure.bench import FEWEST
from specnb.measure.content import ContentK
from specnb.measure.cost import NAMED, CostCurve, straight_curve
from specnb.measure.recording import Trace
from specnb.measure.replay import Counts, Step, counts_of, fixed_k, walk

ALL = "all"
FIXED = "fixed K"
THIS_MACHINE, CUSTOM = "this machine, measured", "custom"
AT = 8
"""The width whose cost T(8)/T(1) stands for a curve."""
WALKS = 40
"""Recordings walked for one number: where a policy meets chance, few recordings are walked several times."""
DRAWS, SEED = 1000, 0


class Machine(NamedTuple):
    """What forwards cost, in plain steps: `ratios[n]` is T(n)/T(1), n = 0 to k_max + 1; c is T_draft(1)/T_target(1)."""

    name: str
    ratios: tuple[float, ...]
    c: float

    @classmethod
    def measured(cls, curve: CostCurve, c: float, k_max: int, name: str = THIS_MACHINE) -> "Machine":
        return cls(name, tuple(curve.ratio(n) for n in range(k_max + 2)), c)

    @classmethod
    def straight(cls, name: str, at8: float, c: float, k_max: int) -> "Machine":
        """T(n) on a line through T(1) and T(8)."""
        return cls.measured(straight_curve(name, at8, widths=range(1, k_max + 2)), c, k_max, name)

    def at(self, n: int = AT) -> float:
        """T(n)/T(1), beyond the last width by the last slope."""
        last = len(self.ratios) - 1
        return self.ratios[n] if n <= last else self.ratios[-1] + (n - last) * (self.ratios[-1] - self.ratios[-2])

    def bent(self, at8: float, c: float) -> "Machine":
        """A custom machine: the shape of this curve, stretched to pass through `at8` at width 8, with another c."""
        rise = self.at() - 1
        if rise < 0.05 or min(self.ratios[1:]) < 1:  # stretching a flat curve would stretch its noise
            return Machine.straight(CUSTOM, at8, c, len(self.ratios) - 2)
        return Machine(CUSTOM, (0.0, *(1 + (r - 1) * (at8 - 1) / rise for r in self.ratios[1:])), c)


class Setting(NamedTuple):
    """A position of all sliders. `k` is the draft length, or the most that a policy which ends drafting may draft."""

    drafter: str
    temperature: float
    content: str
    policy: str
    k: int
    machine: Machine


Make = Callable[[Setting], Controller]
POLICIES: Mapping[str, Make] = {
    FIXED: lambda s: FixedK(s.k),
    "rolling acceptance": lambda s: RollingAcceptance(),
    "content K": lambda s: ContentK(),
    "cost-aware": lambda s: CostAware(s.machine.ratios, s.machine.c),
    "confidence": lambda s: ConfidenceStop(s.k),
    "entropy": lambda s: EntropyStop(s.k),
}
NEED_BELIEFS = frozenset({"confidence", "entropy"})
_USES_K = frozenset({"confidence", "entropy"})
_USES_MACHINE = frozenset({"cost-aware"})


class Tally(NamedTuple):
    """Counts of n recordings as arrays `(n, …)`; with `(n, k_max + 1, …)` for every K from 0."""

    widths: np.ndarray  # (…, k_max + 2): target calls of each width
    totals: np.ndarray  # (…, 4): rounds, drafted, accepted, forwards of the draft model
    tested: np.ndarray  # (…, k_max)
    kept: np.ndarray  # (…, k_max)

    def seconds(self, machine: Machine) -> np.ndarray:
        """Predicted decoding time in plain steps."""
        return self.widths @ np.asarray(machine.ratios) + self.totals[..., 3] * machine.c

    def take(self, *index: object) -> "Tally":
        return Tally(*(a[index] for a in self))


class Speedup(NamedTuple):
    """Predicted speed-up over plain decoding; the interval is NaN for fewer than FEWEST prompts."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Predicted(NamedTuple):
    """What a setting comes to over its prompts. `tested[j]` rounds reached draft j, `kept[j]` kept it."""

    speedup: float
    low: float
    high: float
    n_prompts: int
    n_tokens: int
    rounds: float
    drafted: float
    accepted: float
    tested: np.ndarray
    kept: np.ndarray

    @property
    def tau(self) -> float:
        return self.n_tokens / self.rounds

    @property
    def mean_k(self) -> float:
        """Drafts a round, on average."""
        return self.drafted / self.rounds


class Tables:
    """The trace, prepared. Building it costs one `fixed_k` for each recording and K; looking up costs next to nothing.

    Recordings with fewer than two tokens hold no decoding and are left out. Raises InputError when nothing is left.
    """

    def __init__(self, trace: Trace) -> None:
        self.recordings = tuple(r for r in trace.recordings if r.n_tokens > 1)
        if not self.recordings:
            raise InputError(f"none of {len(trace.recordings)} recordings has two tokens: record longer generations")
        self.k_max = min(r.k_max for r in self.recordings)
        self.drafters, self.contents = self._seen("drafter"), self._seen("category")
        self.temperatures = tuple(sorted(self._seen("temperature")))
        self.n_tokens = np.array([r.n_tokens for r in self.recordings])
        ks = range(self.k_max + 1)
        self.exact = _stack([_stack([_tally(fixed_k(r, k), self.k_max) for k in ks]) for r in self.recordings])
        self._walks: dict[tuple, tuple[Tally, dict[int, list[Step]]]] = {}

    def _seen(self, field: str) -> tuple:
        return tuple(dict.fromkeys(getattr(r, field) for r in self.recordings))

    def chosen(self, setting: Setting, prompt_ids: Sequence[str] | None = None) -> list[int]:
        """Indices of the recordings that a setting is about. Raises InputError when there are none."""
        wanted = (setting.drafter, setting.temperature)
        indices = [
            i
            for i, r in enumerate(self.recordings)
            if (r.drafter, r.temperature) == wanted
            and setting.content in (ALL, r.category)
            and (prompt_ids is None or r.prompt_id in prompt_ids)
        ]
        if not indices:
            raise InputError(f"the trace holds no recording of {setting.content} with {wanted}")
        return indices

    def is_model(self, drafter: str) -> bool:
        """Whether it is a draft model: only these have beliefs."""
        return any(r.beliefs for r in self.recordings if r.drafter == drafter)

    def policies(self, drafter: str) -> tuple[str, ...]:
        """Those that can be replayed: their K is recorded and, where they read beliefs, these are too."""
        reads = self.is_model(drafter)
        some = Setting(drafter, 0.0, ALL, FIXED, 1, Machine.straight(CUSTOM, 1.0, 0.0, self.k_max))
        fits = {name: make(some).k_max <= self.k_max for name, make in POLICIES.items()}
        return tuple(name for name in POLICIES if fits[name] and (reads or name not in NEED_BELIEFS))

    def prepare(self) -> None:
        """Walk ahead the policies whose rounds depend on neither K nor costs; the others are walked when asked for."""
        still = Machine.straight(CUSTOM, 1.0, 0.0, self.k_max)
        for drafter, temperature, content in product(self.drafters, self.temperatures, (*self.contents, ALL)):
            for policy in set(self.policies(drafter)) - {FIXED} - _USES_K - _USES_MACHINE:
                with suppress(InputError):  # a trace need not hold every combination
                    self._walked(Setting(drafter, temperature, content, policy, 1, still))

    def sweep(self, setting: Setting) -> Speedup:
        """For every fixed K from 0, exactly: arrays `(k_max + 1,)`."""
        at = self.chosen(setting)
        return _speedup(self._plain(at), self.exact.take(at).seconds(setting.machine))

    def predict(self, setting: Setting, prompt_ids: Sequence[str] | None = None) -> Predicted:
        """What the setting's policy comes to, on some prompts or all."""
        at = self.chosen(setting, prompt_ids)
        tally = self._tally(setting, at)
        speed = _speedup(self._plain(at), tally.seconds(setting.machine)[:, None])
        rounds, drafted, accepted, _ = tally.totals.sum(0).tolist()
        tested, kept = tally.tested.sum(0), tally.kept.sum(0)
        n = int(self.n_tokens[at].sum())
        numbers = (float(s[0]) for s in speed)
        return Predicted(*numbers, len(at), n, rounds, drafted, accepted, tested, kept)

    def steps(self, setting: Setting, index: int) -> list[Step]:
        """The rounds along one recording; where drafts are kept by chance, those of one seeded draw."""
        if setting.policy == FIXED:
            recording = self.recordings[index]
            return walk(recording, FixedK(setting.k), np.random.default_rng([SEED, index]))
        return self._walked(setting)[1][index]

    def _plain(self, at: list[int]) -> np.ndarray:
        """Plain decoding's time in plain steps: the first token is the prefill's."""
        return self.n_tokens[at] - 1.0

    def _tally(self, setting: Setting, at: list[int]) -> Tally:
        if setting.policy == FIXED:
            return self.exact.take(at, setting.k)
        walked = self.chosen(setting)
        return self._walked(setting)[0].take([walked.index(i) for i in at])

    def _walked(self, setting: Setting) -> tuple[Tally, dict[int, list[Step]]]:
        key = walk_key(setting)
        if key not in self._walks:
            self._walks[key] = self._walk(setting)
            while len(self._walks) > 512:  # dragging a cost slider asks for ever new ones
                self._walks.pop(next(iter(self._walks)), None)
        return self._walks[key]

    def _walk(self, setting: Setting) -> tuple[Tally, dict[int, list[Step]]]:
        at = self.chosen(setting)
        times = max(1, WALKS // len(at)) if setting.temperature else 1
        runs = []
        for seed in range(times):  # policies learn from one generation to the next, so each run begins anew
            controller, rng = POLICIES[setting.policy](setting), np.random.default_rng([SEED, seed])
            runs.append([walk(self.recordings[i], controller, rng) for i in at])
        tallies = [
            [_tally(counts_of(self.recordings[i], s), self.k_max) for i, s in zip(at, run, strict=True)] for run in runs
        ]
        mean = Tally(*(a.mean(0) for a in _stack([_stack(run) for run in tallies])))
        return mean, dict(zip(at, runs[0], strict=True))


def checks(tables: Tables) -> pd.DataFrame:
    """What must hold on every machine and for every model: check, of, hold, ok."""
    greedy = [i for i, r in enumerate(tables.recordings) if not r.temperature]
    rounds, drafted, accepted, _ = np.moveaxis(tables.exact.totals, -1, 0)
    over = rounds + accepted - tables.n_tokens[:, None]  # the last round has no token after its drafts, or one
    cheap, dear = (
        tables.exact.seconds(Machine.straight(CUSTOM, at8, c, tables.k_max)) for at8, c in ((1.1, 0.1), (4.0, 0.5))
    )
    whole = np.isclose(tables.exact.totals[greedy], np.round(tables.exact.totals[greedy]))
    rows = [
        ("greedy counts are whole numbers, for every K", whole),
        ("rounds and accepted drafts make up the tokens, for every K", (over > -1e-9) & (over < 1 + 1e-9)),
        ("no more drafts are accepted than drafted, for every K", accepted <= drafted + 1e-9),
        ("without drafts every round commits one token", rounds[:, 0] == tables.n_tokens),
        ("dearer forwards never make a prediction faster", dear >= cheap - 1e-9),
    ]
    frame = pd.DataFrame([(name, held.size, int(held.sum())) for name, held in rows], columns=["check", "of", "hold"])
    return frame.assign(ok=frame["of"] == frame["hold"])


def machines(tables: Tables, drafter: str, curve: CostCurve, c: float) -> list[Machine]:
    """This machine, and the named ones, for one drafter; only a draft model costs what they say it does."""
    model = tables.is_model(drafter)
    named = [Machine.straight(n, at8, draft_share * model, tables.k_max) for n, (at8, draft_share) in NAMED.items()]
    return [Machine.measured(curve, c, tables.k_max), *named]


def best(tables: Tables, curve: CostCurve, c: dict[str, float], temperature: float = 0.0) -> pd.DataFrame:
    """The best fixed K for each machine, drafter and content, with its predicted speed-up; K = 0 is plain decoding.

    It is chosen on the prompts that it is judged by, so it flatters a little.
    """
    rows = []
    for at, drafter in product(range(1 + len(NAMED)), tables.drafters):
        machine = machines(tables, drafter, curve, c[drafter])[at]
        for content in (*tables.contents, ALL):
            speed = tables.sweep(Setting(drafter, temperature, content, FIXED, 1, machine))
            k = int(np.argmax(speed.value))
            columns = {"speedup": speed.value[k], "low": speed.low[k], "high": speed.high[k]}
            rows.append({"machine": machine.name, "drafter": drafter, "content": content, "k": k, **columns})
    return pd.DataFrame(rows)


def sweep(tables: Tables, drafter: str, machine: Machine, ks: Sequence[int], step_s: float) -> pd.DataFrame:
    """One drafter on one machine in the columns of `tables.k_sweep`; `step_s` is T(1) in seconds."""
    rows = []
    for temperature in tables.temperatures:
        for content in tables.contents:
            setting = Setting(drafter, temperature, content, FIXED, 1, machine)
            for k in (k for k in ks if k <= tables.k_max):
                p = tables.predict(setting._replace(k=k))
                columns = {"speedup": p.speedup, "low": p.low, "high": p.high, "tokens_per_s": p.speedup / step_s}
                counts = {"accepted": round(p.accepted, 1), "drafted": round(p.drafted, 1), "tau": p.tau}
                rows.append({"category": content, "temperature": temperature, "k": k, **columns, **counts})
    return pd.DataFrame(rows)


def walk_key(setting: Setting) -> tuple:
    """All that the rounds of a setting depend on."""
    own_k = setting.k if setting.policy in _USES_K else None
    own_costs = setting.machine[1:] if setting.policy in _USES_MACHINE else None
    return (*setting[:4], own_k, own_costs)


def _tally(counts: Counts, k_max: int) -> Tally:
    widths, tested, kept = np.zeros(k_max + 2), np.zeros(k_max), np.zeros(k_max)
    for width, calls in counts.by_width.items():
        widths[width] = calls
    tested[: len(counts.tested)] = counts.tested
    kept[: len(counts.kept)] = counts.kept
    return Tally(widths, np.array([counts.rounds, counts.drafted, counts.accepted, counts.steps]), tested, kept)


def _stack(tallies: Sequence[Tally]) -> Tally:
    return Tally(*(np.stack(parts) for parts in zip(*tallies, strict=True)))


def _speedup(plain: np.ndarray, seconds: np.ndarray) -> Speedup:
    """Ratio of totals over prompts, `plain (n,)` to `seconds (n, m)`, with a bootstrap over prompts."""
    value = plain.sum() / seconds.sum(0)
    n = len(plain)
    if n < FEWEST:
        return Speedup(value, np.full_like(value, np.nan), np.full_like(value, np.nan))
    times = np.random.default_rng(SEED).multinomial(n, np.full(n, 1 / n), DRAWS).astype(float)
    low, high = np.quantile((times @ plain)[:, None] / (times @ seconds), [0.025, 0.975], axis=0)
    return Speedup(value, low, high)
