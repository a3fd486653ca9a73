"""Rounds as text: a trace shows the same rounds as a live run, and every token has one outcome."""

import re

import pytest

from specnb.book.explorer.tables import Tables, stored
from specnb.book.tokens import RoundText, generated, of_trace, round_table, strip
from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.io import digest, project_dir
from specnb.lm import toy
from specnb.measure.follow import follow
from specnb.measure.recording import Trace
from specnb.store import save

PROMPT = [0, 1, 2, 0, 1, 2, 3]
TRACES = project_dir() / "data" / "traces"
CUT = RoundText((b"a", b"x", b"<b>"), 4, 1, (b"a", b"&"))
KEPT = RoundText((b"a", b" b\n"), 2, 2, (b"a", b" b\n", b"c"))
ENDED = RoundText((b"a", b"b"), 2, 1, (b"a",))
STEP = RoundText((), 0, 0, (b"",))


@pytest.mark.parametrize(
    "drafter", [LookupDrafter, lambda: ModelDrafter(toy.markov(6, order=1, seed=5))]
)
@pytest.mark.parametrize("k", [1, 4])
def test_a_trace_shows_the_rounds_of_the_live_run(drafter, k):
    target = toy.markov(6, order=2, seed=4)
    length = {"max_new_tokens": 40}
    trace = Trace(tuple(follow(target, [drafter()], generate(target, PROMPT, **length), **length)))
    shown = of_trace(trace, k)
    live = generated(generate(target, PROMPT, drafter=drafter(), k=k, **length), target.vocab)
    for one_shown, one_live in zip(shown, live, strict=True):
        bare = one_shown._replace(drafts=(), chances=())
        assert bare == one_live._replace(drafts=())
        assert one_shown.drafts == one_live.drafts[: len(one_shown.drafts)]
        assert len(one_shown.drafts) > one_shown.n_accepted or one_shown.ending != "correction"
    old = Trace(tuple(r._replace(drafts=()) for r in trace.recordings))
    assert [r.fates for r in of_trace(old, k)] == [r.fates for r in shown]


def test_the_strip_shows_every_token_by_outcome_without_styles_or_scripts():
    shown = strip([CUT, KEPT, ENDED, STEP])
    body = shown.partition("</p>")[2]
    assert re.findall(r"<(ins|del|strong|mark)\b[^>]*>([^<]*)<", body) == [
        ("ins", "a"),
        ("del", "x"),
        ("del", "&lt;b&gt;"),
        ("del", " +1 "),
        ("strong", "&amp;"),
        ("ins", "a"),
        ("ins", " b⏎"),
        ("mark", "c"),
        ("ins", "a"),
    ]
    assert not re.search(r"<style|<script|class=|[^-]color:(?!inherit|rgb)", shown)
    assert round_table([ENDED], 1)["accepted"].iloc[1] == "after the end"
    for number in (0, 5):
        with pytest.raises(InputError, match=str(number)):
            round_table([CUT, KEPT, ENDED, STEP], number)


def test_shipped_traces_match_their_checksums_and_other_runs_are_refused(tmp_path):
    for line in (TRACES / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        sha256, file = line.split("  ")
        assert digest(TRACES / file) == sha256
    run, trace, curve, c, _ = stored("data/traces/smollm2-135m")
    tables = Tables(trace)
    assert set(c) == set(tables.drafters) and curve.widths[-1] == tables.k_max + 1
    with pytest.raises(InputError, match="08_x"):
        stored(save(run.model_copy(update={"experiment": "08_x", "measurements": {}}), tmp_path))
