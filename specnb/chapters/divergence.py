"""The tables and figures of notebook 06, section by section."""

import html
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
from numpy.linalg import norm

from specnb.book.claims import MISSING, Values
from specnb.book.style import STYLE, dress, looks
from specnb.decode.generate import generate
from specnb.divergence.errors import TIMES_FLOOR, name_module
from specnb.divergence.faults import FAULTS, RecordedFault, deploy_fault
from specnb.divergence.investigate import Investigation, judge_service, random_script
from specnb.divergence.pair import copy_of, open_net, pair
from specnb.divergence.parts import find
from specnb.divergence.setups import Lab, Outcome
from specnb.divergence.trace import NEIGHBOR, Key
from specnb.draft.model import ModelDrafter
from specnb.errors import require_known
from specnb.io import digest
from specnb.measure.experiment import Experiment, Progress, silent
from specnb.params import DivergenceParams

NOTHING = "-"
"""Placeholder in tables."""
CASE = {"S0": "alone", "S1": "next to itself", "S3": "next to the larger target"}
"""The setups of the case, as its notes name them."""
GALLERY = ("S0", "S1", "S2", "S3")
"""Setups that distinguish the planted faults."""

LIMIT = np.log10(TIMES_FLOOR)
"""Heat above which a tensor counts as wrong."""
LOW, HIGH = -1.0, 8.0
"""Range of a heat map: log10(error / floor)."""
LEAST = 1e-8
"""Smallest value on a logarithmic axis; smaller values are clipped to it."""
WRONG = STYLE["heat"]["wrong"]
LEGEND = (
    f"0: noise floor of fault-free runs; wrong above {LIMIT:.2f} ({TIMES_FLOOR:g} times the floor)"
)


class Study(Experiment):
    """The experiment: one method per section, one record. Raises InputError for unknown faults."""

    def __init__(self, params: DivergenceParams) -> None:
        super().__init__("06_divergence", params, [])
        self.models = [
            {"role": role, "id": f"divergence pair, seed {params.seed}"}
            for role in ("target", "drafter")
        ]
        self.faults = params.gallery or [*FAULTS]
        for name in self.faults:
            require_known("fault", name, FAULTS)
        self._deploy = deploy_fault(params.fault, layer=None if params.layer < 0 else params.layer)

    @cached_property
    def lab(self) -> Lab:
        """The embedded pair, with a pristine copy and noise floors for all faults."""
        p = self.params
        models = pair(seed=p.seed, dtype=p.dtype)
        script = random_script(
            models.draft, tokens=p.tokens, prompt=p.prompt_tokens, k=p.k, seed=p.seed
        )
        return Lab(*models, script=script)

    def investigate(self, progress: Progress = silent) -> Investigation:
        """Deploy the fault in a service, and investigate it."""
        investigation = judge_service(self.lab, deploy=self._deploy, progress=progress)
        self.measured["investigation"] = investigation.document()
        return investigation

    def accept(self) -> pd.DataFrame:
        """Decode speculatively with the deployed draft; return one row per neighbor and verifier.

        Columns: neighbor, verified_by, draft_tokens, accepted, acceptance_rate. The copy of the
        draft has no fault.
        """
        lab, p = self.lab, self.params
        copied, target = "a copy of itself", "the larger target"
        nets = {copied: copy_of(lab.reference), target: lab.target}
        verifiers = {name: open_net(net, name) for name, net in nets.items()}
        drafter = ModelDrafter(open_net(lab.draft, "the draft"))
        rows = []
        for neighbor, by in (
            (copied, copied),
            (target, copied),
            (target, target),
            ("nobody", target),
        ):
            with self._deploy(lab.draft, nets.get(neighbor)):
                written = generate(
                    verifiers[by],
                    lab.script.feeds[0].ids,
                    drafter=drafter,
                    k=p.k,
                    max_new_tokens=p.tokens,
                    ignore_eog=True,
                )
            rows.append(
                {
                    "neighbor": neighbor,
                    "verified_by": by,
                    "draft_tokens": written.total_draft_tokens,
                    "accepted": written.accepted_tokens,
                    "acceptance_rate": written.acceptance_rate,
                }
            )
        self.measured["acceptance"] = rows
        return pd.DataFrame(rows)

    def scale_target(self, factor: float) -> Outcome:
        """Return S3 with the output of the target's experts in layer 0 multiplied by `factor`."""
        with FAULTS["expert_scale"](self.lab.target, None, layer=0, eps=factor - 1):
            return self.lab.run("S3", self._deploy)

    def gallery(self, progress: Progress = silent) -> pd.DataFrame:
        """Plant the faults of the gallery one by one, and investigate each in a service.

        Columns: fault, planted (its description), verdict, planted_module, named_module (the first
        one), module_right, first_token, planted_cause, named_cause, cause_right, seconds. A control
        (`split_k`, `uniform_offset`) passes if no module is named. Raises InputError for a fault
        that does not fit the models, or never acts on this script.
        """
        rows = []
        for done, name in enumerate(self.faults):
            progress(done, len(self.faults), name)
            deploy = RecordedFault(FAULTS[name])
            investigation = judge_service(self.lab, deploy=deploy, setups=GALLERY)
            fault = deploy.acted()
            first = investigation.first
            verdict = investigation.verdict
            planted = NOTHING if fault.first is None else fault.first or "the model's inputs"
            module = first.module if first else None
            unnamed = verdict if verdict == "PRECISION_ONLY" else NOTHING
            cause = next((cause.name for cause in investigation.causes), unnamed)
            rows.append(
                {
                    "fault": name,
                    "planted": fault.note,
                    "verdict": verdict,
                    "planted_module": planted,
                    "named_module": name_module(first) if first else NOTHING,
                    "module_right": module == fault.first,
                    "first_token": first.first_token if first else -1,
                    "planted_cause": fault.cause,
                    "named_cause": cause,
                    "cause_right": cause == fault.cause if fault.first is not None else not first,
                    "seconds": investigation.facts["seconds"],
                }
            )
        table = pd.DataFrame(rows)
        self.measured["gallery"] = table.to_dict("records")  # Python types, for JSON
        return table


