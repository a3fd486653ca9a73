"""`specnb divergence`: the options of the divergence lab. What they do is `specnb.divergence`; they print."""

import shlex
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specnb.cli.divergence_capture import capture
from specnb.cli.divergence_checks import audit, compare, faults, preflight
from specnb.cli.show import Json, complain, judged, names, print_json
from specnb.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from specnb.divergence.features import Service
    from specnb.divergence.investigate import Investigation
    from specnb.measure.triage import Triage


app = typer.Typer(
    help="Acceptance is 0 % and nothing crashes: which module is wrong, at which token, and why?", no_args_is_help=True
)
PAIR = "pair"
LARGEST = 2**63 - 1
"""What a generator of random numbers takes for a seed."""


def investigate(
    draft: Annotated[
        str, typer.Option(help="a model in torch: zoo name, folder, hf:ORG/NAME; or pair, made here")
    ] = PAIR,
    target: Annotated[str | None, typer.Option(help="the model it runs beside [none; of pair its own]")] = None,
    deploy: Annotated[
        str | None, typer.Option(help="the service under suspicion, module:function; the current directory is searched")
    ] = None,
    fault: Annotated[str | None, typer.Option(help="plant this fault, to try the lab out (see faults)")] = None,
    layer: Annotated[int | None, typer.Option(help="layer of the planted fault")] = None,
    setups: Annotated[str | None, typer.Option(help="such as S0,S2 [all that fit, more where one is wrong]")] = None,
    features: Annotated[
        str | None, typer.Option(help="such as graphs,compile: what the service can do without, switched off in turn")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="folder for a page, a JSON document and a reproduction")] = None,
    generation: Annotated[
        Path | None, typer.Option(help="what `specnb generate --json` wrote with this draft: what its acceptance says")
    ] = None,
    tokens: Annotated[int, typer.Option(help="length of the text: longer than a window that is suspected", min=2)] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="of these, fed at once", min=1)] = 16,
    k: Annotated[int, typer.Option("--k", help="tokens drafted a round", min=1)] = 3,
    seed: Annotated[
        int, typer.Option(help="of the tokens that are fed, and of the pair's weights", min=0, max=LARGEST)
    ] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 [float32]")] = None,
    as_json: Json = False,
) -> None:
    """Run a draft alone and beside others, and find the module that is wrong first.

    A service is a context manager deploy(draft, neighbour): while it is entered, calling the draft does what it does
    where nothing is accepted; neighbour is None where the draft is alone. One that can leave features out is
    deploy(draft, neighbour, without), without being the set of their names.

    Exit code: 0 sound, 1 divergent, 125 inconclusive, or nothing could be judged because a model does not open or the
    service raises. git takes these for good, bad and skip, so this finds the commit that broke a service:

    git bisect run specnb divergence investigate --draft DRAFT --target TARGET --deploy my_service:deploy

    Options that cannot be are 2, which git takes for bad: run the line once by hand before git does.
    """
    _require_agreeing(draft, target, deploy, fault, layer, features)
    if prompt_tokens >= tokens:
        raise InputError(f"--prompt-tokens is {prompt_tokens}, and --tokens, all of the text, {tokens}: give fewer")
    wanted = _known_setups(setups, beside_target=draft == PAIR or target is not None)
    from specnb.book.divergence_report import read_acceptance
    from specnb.book.progress import ProgressBar
    from specnb.divergence import deploy as services
    from specnb.divergence import investigate as lab
    from specnb.divergence.features import checked as features_checked
    from specnb.divergence.report import published_alarms
    from specnb.divergence.setups import vocabulary_size

    _require_dtype(draft, dtype)
    service = services.planted(fault, layer=layer) if fault else None
    with ExitStack() as opened:
        if deploy:
            with judged():
                service = services.imported(deploy)
            if features is not None:
                features_checked(service, names(features))
        with judged():
            _tell_engine(draft)
            models = _opened(draft, target, seed, dtype, opened)
        if fault:
            with service(models[0], None):  # not every draft has a place for it: that is no verdict about the draft
                pass
        with judged():
            accepted = None
            if generation is not None:  # its tokens are those of the target, where there is one
                accepted = read_acceptance(generation, vocab_size=vocabulary_size(models[1] or models[0]))
            with ProgressBar() as progress:
                script = lab.made_up(*models, tokens=tokens, prompt=prompt_tokens, k=k, seed=seed)
                investigation = lab.investigate(
                    *models,
                    script=script,
                    deploy=service,
                    setups=wanted,
                    features=names(features) or (),
                    progress=progress,
                )
        alarms = published_alarms()
        _show(investigation, accepted, alarms, as_json)
        if report is not None:  # last, for it may take as long again
            with redirect_stdout(sys.stderr):
                more = {"triage": accepted, "false_alarms": alarms, "slots": draft == PAIR}
                _reported(investigation, report, models, service, more)
    raise typer.Exit(investigation.exit_code)


