"""Does speculation pay on this machine? Measures a target and its drafters in about a minute."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, date, datetime
from functools import cache
from typing import Any, Literal, NamedTuple, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from specnb.decode.generate import checked_settings
from specnb.draft.load import check_drafter, load_drafter
from specnb.io import project_dir, read_json, validated
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.machine import Neighbours
from specnb.measure.baseline import Baseline
from specnb.measure.bench import PairBench, time_pairs
from specnb.measure.cost import NAMED, Cost, CostCurve, plain_rates, verify_curve
from specnb.measure.experiment import Progress, check_prompts, silent
from specnb.measure.intervals import FEWEST, RATIOS, pays
from specnb.measure.pair import share_options
from specnb.prompts import CATEGORIES, Prompt, prompts
from specnb.provenance import provenance

KS = (2, 4, 8)
MAX_NEW_TOKENS = 32
RATES = {"n_prompt": 256, "n_gen": 32, "repeats": 3}
"""Number of tokens of a prefill and of plain decoding, and of timed runs of each."""


class MachineRow(Baseline, frozen=True, extra="forbid", allow_inf_nan=False):
    """Results of `bench_target` for a drafter on a machine: a file of `data/machines`.

    Speeds are in tokens per second. `at8` is T(8)/T(1), `c` the cost of a draft step in plain
    steps. `best_k` is the fastest of KS on short answers to a prompt of each category. `speedup` is
    over plain decoding in the same engine, `over_fastest` over the baseline; both have 95 %
    intervals over prompts, widened for the selection.
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
    over_fastest: PositiveFloat
    over_fastest_low: PositiveFloat
    over_fastest_high: PositiveFloat
    busy: bool
    specnb: str
    measured: date

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if not self.low <= self.speedup <= self.high:
            raise ValueError(
                f"got speedup {self.speedup}, expected low to high, {self.low} to {self.high}"
            )
        return self

    @property
    def verdict(self) -> str:
        """Whether speculation pays; undecided if the machine was busy or 1 is in the interval."""
        if self.busy:
            return "undecided: the machine was busy"
        return pays(self.over_fastest_low, self.over_fastest_high)


@cache
def machine_rows() -> dict[str, MachineRow]:
    """Return the rows of `data/machines` by file name. Raises InputError for invalid rows."""
    files = sorted((project_dir() / "data" / "machines").glob("*.json"))
    return {path.stem: validated(MachineRow, read_json(path), str(path)) for path in files}


def known_machines() -> dict[str, tuple[float, float]]:
    """Return (T(8)/T(1), c) by machine: of NAMED, and of all rows whose c is not 0."""
    return NAMED | {name: (row.at8, row.c) for name, row in machine_rows().items() if row.c}


def machines(cost: Cost, names: Iterable[str] | None = None) -> dict[str, Cost]:
    """Return costs by machine: `cost`, and those on the machines `names`, by default all known.

    Their c is used for draft models only. For trained heads and lookup, c is that of `cost`.
    """
    profiles = known_machines()
    costs = {cost.name: cost}
    for name in profiles if names is None else names:
        at8, c = profiles[name]
        costs[name] = Cost.straight(name, at8, cost.c if cost.of_target else c)
    return costs


class TargetBench(NamedTuple):
    """Results of `bench_target`: speeds of prefill and plain decoding, and of each drafter."""

    target: str
    rates: list[dict[str, Any]]
    verify_curve: CostCurve
    pairs: list[PairBench]
    rows: list[MachineRow]
    """A row of `data/machines` for each of `pairs`; none if there are too few prompts."""


def bench_target(
    target_name: str,
    drafter_names: Sequence[str],
    chosen: Sequence[Prompt] | None = None,
    *,
    ks: Sequence[int] = KS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress = silent,
    **options: Any,
) -> TargetBench:
    """Measure a target on this machine: its speed and T(n), and each drafter with every K.

    Args:
        target_name: a model name, as for `specnb.load`.
        drafter_names: draft models, or names of `registry.DRAFTERS`.
        chosen: prompts; by default one of each category, without chat template.
        ks: draft lengths.
        options: options of drafters (`pair.OPTIONS`), such as `heads_checkpoint`.

    Raises InputError for invalid names and options before the target is loaded, and what `load`,
    `load_drafter` and `generate` raise.
    """
    checked_settings(min(ks), max_new_tokens)
    options_of = share_options(drafter_names, options)
    for name in drafter_names:
        check_drafter(name, target_name, **options_of[name])
    neighbours = Neighbours()
    progress(0, 1, f"loading {target_name}")
    with ExitStack() as opened:
        target = opened.enter_context(closing(load(target_name)))
        check_prompts(target, chosen or [], max_new_tokens)
        progress(0, 1, "measuring prefill and plain decoding")
        rates = plain_rates(target, **RATES)
        timed = chosen or [
            p.without_template for name in CATEGORIES for p in prompts(name, limit=1)
        ]
        drafters = [
            opened.enter_context(
                closing(load_drafter(name, target, strict=True, **options_of[name]).drafter)
            )
            for name in drafter_names
        ]
        pairs = []
        if drafters:
            pairs = time_pairs(
                target, drafters, timed, ks=ks, max_new_tokens=max_new_tokens, progress=progress
            )
        curve = pairs[0].verify_curve if pairs else verify_curve(target)
        busy = neighbours.during(target.caps, []).busy
        rows = []
        if len(timed) >= FEWEST:
            rows = [_machine_row(target, rates, pair, busy=busy) for pair in pairs]
        return TargetBench(target.name, rates, curve, pairs, rows)


def _machine_row(
    target: LanguageModel, rates: Sequence[dict[str, Any]], pair: PairBench, *, busy: bool
) -> MachineRow:
    """Return the row of a drafter at its best K."""
    best = pair.best()
    tokens_per_s = {rate["test"]: rate["tokens_per_s"] for rate in rates}
    facts = provenance(models=[{"id": pair.target}, {"id": pair.drafter}])
    target_id, drafter_id = (model["id"] for model in facts["models"])
    cpu = facts["cpu"]
    gpus = facts["gpu"]
    machine = f"{cpu['model'] or 'CPU'}, {cpu['usable_cores']} cores"
    if gpus and not target.caps.device.startswith("cpu"):
        machine = gpus[0]["name"]
    return MachineRow(
        machine=machine,
        instructions=tuple(cpu["isa"]),
        target=target_id,
        drafter=drafter_id,
        engine=target.caps.engine,
        dtype=target.caps.dtype,
        tokens_per_s=tokens_per_s["generation"],
        prefill_tokens_per_s=tokens_per_s["prefill"],
        at8=pair.verify_curve.ratio(8),
        c=pair.c,
        c_across_engines=pair.c_across_engines,
        best_k=int(best["method"].removeprefix("K = ")),
        **pair.baseline.model_dump(),
        **best[[*RATIOS]].astype(float).to_dict(),
        busy=bool(pair.verify_curve.busy) or busy,
        specnb=facts["specnb"],
        measured=datetime.now(UTC).date(),
    )
