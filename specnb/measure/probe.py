"""A minute with a model on this machine, as one row that people can share: does speculation pay here, at which K?"""

from collections.abc import Iterable
from datetime import UTC, date, datetime
from functools import cache
from typing import Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from specnb.draft.load import open_pair
from specnb.io import project_dir, read_json, validated
from specnb.machine import Neighbours
from specnb.measure.baseline import Baseline
from specnb.measure.bench import pays, time_pair
from specnb.measure.cost import NAMED, Cost, plain_rates
from specnb.measure.experiment import Progress, silent
from specnb.prompts import CATEGORIES, prompts
from specnb.provenance import provenance

KS = (2, 4, 8)
MAX_NEW_TOKENS = 32
HEAD = [
    "machine", "target", "drafter", "plain tok/s", "prefill tok/s", "T(8)/T(1)", "c", "best K", "speed-up", "verdict"
]  # fmt: skip


class MachineRow(Baseline, frozen=True, extra="forbid", allow_inf_nan=False):
    """What `probe` found: a file of `data/machines`, or a line of a Markdown table.

    Speeds in tokens a second; `at8` is T(8)/T(1), c a draft step in plain steps. `best_k` is the fastest of KS on
    short answers to a prompt of each kind, `speedup` its ratio to the baseline with a 95 % interval over prompts, as
    wide as the choice among KS asks. Rows without a `baseline_engine` are older: their speed-up is over the engine's.
    """

    schema_version: Literal[1] = 1
    machine: str
    instructions: tuple[str, ...]
    target: str
    drafter: str
    engine: str
    dtype: str
    tokens_per_s: PositiveFloat
    prefill_tokens_per_s: PositiveFloat
    at8: PositiveFloat
    c: NonNegativeFloat
    c_across_engines: bool = False
    best_k: PositiveInt
    speedup: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    speedup_same_engine: PositiveFloat | None = None
    busy: bool
    specnb: str
    measured: date

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low <= self.speedup <= self.high:
            raise ValueError(f"speedup {self.speedup} is outside of {self.low} to {self.high}")
        return self

    @property
    def verdict(self) -> str:
        """Whether speculation pays: only an idle machine and an interval on one side of 1 decide it."""
        if self.busy:
            return "undecided: the machine was busy"
        verdict = pays(self.low, self.high)
        return verdict if self.baseline_engine else verdict.replace("pays", "pays over the same engine")

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table whose columns are HEAD."""
        speedup = f"{self.speedup:.2f} ({self.low:.2f}-{self.high:.2f})"
        speed, c = f"{self.tokens_per_s:.3g}", f"{self.c:.2f}" + " across engines" * self.c_across_engines
        if self.baseline_engine:
            speed += f" ({self.baseline_engine} {self.baseline_tokens_per_s:.3g})"
        numbers = speed, f"{self.prefill_tokens_per_s:.3g}", f"{self.at8:.2f}", c
        return self.machine, self.target, self.drafter, *numbers, str(self.best_k), speedup, self.verdict


@cache
def machine_rows() -> dict[str, MachineRow]:
    """The rows of `data/machines` by the names of their files. Raises InputError for a damaged or newer one."""
    files = sorted((project_dir() / "data" / "machines").glob("*.json"))
    return {path.stem: validated(MachineRow, read_json(path), str(path)) for path in files}


def known_machines() -> dict[str, tuple[float, float]]:
    """T(8)/T(1), and c of a draft model: of the named machines, and of those rows that a draft model was probed for."""
    return NAMED | {name: (row.at8, row.c) for name, row in machine_rows().items() if row.c}


def machines(cost: Cost, names: Iterable[str] | None = None) -> dict[str, Cost]:
    """Those costs and, by name, what the known machines make of them: only a draft model costs what these say."""
    known, costs = known_machines(), {cost.name: cost}
    for name in known if names is None else names:
        at8, c = known[name]
        costs[name] = Cost.straight(name, at8, cost.c if cost.of_target else c)
    return costs


def probe(target_name: str, drafter_name: str = "lookup", *, progress: Progress = silent) -> MachineRow:
    """Measure plain rates, T(8)/T(1) and c, and every K of KS against plain decoding on one prompt of each category.

    Raises what `specnb.load` and `generate` raise; the drafter must fit.
    """
    chosen = [prompt.without_template for name in CATEGORIES for prompt in prompts(name, limit=1)]
    neighbours = Neighbours()
    progress(0, 1, f"loading {target_name}, {drafter_name}")
    with open_pair(target_name, drafter_name, strict=True) as (target, drafter, _):
        progress(0, 1, "measuring prefill and plain decoding")
        rates = {rate["test"]: rate["tokens_per_s"] for rate in plain_rates(target, n_prompt=256, n_gen=32, repeats=1)}
        timed = time_pair(target, drafter, chosen, ks=KS, max_new_tokens=MAX_NEW_TOKENS, progress=progress)
        curve, best = timed.verify_curve, timed.best()
        facts = provenance(models=[{"id": target.name}, {"id": drafter.name}])
        cpu, gpus = facts["cpu"], facts["gpu"]
        on_gpu = not target.caps.device.startswith("cpu") and gpus
        name = gpus[0]["name"] if on_gpu else f"{cpu['model'] or 'CPU'}, {cpu['usable_cores']} cores"
        ids = [model["id"] for model in facts["models"]]
        return MachineRow(
            machine=name, instructions=tuple(cpu["isa"]), target=ids[0], drafter=ids[1],
            engine=target.caps.engine, dtype=target.caps.dtype, tokens_per_s=rates["generation"],
            prefill_tokens_per_s=rates["prefill"], at8=curve.ratio(8), c=timed.c, specnb=facts["specnb"],
            c_across_engines=timed.c_across_engines, best_k=int(best["method"].removeprefix("K = ")),
            **timed.baseline.model_dump(),
            **best[["speedup", "low", "high", "speedup_same_engine"]].astype(float).to_dict(),
            busy=bool(curve.busy) or neighbours.during(target.caps, []).busy, measured=datetime.now(UTC).date(),
        )  # fmt: skip
