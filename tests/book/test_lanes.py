"""Two lanes: every token is shown, each round when it was committed; the end equals the table."""

import re
import xml.etree.ElementTree as ET

import pytest

from specnb.book.lanes import COLUMNS, publish_lanes
from specnb.book.tables import k_sweep
from specnb.decode.generate import generate
from specnb.lm import toy
from specnb.prompts import Prompt
from specnb.records import RunRecord
from specnb.store import figures_dir
from tests.book import test_publish as publish_tests
from tests.book.test_tables import RATES

SVG = "{http://www.w3.org/2000/svg}"


def record_of(model) -> RunRecord:
    """Return a record of five prompts, decoded plainly and with lookup, a second per round."""
    runs = []
    for i in range(5):
        prompt = Prompt(id=f"code-{i}", category="code", text="abcabcabcabc"[: 6 + i])
        for drafting in ({}, {"drafter": "lookup", "k": 4}):
            g = generate(model, prompt, max_new_tokens=3 * COLUMNS, **drafting)
            timed = [r._replace(draft_s=0.0, verify_s=1.0, rewind_s=0.0) for r in g.rounds]
            times = {"prefill_s": 1.0, "wall_s": 1.0 + len(timed), "rounds": tuple(timed)}
            runs.append(g.model_copy(update=times))
    return publish_tests.record_of(generations=runs, measurements={"baseline": RATES})


def test_each_round_appears_when_committed_and_the_end_equals_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    model = toy.markov(6, order=2, seed=4)
    record = record_of(model)
    lanes = publish_lanes(record, model.vocab, "two_lanes")
    root = ET.parse(figures_dir(record) / "two_lanes.svg").getroot()
    texts = root.findall(f"{SVG}text")
    (key,) = (text for text in texts if text.get("class") == "key")
    texts.remove(key)
    first, second = (at for at, text in enumerate(texts) if text.get("class") == "name")
    lanes_of = texts[first + 1 : second], texts[second + 1 : -3]
    for generation, lines in zip(record.generations, lanes_of, strict=False):
        shown = ["".join(line.itertext()) for line in lines]
        assert (
            "".join(shown) == generation.text
            and max(map(len, shown)) <= COLUMNS < len(shown[0]) * 2
        )
        styles = [span.get("style") for line in lines for span in line]
        delays = {float(re.search(r"[\d.]+", style)[0]) for style in styles}
        assert sorted(delays) == [*range(1, len(generation.rounds) + 1)]
    bars = [float(bar.get("width")) for bar in root.findall(f"{SVG}rect")[1:]]
    seconds = [g.decode_s for g in record.generations[:2]]
    assert bars[1] / bars[0] == pytest.approx(seconds[1] / seconds[0], abs=0.01), "one time scale"
    speedup = k_sweep(record).iloc[-1]["speedup"]
    assert f"{speedup:.2f} [" in repr(lanes) and "5 of 5 texts the same" in repr(lanes)
