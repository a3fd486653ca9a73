"""A plotly figure as a widget: changed in the kernel, drawn in the browser, nothing sent back.

`plotly.graph_objects.FigureWidget` brings plotly.js as its own program (5 MB), and anywidget drops for good every
later change of a widget whose program took over two seconds to start. Here the program is a few lines, which start at
once; plotly.js is asked for afterwards, once a page.
"""

import json

import anywidget
import plotly.graph_objects as go
import traitlets
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

PLOTLY_JS = "plotly.js"
"""What a page asks for in its message."""


class Plot(anywidget.AnyWidget):
    """A figure, drawn; `update` shows another in its place. A reader's zoom is kept."""

    _esm = """
    // One plotly.js for the page. A view that is removed before it arrives leaves the asking to the next one.
    // A kernel that is busy, or gone, keeps only its own plots waiting.
    const page = (globalThis.specnbPlots ??= { turns: new WeakMap(), plotly: null });

    function ask(model, signal) {
      return new Promise((resolve) => {
        const arrived = (_, [source]) => {
          model.off("msg:custom", arrived);
          const module = { exports: {} };
          new Function("module", new TextDecoder().decode(source))(module);
          resolve(module.exports);
        };
        signal.addEventListener("abort", () => resolve(null));
        model.on("msg:custom", arrived);
        model.send("plotly.js");
      });
    }

    async function render({ model, el, signal }) {
      const kernel = model.widget_manager;
      const before = page.turns.get(kernel) ?? Promise.resolve();
      const turn = before.then(async () => { page.plotly ??= signal.aborted ? null : await ask(model, signal); });
      page.turns.set(kernel, turn);
      await turn;
      if (signal.aborted) return;
      const figure = el.appendChild(document.createElement("div"));
      const now = (name) => JSON.parse(model.get(name));
      const draw = () => page.plotly.react(figure, now("_traces"), now("_look"), { displaylogo: false });
      model.on("change:_traces", draw);
      draw();
      return () => page.plotly.purge(figure);
    }
    export default { render };
    """
    _traces = traitlets.Unicode().tag(sync=True)
    _look = traitlets.Unicode().tag(sync=True)

    def __init__(self, figure: go.Figure) -> None:
        super().__init__()
        self.update(figure)
        self.on_msg(self._asked)

    @property
    def figure(self) -> go.Figure:
        """What is drawn now, as a figure that needs no kernel."""
        return go.Figure(json.loads(self._traces), json.loads(self._look))

    def update(self, figure: go.Figure) -> None:
        spec = figure.to_dict()
        self._look = to_json_plotly(spec["layout"] | {"uirevision": "kept"})
        self._traces = to_json_plotly(spec["data"])  # last: the page draws when it changes

    def _asked(self, _widget: object, content: object, _buffers: list) -> None:
        if content == PLOTLY_JS:
            self.send(PLOTLY_JS, buffers=[get_plotlyjs().encode()])
