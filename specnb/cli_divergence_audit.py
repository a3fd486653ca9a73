"""`specnb divergence audit`: is what is sampled with a draft what the rows of draft and target say?"""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from specnb.cli_show import Json, Show, judged, show_frame
from specnb.errors import InputError

if TYPE_CHECKING:
    from specnb.divergence.sampling import Audit


def audit(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="target, as specnb.load takes it")],
    draft: Annotated[str, typer.Option(help="draft model, or lookup, self, medusa")],
    temperature: Annotated[float, typer.Option(help="0 is greedy: exact checks only")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    k: Annotated[int, typer.Option("--k", help="draft length")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="after each prompt")] = 128,
    prompts: Annotated[int, typer.Option(help="shipped prompts, of all categories in turn")] = 12,
    seed: Annotated[int, typer.Option(help="of the first prompt's random draws; the next has the next one")] = 0,
    effect: Annotated[float, typer.Option(help="total variation that must have been seen for sound")] = 0.1,
    as_json: Json = False,
) -> None:
    """Decode, note each draft with its rows, and see whether drafts and tokens follow them.

    Exit code: 0 sound, 1 wrong, 125 inconclusive, or a model that does not open.
    """
    show: Show = context.obj
    for name, value in (("max-new-tokens", max_new_tokens), ("k", k), ("prompts", prompts)):
        if value < 1:
            raise InputError(f"--{name} is {value}: an audit needs at least 1")
    _check(prompts, effect)
    with judged(show.complain):
        options = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "k": k, "max_new_tokens": max_new_tokens,
        }  # fmt: skip
        found = _audited(target, draft, prompts, seed, effect, options)
    if as_json:
        show.json(found.document())
    else:
        _show(show, found)
    raise typer.Exit(found.exit_code)


def _check(n_prompts: int, effect: float) -> None:
    """Refuse what is wrong whatever the models are: that is no verdict."""
    from specnb.divergence.sampling import Tally
    from specnb.prompts import CATEGORIES
    from specnb.prompts import prompts as shipped

    Tally().audit(effect=effect)
    if n_prompts > (n := sum(len(shipped(name)) for name in CATEGORIES)):
        raise InputError(f"--prompts is {n_prompts}, but {n} are shipped: raise --max-new-tokens instead")


def _audited(target: str, draft: str, n_prompts: int, seed: int, effect: float, options: dict[str, float]) -> "Audit":
    from specnb.book.progress import ProgressBar
    from specnb.divergence.auditing.log import listened
    from specnb.divergence.sampling import Tally
    from specnb.draft.load import load_drafter
    from specnb.lm.load import load
    from specnb.prompts import CATEGORIES
    from specnb.prompts import prompts as shipped

    tally = Tally()
    by_category = [shipped(name) for name in CATEGORIES]
    in_turn = [each[at] for at in range(max(map(len, by_category))) for each in by_category if at < len(each)]
    with ExitStack() as opened, ProgressBar() as progress:
        model = load(target)
        opened.callback(model.close)
        drafter = load_drafter(draft, model, strict=True).drafter
        opened.callback(drafter.close)
        for number, prompt in enumerate(in_turn[:n_prompts]):
            progress(number, n_prompts, f"{prompt.id}: {tally.n} positions")
            text = prompt.text or prompt.messages[-1].content  # models without a chat template are audited as well
            listened(model, text, drafter=drafter, hear=tally.add, seed=seed + number, ignore_eog=True, **options)
    return tally.audit(effect=effect)


def _show(show: Show, found: "Audit") -> None:
    import pandas as pd

    show.line(found.line)
    panel = pd.DataFrame(found.panel)
    show_frame(show, "the panel: mean 0, standard deviation 1 where sampling is sound",
               panel[["name", "n", "z", "p_value", "detectable", "needed", "meaning"]])  # fmt: skip
    flaws = [(kind, count, first.position, first.says) for kind, (count, first) in found.flaws.items()]
    show_frame(show, "what cannot be", pd.DataFrame(flaws, columns=["check", "times", "first", "what"]))
    show.line(f"{found.replayed} of {found.n} decisions replayed, {found.repeated} repeated prefixes left out")
