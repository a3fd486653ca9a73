"""Mean and median KL divergence of each engine from the file's own weights in float32.

    python -m tests.benchmarks.faithful --target smollm2-135m
    python -m tests.benchmarks.faithful --tokens 2048 \\
        --target qwen2.5-coder-1.5b-instruct-q4_k_m.gguf

The reference dequantizes the file to float32, in torch. Texts are held-out passages of code and
prose, on which we trained no model. KL is KL(reference || engine), in nats per token.
"""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from specnb import load
from specnb.io import project_dir
from tests.benchmarks.record import add_rows, arguments

WINDOW, PIECE = 256, 32
"""Tokens per text, which starts from an empty state, and per forward pass."""


def windows(model, n_tokens):
    """Return passages of held-out text, WINDOW tokens each, `n_tokens` in all."""
    lines = (project_dir() / "data/models/held_out.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [model.encode(json.loads(line)["text"], special=False)[:WINDOW] for line in lines]
    long = [ids for ids in texts if len(ids) == WINDOW]
    wanted = -(-n_tokens // WINDOW)
    if wanted > len(long):
        raise SystemExit(
            f"the held-out text has {len(long)} passages of {WINDOW} tokens, {wanted} are asked for"
        )
    # both code and prose, which follow each other in the file
    return long[:: len(long) // wanted][:wanted]


def log_probabilities(model, ids):
    """Return the log-probabilities `(len(ids), vocab)` after each token."""
    model.reset()
    rows = [model.forward(ids[start : start + PIECE]) for start in range(0, len(ids), PIECE)]
    return torch.from_numpy(np.concatenate(rows)).double().log_softmax(1).float().numpy()


def compare(reference, other):
    """Return KL(reference || other) of each row, and whether both have the same top token."""
    width = min(reference.shape[1], other.shape[1])
    reference = reference[:, :width]
    other = other[:, :width]
    return (np.exp(reference) * (reference - other)).sum(1), reference.argmax(1) == other.argmax(1)


def main():
    given = arguments(__doc__, __file__, target="smollm2-135m", tokens=2048).parse_args()
    engines = {
        "llama.cpp": given.target,
        "torch int4": f"{given.target}?backend=hf&dtype=int4",
        "torch bfloat16": f"{given.target}?backend=hf&dtype=bfloat16",
    }
    with closing(load(f"{given.target}?backend=hf&dtype=float32")) as model:
        texts = windows(model, given.tokens)
        references = [log_probabilities(model, ids) for ids in texts]
    rows = []
    for engine, name in engines.items():
        with closing(load(name)) as model:
            pairs = [
                compare(reference, log_probabilities(model, ids))
                for reference, ids in zip(references, texts, strict=True)
            ]
        kl, agree = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        rows.append(
            {
                "target": Path(given.target).name,
                "engine": engine,
                "tokens": len(kl),
                "kl_mean": kl.mean(),
                "kl_median": np.median(kl),
                "same_top_token": agree.mean(),
            }
        )
        print(pd.DataFrame(rows[-1:]).to_string(index=False, header=len(rows) == 1), flush=True)
    add_rows(given.out, {"rows": rows})


if __name__ == "__main__":
    main()
