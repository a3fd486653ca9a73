"""A pair of models in one page: does the draft fit, what do rounds cost, what is kept and gained, and with which flags.

The explorer over the reader's own prompts, with the answers above it. The page needs no network and no kernel.
"""

import shlex
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from specnb.book.explorer.live import Workbench
from specnb.book.explorer.page import page, reduced
from specnb.book.explorer.tables import ALL, THIS_MACHINE, Tables, sweep_k
from specnb.book.tables import best_k, compact
from specnb.compat.check import check
from specnb.compat.read import describe
from specnb.errors import InputError
from specnb.lm.files import local_file, parse
from specnb.measure.bench import time_pair
from specnb.measure.experiment import Progress, silent
from specnb.params import ExplorerParams
from specnb.prompts import categories
from specnb.records import RunRecord

TEMPERATURES = [0.0, 0.7]
FLAGS = {
    "specnb": "specnb generate PROMPT --target '{target}' --draft '{draft}' --k {k}",
    "llama.cpp": "llama-server -m {0} -md {1} --spec-type draft-simple --spec-draft-n-max {k}",
    "vLLM": "vllm serve TARGET --speculative-config "
    '\'{{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": {k}}}\'',
    "transformers": "set num_assistant_tokens={k}, num_assistant_tokens_schedule='constant' and "
    "assistant_confidence_threshold=0 in draft.generation_config; target.generate(…, assistant_model=draft)",
}
"""The setting of K in each engine. llama.cpp since May 2026; vLLM takes repositories of the hub; transformers reads the
number from the draft alone."""
SHOWN = ["category", "temperature", "k", "speedup", "low", "high", "acceptance_rate", "tau"]


class PairReport(NamedTuple):
    """The findings about a pair: one JSON document, the page of them with the explorer, and the record of the run.

    In the document `predicted` is the best K by content and temperature, `live` what was timed at K = `k`; `costs` are
    those of rounds that predictions stand on, in a sentence.
    """

    document: dict[str, Any]
    page: str
    record: RunRecord


def examine(
    target: str, draft: str, *, source: str = "", contents: str = "", prompts_per_category: int = 5,
    max_new_tokens: int = 64, progress: Progress = silent,
) -> PairReport:  # fmt: skip
    """Compare the vocabularies, record the pair on prompts of `source`, predict the best K, and run that live.

    Without a `source` the shipped prompts are taken; without `contents`, a text with commas, all of a file,
    or code, json and prose (json only with a chat template). The run is saved as one of notebook 09. Raises InputError
    for a draft whose text has to be spelled in other tokens, and what `read.describe`, `load` and `generate` raise.
    """
    described = describe(target)
    vocabulary = check(described, describe(draft)).summary()
    has_chat = described.vocab is not None and described.vocab.chat_template
    shipped = ["code", "json", "prose"] if has_chat else ["code", "prose"]
    bench = Workbench(ExplorerParams.checked(
        trace="new", target=target, drafters=[draft], prompts=source, temperatures=TEMPERATURES, top_p=1.0,
        contents=contents or ([*categories(source)] if source else shipped),
        prompts_per_category=prompts_per_category, max_new_tokens=max_new_tokens,
    ))  # fmt: skip
    with closing(bench.target):
        try:
            (drafter,) = bench.drafters
        except InputError as error:
            raise InputError(f"{vocabulary} {error}; `specnb bench draft` times such a pair") from error
        with closing(drafter):
            run = bench.trace(progress)
            tables = Tables(run.trace)
            sweep = sweep_k(tables, run.curve, run.c)
            sweep = sweep[sweep["machine"] == THIS_MACHINE]
            best = best_k(sweep).drop(columns="verdict")  # which would be over the target's own engine
            k = int(best.set_index(["category", "temperature"]).loc[(ALL, 0.0), "k"])
            progress(1, 2, f"K = {k} live")
            timed = time_pair(bench.target, drafter, bench.chosen, ks=[k], max_new_tokens=max_new_tokens)
    rates = sweep.assign(acceptance_rate=sweep["accepted"] / sweep["drafted"])
    best = timed.baseline.over(best.merge(rates[["category", "temperature", "k", "acceptance_rate"]]))
    files = [shlex.quote(str(local_file(parse(name)) or name)) for name in (target, draft)]
    flags = {engine: line.format(*files, target=target, draft=draft, k=k) for engine, line in FLAGS.items()}
    document = {
        "target": timed.target, "draft": timed.drafter, "k": k,
        "costs": run.curve.beside(*run.c.values(), across=timed.c_across_engines), "verdict": timed.verdict,
        "conclusion": timed.conclusion, "vocabulary": vocabulary, "run_id": run.record.run_id, "flags": flags,
        "predicted": best.to_dict("records"), "live": timed.table.to_dict("records"),
    }  # fmt: skip
    template = Environment(autoescape=True).from_string(Path(__file__).with_suffix(".html").read_text("utf-8"))
    predicted, live = (
        compact(table).to_html(index=False, border=0, justify="left") for table in (best[SHOWN], timed.table)
    )
    above = template.render(document, predicted=predicted, live=live, baseline=timed.baseline)
    return PairReport(document, page(reduced(run, tables), above), run.record)
