"""The explorer: sliders over a trace, figures that follow them at once, and a button that runs the models.

Works in JupyterLab and under Voila. What is shown is computed in `tables` and drawn by `figures`; here are only the
widgets. Callbacks may come from several threads, so each redraw holds a lock.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from threading import RLock, Thread
from typing import Any
from urllib.parse import quote

import anywidget
import ipywidgets as widgets
import traitlets

from specnb.book.explorer import figures as show
from specnb.book.explorer import tables as computed
from specnb.book.explorer.tables import ALL, CUSTOM, THIS_MACHINE, Setting, Tables, bend
from specnb.book.plot import Plot
from specnb.book.publish import with_picture
from specnb.book.tables import BUSY, decode_speedup
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.experiment import Progress
from specnb.measure.policies import FIXED, POLICIES
from specnb.measure.probe import known_machines
from specnb.measure.recording import Recording, Trace
from specnb.records import Generation, RunRecord

RunLive = Callable[[Setting, Progress], tuple[list[Generation], bool]]
"""A setting -> plain and drafted generations, and whether the machine was busy."""

MAX_AT8, MAX_C = 10.0, 1.5  # of the cost sliders; a measured machine beyond them widens them
SETTING_CONTROLS = ("drafter", "temperature", "content", "policy", "k", "curve")
IDLE = "Runs some prompts plainly and with drafts on this machine, and compares the speed with the prediction."


class Status(anywidget.AnyWidget):
    """Lines of text that a screen reader speaks when they change; also names the sliders around it for one.

    `ipywidgets.HTML` puts a new element in place of the old, which a live region must not do; the handles of
    ipywidgets' sliders carry no name of their own.
    """

    _esm = """
    function render({ model, el }) {
      el.setAttribute("role", "status");
      el.style.whiteSpace = "pre-line";
      const show = () => {
        el.textContent = model.get("lines").join("\\n");
        for (const handle of document.querySelectorAll(".specnb-explorer .noUi-handle")) {
          const label = handle.closest(".widget-inline-hbox")?.querySelector(".widget-label");
          if (!label) continue;
          handle.setAttribute("aria-label", label.textContent);
          const shown = handle.closest(".widget-inline-hbox").querySelector(".widget-readout");
          handle.setAttribute("aria-valuetext", shown.textContent); // of a selection it would be the index
        }
      };
      model.on("change:lines", show);
      show();
      setTimeout(show, 1000);
    }
    export default { render };
    """
    lines = traitlets.List(traitlets.Unicode()).tag(sync=True)


BUTTON = 'class="jupyter-button" style="vertical-align:middle"'
COPY = """onclick="getSelection().selectAllChildren(this.nextElementSibling);
navigator.clipboard?.writeText(getSelection().toString())" """  # selected, too: a clipboard may be refused


def takeaway(csv: str, command: str) -> str:
    """A link that saves a table, and a button that copies the command which stands beside it."""
    link = f'<a {BUTTON} download="explorer.csv" href="data:text/csv,{quote(csv)}">Save table (CSV)</a>'
    button = f"<button {BUTTON} {COPY}>Copy as command</button>"
    return f'{link} {button} <code style="overflow-wrap:anywhere">{escape(command)}</code>'


