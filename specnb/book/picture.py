"""A figure as notebooks show it, and as images that a browser draws of it."""

import asyncio
import atexit
import html
import json
import re
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from specnb.book.style import CONFIG, STYLE
from specnb.errors import InputError

PNG_SCALE = 2
PLOTLY = "application/vnd.plotly.v1+json"
EXPORT_S, RENDER_S, CLOSE_S = 120.0, 60.0, 5.0  # limits: all images with the browser's start, one image, its end
NO_BROWSER = "no Chrome or Chromium was found: `apt-get install chromium`, or `kaleido_get_chrome`, or set BROWSER_PATH"
EXPORT_FAILED = "the export failed, see `specnb check`, or set BROWSER_PATH to another browser"


class PicturedFigure(go.Figure):
    """A figure that notebooks show as plotly's, and as a picture where no plotly runs (GitHub, nbviewer, nbconvert)."""

    _title, _picture = "", b""
    _ipython_display_ = _repr_html_ = None  # plotly's own: they leave the picture out, and ask a server for plotly.js

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict, dict]:
        bundle = {PLOTLY: json.loads(self.to_json()) | {"config": CONFIG}, "text/plain": self._title}
        look = {"width": self.layout.width, "height": self.layout.height, "alt": self._title}
        return (bundle | {"image/png": self._picture}, {"image/png": look}) if self._picture else (bundle, {})


def with_picture(figure: go.Figure) -> PicturedFigure:
    """Return `figure` with its picture for a notebook's output, and write nothing."""
    return draw(figure)[0]


def draw(figure: go.Figure) -> tuple[PicturedFigure, dict[str, bytes], dict[str, str]]:
    """Return `figure` as it is shown, its images, and why others are missing."""
    drawn = PicturedFigure(figure.to_dict())
    drawn.update_layout({side: figure.layout[side] or STYLE["layout"][side] for side in ("width", "height")})
    images, skipped = render_figure(drawn)
    drawn._title, drawn._picture = plain_text(figure.layout.title.text), images.pop("still", b"")
    if "png" in skipped:
        sys.stderr.write(f"plotly only, no picture: {skipped['png']}\n")
    return drawn, images, skipped


def plain_text(title: str | None) -> str:
    """Return a plotly title without its tags, on one line."""
    return " ".join(html.unescape(re.sub(r"</?[A-Za-z][^<>]*>", " ", title or "")).split())


def render_figure(figure: go.Figure) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the images (`still` is the png of scale 1) and, for each suffix that could not be drawn, the reason."""
    try:
        return browser().images(figure.to_dict()), {}
    except Exception as error:
        browser().close()
        reason = str(error) if isinstance(error, InputError) else f"{EXPORT_FAILED} ({type(error).__name__})"
    return {}, dict.fromkeys(("svg", "png", "pdf"), reason)


class Browser:
    """A browser with an event loop in a thread, for the caller may be in a running loop, as in a kernel.

    It starts with the first figure, which takes seconds. Kaleido's own server for synchronous calls waits for ever for
    a browser that died.
    """

    def __init__(self) -> None:
        self._kaleido, self._loop = None, asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        atexit.register(self.close)

    def images(self, spec: dict) -> dict[str, bytes]:
        """Draw one figure. Raises what goes wrong, TimeoutError after EXPORT_S."""
        return asyncio.run_coroutine_threadsafe(self._draw(spec), self._loop).result(EXPORT_S)

    async def _draw(self, spec: dict) -> dict[str, bytes]:
        kaleido, images = self._kaleido or await self._open(), {}
        size = {side: spec["layout"][side] for side in ("width", "height")}
        for name, kind, scale in (("svg", "svg", 1), ("still", "png", 1), ("png", "png", PNG_SCALE), ("pdf", "pdf", 1)):
            images[name] = await kaleido.calc_fig(spec, {"format": kind, "scale": scale, **size})
        return images

    async def _open(self) -> Any:
        import kaleido
        from choreographer.browsers.chromium import Chromium

        path = Chromium.find_browser(skip_local=False)
        if not path or not Path(path).is_file():  # asked here: a Kaleido that finds none leaves five threads behind
            raise InputError(NO_BROWSER)
        self._kaleido = kaleido.Kaleido(n=1, timeout=RENDER_S, mathjax=False, path=path)
        await self._kaleido.open()
        return self._kaleido

    def close(self) -> None:
        """End the browser; one that hangs is killed: kaleido awaits it even while it is cancelled."""
        ended, self._kaleido = self._kaleido, None
        if ended:
            try:
                asyncio.run_coroutine_threadsafe(ended.close(), self._loop).result(CLOSE_S)
            except Exception:
                ended.subprocess.kill()


browser = cache(Browser)
"""The browser of this process."""
