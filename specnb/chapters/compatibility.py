"""Test predicted acceptance: run a pair, and the same draft model with other vocabularies.

The experiment of notebook 03. The vocabulary overlap predicts an acceptance rate (`check.predict`);
the runs measure it.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import STYLE, dress, error_bars, template
from specnb.compat.check import Verdict, predict, reach_of
from specnb.compat.description import Description
from specnb.compat.models import opens
from specnb.compat.read import describe
from specnb.draft.model import ModelDrafter, fit_drafter
from specnb.draft.token_map import Translation
from specnb.draft.translate import TokenIntersection
from specnb.errors import InputError
from specnb.io import plain
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.bench import rotate
from specnb.measure.cost import Cost, verify_costs
from specnb.measure.experiment import Experiment, Progress, prompts_of, silent
from specnb.measure.intervals import NORMAL, interval, pays, rate_ratio, wilson
from specnb.params import CompatibilityParams
from specnb.records import Generation, RunRecord, pool_rounds

EXPERIMENT = "03_compatibility"
OWN_VOCABULARY = "its own"
"""Name of the draft model's own vocabulary in a record."""
PLAIN = "plain decoding"


def with_vocabulary(model: LanguageModel, family: Description) -> TokenIntersection:
    """Return `model` with the vocabulary of another model family; closing it closes `model`.

    It drafts only pieces that both vocabularies have, which isolates the effect of the vocabulary.
    A model of that family would also tokenize text differently. Raises VocabularyMismatch if no
    piece is shared.
    """
    translated = TokenIntersection(model, family)
    translated.name = f"{model.name} as {family.name}"
    return translated


def run_trial(params: CompatibilityParams, *, progress: Progress = silent) -> RunRecord:
    """Generate each prompt plainly, and with `draft_model` in each vocabulary, in rotating order.

    The vocabularies are its own, and those of `draft` and `families`; names with weights run as
    models. `measurements["trial"]` has a row for each: the translation, the overlap, predicted and
    measured acceptance, and `rate_needed`, the acceptance rate above which drafting pays here.
    `in_reach` is the share of generated tokens that could be drafted, and `tau_bound` the resulting
    upper bound on `tau`. `same_text` is None above temperature 0. `speedup` is live, over plain
    decoding in the same engine, with its interval over prompts. Raises what `specnb.load`,
    `read.describe` and `generate` raise; earlier results are saved.
    """
    study = Experiment(EXPERIMENT, params, prompts_of(params, params.categories))
    rows = study.measured["trial"] = []
    names = [
        name
        for name in dict.fromkeys((params.draft, *params.families))
        if name != params.draft_model
    ]
    families = {name: describe(name) for name in names if not opens(name)}
    if absent := [name for name, family in families.items() if family.vocab is None]:
        raise InputError(
            f"no vocabulary available for {absent[0]}: give a name from data/vocab, or a file"
        )
    with study:
        target = study.target = study.opened(load(params.target))
        models = {
            name: study.opened(load(name))
            for name in (params.draft_model, *(name for name in names if name not in families))
        }
        study.drafters = [*map(ModelDrafter, models.values())]
        curve, c = verify_costs(target, study.drafters, params.k, quick=True)
        draft = models.pop(params.draft_model)
        drafters = {}
        for name in (OWN_VOCABULARY, *names):
            model = (
                with_vocabulary(draft, families[name])
                if name in families
                else models.get(name, draft)
            )
            drafters[name] = fit_drafter(model, target)
        runs = {name: [] for name in (PLAIN, *drafters)}
        order = rotate(list(runs), len(study.chosen))
        for done, (_, index, name) in enumerate(order):
            prompt = study.chosen[index]
            progress(done, len(order), f"{prompt.id}, {name}")
            drafter = drafters.get(name)
            run = study.decode(prompt, temperature=params.temperature, drafter=drafter, k=params.k)
            runs[name].append(run)
            study.generations.append(run)
        quality = None
        for name, drafter in drafters.items():
            drafted = runs[name]
            pairs = [*zip(drafted, runs[PLAIN], strict=True)]
            times = [(g.n_decoded, g.decode_s, p.n_decoded, p.decode_s) for g, p in pairs]
            speedup, low, high = interval(times, rate_ratio)
            fit = drafter.translation
            if name == OWN_VOCABULARY and (fit is None or fit.way is Translation.SLICING):
                quality = chance_of(drafted)  # without translation: the draft model's quality
            reach = reach_of(fit) if fit else 1.0
            # else quality is unknown
            predictable = None not in (quality, reach) and name not in models
            expected = predict(reach, params.k, quality) if predictable else None
            cost = Cost(curve, c[models.get(name, draft).name])
            same_text = (
                None if params.temperature else all(g.token_ids == p.token_ids for g, p in pairs)
            )
            tokens = [token for g in drafted for token in g.token_ids]
            can_draft = getattr(drafter.model, "can_draft", None)
            in_reach = sum(map(can_draft, tokens)) / len(tokens) if can_draft else 1.0
            row = {
                "vocabulary": name,
                "text_shared": reach,
                "translated": str(fit.way) if fit else "not needed",
                "pieces_shared": fit.overlap.of_target if fit else 1.0,
                "predicted_rate": expected and expected.acceptance_rate,
                "predicted_tau": expected and expected.tau,
                **pool_rounds(drafted),
                "in_reach": in_reach,
                "tau_bound": bound(in_reach, params.k),
                "same_text": same_text,
                "rate_needed": cost.rate_needed(params.k),
                "speedup": speedup,
                "low": low,
                "high": high,
                "verdict": pays(low, high),
            }
            rows.append(plain(row, nan=None))
        return study.record()


