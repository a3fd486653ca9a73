"""Decoding speed next to busy processes over that without them, in both engines, alternating.

    python -m tests.benchmarks.busy_neighbour

By default, the number of threads follows the free cores; `--threads N` fixes it. With
`GOMP_SPINCOUNT=300000` (the default of libgomp) in the environment, waiting threads spin for
longer; with `OMP_WAIT_POLICY=passive` they do not spin.
"""

import os
import subprocess
import sys
import time

from specnb import generate, load
from specnb.lm.base import LanguageModel
from specnb.machine import LOOK_S, Neighbours
from specnb.measure.intervals import interval, rate_ratio
from specnb.prompts import prompts
from tests.benchmarks.record import arguments, write_record

SPIN = (
    f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(10**6))"  # ends with this process
)
TARGETS = ("smollm2-135m", "smollm2-135m?backend=hf", "smollm2-135m?backend=hf&dtype=bfloat16")
DRAFTERS = {"plain": None, "lookup": "lookup"}


def speeds(
    target: LanguageModel, n_busy: int, n_prompts: int
) -> dict[str, list[tuple[float, ...]]]:
    """Return each drafter's (tokens, seconds) by prompt: with `n_busy` processes, then without."""
    rows = {name: [] for name in DRAFTERS}
    for at, prompt in enumerate(prompts("edit", limit=n_prompts)):
        took = {}
        for n in (0, n_busy) if at % 2 else (n_busy, 0):
            running = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(n)]
            for name, drafter in DRAFTERS.items():
                options = {"drafter": drafter, "max_new_tokens": 48}
                generate(target, prompt, **options)  # not counted: the number of threads adapts
                time.sleep(LOOK_S)
                neighbours = Neighbours()
                done = generate(target, prompt, **options)
                took[name, n] = (done.n_decoded, done.decode_s)
                seen = neighbours.during(target.caps, [done])
                print(
                    f"{prompt.id}, {n} busy, {name}: {done.tokens_per_s:.1f} tokens/s, {seen}",
                    flush=True,
                )
            for process in running:
                process.kill()
                process.wait()
        for name in DRAFTERS:
            rows[name].append((*took[name, n_busy], *took[name, 0]))
    return rows


def main() -> None:
    parser = arguments(__doc__, __file__)
    for name, usual in {"neighbours": 1, "threads": 0, "prompts": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    given = parser.parse_args()

    table = []
    for name in given.targets:
        target = load(name, threads=given.threads)
        for drafter, rows in speeds(target, given.neighbours, given.prompts).items():
            ratio = interval(rows, rate_ratio)
            free = sum(row[2] for row in rows) / sum(row[3] for row in rows)
            table.append(
                {
                    "target": name,
                    "drafter": drafter,
                    "free_tokens_per_s": free,
                    "ratio": ratio.value,
                    "low": ratio.low,
                    "high": ratio.high,
                    "n_prompts": len(rows),
                    "threads_change": target.caps.details.get("threads_change", "no"),
                }
            )
            print(
                f"{name}, {drafter}: {ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) "
                f"of {free:.1f} tokens/s"
            )
        target.close()
    write_record(given.out, {"neighbours": given.neighbours, "rows": table})


if __name__ == "__main__":
    main()
