"""The explorer as one file, opened from `file://`: the numbers of the replay, the keyboard, another trace."""

import io
import json
import re
from itertools import product

import pandas as pd
import pytest

from specnb.book.explorer import page as explorer
from specnb.book.explorer.tables import ALL, SHIPPED, THIS_MACHINE, Setting, Tables, bend, command, csv, stored
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.measure.policies import FIXED
from tests.book.test_explorer import PROMPTS, recorded

pytestmark = [pytest.mark.browser, pytest.mark.slow]
SHOWN = re.compile(r"speed-up (.+), prompts: (\d+) \((?:no|95 % interval (.+) to ([\d.]+)).*tau ([\d.]+): (\d+)")
MOVE = """([id, value]) => {
  const began = performance.now(), moved = new Event("input", { bubbles: true });
  Object.assign(document.getElementById(id), { value }).dispatchEvent(moved);
  return document.body.offsetHeight && performance.now() - began; }"""
COSTS = {"machine": THIS_MACHINE}, {"machine": "laptop, compute-bound"}, {"at8": 3, "c": 0.2}


def compare(page, trace, curve, c) -> None:
    tables, times = Tables(trace), []
    policies = (FIXED, "rolling acceptance", FIXED)
    chosen = product(tables.drafters, enumerate(tables.samplings), zip((3, 8, 24), COSTS, policies, strict=True))
    for drafter, (nth, (t, top_p)), (k, costs, policy) in chosen:
        known, content = tables.machines(drafter, curve, c[drafter]), "prose" if k == 3 else ALL
        machine = known[costs["machine"]] if "machine" in costs else bend(known[THIS_MACHINE], **costs)
        policy = policy if policy in tables.policies(drafter) else FIXED
        setting = Setting(drafter, t, content, policy, k, machine, top_p)
        moves = {"drafter": drafter, "sampling": nth, "content": content, "policy": policy, "k": k}
        moves["machine"] = THIS_MACHINE
        times += [page.evaluate(MOVE, [control, str(value)]) for control, value in (moves | costs).items()]
        p, first = tables.predict(setting), tables.chosen(setting)[0]
        shown = [float(x) for x in SHOWN.search(page.locator("#result").inner_text()).groups() if x]
        wanted = [float(x) for x in (p.speedup, p.n_prompts, p.low, p.high, p.tau, p.n_tokens) if x == x]
        assert shown == pytest.approx(wanted, abs=0.0051), setting
        assert page.locator("#command").inner_text().strip() == command(tables, setting)
        frames = (pd.read_csv(io.StringIO(text)) for text in (page.evaluate("table()"), csv(tables, setting)))
        pd.testing.assert_frame_equal(*frames, rtol=2e-4, atol=1e-3, check_dtype=False)
        reached, kept = page.evaluate("look().p.tested"), page.evaluate("look().p.kept")
        assert [*reached, *kept] == pytest.approx([*p.tested, *p.kept], rel=1e-3, abs=2e-3)
        page.locator("#prompt").select_option(index=0)
        assert t or page.locator("#strip ins").count() == sum(s.n_accepted for s in tables.steps(setting, first))
    print(f"a move: median {sorted(times)[len(times) // 2]:.1f} ms, longest {max(times):.1f} ms")


def test_the_page_shows_what_the_replay_predicts_and_takes_another_trace(page, tmp_path):
    run, trace, curve, c = stored(SHIPPED)
    explorer.write(SHIPPED, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size <= 3_000_000
    page.goto((tmp_path / "page.html").as_uri())
    page.locator("#k").press("ArrowRight")
    assert page.locator("#result").inner_text().startswith("K = 9:")
    compare(page, trace, curve, c)
    drafters = [LookupDrafter(), ModelDrafter(toy.markov(6, order=2, seed=4, sharpness=1.5))]
    runs = [recorded(drafters, PROMPTS, t) for t in (0.0, 0.7)]
    trace = trace._replace(recordings=tuple(recording for run in runs for recording in run))
    c = {recording.drafter: 0.1 for recording in trace.recordings}
    for name, contents in (("toy", explorer.reduced(run, trace, curve, c)), ("bad", {"format": 0})):
        (tmp_path / f"{name}.json").write_text(json.dumps(contents))
        page.locator("#file").set_input_files(tmp_path / f"{name}.json")
        page.wait_for_function("name => document.querySelector('#message').textContent.startsWith(name)", arg=name)
        compare(page, trace, curve, c)