def bound(reach: float, k: int) -> float:
    """Return the upper bound on tau if a share `reach` of the text's tokens can be drafted.

    Every other token needs its own target forward pass.

    >>> bound(0.5, 4)
    2.0
    """
    return k + 1.0 if reach * (k + 1) >= k else 1 / (1 - reach)


def chance_of(generations: Iterable[Generation]) -> float | None:
    """Return the share of tested draft tokens that were accepted; None if none was tested.

    Tokens after a round's first rejection are not tested. In a tree, each position counts once.
    """
    rounds = [r for generation in generations for r in generation.rounds]
    tested = sum(r.n_tested for r in rounds)
    return sum(r.n_accepted for r in rounds) / tested if tested else None


# --- Figures of notebook 03: verdicts of all pairs, and overlap against acceptance ---

LOOKS = STYLE["verdicts"]
"""Letter and color of each verdict."""


def verdicts(matrix: pd.DataFrame) -> go.Figure:
    """Draw `check.matrix`: every pair with the color and letter of its verdict.

    An l or t marks pairs whose verdict llama.cpp's or transformers' own check contradicts.
    """
    names = matrix["target"].unique()
    order = list(LOOKS)
    letters = matrix["verdict"].map(lambda verdict: LOOKS[verdict][0])
    fits = matrix["verdict"].isin([Verdict.DROP_IN, Verdict.SLICING])
    for mark, engine in {" <b>l</b>": "llama_cpp", " <b>t</b>": "transformers"}.items():
        letters += np.where(matrix[engine].notna() & (matrix[engine] != fits), mark, "")
    steps = [
        (at / len(order), colour)
        for i, (_, colour) in enumerate(LOOKS.values())
        for at in (i, i + 1)
    ]
    figure = go.Figure(
        go.Heatmap(
            x=matrix["draft"],
            y=matrix["target"],
            z=matrix["verdict"].map(order.index) + 0.5,
            zmin=0,
            zmax=len(order),
            colorscale=steps,
            text=letters,
            **STYLE["verdict"]["cells"],
        )
    )
    for verdict in filter(set(matrix["verdict"]).__contains__, order):
        letter, colour = LOOKS[verdict]
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=f"{letter}: {verdict}",
            marker={"color": colour, **STYLE["verdict"]["square"]},
        )
    side = 180 + 38 * len(names)
    title = f"{fits.sum()} of {len(matrix)} ordered pairs need no translation"
    return dress(
        figure,
        "verdicts",
        width=side + 120,
        height=side + 100,
        xaxis_categoryarray=names,
        title_text=title,
    )


def overlap_against_acceptance(trial: pd.DataFrame) -> go.Figure:
    """Draw the acceptance rate over the share of a text's tokens that both vocabularies have.

    Open circles are predictions, from the run of the same draft model in its own vocabulary. The
    dashed line is its `rate_needed`.
    """
    drawn = trial.dropna(subset=["text_shared", "acceptance_rate"])
    drawn[["low", "high"]] = [
        wilson(row.acceptance_rate, row.drafted, NORMAL) for row in drawn.itertuples()
    ]
    figure = px.scatter(
        drawn,
        x="text_shared",
        y="acceptance_rate",
        text="vocabulary",
        template=template(),
        **error_bars(drawn, "acceptance_rate"),
    ).update_traces(
        name="measured; 95 % interval, tokens taken as independent",
        marker_size=11,
        showlegend=True,
        textposition="middle right",
        texttemplate="   %{text}",
    )
    figure.add_scatter(
        x=drawn["text_shared"],
        y=drawn["predicted_rate"],
        mode="markers",
        text=drawn["vocabulary"],
        marker_symbol="circle-open",
        marker_size=17,
        marker_color="#444",
        name="predicted from the run with its own vocabulary",
    )
    ends = [drawn["text_shared"].min() - 0.01, 1.0099]
    needed = trial["rate_needed"].iloc[0]
    figure.add_scatter(
        x=ends,
        y=[needed, needed],
        mode="lines",
        line=STYLE["line"],
        name="rate needed to break even",
    )
    figure.update_xaxes(range=ends)
    return dress(figure, "overlap_against_acceptance")
