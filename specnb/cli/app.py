"""The command line: a thin layer over the package, and the only part of it that prints.

All commands except `lab`, `heads train` and `heads convert` have `--json`: one JSON document on
stdout, with the field names of records. Progress goes to stderr.
Exit codes: 0 success, 1 a run or check failed, 2 invalid input, 130 interrupted, 125 inconclusive
(`divergence` and `attach --compare`).
"""

import os
import subprocess
import sys
import webbrowser
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Context, Exit, Option

from specnb import __version__, store
from specnb.cli import attach, batch, divergence, heads, show
from specnb.cli.batch import INTERRUPTED
from specnb.cli.show import (
    App,
    Json,
    TakesPairs,
    complain,
    frame_of,
    print_result,
    table_of,
)
from specnb.errors import InputError, SpecnbError, importing
from specnb.io import comma_list, plain, project_dir, reading, write_atomic

app = App(
    name="specnb",
    help="Speculative decoding, explored in notebooks: exact and measured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
START, MODELS, NOTEBOOKS, LABS = "Start", "Your models", "Notebooks", "Labs"
MOVED = {
    "certify": "describe MODEL --certify",
    "pair": "bench TARGET DRAFT --page FILE",
    "probe": "bench MODEL DRAFT --row FILE",
    "bench plain": "bench MODEL",
    "bench draft": "bench TARGET DRAFT",
    "bench medusa": "bench TARGET medusa --heads-checkpoint FILE",
    "models fetch": "models --fetch NAME",
    "models pairs": "models --pairs",
    "divergence preflight": "check TARGET DRAFT",
}
"""Commands of earlier versions, and their replacements."""


def main() -> None:
    """Run the command line. A SpecnbError is printed as one line, with exit code 2."""
    sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack characters
    try:
        for n in (1, 2):
            if (old := " ".join(sys.argv[1 : 1 + n])) in MOVED:
                raise InputError(f"`specnb {old}` is now `specnb {MOVED[old]}`")
        with importing():
            app()
    except SpecnbError as error:
        complain(error)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, Option("--version", help="print the version")] = False,
) -> None:
    """Handle the options before the command."""
    if version:
        print(f"specnb {__version__}")
        raise Exit


@app.command(rich_help_panel=START)
def generate(
    text: str,
    chat: bool = False,
    target: str = "smollm2-135m",
    draft: str | None = None,
    drafter: str | None = None,
    heads_checkpoint: str | None = None,
    tree: str | None = None,
    k: int | None = None,
    controller: str | None = None,
    strict: bool = False,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    rule: str = "token",
    max_new_tokens: int = 128,
    stop: list[str] | None = None,
    ignore_eog: bool = False,
    baseline: bool = False,
    verbose: bool = False,
    as_json: Json = False,
) -> None:
    """Generate text; by default, a router drafts only where it pays."""
    from specnb.measure.experiment import ProgressBar
    from specnb.measure.pair import run_pair
    from specnb.measure.triage import suspicion

    if draft and drafter not in (None, "auto"):
        raise InputError(
            f"got --draft {draft!r} and --drafter {drafter!r}: "
            "give one, or both with --drafter auto"
        )
    chosen = drafter or draft or (None if controller else "auto")
    console = Console()
    written = []

    def write(piece: str, drafted: bool) -> None:
        bar.close()
        written.append(piece)
        console.print(Text(show.clean(piece), "green" if drafted else ""), end="", soft_wrap=True)

    with ProgressBar() as bar:
        result = run_pair(
            target,
            None if chosen == "none" else chosen,
            [{"role": "user", "content": text}] if chat else text,
            with_baseline=baseline,
            strict=strict,
            heads_checkpoint=heads_checkpoint,
            tree=tree,
            arms=draft if drafter else None,
            k=k,
            controller=controller,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
            rule=rule,
            stop=stop or (),
            ignore_eog=ignore_eog,
            on_text=write if console.is_terminal and not as_json else None,
            progress=bar,
        )
    if not as_json:
        print(show.clean(result.generation.text[len("".join(written)) :]))
    if suspicious := suspicion(result):
        complain(suspicious)
    document = result.model_dump(mode="json") | {"triage": suspicious or None}
    details = (show.summary_of(result),) if verbose else result.summary.notes
    print_result(as_json, document, *details, result.conclusion)


@app.command(rich_help_panel=START)
def explore(trace: str = "", as_json: Json = False) -> None:
    """Open the explorer, an HTML page, on the shipped trace or a run's."""
    from specnb.book.explorer.page import write_page
    from specnb.book.explorer.tables import SHIPPED

    path = store.results_dir() / "explorer.html"
    write_page(trace or SHIPPED, path)
    opened = webbrowser.open(path.absolute().as_uri())
    print_result(
        as_json, {"path": str(path)}, f"{path}{'' if opened else ': open it in a browser'}"
    )


