"""Logs of other engines: their rounds say of every K what a replay of the whole run says, within known bounds."""

import json

import numpy as np
import pytest

from specnb.batch.logs import Request, advise, read_log, sweep_log
from specnb.errors import InputError
from specnb.io import project_dir
from specnb.measure.cost import Cost
from specnb.measure.recording import Trace
from specnb.measure.replay import every_k

COPY = "smollm2-135m:q4_0?backend=llama"
LOGS = project_dir() / "data" / "logs"
SERVER = Cost.straight("server", 1.08, 0.05)
COSTS = (SERVER, Cost.straight("here", 1.6, 0.1), Cost.straight("laptop", 3.8, 0.3))
RUNS = [
    (drafter, content, temperature)
    for drafter, contents in ((COPY, ("code", "edit", "prose")), ("lookup(n=1..6,x4)", ("code", "edit")))
    for content in contents for temperature in (0.0, 1.0)
]  # fmt: skip
"""Runs that were recorded whole, so that every K of them is known."""


@pytest.fixture(scope="module")
def trace():
    return Trace.load(project_dir() / "data" / "traces" / "smollm2-135m" / "trace.parquet")


def decode(recording, k, rng) -> Request:
    """The rounds of a live run with K drafts, as an engine would count them."""
    kept, drafted, at = [], [], 0
    while at < recording.n_tokens:
        drafted.append(min(k, recording.offered[at]))
        chances = (rng.random() < chance for chance in recording.keep[at][: drafted[-1]])
        kept.append(next((n for n, right in enumerate(chances) if not right), len(recording.keep[at][: drafted[-1]])))
        at += kept[-1] + 1
    return Request(tuple(kept), tuple(drafted))


def steps(request, sparse=False):
    """As vLLM writes it with `detailed`; AIPerf's histogram is sparse."""
    histogram = np.bincount(request.accepted, minlength=max(request.drafted) + 1).tolist()
    counts = {"acceptance_histogram": histogram, "num_spec_tokens": max(request.drafted)}
    if sparse:
        counts["acceptance_histogram"] = {str(n): rounds for n, rounds in enumerate(histogram) if rounds}
    return counts | {"per_step_accepted": list(request.accepted), "per_step_drafted": list(request.drafted)}


def spec_bench(request):
    return {"question_id": 1, "choices": [{"turns": [""], "accept_lengths": [n + 1 for n in request.accepted]}]}


FORMATS = {
    "vLLM": lambda r: {"choices": [], "metrics": {"speculative_decoding": steps(r)}},
    "AIPerf": lambda r: {"metadata": {}, "spec_decode_acceptance": steps(r, sparse=True)},
    "Spec-Bench": spec_bench,
}


@pytest.mark.parametrize(("drafter", "content", "temperature"), RUNS)
@pytest.mark.parametrize("own", [4, 8])
def test_a_log_advises_what_the_whole_run_would(trace, drafter, content, temperature, own):
    """Tokens a round of every smaller K within 3 %; the K that is advised loses at most 3 % of the best of them."""
    recordings = trace.select(drafter=drafter, category=content, temperature=temperature, top_p=1.0).recordings
    rng = np.random.default_rng(7)
    requests = [decode(recording, own, rng) for recording in recordings]
    true = list(zip(*(every_k(recording, range(1, own + 1)) for recording in recordings), strict=True))
    if temperature == 0:
        tau = [sum(c.n_tokens for c in of_k) / sum(c.rounds for c in of_k) for of_k in true]
        table = sweep_log(requests, [SERVER], own)
        np.testing.assert_allclose(table["tau"], tau, rtol=0.03)
        bounded = (table["tau_low"] <= tau) & (tau <= table["tau_high"])
        assert bounded.all() or drafter.startswith("lookup")
    swept = sweep_log(requests, COSTS, own)
    for cost in COSTS:
        seconds = [sum(c.seconds(cost) for c in of_k) for of_k in true]
        assert min(seconds) / seconds[advise(swept[swept["machine"] == cost.name])["k"] - 1] >= 0.97


@pytest.mark.parametrize("form", FORMATS)
def test_what_engines_write_is_read_as_it_was(trace, tmp_path, form):
    recordings = trace.select(drafter=COPY, category="code", temperature=0.0).recordings
    requests = [decode(recording, 4, np.random.default_rng(0)) for recording in recordings]
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(FORMATS[form](request)) for request in requests))
    read = read_log(tmp_path / "log.jsonl", k=4)
    assert [request.accepted for request in read] == [request.accepted for request in requests]
    row = sweep_log(read, [SERVER], 6).set_index("k").loc[4]
    assert row["own"] and row["tau"] == row["tau_low"] == row["tau_high"]
    assert row["tau"] == pytest.approx(sum(r.n_tokens for r in requests) / sum(len(r.accepted) for r in requests))


