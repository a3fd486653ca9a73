"""One page about a pair of models: compatibility, costs, acceptance, speed-ups, and engine flags.

The page is the explorer on the user's own prompts, with the results above it. It needs no network
and no kernel.
"""

import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

from jinja2 import Environment

from specnb.book.explorer.live import Workbench
from specnb.book.explorer.page import page, reduced
from specnb.book.explorer.tables import ALL, THIS_MACHINE, Tables, sweep_k
from specnb.book.tables import best_k, compact
from specnb.compat.check import check
from specnb.compat.read import describe
from specnb.errors import InputError
from specnb.lm.files import local_file, parse
from specnb.measure.bench import time_pairs
from specnb.measure.experiment import Progress
from specnb.measure.intervals import RATIOS
from specnb.params import ExplorerParams
from specnb.prompts import categories

TEMPERATURES = [0.0, 0.7]
FLAGS = {
    "specnb": "specnb generate PROMPT --target {0} --draft {1} --k {k}",
    "llama.cpp": "llama-server -m {2} -md {3} --spec-type draft-simple --spec-draft-n-max {k}",
    "vLLM": "vllm serve TARGET --speculative-config "
    '\'{{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": {k}}}\'',
    "transformers": "set num_assistant_tokens={k}, num_assistant_tokens_schedule='constant' and "
    "assistant_confidence_threshold=0 in draft.generation_config; "
    "target.generate(…, assistant_model=draft)",
}
"""Setting of K in each engine; {2} and {3} are files. llama.cpp has the option since May 2026. vLLM
takes Hub repositories. transformers reads the number from the draft model only."""
SHOWN = ["category", "temperature", "k", *RATIOS, "acceptance_rate", "tau"]


def examine(
    target: str,
    draft: str,
    *,
    source: str,
    contents: str,
    prompts_per_category: int,
    max_new_tokens: int,
    progress: Progress,
) -> tuple[dict[str, Any], str]:
    """Compare the vocabularies, record the pair on prompts, predict the best K, and run it live.

    Returns a JSON document and the page that shows it. In the document, `predicted` is the best K
    by content and temperature, `live` the timings at K = `k`, and `costs` a sentence about the
    costs of a round, on which the predictions are based.

    An empty `source` stands for the shipped prompts. `contents` are category names separated by
    commas; the default is all categories of a file, or code, json and prose (json only with a chat
    template). The run is saved as a run of notebook 09.

    Raises InputError for a draft model that needs vocabulary translation, and the errors of
    `read.describe`, `load` and `generate`.
    """
    described = describe(target)
    vocabulary = check(described, describe(draft)).summary()
    has_chat = described.vocab is not None and described.vocab.chat_template
    shipped = ["code", "json", "prose"] if has_chat else ["code", "prose"]
    bench = Workbench(
        ExplorerParams.checked(
            trace="new",
            target=target,
            drafters=[draft],
            prompts=source,
            temperatures=TEMPERATURES,
            top_p=1.0,
            contents=contents or ([*categories(source)] if source else shipped),
            prompts_per_category=prompts_per_category,
            max_new_tokens=max_new_tokens,
        )
    )
    progress(0, 1, f"loading {target}, {draft}")
    with closing(bench.target):
        try:
            (drafter,) = bench.drafters
        except InputError as error:
            raise InputError(f"{vocabulary} {error}; `specnb bench` times such a pair") from error
        with closing(drafter):
            progress(0, 1, "measuring the costs of forward passes")
            run = bench.open_trace(progress)
            tables = Tables(run.trace)
            sweep = sweep_k(tables, run.curve, run.c)
            sweep = sweep[sweep["machine"] == THIS_MACHINE]
            best = best_k(sweep).drop(columns="verdict")  # it would be over the target's own engine
            k = int(best.set_index(["category", "temperature"]).loc[(ALL, 0.0), "k"])
            (timed,) = time_pairs(
                bench.target,
                [drafter],
                bench.chosen,
                ks=[k],
                max_new_tokens=max_new_tokens,
                progress=progress,
            )
    rates = sweep.assign(acceptance_rate=sweep["accepted"] / sweep["drafted"])
    best = timed.baseline.over(
        best.merge(rates[["category", "temperature", "k", "acceptance_rate"]])
    )
    document = {
        "target": timed.target,
        "draft": timed.drafter,
        "k": k,
        "costs": run.curve.describe(*run.c.values(), across=timed.c_across_engines),
        "verdict": timed.verdict,
        "conclusion": timed.conclusion,
        "vocabulary": vocabulary,
        "run_id": run.record.run_id,
        "flags": flags_of(target, draft, k),
        "predicted": best.to_dict("records"),
        "live": timed.table.to_dict("records"),
    }
    template = Environment(autoescape=True).from_string(
        Path(__file__).with_suffix(".html").read_text("utf-8")
    )
    predicted, live = (
        compact(table).to_html(index=False, border=0, justify="left")
        for table in (best[SHOWN], timed.table)
    )
    above = template.render(document, predicted=predicted, live=live, timed=timed)
    return document, page(reduced(run, tables), above)


def flags_of(target: str, draft: str, k: int) -> dict[str, str]:
    """Return the line of FLAGS for each engine, with names and files quoted for the shell."""
    files = [str(local_file(parse(name)) or name) for name in (target, draft)]
    words = [*map(shlex.quote, (target, draft, *files))]
    return {engine: line.format(*words, k=k) for engine, line in FLAGS.items()}