@app.command(
    rich_help_panel=START,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def lab(context: Context, notebook: str = "00") -> None:
    """Open a copy of a notebook in JupyterLab.

    All notebooks are copied to results/lab, where `figures` and `data` are links into the checkout.
    A copy is never overwritten: rename it to get a newer notebook. Options after the name, such as
    `--no-browser --port 8888`, are passed to `jupyter lab`.
    """
    from specnb.book.notebook import find_notebook

    words = context.args
    if notebook.startswith("-"):  # an option of Jupyter, not a name
        notebook, words = "00", [notebook, *words]
    source = find_notebook(notebook)
    root = store.results_dir() / "lab"
    for path in {source, *source.parent.glob("[0-9][0-9]_*.ipynb")}:
        copy = root / "notebooks" / path.name
        if not copy.exists():
            write_atomic(copy, path.read_bytes())
    for name in ("figures", "data"):
        link = root / name
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(project_dir() / name)
    copy = root / "notebooks" / source.name
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        f"--ServerApp.root_dir={root}",
        str(copy),
        *words,
    ]
    raise Exit(subprocess.call(command))


@app.command(rich_help_panel=START)
def check(
    models: list[str] | None = None,
    decode: bool = True,
    verbose: bool = False,
    as_json: Json = False,
) -> None:
    """Check the machine, or a target and its drafter.

    Exit code 1 if a check fails; each failure names its remedy. For a pair: the drafter must not
    change the caller's tokens and must see its own draft tokens, and the caches must be correct
    after a rejection.
    """
    if models:
        raise Exit(_check_models(models, as_json))
    from specnb import doctor

    findings = [finding._asdict() for finding in doctor.diagnose(decode=decode)]
    answers = [row["ok"] for row in findings]
    mark = {True: "ok", False: "MISSING", None: "warning"}
    rows = [row | {"": mark[row["ok"]]} for row in findings if verbose or not row["ok"]]
    title = f"check: {answers.count(True)} of {len(findings)} passed"
    print_result(as_json, findings, table_of(title, rows, ["", "name", "detail", "fix"]))
    raise Exit(int(False in answers))


def _check_models(models: list[str], as_json: bool) -> int:
    """Run `compat.preflight` on a model, or a target and its drafter; return the exit code."""
    from specnb.compat.preflight import preflight
    from specnb.draft.load import open_pair

    if len(models) > 2:
        raise InputError(
            f"expected a target and its drafter, got {len(models)} models: {', '.join(models)}"
        )
    with open_pair(models[0], *models[1:] or [None], strict=True) as (target, drafter, _):
        opened = (drafter, target) if drafter else (target,)
        checks = [check._asdict() for check in preflight(*opened)]
    print_result(
        as_json, checks, table_of("check", checks, ["verdict", "check", "evidence", "remedy"])
    )
    return int(any(check["verdict"] == "fail" for check in checks))


@app.command(rich_help_panel=MODELS)
def describe(model: str, certify: bool = False, as_json: Json = False) -> None:
    """Show how a model loads and rolls back.

    With `--certify`, compare passes over 2 to 64 tokens with single steps, bit for bit; exit code 1
    unless all are identical.
    """
    if certify:
        raise Exit(_certify(model, as_json))
    from specnb.compat.models import sheet
    from specnb.machine import human_bytes

    facts = sheet(model)
    rows = {}
    for name, value in facts.items():
        label = name.removeprefix("n_").removesuffix("_bytes").replace("_", " ")
        rows[label] = human_bytes(value) if value and name.endswith("_bytes") else value
    print_result(as_json, facts, show.facts_of(model, rows))


def _certify(model: str, as_json: bool) -> int:
    """Print the largest width of passes that equal single steps bitwise; return the exit code."""
    from specnb.lm import probe
    from specnb.lm.files import parse
    from specnb.lm.load import load

    with closing(load(model, **({"exact": "true"} | parse(model).options))) as opened:
        widest = probe.certify(opened, range(2, 65), 64)
        certificate = replace(opened.caps, same_bits_up_to=widest).certificate
        exact_by = opened.caps.details.get("exact_by")
        document = {
            "model": model,
            "same_bits_up_to": widest,
            "certificate": certificate,
            "exact_by": exact_by,
        }
    print_result(as_json, document, certificate)
    return int(widest < 64)


