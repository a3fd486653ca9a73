"""Two lanes: every token is shown, each round when it was committed; the end equals the table."""

import re
import xml.etree.ElementTree as ET
from functools import partial

import pytest

from specnb.book.lanes import COLUMNS, publish_lanes
from specnb.book.tables import k_sweep
from specnb.decode.generate import generate
from specnb.lm import toy
from specnb.prompts import Prompt
from specnb.records import RunRecord
from specnb.store import figures_dir
from tests.book import test_publish as publish_tests

SVG = "{http://www.w3.org/2000/svg}"


def record_of(model, n: int) -> RunRecord:
    """Return a record of `n` prompts, decoded plainly and with prompt lookup."""
    chosen = [
        Prompt(id=f"code-{i}", category="code", text="abcabcabcabc"[: 6 + i]) for i in range(n)
    ]
    plain = partial(generate, model, max_new_tokens=3 * COLUMNS)
    runs = [
        run(prompt) for prompt in chosen for run in (plain, partial(plain, drafter="lookup", k=4))
    ]
    runs = [  # one second per round
        g.model_copy(
            update={
                "prefill_s": 1.0,
                "wall_s": 1.0 + len(g.rounds),
                "rounds": tuple(
                    r._replace(draft_s=0.0, verify_s=1.0, rewind_s=0.0) for r in g.rounds
                ),
            }
        )
        for g in runs
    ]
    baseline = {
        "baseline_engine": "llama.cpp q4_1",
        "baseline_tokens_per_s": 50.0,
        "plain_tokens_per_s": 20.0,
    }
    return publish_tests.record_of(
        experiment="00_start_here", generations=runs, measurements={"baseline": baseline}
    )


@pytest.mark.parametrize("n", [2, 5])
def test_each_round_appears_when_committed_and_the_end_equals_the_table(n, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    model = toy.markov(6, order=2, seed=4, sharpness=3.0)
    record = record_of(model, n)
    lanes = publish_lanes(record, model.vocab, "two_lanes")
    root = ET.parse(figures_dir(record) / "two_lanes.svg").getroot()
    texts = root.findall(f"{SVG}text")
    names = [at for at, text in enumerate(texts) if text.get("class") == "name"]
    for generation, start, end in zip(
        record.generations, names, (*names[1:], len(texts) - 3), strict=False
    ):
        lines = texts[start + 1 : end]
        shown = ["".join(line.itertext()) for line in lines]
        assert (
            "".join(shown) == generation.text
            and len(lines) >= 3
            and max(map(len, shown)) <= COLUMNS
        )
        delays = {
            float(re.search(r"[\d.]+", span.get("style"))[0]) for line in lines for span in line
        }
        assert sorted(delays) == [*range(1, len(generation.rounds) + 1)]
    bars = [float(bar.get("width")) for bar in root.findall(f"{SVG}rect")[1:]]
    seconds = [g.decode_s for g in record.generations[:2]]
    assert bars[1] / bars[0] == pytest.approx(seconds[1] / seconds[0], abs=0.01), "one time scale"
    row = k_sweep(record).iloc[-1]
    ending = " ".join("".join(text.itertext()) for text in texts[-3:])
    assert f"{row['speedup']:.2f}" in ending and f"{n} of {n} texts the same" in repr(lanes)
    assert "llama.cpp q4_1, 50.0 tokens/s" in ending and ("] times" in ending) == (n >= 5), (
        "five prompts"
    )
