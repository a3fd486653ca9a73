"""The commands of `specnb divergence`; see `specnb.divergence`."""

from contextlib import ExitStack, closing
from pathlib import Path

import typer

from specnb.cli.show import App, Json, frame_of, judged, print_result, table_of
from specnb.cli.traces import capture, compare, explain_torch
from specnb.errors import InputError, require_known
from specnb.io import comma_list

app = App(help="Find the module and the token where a draft goes wrong.", no_args_is_help=True)
PAIR = "pair"


def investigate(
    draft: str = PAIR,
    target: str | None = None,
    deploy: str | None = None,
    fault: str | None = None,
    setups: str | None = None,
    tokens: int = 32,
    prompt_tokens: int = 16,
    k: int = 3,
    seed: int = 0,
    dtype: str | None = None,
    as_json: Json = False,
) -> None:
    """Run a draft alone and next to other models, and find the first wrong module.

    A service is a context manager deploy(draft, neighbor). Inside it, a call of the draft computes
    the same as in the failing service; neighbor is None if the draft runs alone. A service that
    computes in a coarser type than the draft is not judged: load the draft in that type with
    --dtype.

    Exit code: 0 sound, 1 divergent, 125 inconclusive, or if a model does not load or the service
    raises. git bisect reads these as good, bad and skip, so this finds the commit that broke a
    service:

    git bisect run specnb divergence investigate --draft DRAFT --target TARGET --deploy
    my_service:deploy

    Invalid options exit with 2, which git reads as bad: run the command once by hand first.
    """
    for complaint, wrong in {
        f"got --deploy {deploy!r} and --fault {fault!r}, expected only one of them": deploy
        and fault,
        f"got --target {target}, but the embedded pair has its own: leave it out": draft == PAIR
        and target is not None,
        f"got --prompt-tokens {prompt_tokens}, expected fewer than --tokens {tokens}": prompt_tokens
        >= tokens,
    }.items():
        if wrong:
            raise InputError(complaint)
    from specnb.divergence import investigate as lab
    from specnb.divergence import pair
    from specnb.divergence.faults import deploy_fault
    from specnb.divergence.faults.planting import import_service
    from specnb.divergence.setups import SETUPS
    from specnb.lm.load import load
    from specnb.measure.experiment import ProgressBar

    wanted = comma_list(setups) if setups else []
    for name in wanted:
        require_known("setup", name, SETUPS)
    if dtype is not None:
        require_known(f"type of {draft}", dtype, [*pair.DTYPES, *["float16"] * (draft != PAIR)])
    service = deploy_fault(fault) if fault else None
    with ExitStack() as opened:
        with judged():
            if deploy:
                service = import_service(deploy)
            typed = {"dtype": dtype} if dtype else {}
            if draft == PAIR:
                models = [*pair.pair(seed=seed, **typed)]
            else:
                explain_torch(draft)
                torch_models = (
                    load(name, backend="hf", decoder="transformers", **typed)
                    for name in filter(None, (draft, target))
                )
                models = [opened.enter_context(closing(model)).network for model in torch_models]
        if fault:  # raises if the draft lacks the part that the fault changes
            with service(models[0], None):
                pass
        with judged():
            script = lab.random_script(*models, tokens=tokens, prompt=prompt_tokens, k=k, seed=seed)
            with ProgressBar() as progress:
                investigation = lab.investigate(
                    *models, script=script, deploy=service, setups=wanted, progress=progress
                )
        print_result(as_json, investigation.document(), lab.text(investigation))
    raise typer.Exit(investigation.exit_code)


def audit(
    target: str,
    draft: str,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    k: int = 4,
    max_new_tokens: int = 128,
    prompts: str = "12",
    seed: int = 0,
    effect: float = 0.1,
    as_json: Json = False,
) -> None:
    """Sample from a pair; test whether draft tokens follow q_draft and output tokens p_target.

    Exit code: 0 sound, 1 wrong, 125 inconclusive, or if a model does not load; 2 for invalid
    options.
    """
    import pandas as pd

    from specnb.decode.sampling import Sampling
    from specnb.divergence.lossless import audit_pair, round_robin
    from specnb.divergence.sampling import SamplingTally
    from specnb.draft.load import open_pair
    from specnb.measure.experiment import ProgressBar

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    Sampling(**sampling)
    SamplingTally().audit(effect=effect)  # reject an invalid option before any model is loaded
    chosen = round_robin(int(prompts) if prompts.isdecimal() else prompts)
    with (
        judged(),
        ProgressBar() as progress,
        open_pair(target, draft, strict=True) as (model, drafter, _),
    ):
        result = audit_pair(
            model,
            drafter,
            chosen,
            k=k,
            max_new_tokens=max_new_tokens,
            seed=seed,
            effect=effect,
            progress=progress,
            **sampling,
        )
    panel = frame_of(
        "deviation from what the rows predict", pd.DataFrame(result.panel).drop(columns="far")
    )
    flaws = [(kind, *flaw) for kind, flaw in result.flaws.items()]
    failed = flaws and ("failed exact checks", ["check", "count", "first", "finding"], flaws)
    exact = (
        f"{result.replayed} replayed with their random numbers, "
        f"{result.exact} checked without statistics"
    )
    counts = f"{result.n} positions: {exact}; {result.repeated} with a repeated prefix left out"
    print_result(as_json, result.document(), result.line, panel, failed, counts)
    raise typer.Exit(result.exit_code)


def audit_text(texts: Path, target: str, other: str | None = None, as_json: Json = False) -> None:
    """Feed another engine's greedy tokens through plain decoding, and list the forks.

    A fork is a token that is not the most likely one.

    Each line of the file is {"prompt": …, "output": …}, each as token ids or as text (ids are
    exact), optionally with "id", "source" and "control". There is one verdict per source; its
    control is the source of the same engine without drafts. The difference between the logits of
    TARGET and OTHER decides which margins count as near-ties.

    Exit code: 0 identical or near-ties, 1 hard, 125 inconclusive, or if a model does not load or a
    text does not fit it.
    """
    from specnb.divergence.foreign import SourceVerdict, audit_texts, read_texts
    from specnb.lm.load import load
    from specnb.measure.experiment import ProgressBar

    chosen = read_texts(texts)
    with judged(), ExitStack() as opened, ProgressBar() as progress:
        models = [
            opened.enter_context(closing(load(name))) for name in filter(None, (target, other))
        ]
        result = audit_texts(models[0], chosen, *models[1:], progress=progress)
    document = result.document()
    print_result(
        as_json,
        document,
        result.line,
        table_of("", document["sources"], list(SourceVerdict._fields)),
    )
    raise typer.Exit(result.exit_code)


def faults(as_json: Json = False) -> None:
    """List the planted faults: cause, module that must be found first, upstream issues."""
    from specnb.divergence.faults import FAULTS
    from specnb.divergence.pair import pair

    models = pair()
    rows = []
    for name, fault in FAULTS.items():
        with fault(*models) as planted:
            rows.append(
                {
                    "fault": name,
                    "cause": fault.cause,
                    "first": planted.first,
                    "note": planted.note,
                    "issues": fault.issues,
                    "options": fault.options,
                }
            )
    places = {None: "nothing", "": "the model's inputs"}
    table = [row | {"first": places.get(row["first"], row["first"])} for row in rows]
    print_result(
        as_json,
        rows,
        table_of("planted faults", table, ["fault", "cause", "first", "note", "issues"]),
    )


# in the usual order of use
for command in (investigate, capture, compare, audit, audit_text, faults):
    app.command()(command)