# --- the case: what people compared by hand -------------------------------------------------------


def case_table(investigation: Investigation) -> pd.DataFrame:
    """Return what the case's notes compare, over the prompt: one column per setup.

    An attention output is the input of the output projection. The checksums cover all parameters of
    an expert bank, as loaded and as read by its operations.
    """
    parts = find(investigation.lab.draft)
    columns = {}
    for name, says in CASE.items():
        outcome = investigation.outcomes[name]
        column = {}
        for layer in (0, 1):
            (bank, _), (attention, _) = parts["bank"][layer], parts["attention"][layer]
            read = outcome.trace.params.query("module == @bank").drop_duplicates(
                ["owner", "owner_path"]
            )
            owners = {*read["owner"].replace(NEIGHBOR, "neighbor")}
            leaves = tuple(f"{bank}.{path.rpartition('.')[2]}" for path in read["owner_path"])
            loaded = [
                known for path, known in investigation.lab.loaded.items() if path.endswith(leaves)
            ]
            column |= {
                f"layer {layer} keys, std": _std(outcome, f"{attention}.k_proj", "out"),
                f"layer {layer} attention output, std": _std(outcome, f"{attention}.o_proj", "in"),
                f"layer {layer} expert weights as loaded, checksum": digest(sorted(loaded))[:8],
                f"layer {layer} expert weights as read, checksum": digest(sorted(read["digest"]))[
                    :8
                ],
                f"layer {layer} expert weights, read from": " ".join(sorted(owners)) or NOTHING,
                f"layer {layer} expert output, std": _std(outcome, bank, "out"),
            }
        # the first feed is the prompt
        column["first draft token"] = outcome.logits[0][-1].argmax().item()
        columns[f"{name} {says}"] = column
    return pd.DataFrame(columns, dtype=object).map(
        lambda value: f"{value:.4f}" if isinstance(value, float) else str(value)
    )


HYPOTHESES = {
    "autotuning, caches or buffers that the target's run leaves behind": (
        "S4",
        "right if the target never runs",
        "wrong_unrun",
    ),
    "memory layout, KV slots": (
        "S2",
        "right next to a decoy, as next to a copy of the same shapes",
        "wrong_same_shape",
    ),
    "rounding that adds up, the fused norm and residual, or routing": (
        "S3",
        "wrong in other modules than the experts",
        "banks_alone",
    ),
}
"""The notes' hypotheses: setup, predicted result, and the value that contradicts it if true."""


def tabulate_hypotheses(investigation: Investigation) -> pd.DataFrame:
    """Return one row per hypothesis of the notes, ruled out or open for the planted fault."""
    values = divergence_values(investigation)
    rows = [
        (guess, setup, predicts, "ruled out" if values[value] is True else "open")
        for guess, (setup, predicts, value) in HYPOTHESES.items()
    ]
    return pd.DataFrame(rows, columns=["hypothesis", "setup", "expected", "planted_fault"])


