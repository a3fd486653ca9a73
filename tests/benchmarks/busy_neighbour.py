"""Generation alone and beside busy processes: what is kept of the free speed, in turn on each prompt.

python tests/benchmarks/busy_neighbour.py [--threads 0] [--neighbours 1]

threads 0: they follow the free cores, as by default; a number holds them. `GOMP_SPINCOUNT=300000` (libgomp's default)
in the environment shows what the short spin count is worth, OMP_WAIT_POLICY=passive what no spinning costs.
"""

import argparse
import os
import subprocess
import sys
import time

from specnb import generate, load
from specnb.machine import LOOK_S, Neighbours
from specnb.measure.bench import interval, rate_ratio
from specnb.prompts import prompts

SPIN = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(10**6))"  # ends with this process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in {"neighbours": 1, "threads": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked = parser.parse_args()
    target, rows = load("smollm2-135m", threads=asked.threads), {"plain": [], "lookup": []}
    for at, prompt in enumerate(prompts("edit", limit=8)):
        took = {}
        for n in (0, asked.neighbours) if at % 2 else (asked.neighbours, 0):
            running = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(n)]
            for name in rows:
                options = {"drafter": None if name == "plain" else name, "max_new_tokens": 48}
                generate(target, prompt, **options)  # uncounted: threads find their number
                time.sleep(LOOK_S)
                neighbours, done = Neighbours(), generate(target, prompt, **options)
                took[name, n] = (done.n_decoded, done.decode_s)
                seen = neighbours.during(target.caps, [done])
                print(f"{prompt.id}, {n} busy, {name}: {done.tokens_per_s:.1f} tokens/s, {seen}", flush=True)
            for process in running:
                process.kill()
                process.wait()
        for name in rows:
            rows[name].append((*took[name, asked.neighbours], *took[name, 0]))
    spinning = {name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    print(f"{target.name}, {target.caps.details}, {spinning}: speed beside {asked.neighbours} busy over free speed")
    for name, each in rows.items():
        kept = interval(each, rate_ratio)
        print(f"{name:8} {kept.value:.2f} ({kept.low:.2f}-{kept.high:.2f})")


if __name__ == "__main__":
    main()
