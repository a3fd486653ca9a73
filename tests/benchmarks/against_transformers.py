"""Tokens per second against transformers' `generate`: same weights, dtype, prompts and threads.

    python -m tests.benchmarks.against_transformers --dtype bfloat16

Methods run interleaved on every prompt, in one process. `speedup` is over transformers' plain
`generate`, with an interval over prompts; wall time includes prefill. Takes 8 minutes on two cores
in bfloat16, 15 in float32. `--limit` is the number of prompts of each category, of code, edit and
prose (0: all). For other types than float32, the record's name ends with the type.
"""

import torch
from transformers import AutoModelForCausalLM

from specnb import compare, generate, prompts
from specnb.decode.generate import prompt_ids
from specnb.draft.lookup import LookupDrafter
from specnb.lm.files import zoo_file
from specnb.lm.hf.files import dequantize_once
from specnb.lm.load import load
from specnb.measure.bench import interleaved, tabulate_speeds
from tests.benchmarks.record import arguments, write_record

PLAIN, K, TOKENS = "transformers generate", 8, 48


def methods(dtype):
    """Return functions from a prompt to our Generation or transformers' token ids, by name."""
    gguf = zoo_file("smollm2-135m")
    model = load(f"smollm2-135m?backend=hf&dtype={dtype}")
    other = AutoModelForCausalLM.from_pretrained(
        dequantize_once(gguf), dtype=getattr(torch, dtype)
    ).eval()
    other.generation_config.eos_token_id = sorted(model.vocab.eog)
    drafter = LookupDrafter()

    @torch.inference_mode()
    def foreign(prompt, **options):
        ids = torch.tensor([prompt_ids(model, prompt)])
        options |= {"do_sample": False, "max_new_tokens": TOKENS, "pad_token_id": 2}
        out = other.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, ids.shape[1] :].tolist()

    return {
        PLAIN: foreign,
        "specnb plain": lambda p: generate(model, p, max_new_tokens=TOKENS),
        f"transformers prompt_lookup_num_tokens={K}": lambda p: foreign(
            p, prompt_lookup_num_tokens=K
        ),
        f"specnb lookup k={K}": lambda p: generate(
            model, p, drafter=drafter, k=K, max_new_tokens=TOKENS
        ),
    }


def main():
    given = arguments(__doc__, __file__, dtype="float32", limit=0).parse_args()
    chosen = [
        prompt
        for category in ("code", "edit", "prose")
        for prompt in prompts(category, limit=given.limit or None)
    ]
    every = methods(given.dtype)
    lookups = {name: run for name, run in every.items() if "lookup" in name}
    frames = {"all": compare(every, chosen, baseline=PLAIN)}
    runs = list(interleaved(lookups, chosen))
    texts = {(run.method, run.prompt): run.token_ids for run in runs}
    same = [run for run in runs if len({texts[name, run.prompt] for name in lookups}) == 1]
    if same:
        frames["where both lookups write the same text"] = tabulate_speeds(
            same, baseline=next(iter(lookups))
        )
    for name, frame in frames.items():
        print(
            f"{name} ({given.dtype}, {torch.get_num_threads()} threads)\n"
            f"{frame.round(3).to_string(index=False)}\n"
        )
    tables = {name: frame.to_dict("records") for name, frame in frames.items()}
    out = given.out
    if given.dtype != "float32":
        out = out.with_stem(f"{out.stem}_{given.dtype}")
    write_record(out, {"dtype": given.dtype, "tables": tables}, chosen)


if __name__ == "__main__":
    main()