def _std(outcome: Outcome, module: str, role: str) -> float:
    """Return the standard deviation of a module's input or output over the prompt."""
    values = outcome.trace.arrays[
        outcome.trace.rows(module=module, role=role, step=0)["digest"].iloc[0]
    ]
    return values.astype(float).std()


def tabulate_misleading(investigation: Investigation) -> pd.DataFrame:
    """Compare each module's outputs in S0w, which is right, with those in the first wrong setup.

    Columns: module; std, |ratio - 1| of the standard deviations, and relative_l2, which include
    errors of earlier modules; by_itself, the module's own largest error; ratio, by_itself / floor.
    """
    bad = investigation.outcome()
    sound_run = investigation.outcomes["S0w"].run.whole
    wrong_run = bad.run.whole
    outputs = bad.errors.query("role == 'out'").groupby("at", sort=False)
    rows = []
    for module, error, ratio in outputs[["error", "ratio"]].max().itertuples():
        key = Key(module, 0, "out", "out")
        if key in sound_run and sound_run[key].values.dtype.kind == "f":
            a, b = (run[key].values.astype(float).ravel() for run in (sound_run, wrong_run))
            with np.errstate(divide="ignore", invalid="ignore"):  # outputs that are all zero
                rows.append(
                    (module, abs(b.std() / a.std() - 1), norm(b - a) / norm(a), error, ratio)
                )
    return pd.DataFrame(rows, columns=["module", "std", "relative_l2", "by_itself", "ratio"])


def misleading_figure(investigation: Investigation) -> go.Figure:
    """Plot the error of each module's output: standard deviation, relative L2, and its own error.

    Lines are drawn at LEAST where they are below it; own errors below it are left out.
    """
    table = tabulate_misleading(investigation)
    wrong = table["ratio"] > TIMES_FLOOR
    setup = investigation.outcome().setup
    title = "No module is wrong on its own inputs"
    if wrong.any():
        first = table.loc[wrong.idxmax()]
        title = (
            f"Where the fault starts ({setup.id}), the output's values are off by "
            f"{first['relative_l2']:.0%},<br>its standard deviation by {first['std']:.1%}"
        )
    lines = table[["std", "relative_l2"]].set_axis(
        ["output's standard deviation", "output's values (relative L2)"], axis=1
    )
    text = _named(table["module"])
    figure = px.line(lines.clip(lower=LEAST), **looks("variable", lines, by=["line_dash"]))
    figure.update_traces(opacity=0.7, text=text, hovertemplate=None)
    for name, part, color in (  # markers only: modules' own errors are independent
        ("module's own error: correct", ~wrong, "#888"),
        ("module's own error: wrong", wrong, WRONG),
    ):
        figure.add_scatter(
            y=table["by_itself"].where(part & (table["by_itself"] > LEAST)),
            name=name,
            text=text,
            mode="markers",
            marker_symbol="x-thin",
            marker_size=12,
            marker_line_color=color,
            marker_line_width=3,
        )
    if wrong.any():
        start = "the fault starts here "
        where = {"annotation_text": start, "annotation_position": "top left"}
        figure.add_vline(wrong.idxmax(), line_width=1, **where)
    _name_layers(figure, table["module"], range(len(table)))
    return dress(figure, "misleading", title_text=title)


def setups_figure(investigation: Investigation) -> go.Figure:
    """Plot one strip per setup, modules in run order; the module named first is framed."""
    strips, marks = {}, {}
    for setup, outcome in investigation.outcomes.items():
        name = f"{setup} {outcome.setup.says}"
        strips[name] = heat_of(outcome).max(axis=1)
        if not outcome.clean:
            marks[name] = outcome.wrong["module"].iloc[0]
    first = " and ".join(dict.fromkeys(marks.values())) or "no module"
    title = f"First wrong module: {first}, in {len(marks)} of {len(strips)} setups"
    return draw_strips(pd.concat(strips, axis=1).T, title=title, marks=marks)


