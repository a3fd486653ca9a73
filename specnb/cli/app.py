"""The command line: a thin shell over the package. The only room that prints.

Every command has `--json`: one JSON document on stdout, with the records' field names. Progress goes to stderr.
Exit codes: 0 done, 1 something that was run failed, 2 wrong input, 130 interrupted, 125 a draft that could not be
judged (`divergence`).
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from specnb.cli import divergence
from specnb.cli.show import Json, cell, clean, complain, print_frame, print_json, print_result, print_table
from specnb.errors import InputError, SpecnbError
from specnb.io import project_dir, read_text

app = typer.Typer(
    name="specnb", help="Speculative decoding, explored in notebooks: exact and measured.", no_args_is_help=True,
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
models_app = typer.Typer(help="The zoo: models that run without a hub.", invoke_without_command=True)
heads_app = typer.Typer(help="Trained heads: train them, convert their files.", no_args_is_help=True)
app.add_typer(models_app, name="models")
bench_app = typer.Typer(help="Side-by-side benchmarks, paired and interleaved.", no_args_is_help=True)
app.add_typer(heads_app, name="heads")
app.add_typer(bench_app, name="bench")
app.add_typer(divergence.app, name="divergence")
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}  # with their `--help`: torch is slow to import

HeadsCheckpoint = Annotated[
    str | None, typer.Option(help="trained heads: a folder, a file or a name [the shipped ones of the target]")
]
PARAMETER = ("-p", "--parameter")
INTERRUPTED = 130
LONGEST_PROMPT = 16 << 20


def main() -> None:
    """Entry point: errors made on purpose become one line and exit code 2."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a model may write what the terminal's encoding lacks
    try:
        app()
    except SpecnbError as error:
        complain(error)
        sys.exit(2)


class _TakesPairs(TyperCommand):
    """A command whose `-p NAME VALUE` takes two words, or one, `NAME=VALUE`; typer knows no lists of pairs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest, joined = list(args), []
        while rest:
            joined.append(rest.pop(0))
            if joined[-1] in PARAMETER and rest:
                name = rest.pop(0)
                has_value = rest and "=" not in name and rest[0] not in PARAMETER
                joined.append(f"{name}={rest.pop(0)}" if has_value else name)
        return super().parse_args(ctx, joined)


@app.command(cls=_TakesPairs)
def run(
    notebooks: Annotated[list[str] | None, typer.Argument(help="names or paths; none: all, in order")] = None,
    parameter: Annotated[
        list[str] | None, typer.Option(*PARAMETER, help="or NAME=VALUE; repeatable", metavar="NAME VALUE")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="folder of records [results/]")] = None,
    timeout_s: Annotated[int | None, typer.Option(help="seconds a cell may take", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Run notebooks headless into results/; exit code 1 if one failed."""
    from specnb import store
    from specnb.book.engine import run_notebook
    from specnb.book.notebook import find_notebook, parse_parameters
    from specnb.book.notebook import notebooks as all_notebooks
    from specnb.lm import zoo

    given = parse_parameters(parameter or [])
    paths = [find_notebook(name) for name in notebooks] if notebooks else all_notebooks()
    if given and len(paths) > 1:
        raise InputError(f"-p is for one notebook, but {len(paths)} are to run: name the one that is meant")
    zoo.path("smollm2-135m")  # fetched here, where its progress can be seen
    folder, outcomes, interrupted = results or store.results_dir(), [], False
    try:
        for path in paths:
            outcomes.append(run_notebook(path, given, results=folder, timeout_s=timeout_s, progress=not as_json))
    except KeyboardInterrupt:
        complain(f"{path.stem}: interrupted; what it did until then is in {folder / path.stem}")
        interrupted = True
    rows = [[o.notebook, o.status, f"{o.duration_s:.1f}", o.run_id, str(o.output)] for o in outcomes]
    columns = ["notebook", "status", "seconds", "run", "output"]
    print_result(as_json, [outcome.model_dump(mode="json") for outcome in outcomes], "runs", columns, rows)
    failed = [outcome for outcome in outcomes if outcome.error]
    for outcome in failed:
        complain(f"{outcome.notebook}: {outcome.error.kind}: {outcome.error.message}")
    raise typer.Exit(INTERRUPTED if interrupted else int(bool(failed)))