@app.command(rich_help_panel=MODELS)
def compat(models: list[str], as_json: Json = False) -> None:
    """Check whether a draft model works with a target.

    Prints the verdict, every difference, and whether llama.cpp and transformers accept the pair.
    For more than two models, prints a matrix.
    """
    from specnb.compat.check import check, matrix
    from specnb.compat.read import describe

    described = [describe(name) for name in models]
    if len(described) != 2:
        rows = show.records_of(matrix(described))
        columns = ["target", "draft", "verdict", "way", "n_different", "llama_cpp", "transformers"]
        print_result(as_json, rows, table_of("every pair", rows, columns))
        return
    report = check(*described)
    words = {True: "accepts", False: "refuses", None: "unknown"}
    opinions = {"llama.cpp": report.llama_cpp, "transformers": report.transformers}
    print_result(
        as_json,
        report.to_json(),
        frame_of(report.summary(), report.to_frame()) or report.summary(),
        report.expectation() or "acceptance: nothing can be predicted",
        *(
            f"{engine}: {words[opinion.accepts]}: {opinion.reason}"
            for engine, opinion in opinions.items()
        ),
    )


@app.command(rich_help_panel=MODELS)
def models(
    places: list[str] | None = None,
    pairs: bool = False,
    fetch: str | None = None,
    as_json: Json = False,
) -> None:
    """List models, and which can draft for which.

    Lists the zoo, the models in the checkout, and models known only from published facts. With
    PLACES or `--pairs`, shows which can draft for which: of the models in PLACES, or local ones.
    """
    if fetch:
        from specnb.lm.files import zoo_file

        path = zoo_file(fetch)
        print_result(
            as_json, {"name": fetch, "path": str(path), "n_bytes": path.stat().st_size}, str(path)
        )
        return
    if pairs or places:
        _list_pairs(places, as_json)
        return
    from specnb.compat.models import listing
    from specnb.machine import human_bytes

    document = [vars(row) for row in listing()]
    rows = []
    for row in document:
        size = (
            f"{row['parameters'] / 1e9:g} B weights"
            if row["n_bytes"] is None
            else human_bytes(row["n_bytes"])
        )
        rows.append(
            row | {"size": size, "present": "facts only" if row["path"] is None else row["present"]}
        )
    columns = ["name", "present", "licence", "size", "source"]
    print_result(
        as_json,
        document,
        table_of("models; `specnb models --pairs` shows which can draft for which", rows, columns),
    )


def _list_pairs(places: list[str] | None, as_json: bool) -> None:
    """Print which models can draft for which, and which pairs can be faster."""
    from specnb.compat.models import names_in, pairs
    from specnb.lm.files import status

    table = pairs(names_in(places) if places else [row.name for row in status() if row.present])
    columns = ["draft", "can_win", "best_case", "verdict", "c", "k", "text_shared"]
    parts = [frame_of(f"target {name}", rows[columns]) for name, rows in table.groupby("target")]
    note = (
        "c: ratio of the weights that a step reads (of a mixture of experts, only the active "
        "ones). Best case: 0.7 of the draft tokens are accepted, and a pass over K + 1 tokens "
        "costs no more than one step."
    )
    print_result(
        as_json,
        show.records_of(table),
        *parts,
        note if parts else "none of these models can draft for another",
    )


