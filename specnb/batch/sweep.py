"""Run a notebook over a grid of parameters: one by one, in parallel, or on a dask cluster.

    grid = {"seed": [0, 1, 2], "drafter": ["lookup", "self"]}
    batch = Batch(notebook="01_k_sweep", budget="quick", grid=grid)
    ended = list(run_sweep(jobs(batch, results="results"), workers=2))

The folder of a run depends only on the notebook and its parameters. A second call therefore skips
completed runs, and continues a sweep that was interrupted or lost a machine.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from specnb import store
from specnb.batch.run import Ended, Job, completed_notebook, execute
from specnb.book.notebook import defaults, find_notebook, parsed, read_notebook, resolve_params
from specnb.errors import FetchError, InputError
from specnb.io import JsonObject, comma_list, read_text, reading, validated
from specnb.params import Budget

MAX_RUNS = 10_000


class Batch(BaseModel, frozen=True, extra="forbid"):
    """A notebook, the `parameters` of all runs, and a `grid` of values: one run per combination.

    >>> batch = Batch(notebook="01_k_sweep", grid={"seed": [0, 1], "k_max": [8, 16]})
    >>> len(jobs(batch, results="results"))
    4
    """

    notebook: str
    budget: Budget | None = None
    parameters: JsonObject = {}
    grid: dict[str, list[Any]] = {}


def read_batch(path: Path) -> Batch:
    """Read a batch from a YAML file; values without quotes are parsed as on the command line.

    Raises InputError for invalid content, a repeated key or an alias (`*name`).
    """
    with reading(f"{path}: the YAML"):
        text = read_text(path)
        for event in yaml.parse(text):
            # aliases may be recursive, or grow exponentially
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"alias {event.anchor!r}: write its value out")
        node = yaml.compose(text)
        document = node and _value_of(node)
    return validated(Batch, document, str(path))


def _value_of(node: yaml.Node) -> Any:
    """Return the value of a YAML node; scalars without quotes are `parsed`, empty ones are None.

    Raises ValueError for a repeated key, with its line.
    """
    if node.id == "scalar":
        return node.value if node.style else parsed(node.value or "null")
    if node.id == "sequence":
        return [*map(_value_of, node.value)]
    values = {}
    for key, value in node.value:
        if key.value in values:
            raise ValueError(f"key {key.value!r} is repeated in line {key.start_mark.line + 1}")
        values[key.value] = _value_of(value)
    return values


def batch_of(notebook: str, params: JsonObject, budget: str | None) -> Batch:
    """Return the batch of a command line: a text with commas, or a list, gives one run per item.

    For a parameter that is itself a list, pass one list, or several as a list of lists.
    """
    usual = defaults(read_notebook(find_notebook(notebook)))
    grid = {
        name: _values(value, isinstance(usual.get(name), list)) for name, value in params.items()
    }
    return Batch(notebook=notebook, budget=budget, grid=grid)


def _values(value: Any, is_list: bool) -> list[Any]:
    if isinstance(value, str) and not is_list:
        return [parsed(word) for word in comma_list(value)]
    if isinstance(value, list) and (
        not is_list or (value and all(isinstance(item, list) for item in value))
    ):
        return value
    return [value]


def jobs(batch: Batch, *, results: str) -> list[Job]:
    """Return one job per combination, checked as in `specnb run`, without duplicates.

    Raises InputError for invalid parameters, and for no runs or more than MAX_RUNS.
    """
    source = read_notebook(find_notebook(batch.notebook))
    if twice := sorted(batch.parameters.keys() & batch.grid.keys()):
        raise InputError(f"{twice[0]} is in both parameters and grid: remove one of them")
    counts = {name: len(values) for name, values in batch.grid.items()}
    if not 1 <= (n := prod(counts.values())) <= MAX_RUNS:
        raise InputError(
            f"the grid of {counts} values makes {n} runs, "
            f"expected 1 to {MAX_RUNS}: change or split it"
        )
    by_id = {}
    for values in product(*batch.grid.values()):
        params = batch.parameters | dict(zip(batch.grid, values, strict=True))
        params, resolved = resolve_params(source, params, batch.budget)
        run_id = store.run_id(source.path.stem, resolved)
        budget = resolved.get("budget")
        by_id[run_id] = Job(str(source.path), source.sha256, params, budget, run_id, results)
    return list(by_id.values())


def run_sweep(chosen: Sequence[Job], *, workers: int = 1, scheduler: str = "") -> Iterator[Ended]:
    """Run the jobs that have not completed. Yield the skipped jobs first, then each as it ends.

    Up to `workers` jobs run in parallel on this machine, or the jobs run on the cluster of a dask
    `scheduler` (tcp://HOST:PORT). An interrupt ends all jobs on this machine, or waiting jobs on a
    cluster. Raises FetchError if the scheduler does not respond.
    """
    todo = []
    for job in chosen:
        if completed_notebook(job) == job.notebook_sha256:
            yield Ended(job.run_id, job.params, "skipped", folder=job.folder)
        else:
            todo.append(job)
    if todo:
        yield from _on_dask(scheduler, todo) if scheduler else _here(workers, todo)


def _here(workers: int, todo: Sequence[Job]) -> Iterator[Ended]:
    running = set()
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(execute, job, running) for job in todo]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:  # after an interrupt, or if the caller stops iterating
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):  # a process may be about to start
                for process in list(running):
                    process.stdin.close()
                time.sleep(0.1)


def _on_dask(scheduler: str, todo: Sequence[Job]) -> Iterator[Ended]:
    """Run jobs on a cluster; if a worker dies, its process ends and dask reassigns the job."""
    import distributed

    try:
        client = distributed.Client(scheduler, timeout=30)
    except (OSError, ValueError) as error:
        raise FetchError(
            f"no dask scheduler at {scheduler} ({error}): start one with `dask scheduler`"
        ) from error
    with client:
        jobs = {client.submit(execute, job, set(), key=f"specnb-{job.run_id}"): job for job in todo}
        try:
            for future in distributed.as_completed(jobs):
                job = jobs[future]
                error = future.exception()
                killed = Ended(
                    job.run_id, job.params, "killed", error=str(error), folder=job.folder
                )
                yield killed if error else future.result()
        finally:
            client.cancel([future for future in jobs if not future.done()])