@app.command()
def publish(
    runs: Annotated[list[str] | None, typer.Argument(help="run ids or notebooks; none: all, latest runs")] = None,
    results: Annotated[Path | None, typer.Option(help="folder of records [results/]")] = None,
    figures: Annotated[Path | None, typer.Option(help="folder to publish into [figures/]")] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="with changes; the json says so")] = False,
    as_json: Json = False,
) -> None:
    """Copy the figures of runs and their records into figures/, from a clean checkout, and write its gallery."""
    from specnb import store
    from specnb.book.publish import publish_runs

    figures, results = figures or project_dir() / "figures", results or store.results_dir()
    folders = publish_runs(runs or [], figures, results, allow_dirty=allow_dirty)
    document = {"gallery": str(figures / "README.md"), "runs": [str(folder) for folder in folders]}
    print_json(document) if as_json else print(*document["runs"], document["gallery"], sep="\n")


def _hand_over(context: typer.Context, command: Callable[..., Any]) -> None:
    """Call a command that a feature keeps, with the options behind it."""
    passed_on = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    passed_on.command()(command)
    passed_on(context.args, prog_name=context.command_path)


@heads_app.command(context_settings=PASSED_ON, add_help_option=False)
def train(context: typer.Context) -> None:
    """Train heads for a frozen torch model; stopped, the same command goes on (`specnb heads train --help`)."""
    from specnb.medusa.stages import command

    _hand_over(context, command)


@heads_app.command(context_settings=PASSED_ON, add_help_option=False)
def convert(context: typer.Context) -> None:
    """Convert heads between five layouts of files (`specnb heads convert --help`)."""
    from specnb.medusa.checkpoint import command

    _hand_over(context, command)


@app.command()
def generate(
    target: Annotated[str, typer.Option(help="zoo name, .gguf file, folder or hf:ORG/NAME; options as ?backend=hf&…")],
    prompt: Annotated[str | None, typer.Option(help="text to continue")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="file whose text is to be continued")] = None,
    draft: Annotated[str | None, typer.Option(help="draft model")] = None,
    drafter: Annotated[str | None, typer.Option(help="drafter without a model name: lookup, self or medusa")] = None,
    heads_checkpoint: HeadsCheckpoint = None,
    tree: Annotated[str | None, typer.Option(help="what heads draft: chain, a number of nodes, or auto [auto]")] = None,
    k: Annotated[int | None, typer.Option("--k", help="draft length; of a tree, nodes [4, or the whole tree]")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="length limit")] = 128,
    seed: Annotated[int, typer.Option(help="of the random draws")] = 0,
    rule: Annotated[str, typer.Option(help="verification at temperature > 0: token, block, typical (lossy)")] = "token",
    stop: Annotated[list[str] | None, typer.Option(help="stop string, repeatable")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="put the prompt through the model's chat template")] = False,
    ignore_eog: Annotated[bool, typer.Option("--ignore-eog", help="go on after end-of-generation tokens")] = False,
    baseline: Annotated[bool, typer.Option("--baseline", help="decode plainly too, and compare")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="fail if the drafter cannot be loaded")] = False,
    translate: Annotated[str, typer.Option(help="other vocabularies: auto, tokens, strings, refuse")] = "auto",
    as_json: Json = False,
) -> None:
    """Generate once, speculatively if a drafter is given."""
    from specnb.measure.pair import run_pair
    from specnb.measure.triage import suspicion

    if draft and drafter:
        raise InputError(f"give --draft or --drafter, not both (got {draft!r} and {drafter!r})")
    text = _prompt_text(prompt, prompt_file)
    result = run_pair(
        target, draft or drafter, [{"role": "user", "content": text}] if chat else text, with_baseline=baseline,
        strict=strict, translate=translate, heads_checkpoint=heads_checkpoint, tree=tree, k=k, temperature=temperature,
        top_k=top_k, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed, rule=rule, stop=stop or (),
        ignore_eog=ignore_eog,
    )  # fmt: skip
    if suspicious := suspicion(result):
        complain(suspicious)
    if as_json:
        print_json(result.model_dump(mode="json") | {"triage": suspicious or None})
        return
    print(clean(result.generation.text))
    shown = result.summary.model_dump(exclude={"notes"}) | {"translation": result.generation.translation or None}
    facts = [[name, cell(value)] for name, value in shown.items() if value is not None]
    facts += [["note", note] for note in result.summary.notes]
    print_table(f"{result.generation.target}, {result.generation.drafter or 'no drafter'}", ["", ""], facts)


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise InputError("give the prompt with --prompt or with --prompt-file")
    return read_text(file, LONGEST_PROMPT) if prompt is None else prompt


