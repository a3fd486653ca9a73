"""Between recorded temperatures the explorer interpolates: are its acceptance rates those of live runs?

.venv/bin/python -m tests.benchmarks.glide

The shipped trace's target and draft model decode its prompts live at temperatures that it does not hold. `predicted` is
the accepted share half-way between the neighbours that it holds; `ratio` is predicted over live with an interval over
prompts, each paired with itself. Tokens only: a busy machine changes nothing.
"""

import json
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from specnb.book.explorer.tables import ALL, FREE, SHIPPED, Setting, Tables, stored
from specnb.decode.generate import generate
from specnb.draft.load import load_drafter
from specnb.io import write_atomic
from specnb.lm.load import load
from specnb.measure.bench import interval
from specnb.measure.policies import FIXED
from specnb.measure.replay import split
from specnb.prompts import prompts
from specnb.provenance import provenance

BETWEEN, K = {0.3: (0.2, 0.4), 0.5: (0.4, 0.6)}, 4
RECORD = Path(__file__).with_suffix(".json")


def share(counts: np.ndarray) -> float:
    """Accepted over drafted, from rows (drafted, accepted)."""
    drafted, accepted = counts.sum(axis=0)
    return accepted / drafted


def main() -> None:
    run = stored(SHIPPED)
    tables, rows = Tables(run.trace), []
    name = tables.drafters[-1]
    asked = {prompt.id: prompt for prompt in prompts()}
    with ExitStack() as opened:
        target = opened.enter_context(closing(load(run.record.params["target"])))
        drafter = opened.enter_context(closing(load_drafter(f"{name}?backend=llama", target, strict=True).drafter))
        for temperature, ends in BETWEEN.items():
            recorded: dict[str, list[np.ndarray]] = {}
            for end in ends:
                for index in tables.chosen(Setting(name, end, ALL, FIXED, K, FREE)):
                    counts = split(tables.exact[index, K])[1]
                    recorded.setdefault(tables.recordings[index].prompt_id, []).append(counts[1:3])
            settings = {"k": K, "temperature": temperature, "max_new_tokens": tables.recordings[0].max_new_tokens}
            pairs = []
            for prompt_id, counts in recorded.items():
                live = generate(target, asked[prompt_id], drafter=drafter, **settings)
                pairs.append([*np.sum(counts, axis=0), live.total_draft_tokens, live.accepted_tokens])
            predicted, measured = (interval(np.array(pairs)[:, part], share) for part in (slice(2), slice(2, 4)))
            ratio = interval(pairs, lambda rows: share(rows[:, :2]) / share(rows[:, 2:]))
            rows.append({"drafter": name, "temperature": temperature, "between": ends, "k": K, "n_prompts": len(pairs),
                         "predicted": predicted, "live": measured, "ratio": ratio})  # fmt: skip
            print(rows[-1], flush=True)
    write_atomic(RECORD, json.dumps({"cpu": provenance(models=[])["cpu"], "rows": rows}, indent=1).encode())


if __name__ == "__main__":
    main()