@pytest.mark.parametrize(("file", "tau", "own"), [("vllm", 53 / 43, 3), ("sglang", 106 / 43, 5)])
def test_published_logs_are_read_and_one_request_judges_nothing(file, tau, own):
    requests = read_log(LOGS / f"{file}.json")
    table = sweep_log(requests, [SERVER], 8)
    row = table.query("own").iloc[0]
    assert row["k"] == own and row["tau"] == pytest.approx(tau)
    assert advise(table)["verdict"] == "undecided"


def test_more_drafts_than_were_made_are_bounded_and_never_advised():
    requests = [Request((4, 4, 2, 4), (4,) * 4)] * 6
    table = sweep_log(requests, [SERVER], 8)
    taus = table.set_index("k")
    assert taus.loc[8, "tau_low"] == taus.loc[4, "tau"] < taus.loc[8, "tau_high"]
    advice = advise(table)
    assert advice["k"] == 4 and advice["verdict"] == "pays" and advice["beyond"] > 4


def vllm(**counts):
    return {"metrics": {"speculative_decoding": counts}}


def stepwise(accepted, drafted, **totals):
    return vllm(per_step_accepted=accepted, per_step_drafted=drafted, **totals)


def sglang(histogram, **totals):
    return {"meta_info": {"spec_accept_histogram": histogram, **totals}}


OFF_BY_ONE = sglang([19, 11, 4, 3, 6, 0], spec_verify_ct=43, spec_accept_token_num=90)
ODD = {
    "no JSON": ("no JSON", ["line 1"]),
    "one document, damaged in line 3": ('{\n"a": 1,\n"b" 2}', ["line 3"]),
    "no counts": ({}, ["per_step_accepted"]),
    "totals only": (LOGS.joinpath("llama.json").read_text(), ["65", "347", "detailed"]),
    "a negative count": (stepwise([-1, 2], [3, 3]), ["per_step_accepted.0", "-1"]),
    "unequal lengths": (stepwise([1, 0, 3], [3, 3]), ["3", "2"]),
    "accepted above drafted": (stepwise([1, 4], [3, 3]), ["4", "3"]),
    "no drafts in any round": ([stepwise([0] * 5, [0] * 5)] * 6, ["nothing was drafted", "6"]),
    "accepted above K": (vllm(acceptance_histogram=[3, 1, 2], num_spec_tokens=1), ["2", "1"]),
    "10^10 rounds": (sglang([0, 10_000_000_000]), ["10000000000"]),
    "10^7 drafts in a round": (stepwise([1], [10_000_000]), ["per_step_drafted.0", "10000000"]),
    "many rounds, and many drafts of another": ([sglang([999_999, 1]), stepwise([0], [512])], ["512001024"]),
    "a histogram that is off by one": (OFF_BY_ONE, ["90", "52"]),
    "steps of more drafts": (stepwise([1, 0, 3], [3, 3, 3], num_draft_tokens=8), ["8", "9"]),
}  # fmt: skip
"""Logs that cannot be used, each with what its error names: the place, or the values."""


@pytest.mark.parametrize(("log", "named"), ODD.values(), ids=ODD)
def test_an_odd_log_is_one_error_that_names_the_file_and_the_figures(tmp_path, log, named):
    file = tmp_path / "log.json"
    file.write_text(log if isinstance(log, str) else json.dumps(log))
    with pytest.raises(InputError) as caught:
        read_log(file)
    message = str(caught.value)
    assert str(file) in message and all(part in message for part in named), message
    assert "\n" not in message and len(message) < 1000


@pytest.mark.parametrize("text", ["ok", "a\u2028b", "\x85\u2029"])
def test_the_text_of_an_answer_does_not_change_its_counts(tmp_path, text):
    answer = {"choices": [text]} | stepwise([1, 0, 3], [3, 3, 3])
    lines = [json.dumps(answer, ensure_ascii=False)] * 6 + [json.dumps(stepwise([], []), indent=1)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    assert read_log(tmp_path / "log.jsonl") == [Request((1, 0, 3), (3, 3, 3))] * 6


def test_a_round_without_drafts_has_none_at_any_k():
    """Of two requests one found nothing to draft: its rounds stay plain steps."""
    requests = [Request((0, 0, 0), (0, 0, 0)), Request((2, 2, 2), (2, 2, 2))]
    taus = sweep_log(requests, [SERVER], 2).set_index("k")["tau"]
    assert taus[2] == pytest.approx(12 / 6) and taus[1] < taus[2]
