"""The command line: a thin shell over the package. The only room that prints.

Every command but `lab`, `heads train` and `heads convert` has `--json`: one JSON document on stdout, with the records'
field names. Progress goes to stderr.
Exit codes: 0 done, 1 something that was run failed, 2 wrong input, 130 interrupted, 125 a draft that could not be
judged (`divergence`).
"""

import os
import subprocess
import sys
import webbrowser
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Context, Exit, Option
from typer.core import TyperCommand

from specnb import __version__, store
from specnb.cli import batch, divergence, heads, show
from specnb.cli.batch import INTERRUPTED
from specnb.cli.show import App, Json, complain, frame_of, print_result, table_of, warn_if_busy
from specnb.errors import InputError, SpecnbError, importing
from specnb.io import comma_list, plain, project_dir, reading, write_atomic

app = App(
    name="specnb", help="Speculative decoding, explored in notebooks: exact and measured.", no_args_is_help=True,
    pretty_exceptions_enable=False, rich_markup_mode="markdown",
)  # fmt: skip
models_app = App(invoke_without_command=True)
app.add_typer(models_app, name="models")
bench_app = App(help="Side-by-side benchmarks, paired and interleaved.", no_args_is_help=True)
app.add_typer(heads.app, name="heads")
app.add_typer(bench_app, name="bench")
app.add_typer(divergence.app, name="divergence")


