"""The explorer: sliders over a trace, figures that follow them at once, and a button that runs the models.

Works in JupyterLab and under Voila. What is shown is computed in `tables` and drawn by `figures`;
here are only the widgets. Callbacks may come from several threads, so each redraw holds a lock.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from threading import Event, RLock, Thread
from time import perf_counter
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets

from specnb.book.explorer import figures as show
from specnb.book.explorer.live import live_speedup
from specnb.book.explorer.tables import ALL, CUSTOM, FIXED, THIS_MACHINE, Machine, Setting, Tables
from specnb.book.plot import Plot
from specnb.measure.cost import NAMED, CostCurve
from specnb.measure.recording import Trace
from specnb.records import Generation

RunLive = Callable[[Setting, Callable[[int, int, str], None], Callable[[], bool]], Iterable[Generation]]
"""(setting, progress, cancelled) -> plain and drafted generations; `progress(done, total, what)` before each one."""

KEPT = 10_000  # redraw times
MAX_AT8, MAX_C = 10.0, 1.5  # of the cost sliders; a measured machine beyond them widens them
_WIDE = {"description_width": "120px"}


class Status(anywidget.AnyWidget):
    """Lines of text that a screen reader speaks when they change; also names the sliders around it for one.

    `ipywidgets.HTML` puts a new element in place of the old, which a live region must not do; the handles of
    ipywidgets' sliders carry no name of their own.
    """

    _esm = """
    function name(el) {
      const root = el.closest(".specnb-explorer");
      for (const row of root ? root.querySelectorAll(".widget-inline-hbox") : []) {
        const label = row.querySelector(".widget-label");
        const handle = row.querySelector(".noUi-handle");
        if (label && handle) handle.setAttribute("aria-label", label.textContent);
      }
    }
    function render({ model, el }) {
      el.setAttribute("role", "status");
      el.setAttribute("aria-live", "polite");
      const text = () => {
        el.replaceChildren(...model.get("lines").map((line) => {
          const p = document.createElement("p");
          p.style.margin = "2px 0";
          p.style.lineHeight = "1.4";
          p.textContent = line;
          return p;
        }));
        name(el);
      };
      model.on("change:lines", text);
      text();
      setTimeout(() => name(el), 1000);
    }
    export default { render };
    """
    lines = traitlets.List(traitlets.Unicode()).tag(sync=True)


class Job(Thread):
    """Runs `work(cancelled)` in a thread of its own, then calls `ended(result, error, was_cancelled)` from there.

    `cancelled()` tells the work that it is to stop soon; an error of the work is handed over, never raised.
    """

    def __init__(
        self,
        work: Callable[[Callable[[], bool]], Any],
        ended: Callable[[Any, BaseException | None, bool], None],
    ) -> None:
        super().__init__(name="specnb-live", daemon=True)  # a kernel that is shut down does not wait for it
        self._work, self._ended = work, ended
        self._cancel = Event()

    def cancel(self) -> None:
        """Ask the work to stop; it ends at its next look."""
        self._cancel.set()

    def run(self) -> None:
        result, error = None, None
        try:
            result = self._work(self._cancel.is_set)
        except BaseException as caught:  # whatever it is, it must reach the reader
            error = caught
        self._ended(result, error, self._cancel.is_set())


class Explorer(widgets.VBox):
    """Sliders, figures and summary over `trace`.

    `curve` is this machine's T(n); `c` is T_draft(1)/T_target(1), for each drafter by its name, or one number for
    the draft models (a lookup costs nothing). With `run_live` the setting can be run for real, in the background.
    `redraw_ms` holds how long each redraw took. Raises InputError for what cannot be replayed.
    """

    _job: Job | None = None
    _running = False

    def __init__(
        self, trace: Trace, curve: CostCurve, c: float | Mapping[str, float] = 0.0, *, run_live: RunLive | None = None
    ) -> None:
        self._tables = Tables(trace)
        self._tables.prepare()
        self._c = _by_drafter(self._tables, c)
        self._curve, self._run_live = curve, run_live
        self._lock, self._quiet = RLock(), False
        self._live: tuple[Setting, tuple[float, float, float, float]] | None = None
        self.redraw_ms: deque[float] = deque(maxlen=KEPT)
        self._make_controls()
        self._base = self._preset()
        self._fill_choices()
        self._show_costs(self._base)
        self.view = self._look()
        self.round.max = len(self.view.steps)
        self.speedup = Plot(show.speedup_figure(self.view).update_layout(width=580, height=430))
        self.alpha = Plot(show.alpha_figure(self.view).update_layout(width=400, height=430))
        self.strip = Plot(show.strip_figure(self.view).update_layout(width=980))
        self.summary = Status(lines=show.summary(self.view))
        super().__init__(self._parts())
        self.add_class("specnb-explorer")
        for control in self.controls.values():
            control.observe(self._changed, names="value")

    def __repr__(self) -> str:
        n = len(self._tables.recordings)
        return f"Explorer of {n} recordings: run this notebook in JupyterLab or Voila to move its sliders"

    def setting(self) -> Setting:
        """Where the sliders are."""
        return Setting(
            self.drafter.value, self.temperature.value, self.content.value, self.policy.value, self.k.value,
            self._base if self.curve.value != CUSTOM else self._base.bent(self.at8.value, self.c.value),
        )  # fmt: skip

    def redraw(self) -> None:
        """Show the present setting. What cannot be shown is said in the summary."""
        with self._lock:
            began = perf_counter()
            try:
                self.view = self._look()
            except Exception as error:  # a callback's traceback would end in a log that nobody reads
                self.summary.lines = [f"Nothing to show: {type(error).__name__}: {error}"]
                return
            self._set(self.round, max=len(self.view.steps), value=self.view.round)
            self.speedup.update(show.speedup_data(self.view))
            self.alpha.update(show.alpha_data(self.view))
            self.strip.update(show.strip_data(self.view))
            self.summary.lines = show.summary(self.view)
            self.redraw_ms.append(1000 * (perf_counter() - began))

    def start(self, _button: object = None) -> None:
        """Run the present setting with the models; one run at a time."""
        with self._lock:
            if self._running or self._run_live is None:
                return
            self._running = True
        setting = self.setting()._replace(machine=self._machine(THIS_MACHINE))
        self.run.disabled, self.cancel.disabled = True, False
        self.progress.value, self.progress.bar_style = 0, ""
        self.outcome.lines = [f"Running {show.label(setting)} live …"]
        self._job = Job(lambda cancelled: self._measure(setting, cancelled), self._ended)
        self._job.start()

    def stop(self, _button: object = None) -> None:
        """Ask a live run to end after the generation in hand."""
        if self._job is not None and self._running:
            self.cancel.disabled = True
            self.outcome.lines = ["Cancelling: the generation in hand is finished first …"]
            self._job.cancel()

    def close(self) -> None:
        """Stop a live run and remove the widgets."""
        self.stop()
        super().close()

    def _make_controls(self) -> None:
        t = self._tables
        slider = {"style": _WIDE, "layout": widgets.Layout(width="480px")}
        self.k = widgets.IntSlider(min(8, t.k_max), 1, t.k_max, description="K (tokens)", **slider)
        warmth = [(f"{x:g}" + " (greedy)" * (x == 0), x) for x in t.temperatures]
        self.temperature = widgets.SelectionSlider(options=warmth, description="temperature", **slider)
        self.drafter = widgets.Dropdown(options=t.drafters, description="drafter", **slider)
        contents = (ALL, *t.contents) if len(t.contents) > 1 else t.contents
        self.content = widgets.Dropdown(options=contents, description="content", **slider)
        self.policy = widgets.Dropdown(options=[FIXED], description="policy", **slider)
        curves = (THIS_MACHINE, *NAMED, CUSTOM)
        self.curve = widgets.Dropdown(options=curves, description="cost curve", **slider)
        fine = slider | {"readout_format": ".2f"}
        self.c = widgets.FloatSlider(0, min=0, max=MAX_C, step=0.01, description="c (draft cost)", **fine)
        self.at8 = widgets.FloatSlider(1, min=1, max=MAX_AT8, step=0.02, description="T(8)/T(1)", **fine)
        self.prompt = widgets.Dropdown(options=[("", -1)], description="prompt", **slider)
        self.round = widgets.IntSlider(1, 1, 10_000, description="round", **slider)
        names = ("k", "policy", "temperature", "drafter", "content", "curve", "at8", "c", "prompt", "round")
        self.controls: dict[str, Any] = {name: getattr(self, name) for name in names}
        self.run = widgets.Button(description="Run live", icon="play", button_style="primary")
        self.cancel = widgets.Button(description="Cancel", icon="stop", disabled=True)
        self.progress = widgets.IntProgress(0, 0, 1, description="live run", style=_WIDE)
        idle = "Runs some prompts plainly and with drafts on this machine, and compares the speed with the prediction."
        self.outcome = Status(lines=[idle])
        self.run.on_click(self.start)
        self.cancel.on_click(self.stop)

    def _parts(self) -> list[widgets.Widget]:
        rows = widgets.Layout(display="flex", flex_flow="row wrap")
        above = [control for name, control in self.controls.items() if name not in ("prompt", "round")]
        parts = [widgets.Box(above, layout=rows), self.summary, widgets.Box([self.speedup, self.alpha], layout=rows)]
        if self._run_live is not None:
            parts += [widgets.HBox([self.run, self.cancel, self.progress]), self.outcome]
        return [*parts, widgets.Box([self.prompt, self.round], layout=rows), self.strip]

    def _changed(self, change: dict) -> None:
        with self._lock:
            if self._quiet:
                return
            if change["owner"] in (self.at8, self.c):
                if abs(change["new"] - change["old"]) < change["owner"].step / 2:
                    return  # 4.22 comes back from the browser as 4.220000000000001, though nobody moved it
                self._set(self.curve, value=CUSTOM)
            elif change["owner"] in (self.drafter, self.curve) and self.curve.value != CUSTOM:
                self._base = self._preset()
                self._show_costs(self._base)
            if change["owner"] in (self.drafter, self.temperature, self.content):
                self._fill_choices()
            if change["owner"] is self.prompt:
                self._set(self.round, value=1)
            self.redraw()

    def _set(self, widget: widgets.Widget, **traits: Any) -> None:
        """Change a control without being called back."""
        self._quiet, before = True, self._quiet
        try:
            for name, value in traits.items():
                setattr(widget, name, value)
        finally:
            self._quiet = before

    def _look(self) -> show.View:
        setting = self.setting()
        live = self._live[1] if self._live and self._live[0][:3] == setting[:3] else None
        return show.view(self._tables, setting, self.prompt.value, self.round.value, live)

    def _preset(self) -> Machine:
        return self._machine(self.curve.value)

    def _machine(self, name: str) -> Machine:
        c, k_max = self._c[self.drafter.value], self._tables.k_max
        if name == THIS_MACHINE:
            return Machine.measured(self._curve, c, k_max)
        at8, draft_c = NAMED[name]
        return Machine.straight(name, at8, draft_c if self._tables.is_model(self.drafter.value) else 0.0, k_max)

    def _show_costs(self, machine: Machine) -> None:
        for slider, value in ((self.at8, machine.at()), (self.c, machine.c)):
            # on the slider's own grid: the browser would send a rounded value back, as if it had been moved
            value = slider.min + slider.step * max(0, round((value - slider.min) / slider.step))
            self._set(slider, max=max(slider.max, value), value=round(value, 2))

    def _fill_choices(self) -> None:
        """Policies and prompts that the trace has for the drafter, temperature and content; keeps what was chosen."""
        setting = self.setting()
        policies = self._tables.policies(self.drafter.value)
        kept = self.policy.value if self.policy.value in policies else FIXED
        self._set(self.policy, options=policies, value=kept)
        choices = {self._tables.recordings[i].prompt_id: i for i in self._tables.chosen(setting)}
        before = next((i for name, i in choices.items() if name == self.prompt.label), next(iter(choices.values())))
        self._set(self.prompt, options=list(choices.items()), value=before)

    def _measure(self, setting: Setting, cancelled: Callable[[], bool]) -> tuple[Setting, list[Generation], tuple]:
        generations = list(self._run_live(setting, self._progressed, cancelled))
        if cancelled():
            return setting, generations, ()
        live, drafted = live_speedup(generations), [g for g in generations if g.drafter]
        predicted = self._tables.predict(setting, [g.prompt_id for g in drafted])
        x = setting.k if setting.policy == FIXED else sum(g.total_draft_tokens for g in drafted) / sum(
            len(g.rounds) for g in drafted
        )  # fmt: skip
        self._live = (setting, (x, live.value, live.low, live.high))
        n = f"{len(drafted)} prompt{'s' * (len(drafted) != 1)}"
        text = f"Live, {show.label(setting)}, {n}: speed-up {live.value:.2f} on this machine"
        return setting, generations, (f"{text}; predicted for the same prompts: {predicted.speedup:.2f}.",)

    def _progressed(self, done: int, total: int, step: str) -> None:
        self.progress.max, self.progress.value = total, done
        self.progress.description = f"{done} of {total}"

    def _ended(self, result: tuple | None, error: BaseException | None, was_cancelled: bool) -> None:
        if error is not None:
            lines, look = [f"The live run failed: {type(error).__name__}: {error}"], "danger"
        elif was_cancelled:
            lines, look = [f"Cancelled after {len(result[1])} generations; nothing is shown of them."], "warning"
        else:
            lines, look = list(result[2]), "success"
            self.progress.value, self.progress.description = self.progress.max, "done"
        self.progress.bar_style = look
        self.redraw()
        self.outcome.lines = lines
        self.run.disabled, self.cancel.disabled = False, True
        self._running = False


def _by_drafter(tables: Tables, c: float | Mapping[str, float]) -> Mapping[str, float]:
    """c for every drafter of the trace."""
    return c if isinstance(c, Mapping) else {d: float(c) * tables.is_model(d) for d in tables.drafters}