@app.command(rich_help_panel=MODELS)
def bench(
    target: str = "smollm2-135m",
    drafters: list[str] | None = None,
    k: str = "2,4,8",
    prompts: str = "",
    categories: str = "",
    prompts_per_category: int | None = None,
    max_new_tokens: int | None = None,
    heads_checkpoint: str | None = None,
    row: Path | None = None,
    page: Path | None = None,
    as_json: Json = False,
) -> None:
    """Measure whether drafters pay on this machine, live.

    The baseline is the fastest plain decoding of the same weights. Prints T(n), the cost of a draft
    step, acceptance, and the live speed of every K with intervals, interleaved with plain decoding.
    `--row` writes the result as a row of data/machines. `--page` (one draft model, ten minutes)
    writes a page with the verdict, the best K by content, the flags of other engines, and the
    explorer.
    """
    from specnb.measure.experiment import ProgressBar
    from specnb.measure.intervals import FEWEST
    from specnb.measure.machines import MAX_NEW_TOKENS, bench_target
    from specnb.prompts import categories as all_categories
    from specnb.prompts import prompts as read_prompts

    names = drafters or []
    for option, value in {"--row": row, "--page": page}.items():
        if value and len(names) != 1:
            raise InputError(
                f"{option} needs a target and one drafter, got {', '.join(names) or 'no drafter'}"
            )
    if page:
        if row or heads_checkpoint:
            raise InputError("--page needs a draft model: leave out --row and --heads-checkpoint")
        from specnb.book.explorer.examine import examine

        with ProgressBar() as progress:
            document, html = examine(
                target,
                names[0],
                source=prompts,
                contents=categories,
                prompts_per_category=prompts_per_category or FEWEST,
                max_new_tokens=max_new_tokens or 64,
                progress=progress,
            )
        write_atomic(page, html.encode())
        document = plain(document | {"path": str(page)}, nan=None)
        print_result(
            as_json,
            document,
            *(document[name] for name in ("conclusion", "vocabulary", "costs", "path")),
        )
        return
    options = {"heads_checkpoint": heads_checkpoint} if heads_checkpoint else {}
    with reading(f"--k {k}"):
        ks = [*map(int, comma_list(k))]
    chosen = None
    if prompts or categories or prompts_per_category:
        wanted = comma_list(categories) if categories else all_categories(prompts)
        chosen = [
            prompt
            for name in wanted
            for prompt in read_prompts(name, limit=prompts_per_category or 1, source=prompts)
        ]
        if row and len(chosen) < FEWEST:
            raise InputError(f"--row needs {FEWEST} prompts for an interval, got {len(chosen)}")
    with ProgressBar() as progress:
        result = bench_target(
            target,
            names,
            chosen,
            ks=ks,
            max_new_tokens=max_new_tokens or MAX_NEW_TOKENS,
            progress=progress,
            **options,
        )
    if row:
        write_atomic(row, f"{result.rows[0].model_dump_json(indent=1)}\n".encode())
    pairs = [pair._asdict() | {"table": pair.table.to_dict("records")} for pair in result.pairs]
    rows = [
        machine.model_dump(mode="json") | {"verdict": machine.verdict} for machine in result.rows
    ]
    document = {
        "target": result.target,
        "rates": result.rates,
        "verify_curve": result.verify_curve.model_dump(),
        "pairs": pairs,
        "rows": rows,
    }
    parts = [table_of(result.target, result.rates, ["test", "n_tokens", "tokens_per_s", "std"])]
    if not result.pairs:
        curve = result.verify_curve
        passes = [[n, 1000 * curve.seconds(n), curve.ratio(n)] for n in curve.widths]
        parts.append(("forward passes over n tokens", ["n", "ms", "T(n)/T(1)"], passes))
    for pair in result.pairs:
        parts += [
            pair.verify_curve.describe(pair.c, across=pair.c_across_engines),
            str(pair.baseline),
            frame_of(f"{pair.target}, {pair.drafter}", pair.table),
            pair.conclusion,
        ]
    print_result(as_json, plain(document, nan=None), *parts)


app.command(rich_help_panel=MODELS)(attach.attach)


@app.command(cls=TakesPairs, rich_help_panel=NOTEBOOKS)
def run(
    notebooks: list[str] | None = None,
    parameter: list[str] | None = None,
    budget: str | None = None,
    results: Path | None = None,
    timeout_s: int | None = None,
    as_json: Json = False,
) -> None:
    """Run notebooks headless into results/; exit code 1 if one failed."""
    from specnb.book.engine import format_error, run_notebook
    from specnb.book.notebook import find_notebook, parse_parameters
    from specnb.book.notebook import notebooks as all_notebooks
    from specnb.lm.files import zoo_file

    params = parse_parameters(parameter or [])
    paths = [*map(find_notebook, notebooks or ())] or all_notebooks()
    if params and len(paths) > 1:
        raise InputError(f"-p is for one notebook, but {len(paths)} are to run: name one notebook")
    zoo_file("smollm2-135m")  # downloaded here, to show the progress
    folder = results or store.results_dir()
    document = []
    code = 0
    try:
        for path in paths:
            outcome = run_notebook(
                path, params, budget=budget, results=folder, timeout_s=timeout_s, progress=True
            )
            document.append(outcome._asdict())
    except KeyboardInterrupt:
        complain(f"{path.stem}: interrupted; its results so far are in {folder / path.stem}")
        code = INTERRUPTED
    outputs = (show.clean(os.path.relpath(run["output"])) for run in document)
    runs = table_of("runs", document, ["notebook", "status", "duration_s", "run_id"])
    print_result(as_json, document, runs, *outputs)
    for run in document:
        if run["error"]:
            complain(f"{run['notebook']}: {format_error(run['error'])}")
            code = code or 1
    raise Exit(code)


app.command(cls=TakesPairs, rich_help_panel=NOTEBOOKS)(batch.sweep)
app.command(rich_help_panel=NOTEBOOKS)(batch.results)


@app.command(rich_help_panel=NOTEBOOKS)
def publish(
    runs: list[str] | None = None,
    results: Path | None = None,
    allow_dirty: bool = False,
    as_json: Json = False,
) -> None:
    """Copy the figures and records of runs into figures/.

    Needs a clean checkout. Also writes the gallery.
    """
    from specnb.book.publish import publish_runs

    figures = project_dir() / "figures"
    folders = publish_runs(
        runs or [], figures, results or store.results_dir(), allow_dirty=allow_dirty
    )
    paths = [*map(str, folders)]
    gallery = str(figures / "README.md")
    print_result(as_json, {"gallery": gallery, "runs": paths}, *paths, gallery)


app.add_typer(heads.app, name="heads", rich_help_panel=LABS)
app.add_typer(divergence.app, name="divergence", rich_help_panel=LABS)
