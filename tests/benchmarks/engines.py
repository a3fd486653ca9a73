"""T(n) of each engine on the same weights: milliseconds of a forward pass over n tokens after 256.

    python -m tests.benchmarks.engines
    python -m tests.benchmarks.engines --types int4 \\
        --targets qwen2.5-coder-1.5b-instruct-q4_k_m.gguf

Engines run interleaved. Ratios are over T(1) of llama.cpp at its fastest (exact=false) on the same
file. `same_bits_up_to` is the largest number of tokens for which a forward pass is bit-identical to
single steps. Takes two minutes on two cores.
"""

from pathlib import Path
from statistics import median
from time import perf_counter

import pandas as pd

from specnb import load
from specnb.lm.probe import probe_ids
from tests.benchmarks.record import add_rows, arguments

WIDTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17)
PAST = 256
REFERENCE = "llama.cpp, fastest"


def names(target, types):
    """Return model names by label."""
    of_torch = {f"torch {dtype}": f"{target}?backend=hf&dtype={dtype}" for dtype in types}
    return {REFERENCE: f"{target}?exact=false", "llama.cpp, default": target, **of_torch}


def times(models, repeats):
    """Return milliseconds of passes, models in turn, without the first after a change of model."""
    taken: dict[tuple[str, int], list[float]] = {}
    for model in models.values():
        model.forward(probe_ids(model.vocab.size, PAST), 0)
    for _ in range(repeats):
        for label, model in models.items():
            for width in (WIDTHS[0], *WIDTHS):
                began = perf_counter()
                model.forward(probe_ids(model.vocab.size, width))
                taken.setdefault((label, width), []).append(1e3 * (perf_counter() - began))
                model.rewind(width)
            del taken[label, WIDTHS[0]][-2]
    return taken


def rows_of(target, types, repeats):
    models = {label: load(name) for label, name in names(target, types).items()}
    taken = times(models, repeats)
    plain_ms = median(taken[REFERENCE, 1])
    rows = []
    for label, model in models.items():
        ms = {n: median(taken[label, n]) for n in WIDTHS}
        over = {f"T({n})": ms[n] / plain_ms for n in WIDTHS}
        facts = {
            "ms": ms[1],
            "T(4)/T(1)": ms[4] / ms[1],
            "same_bits_up_to": model.caps.same_bits_up_to,
        }
        rows.append({"target": Path(target).name, "engine": label, **over, **facts})
        model.close()
    return rows


def main():
    types = ["int4", "bfloat16", "float32"]
    parser = arguments(__doc__, __file__, targets=["smollm2-135m"], types=types, repeats=15)
    given = parser.parse_args()
    rows = [row for target in given.targets for row in rows_of(target, given.types, given.repeats)]
    print(pd.DataFrame(rows).round(2).to_string(index=False))
    add_rows(given.out, {"rows": rows})


if __name__ == "__main__":
    main()
