"""How often speculative greedy text diverges from plain greedy text, counted token by token.

    python -m tests.benchmarks.forks --models smollm2-135m "smollm2-135m:f16?exact=true" \\
        --tokens 2000 --threads 1,2,3
    python -m tests.benchmarks.forks --models "smollm2-135m?backend=hf&dtype=int4" --heads hydra \\
        --tokens 7000 --threads 1,2,3 --out tests/benchmarks/forks_torch_int4.json

Generates `--tokens` speculative tokens for each model and number of threads: prompt lookup and a
draft model with K = 1 to 16 in turn, and with `--heads` (hydra or medusa) chains of 1 to 4 tokens
and trees of 1 to 16 nodes. Every other prompt is lengthened beyond 512 tokens. A round of K draft
tokens is a forward pass over K + 1 tokens: if these are at most `same_bits_up_to`, no text may
diverge. 2,000 tokens take about two minutes on two cores.
"""

from contextlib import closing
from dataclasses import asdict
from itertools import count, cycle

from specnb import generate, load, prompts
from specnb.decode.generate import prompt_ids
from specnb.draft.load import load_drafter
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from tests.benchmarks.record import add_rows, arguments

LONG, WIDEST_K, NEW_TOKENS = 520, 16, 64


def contexts(model):
    """Yield prompts endlessly, alternately as they are and lengthened by those that follow."""
    every = cycle([prompt_ids(model, prompt) for prompt in prompts()])
    for short in every:
        yield short
        ids = next(every)
        while len(ids) < LONG:
            ids += next(every)
        yield ids


def fork_rows(model, draft, heads, tokens):
    """Compare speculative texts with plain ones; `fork`: index of the first different token."""
    drafters = [LookupDrafter(), ModelDrafter(draft)]
    done = 0
    if heads:
        drafters += [load_drafter(heads, model, tree=tree).drafter for tree in ("chain", WIDEST_K)]
    for i, ids in zip(count(), contexts(model), strict=False):
        settings = {"max_new_tokens": NEW_TOKENS, "ignore_eog": True}
        expected = generate(model, ids, **settings).token_ids
        for j, drafter in enumerate(drafters):
            k = 1 + (2 * i + j) % WIDEST_K
            text = generate(model, ids, drafter=drafter, k=k, **settings)
            fork = next(
                (
                    n
                    for n, pair in enumerate(zip(expected, text.token_ids, strict=True))
                    if len({*pair}) > 1
                ),
                None,
            )
            shape = "tree" if drafter.tree_nodes else "chain"
            yield {
                "drafter": drafter.name,
                "shape": shape,
                "k": k,
                "context": len(ids),
                "tokens": len(expected),
                "fork": fork,
                "tau": text.tau,
                "certified": k < model.caps.same_bits_up_to,
            }
            done += len(expected)
            if done >= tokens:
                return


def main():
    given = arguments(
        __doc__,
        __file__,
        models=["smollm2-135m"],
        draft="smollm2-135m:q4_0",
        heads="",
        tokens=2000,
        threads="2",
    ).parse_args()
    runs = []
    with closing(load(given.draft)) as draft:
        for name in given.models:
            for threads in map(int, given.threads.split(",")):
                with closing(load(name, threads=threads)) as model:
                    rows = list(fork_rows(model, draft, given.heads, given.tokens))
                    runs.append({"model": model.name, "caps": asdict(model.caps), "rows": rows})
                    certificate = model.caps.certificate
                for promised in (True, False):
                    of = [row for row in rows if row["certified"] is promised]
                    forks = sum(row["fork"] is not None for row in of)
                    kind = "certified" if promised else "other"
                    counted = (
                        f"{forks} forks in {len(of)} {kind} texts "
                        f"of {sum(row['tokens'] for row in of)} tokens"
                    )
                    print(f"{model.name}: {counted}" + f"; {certificate}" * promised, flush=True)
    add_rows(given.out, {"runs": runs})


if __name__ == "__main__":
    main()
