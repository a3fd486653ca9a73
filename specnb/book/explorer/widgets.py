"""Widgets: a plotly figure, and the explorer, `page.html` in a frame connected to the kernel.

The explorer works in JupyterLab and under Voila. The controls belong to the page; their positions
are traits, which Python reads, sets and observes. The page asks the kernel for policies whose
rounds depend on a slider, one at a time, and for live runs.
"""

import json
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import anywidget
import pandas as pd
import plotly.graph_objects as go
import traitlets
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from specnb.book import figures
from specnb.book.explorer.page import page, play, reduced
from specnb.book.explorer.tables import ALL, THIS_MACHINE, Setting, Tables, TracedRun, sweep_k
from specnb.book.picture import with_picture
from specnb.book.style import CONFIG, readable
from specnb.book.tables import BUSY, best_k
from specnb.io import JsonObject, plain
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.intervals import interval, rate_ratio
from specnb.measure.policies import FIXED
from specnb.measure.recording import Recording, Trace
from specnb.records import Generation, RunRecord


class Explorer(anywidget.AnyWidget):
    """The explorer of a run's trace; with `run_live`, a setting can run live in the background.

    `run_live` maps a setting, a `Progress`, and a reader's prompt or "" to alternating plain and
    drafted generations, and whether the machine was busy.

    The positions of the controls are traits: k, round (0: none), drafter, content, policy,
    temperature, top_p. `places` are the first ones. Without a kernel, readers see the
    HTML `still`, or else a figure. Raises InputError for a trace that cannot be replayed.

    To print the predictions whenever K changes:

        explorer.observe(lambda change: print(explorer.selection), "k")
    """

    _esm = """
    function render({ model, el }) {
      const frame = document.createElement("iframe");
      const fitting = new ResizeObserver(([{ target }]) => {
        frame.style.height = `${target.offsetHeight}px`;
      });
      const paint = () => { // in the theme of the surrounding page
        const channels = getComputedStyle(el).color.match(/\\d+/g).slice(0, 3);
        const bright = channels.every((part) => part > 127);
        frame.contentDocument.documentElement.style.colorScheme = bright ? "dark" : "light";
      };
      const receive = (message) => frame.contentWindow.receive(message);
      const names = ["k", "round", "drafter", "content", "policy", "temperature", "top_p"];
      let own = false; // whether the page has changed the traits
      const move = () => {
        if (own) return;
        const values = names.map((name) => [name, model.get(name)]);
        frame.contentWindow.move(Object.fromEntries(values));
      };
      const tell = (place) => {
        own = true;
        for (const name of [...names, "_machine"]) model.set(name, place[name]);
        own = false;
        model.save_changes();
      };
      const moves = names.map((name) => `change:${name}`);
      frame.onload = () => {
        paint();
        move();
        frame.contentWindow.attach((message) => model.send(message), model.get("_runs"), tell);
        fitting.observe(frame.contentDocument.body);
        model.on("msg:custom", receive);
        for (const event of moves) model.on(event, move);
      };
      Object.assign(frame.style, { width: "100%", border: 0 });
      Object.assign(frame, { title: "explorer", srcdoc: model.get("_page") });
      el.append(frame);
      const repainting = new MutationObserver(() => setTimeout(paint, 300));
      // JupyterLab names its theme in these attributes.
      const themes = ["data-jp-theme-name", "data-jp-theme-light"];
      repainting.observe(document.body, { attributeFilter: themes });
      return () => {
        fitting.disconnect();
        repainting.disconnect();
        model.off("msg:custom", receive);
        for (const event of moves) model.off(event, move);
      };
    }
    export default { render };
    """
    _page = traitlets.Unicode().tag(sync=True)
    _runs = traitlets.Bool().tag(sync=True)

    def __init__(
        self, run: TracedRun, *, run_live: Callable | None = None, still: str = "", **places: Any
    ) -> None:
        self._tables = Tables(run.trace)
        self._run = run
        self._run_live = run_live
        self._still = still
        temperature, top_p = self._tables.samplings[0]
        options = {"drafter": self._tables.drafters[0], "temperature": temperature, "top_p": top_p}
        options |= {"k": 8, "round": 0, "content": ALL, "policy": FIXED, "_machine": {}} | places
        self.add_traits(
            **{name: traitlets.Any(value).tag(sync=True) for name, value in options.items()}
        )
        super().__init__(_page=page(reduced(run, self._tables)), _runs=run_live is not None)
        self.on_msg(self._answer)

    @classmethod
    def of(cls, record: RunRecord, recordings: Sequence[Recording]) -> "Explorer":
        """Explore the recordings of `ksweep.run` or `run_league`, with the record's costs."""
        curve = CostCurve.model_validate(record.measurements["verify_curve"])
        return cls(TracedRun(record, Trace(tuple(recordings)), curve, record.measurements["cs"]))

    @property
    def selection(self) -> pd.DataFrame:
        """The predictions of `Tables.sweep`, one row per fixed K, at the positions of the controls.

        Between recorded temperatures, it is that of the nearest. For a drafter that the page does
        not show yet, the machine is that of the trace.
        """
        recorded = [
            temperature for temperature, top_p in self._tables.samplings if top_p == self.top_p
        ]
        nearest = min(recorded, key=lambda temperature: abs(temperature - self.temperature))
        machine = Cost(self._run.curve, self._run.c[self.drafter])
        if self._machine.get("drafter") == self.drafter:
            machine = _cost_of(self._machine)
        return self._tables.sweep(
            Setting(self.drafter, nearest, self.content, FIXED, self.k, machine, self.top_p)
        )

    def _repr_mimebundle_(self, **asked: Any) -> tuple[dict, dict]:
        """Return the widget and, for readers without a kernel, HTML or a figure of all drafters."""
        widget, metadata = super()._repr_mimebundle_(**asked)
        if self._still:
            return widget | {"text/html": self._still, "text/plain": "Explorer"}, metadata
        sweep = sweep_k(self._tables, self._run.curve, self._run.c)
        ends = sweep.query(
            f"machine == '{THIS_MACHINE}' and category == '{ALL}'"
            " and (temperature == temperature.min() or temperature == temperature.max())"
        )
        category = ends["temperature"].map("temperature {:g}".format)
        ends = ends.assign(category=category, drafter=ends["drafter"].map(readable))
        figure = figures.speedup_over_k(
            ends,
            panel="drafter",
            marks={"fastest K, with 95 % interval": best_k(ends)},
            title="Predicted speedup over plain decoding in the same engine, all contents",
        )
        data, metadata = with_picture(figure)._repr_mimebundle_()
        return widget | data, metadata

    def _answer(self, _widget: object, message: JsonObject, _buffers: object) -> None:
        """Answer a message of the page: simulate a policy, or start a live run."""
        setting = Setting(
            **message["setting"] | {"machine": _cost_of(message["setting"]["machine"])}
        )
        if message.get("run"):
            # a daemon thread does not delay the shutdown of the kernel
            Thread(
                target=self._measure, args=(setting, message.get("prompt", "")), daemon=True
            ).start()
            return
        try:
            answer = play(self._tables, setting)
        except Exception as error:  # a callback's traceback would only go to a log
            answer = setting.place | {"error": f"{type(error).__name__}: {error}"}
        self.send({"answer": answer | {"key": message["key"]}})

    def _measure(self, setting: Setting, prompt: str) -> None:
        """Run a setting live and send the result; an error is sent, never raised."""
        try:
            message = self._compared(setting, *self._run_live(setting, self._report, prompt))
        except BaseException as error:  # every error must reach the reader
            message = {"outcome": f"The live run failed: {type(error).__name__}: {error}"}
        self.send(message | {"done": True})

    def _report(self, done: int, total: int, step: str) -> None:
        self.send({"outcome": f"Running live, {done} of {total}: {step} …"})

    def _compared(self, setting: Setting, generations: list[Generation], busy: bool) -> JsonObject:
        """Return a live run's speed as a point on the page, and a sentence with its prediction."""
        drafted = generations[1::2]
        pairs = zip(drafted, generations[::2], strict=True)
        live = interval(
            [(g.n_decoded, g.decode_s, b.n_decoded, b.decode_s) for g, b in pairs], rate_ratio
        )
        here = setting._replace(machine=Cost(self._run.curve, self._run.c[setting.drafter]))
        ids = {r.prompt_id for r in self._tables.recordings} & {g.prompt_id for g in drafted}
        predicted = self._tables.speedup(here, [*ids])  # a reader's prompt is not among them
        mean_k = sum(g.total_draft_tokens for g in drafted) / sum(len(g.rounds) for g in drafted)
        point = {
            "k": setting.k if setting.policy == FIXED else mean_k,
            "busy": busy,
            "speedup": live.value,
            "low": live.low,
            "high": live.high,
            "setting": setting.place,
        }
        line = (
            f"Live, {setting.policy}, prompts: {len(drafted)}: {live.value:.2f} times "
            "plain decoding in the same engine on this machine; "
            f"predicted for the {'same' if ids else 'recorded'} prompts: {predicted:.2f}."
        )
        if busy:
            line += f" Measured while {BUSY}: run it again."
        return {"outcome": line, "point": plain(point, nan=None)}


