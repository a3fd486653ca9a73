"""What capturing costs: decoding steps inside `capture` against plain ones, in turn: both meet the same machine.

python tests/benchmarks/capture_cost.py [--model smollm2-135m] [--dtype float32] [--context 128] [--pairs 30]

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=30)
    asked = parser.parse_args()
    network = load(asked.model, backend="hf", dtype=asked.dtype).network
    threads = torch.get_num_threads()
    print(f"{asked.model}, {asked.dtype}, {asked.context} tokens in the cache, {threads} threads: captured / plain")
    for n in WIDTHS:
        for at_use in (False, True):
            ratio = cost(network, n, asked.context, at_use=at_use, pairs=asked.pairs)
            followed = "parameters followed" if at_use else "tensors only"
            print(f"{n:5} new, {followed:20} {ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})", flush=True)


@torch.inference_mode()
def cost(network: torch.nn.Module, n: int, context: int, *, at_use: bool, pairs: int) -> Interval:
    """Mean ratio of the times of `pairs` forwards of `n` tokens with and without capture; the first pair warms up."""
    ids = torch.arange(100, 100 + n)[None]
    cache = network(torch.arange(100, 100 + context)[None], use_cache=True).past_key_values

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

    def pair(plain_first: bool) -> tuple[float, float]:
        plain = forward() if plain_first else None
        seen = captured()
        return seen, forward() if plain is None else plain

    rows = [pair(bool(i % 2)) for i in range(pairs + 1)]
    return interval(rows[1:], lambda sample: float(np.exp(np.log(sample[:, 0] / sample[:, 1]).mean())))


if __name__ == "__main__":
    main()
