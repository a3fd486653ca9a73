"""Tables over runs: what there is, two runs side by side, and a run as Spec-Bench writes it."""

import json
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specnb import store
from specnb.batch.run import place
from specnb.errors import InputError
from specnb.io import reading, write_atomic
from specnb.measure.bench import interval, rate, rate_ratio
from specnb.records import Generation, RunRecord, pool_rounds

OVERVIEW = """
    SELECT r.run_id, r.experiment, r.started, r.status, r.params AS differs,
           date_diff('second', r.started, r.ended) AS seconds,
           count(g.run_id) AS generations, sum(g.n_tokens) AS tokens
    FROM runs r LEFT JOIN generations g ON g.run_id = r.run_id AND g.experiment = r.experiment
    GROUP BY ALL ORDER BY r.started
"""
GROUP = ("category", "drafter", "controller", "k", "temperature", "top_p")
"""Fields that generations of one group share: a category and a method."""


@contextmanager
def local_copy(results: str | None) -> Iterator[Path]:
    """Yield the folder of the records in `results`; for s3://… a copy without notebooks and figures.

    None is the usual folder. A key that would lie outside the folder (with "..", or absolute) is
    left out, with one warning that names all of them. Raises InputError for a place that cannot be
    read.
    """
    if not results or "://" not in results:
        yield Path(results or store.results_dir())
        return
    from pyarrow import fs

    system, base = place(results)
    odd = []
    with tempfile.TemporaryDirectory(prefix="specnb-results-") as name:
        folder = Path(name)
        with reading(results):
            for info in system.get_file_info(fs.FileSelector(base, recursive=True)):
                key = Path(info.path)
                if ".." in key.parts or not key.is_relative_to(base):
                    odd.append(info.path)
                elif key.name in (store.RUN, store.ROUNDS):
                    with system.open_input_stream(info.path) as file:
                        write_atomic(folder / key.relative_to(base), file.read())
        if odd:
            warnings.warn(f"{results}: left out keys outside of it: {', '.join(odd)}", stacklevel=3)
        yield folder


def overview(results: Path) -> pd.DataFrame:
    """Return a row for each run, oldest first; `differs` are the parameters that its experiment does not share."""
    table = store.query(OVERVIEW, results)
    texts = table["differs"].map(lambda text: [f"{name}={value}" for name, value in json.loads(text).items()])
    shared = texts.map(set).groupby(table["experiment"]).transform(lambda each: [set.intersection(*each)] * len(each))
    differs = [", ".join(t for t in each if t not in common) for each, common in zip(texts, shared, strict=True)]
    return table.assign(differs=differs)


def record_of(run_id: str, results: Path) -> RunRecord:
    """Return the record of a run, named by its id or the beginning of it. Raises InputError for none, or several."""
    folders = sorted(path.parent for path in results.rglob(store.RUN) if path.parent.name.startswith(run_id))
    if len(folders) != 1:
        names = ", ".join(str(folder.relative_to(results)) for folder in folders) or "none"
        raise InputError(f"run {run_id!r} in {results}: got {names}, expected one: see `specnb results` for the ids")
    return store.load_record(folders[0])


def differing(a: RunRecord, b: RunRecord) -> pd.DataFrame:
    """Return the parameters and facts of the machine in which two runs differ. Columns: name, a, b."""
    facts = {}
    for side, record in (("a", a), ("b", b)):
        git, cpu = (record.provenance.get(name) or {} for name in ("git", "cpu"))
        machine = {"commit": git.get("commit"), "cpu": cpu.get("model"), "cores": cpu.get("usable_cores")}
        facts[side] = {"experiment": record.experiment, "status": record.status, **record.params, **machine}
    table = pd.DataFrame(facts, dtype=object).rename_axis("name").reset_index()
    return table[table["a"].map(str) != table["b"].map(str)]


def compare_runs(a: RunRecord, b: RunRecord) -> pd.DataFrame:
    """Compare what both runs did with the same prompts, category by category and method by method.

    Columns: GROUP, n_prompts, tau_a, tau_b, accepted_a, accepted_b (shares of drafts), tokens_per_s_a,
    tokens_per_s_b, and `ratio` b over a of these with its 95 % interval `low`, `high` over prompts; `identical` counts
    the prompts whose tokens are the same. A method that one run lacks is left out. Raises InputError where nothing is
    common.
    """
    group = attrgetter(*GROUP)
    by_a, by_b = ({(group(g), g.prompt_id): g for g in run.generations} for run in (a, b))
    pairs = {}
    for key in filter(by_b.__contains__, by_a):
        pairs.setdefault(key[0], []).append((by_a[key], by_b[key]))
    if not pairs:
        raise InputError(f"runs {a.run_id} and {b.run_id} share no prompt with the same method: nothing to compare")
    return pd.DataFrame([_row(method, both) for method, both in pairs.items()])


def _row(method: tuple, pairs: list[tuple[Generation, Generation]]) -> dict[str, Any]:
    timed = [(y.n_decoded, y.decode_s, x.n_decoded, x.decode_s) for x, y in pairs if x.n_decoded and y.n_decoded]
    row = dict(zip(GROUP, method, strict=True)) | {"n_prompts": len(pairs)}
    for side, of in zip("ab", zip(*pairs, strict=True), strict=True):
        rounds, times = pool_rounds(of), [(g.n_decoded, g.decode_s) for g in of]
        row |= {f"tau_{side}": rounds["tau"], f"accepted_{side}": rounds["acceptance_rate"]}
        row[f"tokens_per_s_{side}"] = rate(np.array(times))
    row |= zip(("ratio", "low", "high"), interval(timed, rate_ratio) if timed else (None,) * 3, strict=True)
    return row | {"identical": sum(x.token_ids == y.token_ids for x, y in pairs)}


def export_spec_bench(record: RunRecord, folder: Path) -> list[Path]:
    """Write a run as Spec-Bench's answer files, one for each method; its `evaluation/speed.py` reads them.

    There a line is a question, `accept_lengths` are tokens committed a round, `wall_time` is of the whole call. Plain
    decoding is the file whose name says vanilla. Repeats of a prompt are further choices, of which Spec-Bench reads
    the first. Raises InputError for a run without generations.
    """
    methods = {}
    for g in record.generations:
        method = "-".join(filter(None, (g.drafter, g.controller, f"k{g.k}"))) if g.k else "vanilla"
        name = re.sub(r"[^\w.=-]", "_", f"{g.target}-{method}-temp-{g.temperature:g}")
        questions = methods.setdefault(folder / f"{name}.jsonl", {})
        question = {"question_id": g.prompt_id, "category": g.category, "model_id": name, "choices": []}
        choices = questions.setdefault(g.prompt_id, question)["choices"]
        choices.append({
            "index": len(choices), "turns": [g.text], "decoding_steps": [len(g.rounds)],
            "new_tokens": [len(g.token_ids)], "wall_time": [g.wall_s],
            "accept_lengths": [len(r.committed_ids) for r in g.rounds],
        })  # fmt: skip
    if not methods:
        raise InputError(f"run {record.run_id} holds no generations: export one of 01_k_sweep")
    for path, questions in methods.items():
        write_atomic(path, "".join(f"{json.dumps(question)}\n" for question in questions.values()).encode())
    return [*methods]
