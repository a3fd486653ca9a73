"""A plotly figure as a widget: changed in the kernel, drawn in the browser, nothing sent back.

`plotly.graph_objects.FigureWidget` brings plotly.js as its own program (5 MB), and anywidget drops for good every
later change of a widget whose program took over two seconds to start. Here the program is a few lines, which start at
once; plotly.js comes as a text beside the figure and is run once a page, after a moment in which the page's other
widgets start: it blocks them for seconds on a busy machine.
"""

import json

import anywidget
import plotly.graph_objects as go
import traitlets
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from specnb.book.style import CONFIG


class Plot(anywidget.AnyWidget):
    """A figure, drawn no wider than its place and in the colours of its page; `update` shows another.

    A zoom is kept until the place changes.
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
        return plotly.react(figure, now("_traces"), { ...themed(look), height, autosize: true }, CONFIG);
      };
      const themed = (look) => { // letters of the page's colour on its ground, whatever theme it has
        const color = getComputedStyle(el).color, ground = "rgba(0,0,0,0)", gridcolor = "rgba(128,128,128,.3)";
        const theme = look.template?.layout ?? {}, axis = { linecolor: color, tickcolor: color, gridcolor };
        const axes = { xaxis: { ...theme.xaxis, ...axis }, yaxis: { ...theme.yaxis, ...axis } };
        const paper = { paper_bgcolor: ground, plot_bgcolor: ground, font: { ...theme.font, color }, ...axes };
        return { ...look, template: { ...look.template, layout: { ...theme, ...paper } } };
      };
      let drawnWidth = 0;
      const fitting = new ResizeObserver(() => {
        if (figure.clientWidth === drawnWidth) return;
        drawnWidth = figure.clientWidth;
        plotly.purge(figure); // else the margin of a legend in more lines stays
        draw();
      });
      model.on("change:_traces", draw);
      draw();
      fitting.observe(el);
      const repainting = new MutationObserver(() => setTimeout(draw, 300)); // JupyterLab names its theme there
      repainting.observe(document.body, { attributeFilter: ["data-jp-theme-name", "data-jp-theme-light"] });
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

    @property
    def figure(self) -> go.Figure:
        """What is drawn now, as a figure that needs no kernel."""
        return go.Figure(json.loads(self._traces), json.loads(self._look))

    def update(self, figure: go.Figure) -> None:
        spec = figure.to_dict()
        self._look = to_json_plotly(spec["layout"] | {"uirevision": "kept"})
        self._traces = to_json_plotly(spec["data"])  # last: the page draws when it changes
