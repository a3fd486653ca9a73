"""Rollback strategies in llama.cpp against separate replay, paired on the same scripted drafts of the embedded hybrid.

python tests/benchmarks/strategies.py
"""

from functools import partial

from specnb import generate, load
from specnb.lm.base import LanguageModel
from specnb.measure.bench import compare
from specnb.records import Generation
from specnb.ssm.strategies import ScriptedDrafter, name_in, passages

CELLS = ((2, 0.0), (4, 0.5), (4, 0.8), (8, 0.8))
"""K, and the chance that a draft is right."""
TOKENS = 48


def main() -> None:
    name = name_in("tiny-hybrid", "llama")
    models = {strategy: load(name, rollback=strategy) for strategy in ("checkpoint", "fused", "snapshots")}
    plain = models["checkpoint"]
    prompts = [plain.encode(prompt.text)[:64] for prompt in passages(limit=16)]
    longest = TOKENS + max(k for k, _ in CELLS)
    truths = [generate(plain, ids, max_new_tokens=longest, ignore_eog=True).token_ids for ids in prompts]

    def run(model: LanguageModel, k: int, rate: float, at: int) -> Generation:
        drafter = ScriptedDrafter(truths[at], rate, vocab_size=model.vocab.size, seed=at)
        return generate(model, prompts[at], drafter=drafter, k=k, max_new_tokens=TOKENS, ignore_eog=True)

    for k, rate in CELLS:
        methods = {strategy: partial(run, model, k, rate) for strategy, model in models.items()}
        frame = compare(methods, range(len(prompts)), baseline="checkpoint", repeats=3)
        print(f"K = {k}, {rate:.0%} right\n{frame.round(3).to_string(index=False)}\n")


if __name__ == "__main__":
    main()
