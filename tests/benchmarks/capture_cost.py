"""What capturing costs: decoding steps inside `capture` against plain ones, in turn: both meet the same machine.

python tests/benchmarks/capture_cost.py [--pairs 30]

The sketch pass: digests, statistics and sketches of every tensor of every module and of the cache, no tensor kept in
full. The first forward in a capture is not timed: it takes the digests of the weights, once.
"""

import argparse
import time

import numpy as np
import torch

from specnb import load
from specnb.divergence.capture import capture
from specnb.measure.bench import Interval, interval

WIDTHS = (1, 8, 128)
"""New tokens of a forward: decoding, verification of drafts, a prompt."""
CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    network = load("smollm2-135m", backend="hf", dtype="float32").network
    print(f"float32, {CONTEXT} tokens in the cache, {torch.get_num_threads()} threads: captured / plain")
    for n in WIDTHS:
        for at_use in (False, True):
            ratio = cost(network, n, at_use=at_use, pairs=pairs)
            followed = "parameters followed" if at_use else "tensors only"
            print(f"{n:5} new, {followed:20} {ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})", flush=True)


@torch.inference_mode()
def cost(network: torch.nn.Module, n: int, *, at_use: bool, pairs: int) -> Interval:
    """Mean ratio of the times of `pairs` forwards of `n` tokens with and without capture; the first pair warms up."""
    ids = torch.arange(100, 100 + n)[None]
    cache = network(torch.arange(100, 100 + CONTEXT)[None], use_cache=True).past_key_values

    def forward() -> float:
        start = time.perf_counter()
        network(ids, past_key_values=cache, use_cache=True)
        seconds = time.perf_counter() - start
        cache.crop(-n)
        return seconds

    def captured() -> float:
        with capture(network, at_use=at_use):
            forward()
            return forward()

    rows = []
    for i in range(pairs + 1):
        first, second = (captured, forward) if i % 2 else (forward, captured)
        seconds = {run: run() for run in (first, second)}
        rows.append((seconds[captured], seconds[forward]))
    return interval(rows[1:], lambda sample: float(np.exp(np.log(sample[:, 0] / sample[:, 1]).mean())))


if __name__ == "__main__":
    main()