def divergence_values(investigation: Investigation) -> Values:
    """Return the values for the claims of notebook 06; MISSING for setups S2 and S4 if not run.

    `kept` and `kept_itself` are the shares of greedy tokens that do not change if the draft runs
    next to the target, or next to a copy of itself.
    """
    seen = case_table(investigation)
    outcomes = investigation.outcomes
    alone = seen["S0 alone"]
    beside = seen["S3 next to the larger target"]
    tokens = {
        name: np.concatenate([logits.argmax(-1) for logits in outcomes[name].logits])
        for name in CASE
    }
    kept, kept_itself = ((tokens[name] == tokens["S0"]).mean() for name in ("S3", "S1"))
    wrong = {
        name: not outcomes[name].clean if name in outcomes else MISSING for name in ("S2", "S4")
    }
    banks = [path for path, _ in find(investigation.lab.draft)["bank"]]
    output_alone, output_beside = (
        float(column["layer 0 expert output, std"]) for column in (alone, beside)
    )
    first = investigation.first
    return {
        "kept": kept,
        "kept_itself": kept_itself,
        "kept_less": kept_itself - kept,
        "n": len(tokens["S0"]),
        "token": beside["first draft token"],
        "token_alone": alone["first draft token"],
        "begins_between": alone["layer 0 attention output, std"]
        == beside["layer 0 attention output, std"]
        and alone["layer 1 keys, std"] != beside["layer 1 keys, std"],
        "at_bank_0": first is not None and first.module == banks[0],
        "line": investigation.line.partition(" (")[0],
        "read_alike": alone["layer 0 expert weights as read, checksum"]
        == beside["layer 0 expert weights as read, checksum"],
        "output_alone": output_alone,
        "output_beside": output_beside,
        "output_ratio": output_beside / output_alone,
        "wrong_unrun": wrong["S4"],
        "wrong_same_shape": wrong["S2"] if outcomes["S1"].clean else False,
        "banks_alone": set(outcomes["S3"].wrong["module"]) <= {*banks},
        "foreign": outcomes["S1"].foreign["owner_path"].nunique(),
    }


# --- figures --------------------------------------------------------------------------------------


def heat_of(outcome: Outcome) -> pd.DataFrame:
    """Return log10(error / floor), LOW to HIGH, of each module's worst tensor by position."""
    places = [outcome.errors["module"], outcome.errors["position"]]
    with np.errstate(divide="ignore"):
        heat = np.log10(outcome.errors["ratio"]).fillna(0).clip(LOW, HIGH).groupby(places).max()
    return heat.unstack().loc[outcome.errors["module"].unique()]


def draw_strips(table: pd.DataFrame, *, title: str, marks: Mapping[str, str]) -> go.Figure:
    """Plot one strip per row (a setup): the worst token of each module, in run order.

    `table` has one column per module. `marks` maps a row to the module to frame and label.
    """
    modules = _named(table.columns)
    heat = go.Heatmap(
        x=modules,
        y=_named(table.index),
        z=table.round(2).to_numpy().tolist(),
        zmin=LOW,
        zmax=HIGH,
        **STYLE["heat"]["cells"],
    )
    figure = go.Figure(heat)
    for name, module in marks.items():
        x = table.columns.get_loc(module)
        y = table.index.get_loc(name)
        box = {"x0": x - 0.5, "x1": x + 0.5, "y0": y - 0.42, "y1": y + 0.42}
        figure.add_shape(type="rect", line_color="#111", line_width=2, **box)
        anchor, shift = ("left", 7) if x < len(modules) / 2 else ("right", -7)
        figure.add_annotation(
            x=x,
            y=y,
            text=modules[x],
            bgcolor="rgba(255, 255, 255, 0.9)",
            xanchor=anchor,
            xshift=shift,
            showarrow=False,
            font_size=11,
        )
    _name_layers(figure, table.columns, modules)
    note = f"{LEGEND}; framed: first wrong module"
    return dress(
        figure, "strips", title_text=title, title_subtitle_text=note, height=200 + 26 * len(table)
    )


def _name_layers(figure: go.Figure, modules: Sequence[str], places: Sequence[str | int]) -> None:
    """Label each layer at the middle of its modules, and draw a line before it."""
    numbers = pd.Series([*modules]).str.extract(r"\b(\d+)\b", expand=False)
    layers = numbers.groupby(numbers, sort=False).groups
    every = max(1, -(-len(layers) // 12))  # as many labels as fit
    for start, *_ in layers.values():
        figure.add_vline(start - 0.5, line_color="#888", line_width=1, line_dash="dot")
    middles = {
        f"layer {number}": places[of[len(of) // 2]] for number, of in [*layers.items()][::every]
    }
    figure.update_xaxes(tickvals=[*middles.values()], ticktext=[*middles])


def _named(modules: Sequence[str]) -> list[str]:
    """Return module paths with HTML escaped, because figures interpret tags."""
    return [html.escape(str(module)) or "(the model)" for module in modules]
