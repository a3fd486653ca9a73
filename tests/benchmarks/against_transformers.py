"""Tokens a second beside transformers' `generate`: same weights, dtype, prompts, threads, in one process.

    python tests/benchmarks/against_transformers.py --dtype float32
    python tests/benchmarks/against_transformers.py --dtype bfloat16 --json

Methods run interleaved on every prompt; `speedup` is over transformers' plain `generate`, with a bootstrap interval
over prompts; wall time contains the prefill. `plain` and `lookup` are ours. Takes 8 minutes on two cores in bfloat16,
15 in float32; `--prompts 4` a third of that, with intervals twice as wide.
"""

import argparse
import json
from collections.abc import Callable

import pandas as pd
import torch
from transformers import AutoModelForCausalLM

from specnb import compare, generate, prompts
from specnb.decode.generate import prompt_ids
from specnb.draft.lookup import LookupDrafter
from specnb.lm import zoo
from specnb.lm.hf.files import dequantised
from specnb.lm.hf.model import DTYPES, HfModel
from specnb.prompts import Prompt
from specnb.provenance import provenance


def methods(dtype: str, k: int, n: int) -> dict[str, Callable[[Prompt], object]]:
    """Prompt -> Generation (ours) or generated ids (theirs)."""
    gguf = zoo.path("smollm2-135m")
    ours = HfModel.open(gguf, dtype=dtype, name=f"smollm2-135m?backend=hf&dtype={dtype}")
    theirs = AutoModelForCausalLM.from_pretrained(dequantised(gguf), dtype=DTYPES[dtype]).eval()
    theirs.generation_config.eos_token_id = sorted(ours.vocab.eog)
    drafter = LookupDrafter()

    def foreign(**options: object) -> Callable[[Prompt], list[int]]:
        @torch.inference_mode()
        def run(prompt: Prompt) -> list[int]:
            ids = torch.tensor([prompt_ids(ours, prompt)])
            mask = torch.ones_like(ids)
            out = theirs.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=n, pad_token_id=2, **options
            )
            return out[0, ids.shape[1] :].tolist()

        return run

    return {
        "transformers generate": foreign(),
        "specnb plain": lambda p: generate(ours, p, max_new_tokens=n),
        f"transformers prompt_lookup_num_tokens={k}": foreign(prompt_lookup_num_tokens=k),
        f"specnb lookup k={k}": lambda p: generate(ours, p, drafter=drafter, k=k, max_new_tokens=n),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=14, help="per category")
    parser.add_argument("--categories", nargs="+", default=["code", "edit", "prose"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()

    chosen = [p for category in given.categories for p in prompts(category, limit=given.prompts)]
    made = methods(given.dtype, given.k, given.tokens)
    frames = {"all": compare(made, chosen, baseline="transformers generate", repeats=given.repeats)}
    lookups = {name: run for name, run in made.items() if "lookup" in name}
    frames["lookup against lookup, where both write the same text"] = compare(
        lookups, chosen, baseline=next(iter(lookups)), repeats=given.repeats, same_text=True
    )
    if given.json:
        tables = {name: json.loads(frame.to_json(orient="records")) for name, frame in frames.items()}
        print(json.dumps({"settings": vars(given), "provenance": provenance(), "tables": tables}))
        return
    with pd.option_context("display.width", 200, "display.max_columns", 20):
        for name, frame in frames.items():
            print(
                f"{name} ({given.dtype}, {torch.get_num_threads()} threads)\n{frame.round(3).to_string(index=False)}\n"
            )


if __name__ == "__main__":
    main()
