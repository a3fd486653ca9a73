"""`specnb sweep` and `specnb results`: batches of runs, and tables over them."""

from collections import Counter
from pathlib import Path

from typer import Exit

from specnb import store
from specnb.batch.run import INTERRUPTED
from specnb.cli.show import Json, complain, frame_of, print_result, records_of, table_of
from specnb.errors import InputError
from specnb.io import plain


def sweep(
    notebook: str,
    parameter: list[str] | None = None,
    budget: str | None = None,
    workers: int = 1,
    scheduler: str = "",
    results: str | None = None,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Run a notebook over a grid of parameters; resumes.

    Completed runs are skipped, so the same command resumes after an interrupt.

    `specnb sweep 01 -p seed 0,1,2 -p drafter lookup,self --workers 2` makes six runs. A batch file
    sets notebook, budget, parameters and grid (see notebooks/batches). The exit code is 1 if a run
    failed; the other runs are not affected.

    On several machines: start `dask scheduler` on one, and on each of them
    `dask worker tcp://HOST:8786 --nthreads 1`, in the same checkout and environment, with results
    in a shared folder or s3://. On SLURM, start the workers
    with dask_jobqueue.SLURMCluster(cores=1, processes=1), on Kubernetes with
    dask_kubernetes.operator.KubeCluster, and pass their scheduler_address to `--scheduler`.
    """
    from specnb.batch import sweep as batches
    from specnb.book.notebook import parse_parameters

    params = parse_parameters(parameter or [])
    if not notebook.endswith((".yaml", ".yml")):
        batch = batches.batch_of(notebook, params, budget)
    elif params or budget:
        raise InputError(
            f"got -p or --budget with the batch file {notebook}: set them in the file instead"
        )
    else:
        batch = batches.read_batch(Path(notebook))
    results = results or str(store.results_dir())
    jobs = batches.jobs(batch, results=results)
    if dry_run:
        columns = ["run_id", "params", "folder"]
        rows = [{name: getattr(job, name) for name in columns} for job in jobs]
        print_result(as_json, rows, table_of(f"{len(jobs)} runs", rows, columns))
        return
    ended = []
    code = 0
    try:
        for run in batches.run_sweep(jobs, workers=workers, scheduler=scheduler):
            ended.append(run)
            code = code or int(not run.ok)
            params = ", ".join(f"{name}={value}" for name, value in run.params.items())
            failure = "" if run.ok else f": {run.error}; see {run.folder}"
            complain(f"{len(ended)}/{len(jobs)} {run.run_id} {run.status} ({params}){failure}")
    except KeyboardInterrupt:
        code = INTERRUPTED
        complain(f"interrupted after {len(ended)} of {len(jobs)} runs; the same command resumes")
    counts = Counter(run.status for run in ended)
    title = ", ".join(f"{n} {status}" for status, n in counts.items()) or "nothing was run"
    document = [run._asdict() for run in ended]
    print_result(
        as_json,
        document,
        table_of(title, document, ["run_id", "status", "duration_s", "attempts", "params"]),
    )
    raise Exit(code)


def results(
    query: str | None = None,
    results: str | None = None,
    log: Path | None = None,
    k: int | None = None,
    c: float = 0.05,
    t8: float | None = None,
    as_json: Json = False,
) -> None:
    """Query runs with SQL (duckdb), or read another engine's log.

    Without a query, all runs are listed. With `--from`, prints the best K from another engine's
    counts.

    `specnb results "SELECT k, avg(n_accepted) FROM rounds GROUP BY k"`

    `specnb results --from responses.jsonl --c 0.05 --t8 1.1` reads the counts of vLLM, SGLang,
    AIPerf and Spec-Bench, log lines of llama-server and vLLM, and their Prometheus counters.
    """
    if log:
        _advise(log, k, c, t8, as_json)
        return
    from specnb.batch.results import local_copy, overview

    with local_copy(results) as folder:
        table = store.query(query, folder) if query else overview(folder)
    print_result(as_json, records_of(table), frame_of("results", table) or "no rows")


def _advise(log: Path, k: int | None, c: float, t8: float | None, as_json: bool) -> None:
    """Print a log's tokens per round at every K, and the best K for one or the named machines."""
    from specnb.batch.logs import advise, by_position, find_faults, read_log, sweep_log
    from specnb.measure.cost import NAMED, Cost
    from specnb.measure.intervals import FEWEST

    requests = read_log(log, k)
    machines = {f"T(8)/T(1) = {t8:g}, c = {c:g}": (t8, c)} if t8 else NAMED
    costs = [Cost.straight(name, *of_machine) for name, of_machine in machines.items()]
    swept = sweep_log(requests, costs, 2 * max(max(request.drafted) for request in requests))
    table = swept.loc[swept["machine"] == costs[0].name, ["k", "tau", "tau_low", "tau_high", "own"]]
    groups = zip(costs, swept.groupby("machine", sort=False), strict=True)
    advice = [advise(rows) | {"break_even": cost.break_even()} for cost, (_, rows) in groups]
    positions = by_position(requests)
    faults = find_faults(requests, k)
    document = {
        "requests": len(requests),
        "tau": records_of(table),
        "advice": advice,
        "positions": records_of(positions),
        "findings": faults,
    }
    counted = "one request" if len(requests) == 1 else f"{len(requests)} requests"
    title = (
        f"{counted}: tokens per round; beyond the log's own K they lie between tau low and tau high"
    )
    best = "best K that the log can judge"
    if len(requests) < FEWEST:
        best += f"; {counted}: no verdict"
    print_result(
        as_json,
        plain(document, nan=None),
        table_of("findings", faults, ["check", "evidence", "remedy"]) if faults else "",
        frame_of(
            "draft positions; tau if each of these rounds had ended its draft there", positions
        ),
        frame_of(title, table),
        table_of(best, advice, [*advice[0]]),
    )
