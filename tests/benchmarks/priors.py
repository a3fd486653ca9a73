"""How often are drafts kept, by the length of a match and by a draft model's largest probability?

.venv/bin/python -m tests.benchmarks.priors

Along the shipped trace: fitted on every other prompt, and set beside the shares that `decode.costaware` begins with, on
the prompts in between. `error` is the mean squared error of a chance (Brier's score), fitted and built in.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from specnb.book.explorer.tables import SHIPPED, stored
from specnb.decode.costaware import MATCH_EDGES, MATCH_PRIOR, TOP_EDGES, TOP_PRIOR
from specnb.measure.recording import Recording

PARTS = ("fitted", "held out")


def by_match(recording: Recording) -> Iterator[tuple[float, float]]:
    """Yield the match behind each draft that was reached, and whether it was kept."""
    for support, chances in zip(recording.support, recording.keep, strict=False):
        for j, chance in enumerate(chances if support else ()):
            yield support + j, chance
            if not chance:
                break


def by_top(recording: Recording) -> Iterator[tuple[float, float]]:
    """Yield the largest probability of each row along the text, and how often its draft is kept."""
    for belief, chances in zip(recording.beliefs, recording.keep, strict=False):
        if chances:
            yield belief, chances[0]


def main() -> None:
    trace = stored(SHIPPED).trace
    for title, pairs_of, edges, prior in (("tokens of match", by_match, MATCH_EDGES, MATCH_PRIOR),
                                          ("largest probability", by_top, TOP_EDGES, TOP_PRIOR)):  # fmt: skip
        parts = {part: [] for part in PARTS}
        for recording in trace.recordings:
            nth = int(recording.prompt_id.rsplit("-", 1)[-1])
            parts[PARTS[nth % 2]] += pairs_of(recording)
        frames = {part: pd.DataFrame(pairs, columns=["number", "kept"]) for part, pairs in parts.items()}
        for frame in frames.values():
            frame["bin"] = np.searchsorted(edges, frame["number"])
        fitted = frames["fitted"].groupby("bin")["kept"].agg(["mean", "size"]).reindex(range(len(prior)))
        held_out = frames["held out"]
        errors = {name: float(((held_out["bin"].map(dict(enumerate(chances))) - held_out["kept"]) ** 2).mean())
                  for name, chances in (("fitted", fitted["mean"].fillna(0.5)), ("built in", prior))}  # fmt: skip
        table = fitted.assign(built_in=prior, up_to=[*edges, float("inf")]).set_index("up_to")
        print(f"{title}: error on {len(held_out)} drafts held out {errors}\n{table.round(2)}\n")


if __name__ == "__main__":
    main()
