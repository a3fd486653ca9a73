"""T(n) of both engines over the same weights: milliseconds for n new tokens behind 200, interleaved.

    python tests/benchmarks/engines.py --out tests/benchmarks/engines.json

Ratios are over llama.cpp with exact=false, its fastest; `same_bits_up_to` says how far a row's blocks have the bits of
its single steps. `transformers` is its own modules under our loop. Takes two minutes on two cores.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter

import pandas as pd

from specnb import load
from specnb.io import plain
from specnb.lm.base import LanguageModel
from specnb.lm.probe import probe_ids
from specnb.provenance import provenance

WIDTHS, PAST = (1, 2, 5, 9, 17), 200
TYPES = {"bf16": "bfloat16", "f32": "float32"}


def names(kind: str) -> dict[str, str]:
    """Label -> model, of one type; the first is the reference."""
    torch = f"smollm2-135m?backend=hf&dtype={TYPES[kind]}"
    return {
        "llama.cpp, fastest": f"smollm2-135m:{kind}?exact=false",
        "llama.cpp, default": f"smollm2-135m:{kind}",
        "llama.cpp, exact": f"smollm2-135m:{kind}?exact=true",
        "torch": torch,
        "torch, transformers": f"{torch}&decoder=transformers",
    }


def times(models: dict[str, LanguageModel], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Milliseconds of each forward, the models in turn."""
    taken: dict[tuple[str, int], list[float]] = {}
    for model in models.values():
        model.forward(probe_ids(model.vocab.size, PAST), 0)
    for _ in range(repeats + 1):
        for label, model in models.items():
            for width in WIDTHS:
                began = perf_counter()
                model.forward(probe_ids(model.vocab.size, width))
                taken.setdefault((label, width), []).append(1e3 * (perf_counter() - began))
                model.rewind(width)
    return {key: values[1:] for key, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a .json file for the table and what it was measured with")
    given = parser.parse_args()

    rows = []
    for kind in TYPES:
        models = {label: load(name) for label, name in names(kind).items()}
        taken = times(models, given.repeats)
        reference = next(iter(models))
        for label, model in models.items():
            ms = {width: median(taken[label, width]) for width in WIDTHS}
            row = {"type": kind, "engine": label} | {f"T({n})": ms[n] for n in WIDTHS}
            row |= {f"over fastest, {n}": ms[n] / median(taken[reference, n]) for n in (1, 5, 9)}
            rows.append(row | {"T(9)/T(1)": ms[9] / ms[1], "same_bits_up_to": model.caps.same_bits_up_to})
        for model in models.values():
            model.close()
    print(pd.DataFrame(rows).round(2).to_string(index=False))
    if given.out:
        document = plain({"rows": rows, "provenance": provenance()}, nan=None)
        given.out.write_text(f"{json.dumps(document, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
