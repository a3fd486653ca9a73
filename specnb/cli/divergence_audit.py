"""`specnb divergence audit`: is what is sampled with a draft what the rows of draft and target say?"""

from contextlib import ExitStack
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

from specnb.cli.show import Json, judged, print_frame, print_json
from specnb.errors import InputError

if TYPE_CHECKING:
    from specnb.divergence.sampling import Audit
    from specnb.prompts import Prompt


def audit(
    target: Annotated[str, typer.Option(help="target, as specnb.load takes it")],
    draft: Annotated[str, typer.Option(help="draft model, or lookup, self, medusa")],
    temperature: Annotated[float, typer.Option(help="0 is greedy: exact checks only")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    k: Annotated[int, typer.Option("--k", help="draft length")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="after each prompt")] = 128,
    prompts: Annotated[int, typer.Option(help="shipped prompts, of all categories in turn")] = 12,
    seed: Annotated[int, typer.Option(help="of the first prompt's random draws; the next has the next one")] = 0,
    effect: Annotated[
        float,
        typer.Option(help="smallest fault that must not be missed, as a share of probability; less needs more text"),
    ] = 0.1,
    as_json: Json = False,
) -> None:
    """Decode, note each draft with its rows, and see whether drafts and tokens follow them.

    Exit code: 0 sound, 1 wrong, 125 inconclusive, or a model that does not open; 2 for options that cannot be.
    """
    bounded = {"max-new-tokens": (max_new_tokens, 1), "k": (k, 1), "prompts": (prompts, 1), "seed": (seed, 0)}
    for name, (value, least) in bounded.items():
        if value < least:
            raise InputError(f"--{name} is {value}: an audit needs at least {least}")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    _check(sampling, effect)
    texts = _in_turn(prompts)
    with judged():
        options = sampling | {"k": k, "max_new_tokens": max_new_tokens}
        found = _audited(target, draft, texts, seed, effect, options)
    if as_json:
        print_json(found.document())
    else:
        _show(found)
    raise typer.Exit(found.exit_code)


def _check(sampling: dict[str, float], effect: float) -> None:
    """Refuse what is wrong whatever the models are: that is no verdict."""
    from specnb.decode.sampling import Sampling
    from specnb.divergence.sampling import Tally

    Sampling(**sampling)
    Tally().audit(effect=effect)


def _in_turn(n: int) -> "list[Prompt]":
    """The first n shipped prompts, of all categories in turn. InputError if there are fewer."""
    from specnb.prompts import CATEGORIES, prompts

    turns = zip_longest(*(prompts(name) for name in CATEGORIES))
    found = [prompt for turn in turns for prompt in turn if prompt is not None]
    if n > len(found):
        raise InputError(f"--prompts is {n}, but {len(found)} are shipped: raise --max-new-tokens instead")
    return found[:n]


def _audited(
    target: str, draft: str, prompts: "list[Prompt]", seed: int, effect: float, options: dict[str, float]
) -> "Audit":
    from specnb.book.progress import ProgressBar
    from specnb.divergence.auditing.log import listened
    from specnb.divergence.sampling import Tally
    from specnb.draft.load import load_drafter
    from specnb.lm.load import load

    tally = Tally()
    with ExitStack() as opened, ProgressBar() as progress:
        model = load(target)
        opened.callback(model.close)
        drafter = load_drafter(draft, model, strict=True).drafter
        opened.callback(drafter.close)
        for number, prompt in enumerate(prompts):
            progress(number, len(prompts), f"{prompt.id}: {tally.n} positions")
            text = prompt.text or prompt.messages[-1].content  # models without a chat template are audited as well
            listened(model, text, drafter=drafter, hear=tally.add, seed=seed + number, ignore_eog=True, **options)
    return tally.audit(effect=effect)


def _show(found: "Audit") -> None:
    import pandas as pd

    print(found.line)
    panel = pd.DataFrame(found.panel)
    print_frame("five sums: z counts standard deviations from what the rows promise, and beyond 4 is no accident",
               panel[["name", "n", "z", "p_value", "detectable", "needed", "meaning"]])  # fmt: skip
    print(
        f"detectable: the share of probability that these positions would have shown to be misplaced; needed: how many "
        f"positions would show {found.effect:g}"
    )
    flaws = [(kind, count, first.position, first.says) for kind, (count, first) in found.flaws.items()]
    print_frame("what cannot be", pd.DataFrame(flaws, columns=["check", "times", "first", "what"]))
    print(
        f"of {found.n} positions {found.replayed} were replayed with their random numbers, of {found.exact} the token "
        f"was checked without statistics; {found.repeated} repeated prefixes were left out"
    )
