"""Two lanes: an SVG animation of plain and speculative decoding of one prompt, at measured speed.

Each round appears when it was committed, counted from the first token. Both bars have one time
scale. At the end of the animation, and for readers who prefer reduced motion, both texts are
complete.
"""

from collections.abc import Iterator
from html import escape
from itertools import accumulate

from IPython.display import SVG

from specnb.book.claims import Estimate
from specnb.book.publish import caption_of, is_quick, publish_svg
from specnb.book.style import QUICK, readable
from specnb.book.tables import baseline, k_sweep, live_rows
from specnb.book.tokens import ACCEPTED, BONUS, CORRECTION, generated, shown_text
from specnb.lm.vocab import Vocabulary
from specnb.measure.intervals import RATIOS
from specnb.records import Generation, RunRecord

COLUMNS = 106
WIDTH = 960
LINE = 20
LEFT = 16
KEY = (
    '<tspan class="accepted">accepted draft tokens</tspan>, '
    '<tspan class="correction">the target\'s own</tspan> '
    '(<tspan class="bonus">after a fully accepted draft</tspan>)'
)
FATE = {ACCEPTED: "accepted", CORRECTION: "correction", BONUS: "bonus"}
STYLE = """
text { font: 14px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #222; white-space: pre; }
.name, .end, .key { font: bold 15px "DejaVu Sans", Arial, sans-serif; }
.key { font-size: 13px; font-weight: normal; text-anchor: end; }
.accepted { fill: #00734f; } .correction, .bonus { fill: #b34700; font-weight: bold; } \
.bonus { fill: #8a6d00; }
rect { fill: #fff; } .bar { fill: #0072b2; }
.round, .end { animation: show .01s backwards; }
.bar { transform-origin: 16px 0; animation: grow linear backwards; }
@keyframes show { from, to { fill-opacity: 0; } } @keyframes grow { from { transform: scaleX(0); } }
@media (prefers-reduced-motion: reduce) { .round, .end, .bar { animation: none; } }
@media (prefers-color-scheme: dark) { rect { fill: #16181b; } text { fill: #e6e6e6; } \
.bar { fill: #56b4e9; }
  .accepted { fill: #4fd1a5; } .correction { fill: #ff9a52; } .bonus { fill: #facc15; } }
"""


class Lanes(SVG):
    """An SVG; its `alt` replaces it where it cannot be shown."""

    def __repr__(self) -> str:
        return (self.metadata or {})["alt"]


def publish_lanes(record: RunRecord, vocab: Vocabulary, name: str) -> Lanes:
    """Publish a record's first two generations, plain and speculative, as `NAME.svg`; return it.

    It ends with the speedup on this prompt, and over all of the record.
    """
    plain, drafted = record.generations[:2]
    longest_s = max(plain.decode_s, drafted.decode_s)
    top = 0
    parts = []
    for generation, title in (
        (plain, "plain decoding"),
        (drafted, f"{readable(drafted.drafter)}, K = {drafted.k}"),
    ):
        seconds = generation.decode_s
        rate = f"{generation.tokens_per_s:.1f} tokens/s, {seconds:.1f} s"
        parts.append(
            f'<text class="name" x="{LEFT}" y="{top + 26}">{escape(f"{title}: {rate}")}</text>'
        )
        if generation is drafted:
            parts.append(f'<text class="key" x="{WIDTH - LEFT}" y="{top + 26}">{KEY}</text>')
        lines = list(_lines(generation, vocab))
        for row, spans in enumerate(lines):
            parts.append(f'<text x="{LEFT}" y="{top + 60 + LINE * row}">{"".join(spans)}</text>')
        width = (WIDTH - 2 * LEFT) * seconds / longest_s
        grows = f'width="{width:.0f}" style="animation-duration:{seconds:.2f}s"'
        parts.append(f'<rect class="bar" x="{LEFT}" y="{top + 36}" height="4" {grows}/>')
        top += 70 + LINE * len(lines)
    wait = f'style="animation-delay:{longest_s:.2f}s"'
    ending = _ending(record)
    for line in ending:
        top += 24
        parts.append(f'<text class="end" x="{LEFT}" y="{top}" {wait}>{escape(line)}</text>')
    size = f'width="{WIDTH}" height="{top + 20}" viewBox="0 0 {WIDTH} {top + 20}"'
    label = escape(caption_of("One prompt, plainly and with drafts", record))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        f"<title>{label}</title><style>{STYLE}</style>"
    )
    svg = f'{head}<rect width="100%" height="100%"/>{"".join(parts)}</svg>\n'
    publish_svg(
        svg, name, "One prompt, plainly and with drafts, at the speed that was measured", record
    )
    return Lanes(svg, metadata={"alt": " ".join(ending)})


def _lines(generation: Generation, vocab: Vocabulary) -> Iterator[list[str]]:
    """Yield the lines of a lane as lists of spans, parts of rounds with their times."""
    seconds = [r.draft_s + r.verify_s + r.rewind_s for r in generation.rounds]
    scale = generation.decode_s / sum(seconds)
    line = []
    width = 0
    for words, end_s in zip(generated(generation, vocab), accumulate(seconds), strict=True):
        span = []
        opening = f'<tspan class="round" style="animation-delay:{end_s * scale:.2f}s">'
        for piece, fate in zip(words.committed, words.fates, strict=True):
            text = shown_text(piece, blank=" ")
            if width + len(text) > COLUMNS:
                yield [*line, f"{opening}{''.join(span)}</tspan>"]
                line = []
                span = []
                width = 0
            span.append(f'<tspan class="{FATE.get(fate, "")}">{escape(text)}</tspan>')
            width = COLUMNS if text.endswith("⏎") else width + len(text)
        line.append(f"{opening}{''.join(span)}</tspan>")
    yield line


def _ending(record: RunRecord) -> list[str]:
    """Return the last lines: speedup on this prompt, over all prompts, and over the fastest."""
    row = k_sweep(record).iloc[-1]  # all contents, speculative
    n = row["n_prompts"]
    whole, over_fastest = (Estimate(*row[[*names]], n=n) for names in (RATIOS[:3], RATIOS[3:]))
    speedups = (
        live_rows(record).query("k > 0").eval("n_decoded / seconds * plain_s / plain_decoded")
    )
    first = speedups.iloc[0]
    best = f", the best case of {n}" if n > 1 and first == speedups.max() else ""
    identical = (
        f"; {row['identical']} of {n} texts the same to the last token"
        if row["temperature"] == 0
        else ""
    )
    fastest = baseline(record)
    quick = f" {QUICK.capitalize()}." if is_quick(record) else ""
    return [
        f"This prompt{best}: {first:.2f} times as fast as plain decoding in the same engine.",
        f"All prompts ({n}): {whole:.2f} times{identical}.",
        (
            "All, over the fastest plain decoding "
            f"({fastest.baseline_engine}, {fastest.baseline_tokens_per_s:.1f} tokens/s): "
            f"{over_fastest:.2f} times.{quick}"
        ),
    ]
