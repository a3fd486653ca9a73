"""`specnb sweep`, `results`, `compare` and `export`: batches of runs, and tables over them."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specnb.batch.run import INTERRUPTED
from specnb.cli.show import Json, clean, complain, print_frame, print_json, print_result
from specnb.errors import InputError

Results = Annotated[str | None, typer.Option(help="folder of records, or s3://BUCKET/PREFIX [results/]")]
PARAMETER = ("-p", "--parameter")


def sweep(
    notebook: Annotated[str, typer.Argument(metavar="NOTEBOOK", help="a notebook, or a batch file (.yaml)")],
    parameter: Annotated[
        list[str] | None,
        typer.Option(*PARAMETER, help="values by commas, a run each; repeatable", metavar="NAME VALUE"),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="quick, normal or full [$SPECNB_BUDGET, or the cell's]")] = None,
    workers: Annotated[int, typer.Option(help="runs at once; they disturb each other's speeds, not counts", min=1)] = 1,
    scheduler: Annotated[str, typer.Option(help="of a dask cluster, tcp://HOST:PORT; its workers run the batch")] = "",
    resource: Annotated[list[str] | None, typer.Option(help="of a dask worker, a run: GPU=1; repeatable")] = None,
    results: Results = None,
    timeout_s: Annotated[float | None, typer.Option(help="seconds a run may take", min=1)] = None,
    retries: Annotated[int, typer.Option(help="of a run whose kernel or process dies", min=0)] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the runs, and run nothing")] = False,
    as_json: Json = False,
) -> None:
    """Run a notebook over a grid of parameters; what has completed is skipped, so a second call resumes.

    `specnb sweep 01 -p seed 0,1,2 -p drafter lookup,self --workers 2` makes six runs. A batch file holds the same as
    notebook, budget, parameters and grid (see notebooks/batches). Exit code 1 if a run failed; the others are kept.

    On many machines: `dask scheduler` on one, `dask worker tcp://HOST:8786 --nthreads 1` on each (for GPUs with
    --resources GPU=1), from the same checkout and environment, with results in a shared folder or s3://. On SLURM
    start the workers with dask_jobqueue.SLURMCluster(cores=1, processes=1), on Kubernetes with
    dask_kubernetes.operator.KubeCluster, and give `--scheduler` the address that their scheduler_address shows.
    """
    from specnb import store
    from specnb.batch import sweep as batches
    from specnb.book.notebook import parse_parameters

    given = parse_parameters(parameter or [])
    if notebook.endswith((".yaml", ".yml")):
        if given or budget:
            raise InputError(f"{notebook} holds the whole batch: leave -p and --budget out, or write them into it")
        batch = batches.read_batch(Path(notebook))
    else:
        batch = batches.batch_of(notebook, given, budget)
    results = results or str(store.results_dir())
    jobs = batches.jobs(batch, results=results, limit_s=timeout_s, retries=retries)
    if dry_run:
        rows = [{"run_id": job.run_id, "params": job.params, "folder": job.folder} for job in jobs]
        print_result(as_json, rows, f"{len(jobs)} runs", ["run_id", "params", "folder"])
        return
    pairs = (text.partition("=") for text in resource or ())
    try:
        resources = {name: float(n) for name, _, n in pairs}
    except ValueError as error:
        raise InputError(f"--resource takes NAME=NUMBER, such as GPU=1, got {resource}") from error
    ended, interrupted = [], False
    with _board(len(jobs)) as (tell, tick):
        try:
            for run in batches.sweep(jobs, workers=workers, scheduler=scheduler, resources=resources, tell=tell):
                ended.append(run)
                tick(run.run_id, f"{run.status} {_short(run.params)}")
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        complain(f"interrupted after {len(ended)} of {len(jobs)} runs; the same command goes on from there")
    counts = Counter(run.status for run in ended)
    title = ", ".join(f"{n} {status}" for status, n in counts.items()) or "nothing was run"
    columns = ["run_id", "status", "duration_s", "attempts", "params"]
    print_result(as_json, [run._asdict() for run in ended], title, columns)
    failed = [run for run in ended if not run.ok]
    for run in failed:
        complain(f"{run.run_id} {run.status} ({_short(run.params)}): {run.error}; see {run.folder}")
    raise typer.Exit(INTERRUPTED if interrupted else int(bool(failed)))


def _short(params: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.items())


@contextmanager
def _board(total: int) -> Iterator[tuple]:
    """Yield `tell` and `tick`: a bar of all runs and a line for each running one; plain lines without a terminal."""
    console = Console(stderr=True)
    bar = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*bar, console=console, disable=not console.is_terminal) as progress:
        whole, lines, done = progress.add_task("runs", total=total), {}, 0

        def tell(run_id: str, line: str) -> None:
            if run_id not in lines:
                lines[run_id] = progress.add_task(run_id, total=None)
            progress.update(lines[run_id], description=f"{run_id} {clean(line)[:80]}")

        def tick(run_id: str, line: str) -> None:
            nonlocal done
            done += 1
            progress.advance(whole)
            if run_id in lines:
                progress.remove_task(lines.pop(run_id))
            if not console.is_terminal:
                complain(f"{done}/{total} {run_id} {line}")

        yield tell, tick


def results(
    query: Annotated[
        str | None, typer.Argument(help="SQL over the tables runs, generations, rounds [all runs]")
    ] = None,
    results: Results = None,
    csv: Annotated[Path | None, typer.Option(help="write the table into this file")] = None,
    as_json: Json = False,
) -> None:
    """List all runs, or what a query (duckdb) finds in them.

    `specnb results "SELECT k, avg(n_accepted) FROM rounds GROUP BY k"`
    """
    from specnb import store
    from specnb.batch.results import at_hand, overview

    where = results or str(store.results_dir())
    with at_hand(where) as folder:
        table = store.query(query, folder) if query else overview(folder)
    if csv:
        table.to_csv(csv, index=False)
    if as_json:
        print_json(json.loads(table.to_json(orient="records", date_format="iso")))
    elif len(table):
        print_frame(where, table)
    else:
        print("no rows")


def compare(
    run_a: Annotated[str, typer.Argument(help="id of a run, or its beginning")],
    run_b: Annotated[str, typer.Argument(help="of another one")],
    results: Results = None,
    as_json: Json = False,
) -> None:
    """Put two runs side by side: how they differ, and what came of it on the prompts that both have."""
    from specnb import store
    from specnb.batch import results as tables

    with tables.at_hand(results or str(store.results_dir())) as folder:
        a, b = (tables.record_of(run, folder) for run in (run_a, run_b))
    differs, table = tables.differing(a, b), tables.compare(a, b)
    if as_json:
        document = {"differs": differs, "table": table}
        print_json({name: json.loads(frame.to_json(orient="records")) for name, frame in document.items()})
        return
    print_frame(f"a = {a.run_id}, b = {b.run_id}: what differs", differs)
    print_frame("on the prompts of both", table.dropna(axis=1, how="all"))


def export(
    run: Annotated[str, typer.Argument(help="id of a run, or its beginning")],
    out: Annotated[Path, typer.Option(help="folder for the files")] = Path("spec_bench"),
    results: Results = None,
    as_json: Json = False,
) -> None:
    """Write a run as Spec-Bench's answer files, a file for each method, for its evaluation/speed.py."""
    from specnb import store
    from specnb.batch import results as tables

    with tables.at_hand(results or str(store.results_dir())) as folder:
        paths = tables.export_spec_bench(tables.record_of(run, folder), out)
    files = [os.path.relpath(path) for path in paths]
    print_json({"run_id": run, "files": files}) if as_json else print(*files, sep="\n")