@app.command()
def compat(
    models: Annotated[list[str], typer.Argument(help="the target and a draft, or more models for the matrix of all")],
    as_json: Json = False,
) -> None:
    """Will a draft model work with a target? The verdict, every difference, what other engines would say."""
    from specnb.compat.check import check, matrix
    from specnb.compat.read import describe

    described = [describe(name) for name in models]
    if len(described) != 2:
        table = matrix(described)
        columns = ["target", "draft", "verdict", "way", "n_different", "llama_cpp", "transformers"]
        rows = [[cell(value) for value in row] for row in table[columns].to_numpy()]
        print_result(as_json, json.loads(table.to_json(orient="records")), "every pair", columns, rows)
        return
    report = check(*described)
    if as_json:
        print_json(report.to_json())
        return
    columns = ["topic", "severity", "target", "draft", "what to do"]
    print_table(report.summary(), columns, report.to_frame().to_numpy().tolist())
    print(report.expectation() or "acceptance: nothing can be predicted")
    words = {True: "accepts", False: "refuses", None: "cannot be told"}
    for engine, opinion in (("llama.cpp", report.llama_cpp), ("transformers", report.transformers)):
        print(f"{engine}: {words[opinion.accepts]}: {opinion.reason}")


@models_app.callback()
def models(context: typer.Context, as_json: Json = False) -> None:
    """List the zoo and the models of the checkout: source, size, licence, present or not."""
    if context.invoked_subcommand:
        return
    from specnb.lm import zoo
    from specnb.lm.preflight import human_bytes

    rows = zoo.status()
    document = [{**vars(row), "path": str(row.path)} for row in rows]
    shown = [[r.name, r.source, r.licence, human_bytes(r.n_bytes), "yes" if r.present else "no"] for r in rows]
    print_result(as_json, document, "zoo", ["name", "source", "licence", "size", "present"], shown)


@models_app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="zoo name, such as smollm2-135m or smollm2-135m:q8_0")] = "smollm2-135m",
    as_json: Json = False,
) -> None:
    """Fetch (or make) a model and print where it is."""
    from specnb.lm import zoo

    path = zoo.path(name)
    print_json({"name": name, "path": str(path), "n_bytes": path.stat().st_size}) if as_json else print(path)


@models_app.command("verify")
def verify(as_json: Json = False) -> None:
    """Read every fetched and derived file and compare its digest; exit code 1 if one is damaged."""
    from specnb.lm import zoo

    rows = zoo.verify()
    shown = [[r.name, str(r.path), "yes" if r.ok else "NO"] for r in rows]
    document = [{**row._asdict(), "path": str(row.path)} for row in rows]
    print_result(as_json, document, "verify", ["name", "path", "ok"], shown)
    raise typer.Exit(0 if all(row.ok for row in rows) else 1)


@bench_app.command("medusa")
def bench_medusa(
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="the backbone [smollm2-135m in torch, bfloat16]")] = None,
    heads_checkpoint: HeadsCheckpoint = None,
    categories: Annotated[str | None, typer.Option(help="prompt categories, separated by commas [all]")] = None,
    prompts_per_category: Annotated[int, typer.Option(help="prompts that are timed")] = 2,
    num_trials: Annotated[int, typer.Option(help="timed runs of each prompt; their median counts")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="length limit")] = 128,
    tree: Annotated[str, typer.Option(help="drafts: auto (by measured costs), chain, or a number of nodes")] = "auto",
    k: Annotated[int | None, typer.Option("--k", help="draft length; of a tree, nodes [all]")] = None,
    dtype: Annotated[str | None, typer.Option(help="of the target, in place of that in its name")] = None,
    seed: Annotated[int, typer.Option(help="of the shuffled weights that acceptance must beat")] = 0,
    as_json: Json = False,
) -> None:
    """Trained heads against plain decoding; exit code 1, a diagnosis and no speed where a gate fails."""
    from specnb.book.progress import ProgressBar
    from specnb.medusa import bench as heads_bench

    given = {name: value for name, value in context.params.items() if value is not None and name != "as_json"}
    with ProgressBar() as progress:
        result = heads_bench.run(heads_bench.HeadsBenchParams.checked(**given), progress=progress)
    if as_json:
        print_json(result.document())
    else:
        for title, table in result.tables():
            print_frame(title, table)
    raise typer.Exit(0 if result.checked.passed else 1)


@app.command()
def check(
    decode: Annotated[bool, typer.Option(help="decode one token with the real model (fetches it)")] = True,
    as_json: Json = False,
) -> None:
    """Check every prerequisite and name the fix for what is missing; exit code 1 if something is."""
    from specnb import doctor

    findings = doctor.diagnose(decode=decode)
    mark = {True: "ok", False: "MISSING", None: "warning"}
    rows = [[mark[f.ok], f.name, f.detail + (f"\nfix: {f.fix}" if f.fix else "")] for f in findings]
    print_result(as_json, [finding._asdict() for finding in findings], "check", ["", "what", "found"], rows)
    raise typer.Exit(int(any(finding.ok is False for finding in findings)))