def main() -> None:
    """Entry point: errors made on purpose become one line and exit code 2."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a model may write what the terminal's encoding lacks
    try:
        with importing():
            app()
    except SpecnbError as error:
        complain(error)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, Option("--version", help="print the version")] = False) -> None:
    """Take the options that stand before a command."""
    if version:
        print(f"specnb {__version__}")
        raise Exit


class _TakesPairs(TyperCommand):
    """A command whose `-p NAME VALUE` takes two words, or one, `NAME=VALUE`; typer knows no lists of pairs."""

    def parse_args(self, ctx, args):
        rest, joined = iter(args), []
        for word in rest:
            joined.append(word)
            if word in ("-p", "--parameter"):
                name = next(rest, "")
                joined.append("=".join([name, *islice(rest, "=" not in name)]))
        return super().parse_args(ctx, joined)


@app.command(cls=_TakesPairs)
def run(
    notebooks: list[str] | None = None,
    parameter: list[str] | None = None,
    budget: str | None = None,
    results: Path | None = None,
    timeout_s: int | None = None,
    as_json: Json = False,
) -> None:
    """Run notebooks headless into results/; exit code 1 if one failed."""
    from specnb.book.engine import run_notebook
    from specnb.book.notebook import find_notebook, parse_parameters
    from specnb.book.notebook import notebooks as all_notebooks
    from specnb.lm.files import zoo_file
    from specnb.measure.experiment import ProgressBar

    params = parse_parameters(parameter or [])
    paths = [find_notebook(name) for name in notebooks] if notebooks else all_notebooks()
    if params and len(paths) > 1:
        raise InputError(f"-p is for one notebook, but {len(paths)} are to run: name the one that is meant")
    warn_if_busy()
    zoo_file("smollm2-135m")  # fetched here, where its progress can be seen
    folder, document, code = results or store.results_dir(), [], 0
    try:
        with ProgressBar() as bar:
            for path in paths:
                outcome = run_notebook(path, params, budget=budget, results=folder, timeout_s=timeout_s, progress=bar)
                document.append(outcome._asdict())
    except KeyboardInterrupt:
        complain(f"{path.stem}: interrupted; what it did until then is in {folder / path.stem}")
        code = INTERRUPTED
    outputs = (show.clean(os.path.relpath(run["output"])) for run in document)
    runs = table_of("runs", document, ["notebook", "status", "duration_s", "run_id"])
    print_result(as_json, document, runs, *outputs)
    for run in document:
        if error := run["error"]:
            complain(f"{run['notebook']}: {error['kind']}: {error['message']}")
            code = code or 1
    raise Exit(code)


app.command(cls=_TakesPairs)(batch.sweep)
app.command()(batch.results)


@app.command()
def publish(
    runs: list[str] | None = None,
    results: Path | None = None,
    allow_dirty: bool = False,
    as_json: Json = False,
) -> None:
    """Copy the figures of runs and their records into figures/, from a clean checkout, and write its gallery."""
    from specnb.book.publish import publish_runs

    figures = project_dir() / "figures"
    folders = publish_runs(runs or [], figures, results or store.results_dir(), allow_dirty=allow_dirty)
    paths = [str(folder) for folder in folders]
    gallery = str(figures / "README.md")
    print_result(as_json, {"gallery": gallery, "runs": paths}, *paths, gallery)


@app.command()
def explore(trace: str = "", as_json: Json = False) -> None:
    """Open the explorer as a page that needs no kernel, on the shipped trace or on that of a run."""
    from specnb.book.explorer.page import write_page
    from specnb.book.explorer.tables import SHIPPED

    path = store.results_dir() / "explorer.html"
    write_page(trace or SHIPPED, path)
    opened = webbrowser.open(path.absolute().as_uri())
    print_result(as_json, {"path": str(path)}, f"{path}{'' if opened else ': open it in a browser'}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(context: Context, notebook: str = "00") -> None:
    """Open a copy of a notebook in JupyterLab, in results/lab; `figures` and `data` there are links into the checkout.

    All notebooks are copied. An unchanged copy is updated when its notebook changes, an edited copy is never replaced.
    Options after the name, such as `--no-browser --port 8888`, are those of `jupyter lab`.
    """
    from specnb.book.notebook import find_notebook

    words = context.args
    if notebook.startswith("-"):  # the first option of Jupyter, and no name
        notebook, words = "00", [notebook, *words]
    source = find_notebook(notebook)
    root = store.results_dir() / "lab"
    _copy_notebooks(source, root)
    copy = root / "notebooks" / source.name
    command = [sys.executable, "-m", "jupyter", "lab", f"--ServerApp.root_dir={root}", str(copy), *words]
    raise Exit(subprocess.call(command))


def _copy_notebooks(source: Path, root: Path) -> None:
    """Copy `source` and the numbered notebooks next to it to `root/notebooks`, and name outdated copies.

    A second copy in `root/.copied` stays unchanged: it shows which copies were edited. The links of
    notebooks to figures and data resolve.
    """
    for path in {source, *source.parent.glob("[0-9][0-9]_*.ipynb")}:
        copy, copied = root / "notebooks" / path.name, root / ".copied" / path.name
        new = path.read_bytes()
        base = copied.read_bytes() if copied.exists() else None
        if not copy.exists() or copy.read_bytes() in (base, new):
            for file in (copied, copy):
                write_atomic(file, new)
        elif base != new:
            complain(f"{copy} has your changes and was kept, but its notebook is newer: rename it to get the new one")
    for name in ("figures", "data"):
        link = root / name
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(project_dir() / name)


@app.command()
def generate(
    text: str | None = None,
    prompt: str | None = None,
    chat: bool = False,
    target: str = "smollm2-135m",
    draft: str | None = None,
    drafter: str | None = None,
    self_type: str | None = None,
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
    as_json: bool = False,
) -> None:
    """Generate once. Unless a drafter is named, a router drafts only where that pays."""
    from specnb.measure.experiment import ProgressBar
    from specnb.measure.pair import run_pair
    from specnb.measure.triage import suspicion

    if draft and drafter not in (None, "auto"):
        raise InputError(f"give --draft or --drafter, or both with --drafter auto (got {draft!r} and {drafter!r})")
    if bool(text) == bool(prompt):
        raise InputError(f"got the prompts {text!r} and {prompt!r}, expected one: give it as it is or with --prompt")
    chosen = drafter or draft or (None if controller else "auto")
    text, console, written = text or prompt, Console(), []
    if baseline:
        warn_if_busy()

    def write(piece: str, drafted: bool) -> None:
        bar.close()
        written.append(piece)
        console.print(Text(show.clean(piece), "green" if drafted else ""), end="", soft_wrap=True)

    with ProgressBar() as bar:
        result = run_pair(
            target, None if chosen == "none" else chosen, [{"role": "user", "content": text}] if chat else text,
            with_baseline=baseline, strict=strict, heads_checkpoint=heads_checkpoint, tree=tree, self_type=self_type,
            arms=draft if drafter else None, k=k, controller=controller, temperature=temperature, top_k=top_k,
            top_p=top_p, max_new_tokens=max_new_tokens, seed=seed, rule=rule, stop=stop or (), ignore_eog=ignore_eog,
            on_text=write if console.is_terminal and not as_json else None, progress=bar,
        )  # fmt: skip
    if not as_json:
        print(show.clean(result.generation.text[len("".join(written)) :]))
    if suspicious := suspicion(result):
        complain(suspicious)
    document = result.model_dump(mode="json") | {"triage": suspicious or None}
    details = (show.summary_of(result), result.summary.what_paid) if verbose else result.summary.notes
    print_result(as_json, document, *details, result.conclusion)


@app.command()
def describe(model: str, as_json: Json = False) -> None:
    """Show what a model is, whether and how it opens here, how it rolls back, and what can draft for it."""
    from specnb.compat.models import sheet
    from specnb.machine import human_bytes

    facts, rows = sheet(model), {}
    for name, value in facts.items():
        label = name.removeprefix("n_").removesuffix("_bytes").replace("_", " ")
        rows[label] = human_bytes(value) if value and name.endswith("_bytes") else value
    print_result(as_json, facts, show.facts_of(model, rows))


@app.command()
def compat(models: list[str], as_json: Json = False) -> None:
    """Check whether a draft model works with a target: the verdict, every difference, the view of other engines."""
    from specnb.compat.check import check, matrix
    from specnb.compat.read import describe

    described = [describe(name) for name in models]
    if len(described) != 2:
        rows = show.records_of(matrix(described))
        columns = ["target", "draft", "verdict", "way", "n_different", "llama_cpp", "transformers"]
        print_result(as_json, rows, table_of("every pair", rows, columns))
        return
    report, words = check(*described), {True: "accepts", False: "refuses", None: "cannot be told"}
    opinions = {"llama.cpp": report.llama_cpp, "transformers": report.transformers}
    print_result(
        as_json, report.to_json(), frame_of(report.summary(), report.to_frame()) or report.summary(),
        report.expectation() or "acceptance: nothing can be predicted",
        *(f"{engine}: {words[opinion.accepts]}: {opinion.reason}" for engine, opinion in opinions.items()),
    )  # fmt: skip


@app.command()
def certify(model: str, as_json: Json = False) -> None:
    """Compare passes over 2 to 64 tokens with single steps, bit for bit; exit code 1 unless all are identical."""
    from specnb.lm import probe
    from specnb.lm.files import parse
    from specnb.lm.load import load

    with closing(load(model, **({"exact": "true"} | parse(model).options))) as opened:
        widest = probe.certify(opened, range(2, 65), 64)
        certificate = replace(opened.caps, same_bits_up_to=widest).certificate
        exact_by = opened.caps.details.get("exact_by")
        document = {"model": model, "same_bits_up_to": widest, "certificate": certificate, "exact_by": exact_by}
    print_result(as_json, document, certificate)
    raise Exit(int(widest < 64))


@models_app.callback()
def models(
    context: Context,
    places: Annotated[list[str] | None, Option("--in", help="this .gguf file, or a folder, too; repeatable")] = None,
    as_json: Json = False,
) -> None:
    """List every model: the zoo, the checkout's, those known by published facts, and yours, with each one's roles.

    A role needs a listed partner with the same ids, and sizes with which the pair can win; `pairs` says which and why.
    """
    if context.invoked_subcommand:
        return
    from specnb.compat.models import listing
    from specnb.machine import human_bytes

    document = [vars(row) for row in listing(places or ())]
    rows = []
    for row in document:
        size = f"{row['parameters'] / 1e9:g} B weights" if row["n_bytes"] is None else human_bytes(row["n_bytes"])
        rows.append(row | {"size": size, "present": "facts only" if row["path"] is None else row["present"]})
    columns = ["name", "roles", "present", "licence", "size", "source"]
    print_result(as_json, document, table_of("models; `specnb models pairs` says who drafts for whom", rows, columns))


@models_app.command("fetch")
def fetch(name: str = "smollm2-135m", as_json: Json = False) -> None:
    """Fetch (or make) a model and print where it is."""
    from specnb.lm.files import zoo_file

    path = zoo_file(name)
    print_result(as_json, {"name": name, "path": str(path), "n_bytes": path.stat().st_size}, str(path))


@models_app.command("pairs")
def model_pairs(places: list[str] | None = None, as_json: Json = False) -> None:
    """Say which of some models can draft for which, and which can win: the answer to "I have 30 files, which one?"."""
    from specnb.compat.models import names_in, pairs
    from specnb.lm.files import status

    table = pairs(names_in(places) if places else [row.name for row in status() if row.present])
    columns = ["draft", "can_win", "best_case", "verdict", "c", "k", "text_shared"]
    parts = [frame_of(f"target {name}", rows[columns]) for name, rows in table.groupby("target")]
    note = (
        "c: ratio of the weights that a step reads, in a mixture of experts only the active ones. "
        "Best case: 0.7 of the draft tokens are accepted, and a wide forward pass costs no more than one step."
    )
    print_result(
        as_json, show.records_of(table), *parts, note if parts else "no model of these can draft for another one"
    )


@bench_app.command("plain")
def bench_plain(
    model: str,
    prompt_tokens: int = 512,
    new_tokens: int = 128,
    num_trials: int = 5,
    as_json: Json = False,
) -> None:
    """Measure tokens per second of prefill and of plain decoding, as llama-bench does."""
    from specnb.lm.load import load
    from specnb.measure.cost import plain_rates

    warn_if_busy()
    with closing(load(model)) as opened:
        rates = plain_rates(opened, n_prompt=prompt_tokens, n_gen=new_tokens, repeats=num_trials)
        caps = {name: getattr(opened.caps, name) for name in ("engine", "device", "dtype", "details")}
    document = {"model": model, **caps, "rates": rates}
    print_result(as_json, document, table_of(model, rates, ["test", "n_tokens", "tokens_per_s", "std"]))


@bench_app.command("draft")
def bench_draft(
    target: str,
    drafter: str,
    k: str = "2,4,8",
    categories: str = "code,edit,prose",
    prompts_per_category: int = 2,
    max_new_tokens: int = 64,
    heads_checkpoint: str | None = None,
    as_json: Json = False,
) -> None:
    """Measure costs, acceptance and speed-up of a pair over the fastest plain decoding, on the shipped prompts."""
    from specnb.measure.bench import bench_pair
    from specnb.prompts import prompts

    warn_if_busy()
    with reading(f"--k {k}"):
        ks = [*map(int, comma_list(k))]
    chosen = [prompt for name in comma_list(categories) for prompt in prompts(name, limit=prompts_per_category)]
    result = bench_pair(
        target,
        drafter,
        chosen,
        ks=ks,
        max_new_tokens=max_new_tokens,
        heads_checkpoint=heads_checkpoint,
    )
    print_result(
        as_json,
        plain(result._asdict() | {"table": result.table.to_dict("records")}, nan=None),
        result.verify_curve.describe(result.c, across=result.c_across_engines),
        str(result.baseline),
        frame_of(f"{result.target}, {result.drafter}", result.table),
        result.conclusion,
    )


@bench_app.command(
    "medusa",
    hidden=True,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def bench_medusa() -> None:
    """Name the command that replaces this one."""
    raise InputError("bench medusa is now: bench draft TARGET medusa --heads-checkpoint PATH")


@app.command()
def pair(
    target: str,
    draft: str,
    prompts: str = "",
    categories: str = "",
    prompts_per_category: int = 5,
    max_new_tokens: int = 64,
    out: Path | None = None,
    as_json: Json = False,
) -> None:
    """Examine a pair on your prompts, in ten minutes: one HTML file with the verdict, best K, flags, and explorer."""
    from specnb.book.explorer.pair import examine
    from specnb.measure.experiment import ProgressBar

    warn_if_busy()
    with ProgressBar() as progress:
        report = examine(
            target, draft, source=prompts, contents=categories, prompts_per_category=prompts_per_category,
            max_new_tokens=max_new_tokens, progress=progress,
        )  # fmt: skip
    path = out or store.folder_of(report.record) / "pair.html"
    write_atomic(path, report.page.encode())
    document = plain(report.document | {"path": str(path)}, nan=None)
    print_result(as_json, document, report.document["conclusion"], document["vocabulary"], document["costs"], str(path))


@app.command()
def probe(
    model: str = "smollm2-135m",
    draft: str = "lookup",
    out: Path | None = None,
    as_json: Json = False,
) -> None:
    """Measure this machine, in a minute: plain speed, T(8)/T(1), best K and the verdict, as a row to share."""
    from specnb.measure.experiment import ProgressBar
    from specnb.measure.probe import HEAD
    from specnb.measure.probe import probe as measure

    warn_if_busy()
    with ProgressBar() as progress:
        row = measure(model, draft, progress=progress)
    if out:
        write_atomic(out, f"{row.model_dump_json(indent=1)}\n".encode())
    table = f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|\n| {' | '.join(row.cells())} |"
    print_result(as_json, row.model_dump(mode="json") | {"verdict": row.verdict}, table)


@app.command()
def check(decode: bool = True, verbose: bool = False, as_json: Json = False) -> None:
    """Check every prerequisite and name the fix for each that is missing; exit code 1 if one is."""
    from specnb import doctor

    findings = [finding._asdict() for finding in doctor.diagnose(decode=decode)]
    answers, mark = [row["ok"] for row in findings], {True: "ok", False: "MISSING", None: "warning"}
    rows = [row | {"": mark[row["ok"]]} for row in findings if verbose or not row["ok"]]
    title = f"check: {answers.count(True)} of {len(findings)} are fine"
    print_result(as_json, findings, table_of(title, rows, ["", "name", "detail", "fix"]))
    raise Exit(int(False in answers))
