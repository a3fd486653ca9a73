"""Show figures in notebooks, and render them as images with a browser."""

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
EXPORT_S = 120.0  # time limit for all images of a figure, including the start of the browser
RENDER_S = 60.0  # time limit for one image
CLOSE_S = 5.0  # time limit for closing the browser
NO_BROWSER = (
    "no Chrome or Chromium was found: "
    "`apt-get install chromium`, or `kaleido_get_chrome`, or set BROWSER_PATH"
)
EXPORT_FAILED = "the export failed, see `specnb check`, or set BROWSER_PATH to another browser"


class PicturedFigure(go.Figure):
    """A plotly figure, with an image for viewers that do not run plotly (GitHub, nbconvert)."""

    _title = ""
    _picture = b""
    # plotly's methods omit the image, and load plotly.js from a server
    _ipython_display_ = None
    _repr_html_ = None

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict, dict]:
        bundle = {
            PLOTLY: json.loads(self.to_json()) | {"config": CONFIG},
            "text/plain": self._title,
        }
        look = {"width": self.layout.width, "height": self.layout.height, "alt": self._title}
        return (
            (bundle | {"image/png": self._picture}, {"image/png": look})
            if self._picture
            else (bundle, {})
        )


def with_picture(figure: go.Figure) -> PicturedFigure:
    """Return `figure` with its image, for the output of a notebook. Writes no files."""
    return draw(figure)[0]


def draw(figure: go.Figure) -> tuple[PicturedFigure, dict[str, bytes], dict[str, str]]:
    """Return `figure` as notebooks show it, its images by suffix, and why images are missing."""
    drawn = PicturedFigure(figure.to_dict())
    drawn.update_layout(
        {side: figure.layout[side] or STYLE["layout"][side] for side in ("width", "height")}
    )
    drawn._title = plain_text(figure.layout.title.text)
    try:
        images = browser().images(drawn.to_dict())
    except Exception as error:
        browser().close()
        reason = (
            str(error)
            if isinstance(error, InputError)
            else f"{EXPORT_FAILED} ({type(error).__name__})"
        )
        sys.stderr.write(f"plotly only, no picture: {reason}\n")
        return drawn, {}, dict.fromkeys(("svg", "png", "pdf"), reason)
    drawn._picture = images.pop("still")
    return drawn, images, {}


def plain_text(title: str | None) -> str:
    """Return a plotly title on one line, without HTML tags."""
    return " ".join(html.unescape(re.sub(r"</?[A-Za-z][^<>]*>", " ", title or "")).split())


class Browser:
    """A browser with an event loop in its own thread, because a kernel already runs a loop.

    It starts with the first figure, which takes seconds. Kaleido's own server for synchronous calls
    would wait forever for a browser that died.
    """

    def __init__(self) -> None:
        self._kaleido = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        atexit.register(self.close)

    def images(self, spec: dict) -> dict[str, bytes]:
        """Render one figure; `still` is the PNG at scale 1.

        Raises the browser's errors, and TimeoutError after EXPORT_S.
        """
        return asyncio.run_coroutine_threadsafe(self._draw(spec), self._loop).result(EXPORT_S)

    async def _draw(self, spec: dict) -> dict[str, bytes]:
        kaleido = self._kaleido or await self._open()
        images = {}
        size = {side: spec["layout"][side] for side in ("width", "height")}
        for name, kind, scale in (
            ("svg", "svg", 1),
            ("still", "png", 1),
            ("png", "png", PNG_SCALE),
            ("pdf", "pdf", 1),
        ):
            images[name] = await kaleido.calc_fig(spec, {"format": kind, "scale": scale, **size})
        return images

    async def _open(self) -> Any:
        import kaleido
        from choreographer.browsers.chromium import Chromium

        path = Chromium.find_browser(skip_local=False)
        # checked here: a Kaleido without a browser leaks five threads
        if not path or not Path(path).is_file():
            raise InputError(NO_BROWSER)
        self._kaleido = kaleido.Kaleido(n=1, timeout=RENDER_S, mathjax=False, path=path)
        await self._kaleido.open()
        return self._kaleido

    def close(self) -> None:
        """Close the browser, or kill it if it hangs, because a cancelled kaleido waits for it."""
        ended = self._kaleido
        self._kaleido = None
        if ended:
            try:
                asyncio.run_coroutine_threadsafe(ended.close(), self._loop).result(CLOSE_S)
            except Exception:
                ended.subprocess.kill()


browser = cache(Browser)
"""The browser of this process."""