def _cost_of(machine: JsonObject) -> Cost:
    """Return the costs that the page sends."""
    samples_s = [(ratio,) for ratio in machine["ratios"][1:]]
    curve = CostCurve(model="", context=0, widths=range(1, len(samples_s) + 1), samples_s=samples_s)
    return Cost(curve, machine["c"])


class Plot(anywidget.AnyWidget):
    """A plotly figure that fits the width and colors of its page; `update` replaces the figure.

    The kernel changes it and the browser draws it; nothing is sent back. The zoom survives updates,
    but not a change of the width.

    `plotly.graph_objects.FigureWidget` contains plotly.js in its own module (5 MB), and anywidget
    drops all later changes of a widget whose module takes more than two seconds to start. Here, the
    module is a few lines; plotly.js is sent as text with the figure and runs once per page. It
    starts with a delay, because on a busy machine it blocks the page's other widgets for seconds.
    """

    _esm = """
    function run(source) {
      const module = { exports: {} };
      new Function("module", source)(module);
      return module.exports;
    }

    async function render({ model, el }) {
      await new Promise((others) => setTimeout(others, 500));
      const plotly = (globalThis.specnbPlotly ??= run(model.get("_plotly")));
      const figure = el.appendChild(document.createElement("div"));
      const now = (name) => JSON.parse(model.get(name));
      const draw = () => {
        const { width = 960, height = 480, ...look } = now("_look");
        Object.assign(el.style, { width: `${width}px`, maxWidth: "100%" });
        const layout = { ...themed(look), height, autosize: true };
        return plotly.react(figure, now("_traces"), layout, CONFIG);
      };
      const themed = (look) => { // text in the page's color on its background, in any theme
        const color = getComputedStyle(el).color;
        const ground = "rgba(0,0,0,0)", gridcolor = "rgba(128,128,128,.3)";
        const theme = look.template?.layout ?? {};
        const axis = { linecolor: color, tickcolor: color, gridcolor };
        const axes = { xaxis: { ...theme.xaxis, ...axis }, yaxis: { ...theme.yaxis, ...axis } };
        const font = { ...theme.font, color };
        const paper = { paper_bgcolor: ground, plot_bgcolor: ground, font, ...axes };
        return { ...look, template: { ...look.template, layout: { ...theme, ...paper } } };
      };
      let drawnWidth = 0;
      const fitting = new ResizeObserver(() => {
        if (figure.clientWidth === drawnWidth) return;
        drawnWidth = figure.clientWidth;
        plotly.purge(figure); // otherwise the margin of a multi-line legend remains
        draw();
      });
      model.on("change:_traces", draw);
      draw();
      fitting.observe(el);
      const repainting = new MutationObserver(() => setTimeout(draw, 300));
      // JupyterLab names its theme in these attributes.
      const themes = ["data-jp-theme-name", "data-jp-theme-light"];
      repainting.observe(document.body, { attributeFilter: themes });
      return () => { fitting.disconnect(); repainting.disconnect(); plotly.purge(figure); };
    }
    export default { render };
    """.replace("CONFIG", json.dumps(CONFIG))
    _plotly = traitlets.Unicode().tag(sync=True)
    _traces = traitlets.Unicode().tag(sync=True)
    _look = traitlets.Unicode().tag(sync=True)

    def __init__(self, figure: go.Figure) -> None:
        super().__init__(_plotly=get_plotlyjs())
        self.update(figure)

    def __repr__(self) -> str:
        return "A live figure: open the notebook in JupyterLab and run this cell"

    def update(self, figure: go.Figure) -> None:
        spec = figure.to_dict()
        self._look = to_json_plotly(spec["layout"] | {"uirevision": "same"})
        self._traces = to_json_plotly(spec["data"])  # last: the page draws when it changes
