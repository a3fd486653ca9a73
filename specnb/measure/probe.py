"""A minute with a model on this machine, as one row that people can share: does speculation pay here, at which K?"""

from datetime import UTC, date, datetime
from functools import cache, partial
from typing import Literal

from pydantic import BaseModel

from specnb.decode.generate import generate
from specnb.draft.load import open_pair
from specnb.io import project_dir
from specnb.lm.busy import Neighbours
from specnb.measure.bench import compare
from specnb.measure.cost import NAMED, plain_rates, verify_costs
from specnb.measure.experiment import Progress, silent
from specnb.prompts import CATEGORIES, prompts
from specnb.provenance import provenance

KS = (2, 4, 8)
MAX_NEW_TOKENS = 32
HEAD = (
    "machine",
    "target",
    "drafter",
    "plain tok/s",
    "prefill tok/s",
    "T(8)/T(1)",
    "c",
    "best K",
    "speed-up",
    "verdict",
)


class MachineRow(BaseModel, frozen=True, extra="forbid"):
    """What `probe` found: a file of `data/machines`, or a line of a Markdown table.

    Speeds in tokens a second; `at8` is T(8)/T(1), c a draft step in plain steps. `best_k` is the fastest of KS on
    short answers to a prompt of each kind, `speedup` its ratio to plain decoding with a 95 % interval over prompts.
    """

    schema_version: Literal[1] = 1
    machine: str
    instructions: tuple[str, ...]
    target: str
    drafter: str
    engine: str
    dtype: str
    tokens_per_s: float
    prefill_tokens_per_s: float
    at8: float
    c: float
    best_k: int
    speedup: float
    low: float
    high: float
    busy: bool
    specnb: str
    measured: date

    @property
    def verdict(self) -> str:
        """Whether speculation pays: only an idle machine and an interval on one side of 1 decide it."""
        if self.busy:
            return "undecided: the machine was busy"
        return "pays" if self.low > 1 else "does not pay" if self.high < 1 else "undecided"

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table whose columns are HEAD."""
        speedup = f"{self.speedup:.2f} ({self.low:.2f}-{self.high:.2f})"
        numbers = f"{self.tokens_per_s:.3g}", f"{self.prefill_tokens_per_s:.3g}", f"{self.at8:.2f}", f"{self.c:.2f}"
        return self.machine, self.target, self.drafter, *numbers, str(self.best_k), speedup, self.verdict


@cache
def machine_rows() -> dict[str, MachineRow]:
    """The rows of `data/machines` by the names of their files."""
    paths = sorted((project_dir() / "data" / "machines").glob("*.json"))
    return {path.stem: MachineRow.model_validate_json(path.read_bytes()) for path in paths}


def known_machines() -> dict[str, tuple[float, float]]:
    """T(8)/T(1), and c of a draft model: of the named machines, and of those rows that a draft model was probed for."""
    return NAMED | {name: (row.at8, row.c) for name, row in machine_rows().items() if row.c}


def probe(target_name: str, drafter_name: str = "lookup", *, progress: Progress = silent) -> MachineRow:
    """Measure plain rates, T(8)/T(1) and c, and every K of KS against plain decoding on one prompt of each category.

    Raises what `specnb.load` and `generate` raise; the drafter must fit.
    """
    chosen = [prompt.without_template for name in CATEGORIES for prompt in prompts(name, limit=1)]
    neighbours = Neighbours()
    with open_pair(target_name, drafter_name, strict=True) as (target, drafter, _):
        progress(0, 3, "plain rates")
        rates = {rate["test"]: rate["tokens_per_s"] for rate in plain_rates(target, n_prompt=256, n_gen=32, repeats=1)}
        progress(1, 3, "cost of wide forwards")
        curve, c = verify_costs(target, [drafter], max(KS))
        progress(2, 3, f"K = {', '.join(map(str, KS))} on {len(chosen)} prompts")
        plain = partial(generate, target, max_new_tokens=MAX_NEW_TOKENS)
        methods = {"0": plain} | {str(k): partial(plain, drafter=drafter, k=k) for k in KS}
        table = compare(methods, chosen, baseline="0").set_index("method").drop(index="0")
        best = table["speedup"].idxmax()
        facts = provenance(models=[{"id": target.name}, {"id": drafter.name}])
        cpu, gpus = facts["cpu"], facts.get("gpu") or ()
        on_gpu = not target.caps.device.startswith("cpu") and gpus
        name = gpus[0]["name"] if on_gpu else f"{cpu['model'] or 'CPU'}, {cpu['usable_cores']} cores"
        return MachineRow(
            machine=name, instructions=tuple(cpu["isa"]), target=facts["models"][0]["id"],
            drafter=facts["models"][1]["id"],
            engine=target.caps.engine, dtype=target.caps.dtype, tokens_per_s=rates["generation"],
            prefill_tokens_per_s=rates["prefill"], at8=curve.ratio(8), c=c[drafter.name], best_k=int(best),
            **table.loc[best, ["speedup", "low", "high"]].astype(float).to_dict(), specnb=facts["specnb"],
            busy=bool(curve.busy) or neighbours.during(target.caps, []).busy, measured=datetime.now(UTC).date(),
        )  # fmt: skip
