"""`specnb bench`: the options of the side-by-side benchmarks. What they do is `specnb.medusa.bench`; they print."""

from typing import Annotated

import typer

from specnb.cli.show import Json, print_frame, print_json

app = typer.Typer(help="Side-by-side benchmarks, paired and interleaved.", no_args_is_help=True)


@app.command()
def medusa(
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="the backbone [smollm2-135m in torch, bfloat16]")] = None,
    heads_checkpoint: Annotated[
        str | None, typer.Option(help="trained heads: a folder, a file or a name [the shipped ones of the target]")
    ] = None,
    categories: Annotated[str | None, typer.Option(help="prompt categories, separated by commas [all]")] = None,
    prompts_per_category: Annotated[int, typer.Option(help="prompts that are timed")] = 2,
    num_trials: Annotated[int, typer.Option(help="timed runs of each prompt; their median counts")] = 5,
    warmup_steps: Annotated[int, typer.Option(help="uncounted generations by each method, 1 or more")] = 2,
    max_new_tokens: Annotated[int, typer.Option(help="length limit")] = 128,
    tree: Annotated[str, typer.Option(help="drafts: auto (by measured costs), chain, or a number of nodes")] = "auto",
    k: Annotated[int | None, typer.Option("--k", help="at most so many drafts a round [all]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, instead of the target's")] = None,
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
