"""The report's experiment in small: Qwen2.5-Coder-1.5B with the 0.5B as its draft model, on code, greedily.

.venv/bin/python -m tests.benchmarks.report_pair [SETTING ...]

In 4 bits, with the target in 16 bits, and across engines. Plain decoding and every K run live, in turn; K is also
predicted from one pass of the draft model along the plain text and from T(n) and c. What a round is predicted to cost
and what it took are both without the prompt. Fetches 1.6 GB from a hub, and wants 16 GB of memory.
"""

import argparse
import json
from collections import deque

import numpy as np

from specnb.decode.generate import generate
from specnb.draft.load import open_pair
from specnb.io import project_dir, write_atomic
from specnb.measure.bench import interval, rate, rate_ratio
from specnb.measure.cost import Cost, verify_costs
from specnb.measure.follow import follow
from specnb.measure.replay import every_k
from specnb.prompts import prompts
from specnb.provenance import provenance
from specnb.records import Generation, pool_rounds

TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
SETTINGS = {
    "4 bits": (TARGET, DRAFT),
    "16 bits": (f"{TARGET}:f16", f"{DRAFT}:q4_0"),
    "across engines": (f"{TARGET}?backend=hf&dtype=float32", f"{DRAFT}:q4_0?backend=llama"),
}
KS, N_PROMPTS, N_TOKENS = (4, 8, 12, 16, 20, 24), 5, 128
RECORD = project_dir() / "data" / "report" / "small.json"


def decoded(generation: Generation) -> tuple[float, float]:
    """Tokens after the first, and their seconds."""
    return len(generation.token_ids) - 1, generation.decode_s


def run(target_name: str, draft_name: str) -> list[dict[str, object]]:
    """Return a row for each K; K = 0 is plain decoding."""
    with open_pair(target_name, draft_name, strict=True) as (target, drafter, _):
        curve, c = verify_costs(target, [drafter], max(KS), repeats=3)
        cost, order = Cost(curve, c[drafter.name]), deque((0, *KS))
        live: dict[int, list[Generation]] = {k: [] for k in order}
        counts = []
        for prompt in prompts("code", limit=N_PROMPTS):
            for k in order:
                live[k].append(generate(target, prompt, drafter=drafter if k else None, k=k, max_new_tokens=N_TOKENS))
                print(k, prompt.id, len(live[k][-1].token_ids), f"{live[k][-1].wall_s:.1f} s", flush=True)
            order.rotate(1)
            (along,) = follow(target, [drafter], live[0][-1], k_max=max(KS), max_new_tokens=N_TOKENS)
            counts.append(every_k(along, (0, *KS)))
        facts = {
            "target": target.name, "draft": drafter.name, "c": cost.c, "widths": curve.widths,
            "t_ms": [1e3 * s for s in curve.median_s], "busy": curve.busy,
        }  # fmt: skip
    rows = []
    for at, (k, generations) in enumerate(live.items()):
        pairs = [(*decoded(g), *decoded(plain)) for g, plain in zip(generations, live[0], strict=True)]
        texts = [len(plain.token_ids) - 1 for plain in live[0]]
        replayed = [
            (n, count[at].seconds(cost), n, n * curve.seconds(1)) for n, count in zip(texts, counts, strict=True)
        ]
        rows.append(
            facts | pool_rounds(generations) | {
                "k": k, "n_prompts": len(pairs), "tokens_per_s": rate(np.asarray(pairs)[:, :2]),
                "speedup": interval(pairs, rate_ratio), "predicted": interval(replayed, rate_ratio),
                "tau_replayed": sum(texts) / sum(count[at].rounds for count in counts),
                "identical": sum(g.token_ids == plain.token_ids for g, plain in zip(generations, live[0], strict=True)),
                "loops": sum(g.loops for g in generations),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    for setting in parser.parse_args().settings:
        rows = [{"setting": setting} | row for row in run(*SETTINGS[setting])]
        older = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
        rows = [row for row in older if row["setting"] != setting] + rows
        facts = provenance(models=[{"id": name} for pair in SETTINGS.values() for name in pair])
        write_atomic(RECORD, json.dumps({"provenance": facts, "rows": rows}, indent=1).encode())


if __name__ == "__main__":
    main()
