"""Does a copy with fewer bits pay as the draft model of its own model, both in llama.cpp?

.venv/bin/python -m tests.benchmarks.quant_gap

For each pair: bytes of both files, T(1) of the target, c, T(5)/T(1), and each K live, interleaved
with plain decoding of the same weights, with its acceptance rate and the rate it would need to pay.
"""

from specnb.draft.load import open_pair
from specnb.lm.files import zoo_file
from specnb.measure.bench import time_pairs
from specnb.prompts import prompts
from tests.benchmarks.record import arguments, write_record

PAIRS = (("q8_0", "q4_0"), ("q6_k", "q4_0"), ("q4_0", "q2_k"))
CONTENTS = ("code", "edit", "prose")
N_PROMPTS = 2
N_TOKENS = 48
KS = (2, 4, 8)


def time_quants(target_type, draft_type):
    """Return a row for each K of a pair, and one of plain decoding."""
    names = [f"smollm2-135m:{kind}" for kind in (target_type, draft_type)]
    sizes = [zoo_file(name).stat().st_size for name in names]
    chosen = [prompt for content in CONTENTS for prompt in prompts(content, limit=N_PROMPTS)]
    with open_pair(names[0], names[1], strict=True) as (target, drafter, _):
        (pair,) = time_pairs(target, [drafter], chosen, ks=KS, max_new_tokens=N_TOKENS)
    curve = pair.verify_curve
    facts = {
        "target": target_type,
        "draft": draft_type,
        "target_bytes": sizes[0],
        "draft_bytes": sizes[1],
        "step_ms": 1e3 * curve.seconds(1),
        "c": pair.c,
        "at5": curve.ratio(5),
    }
    rows = pair.table[pair.table["method"].str.match("plain|K =")].to_dict("records")
    return [facts | row for row in rows]


def main():
    given = arguments(__doc__, __file__).parse_args()
    rows = [row for pair in PAIRS for row in time_quants(*pair)]
    for row in rows:
        ends = f"{row['speedup']:.2f} of plain here"
        print(
            row["target"],
            row["draft"],
            f"c {row['c']:.2f} T(5)/T(1) {row['at5']:.2f}",
            row["method"],
            ends,
        )
    write_record(given.out, {"rows": rows})


if __name__ == "__main__":
    main()