def _require_agreeing(
    draft: str, target: str | None, deploy: str | None, fault: str | None, layer: int | None, features: str | None
) -> None:
    if deploy and fault:
        raise InputError(f"give --deploy or --fault, not both (got {deploy!r} and {fault!r})")
    if layer is not None and not fault:
        raise InputError(f"--layer {layer} is that of a planted fault: add --fault NAME")
    if features is not None and not deploy:
        raise InputError(f"--features {features} are those of a service: add --deploy module:function")
    if draft == PAIR and target is not None:
        raise InputError(f"the embedded pair has its own target: leave --target {target} out, or name a --draft")


def _require_dtype(draft: str, dtype: str | None) -> None:
    if draft == PAIR:
        from specnb.divergence.pair import DTYPES
    else:
        from specnb.lm.hf.model import DTYPES
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: {draft} is opened in {', '.join(DTYPES)}")


def _tell_engine(draft: str) -> None:
    """Say so where the draft is known by a name that llama.cpp opens: torch judges other code than runs there."""
    from specnb.lm.load import parse

    if draft != PAIR and parse(draft).backend == "llama":
        complain(
            f"{draft} is opened in torch here, dequantised: this judges transformers' code, not llama.cpp's; for that "
            f"write traces with `specnb divergence capture {shlex.quote(draft)} --backend llama --out FOLDER` and see "
            "where they part with `specnb divergence compare`"
        )


def _opened(
    draft: str, target: str | None, seed: int, dtype: str | None, until: ExitStack
) -> tuple["nn.Module", "nn.Module | None"]:
    """Draft and target as torch modules; those that were loaded are closed with `until`."""
    typed = {"dtype": dtype} if dtype else {}
    if draft == PAIR:
        from specnb.divergence.pair import pair

        models = pair(seed=seed, **typed)
        return models.draft, models.target
    from specnb.lm.load import load

    def network(name: str) -> "nn.Module":
        model = load(name, backend="hf", exact=False, **typed)  # with transformers' own attention
        until.callback(model.close)
        return model.network

    return network(draft), None if target is None else network(target)


def _show(
    investigation: "Investigation", accepted: "Triage | None", alarms: tuple[int, int] | None, as_json: bool
) -> None:
    from specnb.book.divergence_report import acceptance_document, acceptance_line
    from specnb.divergence.report import text

    if as_json:
        print_json(
            investigation.document() | ({} if accepted is None else {"acceptance": acceptance_document(accepted)})
        )
        return
    print(text(investigation, alarms))
    if accepted is not None:
        print(f"Acceptance: {acceptance_line(accepted)}")


def _reported(
    investigation: "Investigation",
    folder: Path,
    models: tuple["nn.Module", "nn.Module | None"],
    service: "Service | None",
    more: dict[str, Any],
) -> None:
    """Write the report, of a divergence with a reproduction. What cannot be written does not change the verdict.

    `more` is what `write` takes besides.
    """
    from specnb.book.divergence_report import write
    from specnb.divergence.repro import minimal

    repro = None
    if investigation.case.bad is not None:
        try:
            repro = minimal(*models, outcome=investigation.case.bad, deploy=service)
        except (Exception, SystemExit) as error:
            complain(f"the report has no reproduction: {error}")
    try:
        page = write(investigation, folder, repro=repro, **more)
        complain(f"the report is in {page}")
    except Exception as error:
        complain(error)


def _known_setups(text: str | None, *, beside_target: bool) -> list[str] | None:
    """Raises InputError for a set-up that there is not, and for one beside a target where there is none."""
    from specnb.divergence.setups import SETUPS

    wanted = names(text)
    if unknown := [name for name in wanted or () if name not in SETUPS]:
        raise InputError(f"unknown set-up {unknown[0]!r} in --setups {text}; known: {', '.join(SETUPS)}")
    if beside := [name for name in wanted or () if SETUPS[name].beside == "target" and not beside_target]:
        raise InputError(f"--setups {text}: {beside[0]} runs the draft beside a target: add --target")
    return wanted


# in the order in which one uses them
for command, line in {
    preflight: "Seconds: weights, configs, caches, drafting. First of all.",
    investigate: "Run a draft alone and beside others: what is wrong first?",
    capture: "Write down what a model computes, in torch or llama.cpp.",
    compare: "Where two such traces part, and whether it is rounding.",
    audit: "Is what is sampled what the rows of draft and target say?",
    faults: "List the planted faults, for trying the lab out.",
}.items():
    app.command(short_help=line)(command)
