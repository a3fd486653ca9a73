"""`specnb attach`: does speculation pay on a running server? What changed between two builds?"""

from pathlib import Path

from typer import Exit

from specnb.cli.show import Json, complain, frame_of, print_result
from specnb.errors import InputError
from specnb.io import read_json, write_atomic, write_json
from specnb.store import results_dir


def attach(
    url: str | None = None,
    plain: str = "",
    target: str = "",
    prompts: str = "",
    prompts_per_category: int = 5,
    max_new_tokens: int = 64,
    timeout_s: float = 120.0,
    save: Path | None = None,
    compare: tuple[Path, Path] | None = None,
    as_json: Json = False,
) -> None:
    """Measure whether speculation pays on a running server.

    The server is llama-server, vLLM or SGLang. Sends prompts one at a time, at temperatures 0 and
    1, and contacts only the URL. Prints the speedup by content, the best K with its interval, and
    suspected faults; writes a page and a JSON file. Plain replies come from a second server without
    a draft (`--plain`), or from the same one if requests can set K. An API key is read from
    SPECNB_API_KEY. Start llama-server with `--metrics`, which counts rounds.

    `--compare OLD NEW` reports what changed between two such files: arithmetic, drafting, cost, or
    nothing.

    Exit code: 0 success, 1 if the server stopped responding; measurements so far are saved. With
    `--compare`, for `git bisect run`: 0 nothing, 1 something, 125 cannot know.
    """
    from pandas import DataFrame

    from specnb.batch import attach as servers
    from specnb.measure.experiment import ProgressBar
    from specnb.params import ServerParams

    if compare:
        change = servers.compare_builds(*map(read_json, compare))
        advice = f"; {change.remedy}" if change.remedy else ""
        print_result(as_json, change._asdict(), f"{change.verdict}: {change.evidence}{advice}")
        raise Exit(servers.EXIT_CODES[change.verdict])
    if not url:
        raise InputError(
            "got no URL, expected one such as http://localhost:8080, or --compare OLD NEW"
        )
    params = ServerParams.checked(
        server=url,
        plain=plain,
        target=target,
        prompts=prompts,
        prompts_per_category=prompts_per_category,
        max_new_tokens=max_new_tokens,
        timeout_s=timeout_s,
    )
    with ProgressBar() as progress:
        document = servers.run_server(params, progress=progress).measurements
    if document["runs"]:
        path = save or results_dir() / "attach.json"
        write_json(path, document)
        write_atomic(path.with_suffix(".html"), servers.draw_page(document).encode())
        findings = frame_of("findings", DataFrame(document["findings"]))
        contents = frame_of("by content", DataFrame(document["contents"]))
        print_result(
            as_json, document, document["line"], document["option"], contents, findings, str(path)
        )
    if document["error"]:
        complain(document["error"])
        raise Exit(1)
