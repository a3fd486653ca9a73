"""Copy along texts that are written already: tokens a target call and hits of lookup, suffix and loose suffix matches.

.venv/bin/python -m tests.benchmarks.copiers

The texts are the greedy ones of the shipped trace (SmolLM2-135M, 8 prompts a content). `speed` is what a bfloat16 torch
target gains, T(9)/T(1) = 1.16, and a 4-bit one in llama.cpp, 1.65, on straight lines; a copier's own time is left out.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import DrafterBase, TokenView
from specnb.draft.lookup import LookupDrafter
from specnb.draft.suffix import SuffixDrafter
from specnb.io import project_dir, write_atomic
from specnb.lm.files import zoo_file
from specnb.lm.gguf.binding import FileTokenizer

K, RISES = 8, {"speed at 1.16": 0.16 / 8, "speed at 1.65": 0.65 / 8}
RECORD = Path(__file__).with_suffix(".json")


def copy_along(drafter: DrafterBase, prompt: list[int], text: list[int]) -> dict[str, int]:
    """Return rounds, drafts, drafts kept, and rounds with drafts, where every right draft is kept."""
    tokens, chooser = list(prompt), Chooser(Sampling())
    counts = dict.fromkeys(("rounds", "drafted", "kept", "hits"), 0)
    drafter.start(view := TokenView(tokens))
    while (left := len(prompt) + len(text) - len(tokens)) > 0:
        ids = drafter.propose(view, min(K, left - 1), chooser).ids if left > 1 else ()
        start = len(tokens) - len(prompt)
        kept = next((i for i, token in enumerate(ids) if token != text[start + i]), len(ids))
        tokens += text[start : start + kept + 1]
        drafter.commit(view)
        for name, n in zip(counts, (1, len(ids), kept, bool(ids)), strict=True):
            counts[name] += n
    return counts


def main() -> None:
    tokenizer = FileTokenizer(zoo_file("smollm2-135m"))
    trace = pd.read_parquet(project_dir() / "data" / "traces" / "smollm2-135m" / "trace.parquet")
    texts = trace[trace["drafter"].str.startswith("lookup") & (trace["temperature"] == 0)]
    makers: dict[str, Callable[[], DrafterBase]] = {
        "lookup": LookupDrafter,
        "suffix": SuffixDrafter,
        "suffix, at most twice the match": lambda: SuffixDrafter(2.0),
        "suffix, loose": lambda: SuffixDrafter(loose=tokenizer.vocab),
    }
    rows = []
    for name, make in makers.items():
        for row in texts.itertuples():
            counts = copy_along(make(), tokenizer(row.prompt.decode(), special=True), list(row.token_ids))
            facts = {"drafter": name, "content": row.category, "prompt": row.prompt_id, "tokens": len(row.token_ids)}
            rows.append(facts | counts)
    write_atomic(RECORD, (json.dumps({"rows": rows}) + "\n").replace("}, ", "},\n").encode())
    table = pd.DataFrame(rows).drop(columns="prompt").groupby(["content", "drafter"], sort=False).sum()
    table["tau"], table["hit rate"] = table["tokens"] / table["rounds"], table["hits"] / table["rounds"]
    table["wrong"] = 1 - table["kept"] / table["drafted"]
    for name, rise in RISES.items():
        table[name] = table["tokens"] / (table["rounds"] + rise * table["drafted"])
    print(table[["tau", "hit rate", "wrong", *RISES]].round(3).to_string())


if __name__ == "__main__":
    main()