class Explorer(widgets.VBox):
    """Sliders, figures and summary over `trace`.

    `curve` is T(n) of the trace's machine, `c` T_draft(1)/T_target(1) for each drafter by its name. With
    `run_live` the setting can be run for real, in the background. Raises InputError for what cannot be replayed.
    """

    def __init__(
        self, trace: Trace, curve: CostCurve, c: Mapping[str, float], *, run_live: RunLive | None = None
    ) -> None:
        self._tables = Tables(trace)
        self._curve, self._c, self._run_live = curve, c, run_live
        self._lock, self._quiet = RLock(), False
        self._live: tuple[Setting, show.Live] | None = None
        self._pinned: show.View | None = None
        self._add_controls()
        self._base = self._machines()[THIS_MACHINE]
        self._fill_choices()
        self._show_costs()
        view = self._look()
        self.round.max = len(view.steps)
        self.speedup, self.alpha = Plot(show.speedup(view)), Plot(show.alpha(view))
        self.strip, self.summary = widgets.HTML(show.strip(view)), Status(lines=show.summary(view))
        self.takeaway = widgets.HTML(self._taken(view.setting))
        self._first = {name: self.controls[name].value for name in SETTING_CONTROLS}
        gaps = {"align_items": "center", "grid_gap": "0 8px", "max_width": "1010px"}  # two columns at most
        rows = widgets.Layout(display="flex", flex_flow="row wrap", **gaps)
        above = [control for name, control in self.controls.items() if name not in ("prompt", "round")]
        live = [] if run_live is None else [widgets.Box([self.run, self.outcome], layout=rows)]
        plots, below = widgets.Box([self.speedup, self.alpha], layout=rows), [self.prompt, self.round]
        buttons = widgets.Box([self.pin, self.reset, self.takeaway], layout=rows)
        parts = [widgets.Box(above, layout=rows), self.summary, plots, buttons, *live, widgets.Box(below, layout=rows)]
        super().__init__([*parts, self.strip])
        self.add_class("specnb-explorer")
        for control in self.controls.values():
            control.tooltip = control.description  # without one its label says "null"
            control.observe(self._changed, names="value")

    @classmethod
    def of(cls, record: RunRecord, recordings: Sequence[Recording]) -> "Explorer":
        """Over what `ksweep.run` followed, with the costs of its record."""
        curve = CostCurve.model_validate(record.measurements["verify_curve"])
        return cls(Trace(tuple(recordings)), curve, record.measurements["cs"])

    def _repr_mimebundle_(self, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget and, for readers without a kernel, its curve as a figure that stands still."""
        data, metadata = with_picture(self.speedup.figure)._repr_mimebundle_()
        return super()._repr_mimebundle_(**asked) | data, metadata

    def setting(self) -> Setting:
        """Where the sliders are."""
        machine = self._base if self.curve.value != CUSTOM else bend(self._base, self.at8.value, self.c.value)
        temperature, top_p = self.temperature.value
        chosen = (self.content.value, self.policy.value, self.k.value)
        return Setting(self.drafter.value, temperature, *chosen, machine, top_p)

    def redraw(self) -> None:
        """Show the present setting. What cannot be shown is said in the summary."""
        with self._lock:
            try:
                view = self._look()
            except Exception as error:  # a callback's traceback would end in a log that nobody reads
                self.summary.lines = [f"Nothing to show: {type(error).__name__}: {error}"]
                return
            with self._silently():
                self.round.max, self.round.value = len(view.steps), view.round
                self.k.disabled = "k" not in POLICIES[view.setting.policy].depends
            self.speedup.update(show.speedup(view))
            self.alpha.update(show.alpha(view))
            self.strip.value, self.summary.lines = show.strip(view), show.summary(view)
            self.takeaway.value = self._taken(view.setting)

    def _pin(self, _button: object = None) -> None:
        """Keep the present setting as the one that others are compared with."""
        with self._lock:
            self._pinned = self._look()._replace(pinned=None)
            self.redraw()

    def _reset(self, _button: object = None) -> None:
        """Every control as it was at first, and nothing pinned."""
        with self._lock, self._silently():
            self._pinned = None
            for name, value in self._first.items():
                self.controls[name].value = value
            self._base = self._machines()[THIS_MACHINE]
            self._show_costs()
            self._fill_choices()
            self.prompt.index, self.round.value = 0, 1
            self.redraw()

    def start(self, _button: object = None) -> None:
        """Run the present setting with the models, in a thread of its own; one run at a time."""
        with self._lock:
            if self.run.disabled:
                return
            self.run.disabled = True
        setting = self.setting()._replace(machine=self._machines()[THIS_MACHINE])
        # a daemon: a kernel that is shut down does not wait for it
        Thread(target=self._run, args=(setting,), name="specnb-live", daemon=True).start()

    def _add_controls(self) -> None:
        t = self._tables
        slider = {"style": {"description_width": "120px"}, "layout": widgets.Layout(width="480px", max_width="100%")}
        fine = slider | {"readout_format": ".2f"}
        samplings = [(computed.sampling_label(*sampling), sampling) for sampling in t.samplings]
        contents = (ALL, *t.contents) if len(t.contents) > 1 else t.contents
        curves = (THIS_MACHINE, *known_machines(), CUSTOM)
        self.k = widgets.IntSlider(min(8, t.k_max), 1, t.k_max, description="K (tokens)", **slider)
        self.policy = widgets.Dropdown(options=[FIXED], description="policy", **slider)
        self.temperature = widgets.SelectionSlider(options=samplings, description="temperature", **slider)
        self.drafter = widgets.Dropdown(options=t.drafters, description="drafter", **slider)
        self.content = widgets.Dropdown(options=contents, description="content", **slider)
        self.curve = widgets.Dropdown(options=curves, description="cost curve", **slider)
        self.at8 = widgets.FloatSlider(1, min=1, max=MAX_AT8, step=0.02, description="T(8)/T(1)", **fine)
        self.c = widgets.FloatSlider(0, min=0, max=MAX_C, step=0.01, description="c (draft cost)", **fine)
        self.prompt = widgets.Dropdown(options=[("", -1)], description="prompt", **slider)
        self.round = widgets.IntSlider(1, 1, 10_000, description="round", **slider)
        names = ("k", "policy", "temperature", "drafter", "content", "curve", "at8", "c", "prompt", "round")
        self.controls = {name: getattr(self, name) for name in names}
        self.run = widgets.Button(description="Run live", icon="play", button_style="primary")
        self.run.on_click(self.start)
        self.pin, self.reset = widgets.Button(description="Pin"), widgets.Button(description="Reset")
        self.pin.tooltip, self.reset.tooltip = "compare with this setting", "as at first, nothing pinned"
        self.pin.on_click(self._pin)
        self.reset.on_click(self._reset)
        self.outcome = Status(lines=[IDLE])

    def _changed(self, change: dict) -> None:
        control = change["owner"]
        with self._lock:
            if self._quiet:
                return
            if control in (self.at8, self.c):
                if abs(change["new"] - change["old"]) < control.step / 2:
                    return  # 4.22 comes back from the browser as 4.220000000000001, though nobody moved it
                with self._silently():
                    self.curve.value = CUSTOM
            elif control in (self.drafter, self.curve) and self.curve.value != CUSTOM:
                self._base = self._machines()[self.curve.value]
                self._show_costs()
            if control in (self.drafter, self.temperature, self.content):
                self._fill_choices()
            if control is self.prompt:
                with self._silently():
                    self.round.value = 1
            self.redraw()

    @contextmanager
    def _silently(self) -> Iterator[None]:
        """Change controls without being called back."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _look(self) -> show.View:
        setting = self.setting()
        asked = (setting.recorded, setting.content)
        live = self._live[1] if self._live and (self._live[0].recorded, self._live[0].content) == asked else None
        return show.view(self._tables, setting, self.prompt.value, self.round.value, live, self._pinned)

    def _taken(self, setting: Setting) -> str:
        return takeaway(computed.csv(self._tables, setting), computed.command(self._tables, setting))

    def _machines(self) -> dict[str, Cost]:
        return self._tables.machines(self.drafter.value, self._curve, self._c[self.drafter.value])

    def _show_costs(self) -> None:
        with self._silently():
            for slider, value in ((self.at8, self._base.at8), (self.c, self._base.c)):
                # on the slider's grid: the browser would send a rounded value back, as if it had been moved
                value = slider.min + slider.step * max(0, round((value - slider.min) / slider.step))
                slider.max = max(slider.max, value)
                slider.value = round(value, 2)

    def _fill_choices(self) -> None:
        """Policies and prompts that the trace has for the drafter, temperature and content; keeps what was chosen."""
        policies = self._tables.policies(self.drafter.value)
        policy = self.policy.value if self.policy.value in policies else FIXED
        prompts = {self._tables.recordings[i].prompt_id: i for i in self._tables.chosen(self.setting())}
        prompt = prompts.get(self.prompt.label, next(iter(prompts.values())))
        with self._silently():
            self.policy.options, self.policy.value = policies, policy
            self.prompt.options, self.prompt.value = list(prompts.items()), prompt

    def _run(self, setting: Setting) -> None:
        """A live run from its start to its last line; an error is shown, never raised."""
        try:
            line = self._measured(setting, *self._run_live(setting, self._progressed))
        except BaseException as error:  # whatever it is, it must reach the reader
            line = f"The live run failed: {type(error).__name__}: {error}"
        self.redraw()
        self.outcome.lines = [line]
        self.run.disabled = False

    def _measured(self, setting: Setting, generations: list[Generation], busy: bool) -> str:
        drafted = [g for g in generations if g.drafter]
        live = decode_speedup(drafted, [g for g in generations if not g.drafter])
        mean_k = sum(g.total_draft_tokens for g in drafted) / sum(len(g.rounds) for g in drafted)
        k = setting.k if setting.policy == FIXED else mean_k
        self._live = (setting, (k, live.value, live.low, live.high, busy))
        predicted = self._tables.predict(setting, [g.prompt_id for g in drafted])
        return (
            f"Live, {show.label(setting)}, prompts: {len(drafted)}: speed-up {live.value:.2f} "
            f"on this machine; predicted for the same prompts: {predicted.speedup:.2f}."
            + f" Measured while {BUSY}: run it again."
            * busy
        )

    def _progressed(self, done: int, total: int, step: str) -> None:
        self.outcome.lines = [f"Running live, {done} of {total}: {step} …"]
