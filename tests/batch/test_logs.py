"""Logs of other engines: their rounds predict every K as a replay does, within known bounds."""

import json

import numpy as np
import pytest

from specnb.batch.logs import Request, advise, by_position, find_faults, read_log, sweep_log
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
    for drafter, contents in (
        (COPY, ("code", "edit", "prose")),
        ("lookup(n=1..6,x4)", ("code", "edit")),
    )
    for content in contents
    for temperature in (0.0, 1.0)
]
"""Complete recordings, so that the result of every K is known."""


@pytest.fixture(scope="module")
def trace():
    return Trace.load(project_dir() / "data" / "traces" / "smollm2-135m" / "trace.parquet")


def decode(recording, k, rng) -> Request:
    """Return the rounds of a live run with K = `k`, as an engine would count them."""
    kept, drafted, at = [], [], 0
    while at < recording.n_tokens:
        drafted.append(min(k, recording.offered[at]))
        chances = recording.keep[at][: drafted[-1]]
        kept.append([*(rng.random() < chance for chance in chances), False].index(False))
        at += kept[-1] + 1
    return Request(tuple(kept), tuple(drafted))


def steps(request):
    """Return the counts as vLLM writes them with `detailed`."""
    return {
        "acceptance_histogram": np.bincount(request.accepted).tolist(),
        "num_spec_tokens": max(request.drafted),
        "per_step_accepted": list(request.accepted),
        "per_step_drafted": list(request.drafted),
    }


def sparse(request):
    """Return the counts as AIPerf writes them, with a sparse histogram."""
    counts = steps(request)
    rounds = enumerate(counts["acceptance_histogram"])
    return counts | {"acceptance_histogram": {str(n): count for n, count in rounds if count}}


def spec_bench(request):
    return {
        "question_id": 1,
        "choices": [{"turns": [""], "accept_lengths": [n + 1 for n in request.accepted]}],
    }


FORMATS = {
    "vLLM": lambda r: {"choices": [], "metrics": {"speculative_decoding": steps(r)}},
    "AIPerf": lambda r: {"metadata": {}, "spec_decode_acceptance": sparse(r)},
    "Spec-Bench": spec_bench,
}


@pytest.mark.parametrize(("drafter", "content", "temperature"), RUNS)
@pytest.mark.parametrize("own", [4, 8])
def test_advice_from_a_log_agrees_with_a_replay_of_the_whole_run(
    trace, drafter, content, temperature, own
):
    """Tokens per round of smaller K are within 3 %; the advised K costs at most 3 % of speed."""
    chosen = {"drafter": drafter, "category": content, "temperature": temperature, "top_p": 1.0}
    recordings = trace.select(**chosen).recordings
    rng = np.random.default_rng(7)
    requests = [decode(recording, own, rng) for recording in recordings]
    ks = range(1, own + 1)
    true = [*zip(*(every_k(recording, ks) for recording in recordings), strict=True)]
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
def test_the_formats_of_engines_are_read_without_loss(trace, tmp_path, form):
    recordings = trace.select(drafter=COPY, category="code", temperature=0.0).recordings
    requests = [decode(recording, 4, np.random.default_rng(0)) for recording in recordings]
    lines = [json.dumps(FORMATS[form](request)) for request in requests]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    read = read_log(tmp_path / "log.jsonl", k=4)
    assert [request.accepted for request in read] == [request.accepted for request in requests]
    row = sweep_log(read, [SERVER], 6).set_index("k").loc[4]
    rate = sum(r.n_tokens for r in requests) / sum(len(r.accepted) for r in requests)
    assert row["own"] and row["tau"] == row["tau_low"] == row["tau_high"] == pytest.approx(rate)


def test_k_above_the_logged_k_is_bounded_and_never_advised():
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


LLAMA = (
    "0.06.896.015 I slot print_timing: id  1 | task 0 | "
    "draft acceptance = 0.64479 (  167 accepted /   259 generated), "
    "mean acceptance length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)\n"
)
"""From llama.cpp #24536. Other lines and counters are of the same rounds unless stated."""
LLAMA_NEWER = (
    "slot print_timing: id 1 | "
    "draft acceptance = 0.64479 (  167 accepted /   259 generated), mean len =  2.92\n"
    "slot print_timing: id 1 |      acc per pos = (0.805, 0.632, 0.483)\n"
)
VLLM = (
    "(APIServer pid=1) INFO 05-21 21:11:56 [metrics.py:101] SpecDecoding metrics: "
    "Mean acceptance length: 3.03, "
    "Accepted throughput: 3.87 tokens/s, Drafted throughput: 5.72 tokens/s, "
    "Accepted: 337 tokens, Drafted: 498 tokens, "
    "Per-position acceptance rate: 0.837, 0.669, 0.524, Avg Draft acceptance rate: 67.7%\n"
)
METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 87.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 259.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 167.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 55.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 42.0
"""
LINES = {
    "llama.cpp": (LLAMA, 87, [70, 55, 42]),
    "llama.cpp of September": (LLAMA_NEWER, 87, [70, 55, 42]),
    "vLLM": (VLLM, 166, [139, 111, 87]),
    "counters of vLLM": (METRICS, 87, [70, 55, 42]),
    "counters of llama.cpp": (
        METRICS.replace("vllm:", "llamacpp:").replace('engine="0",model_name="m",', ""),
        87,
        [70, 55, 42],
    ),
}
"""Texts, their rounds, and how many of these accepted at least 1, 2 and 3 draft tokens."""


@pytest.mark.parametrize(("text", "rounds", "reached"), LINES.values(), ids=LINES)
def test_counts_are_recovered_from_rounded_rates(tmp_path, text, rounds, reached):
    (tmp_path / "log.txt").write_text(f"other lines\n{text}other lines\n")
    (request,) = read_log(tmp_path / "log.txt")
    assert len(request.accepted) == rounds
    table = by_position([request])
    assert table["accepted"].tolist() == reached and table["tested"].tolist() == [
        rounds,
        *reached[:-1],
    ]
    np.testing.assert_allclose(table["tau"], 1 + np.cumsum(reached) / rounds)
    assert sweep_log([request], [SERVER], 3).query("own")["tau"].item() == pytest.approx(
        table["tau"].iloc[-1]
    )


def test_lines_of_a_real_server_match_its_token_counts():
    requests = read_log(LOGS / "llama-server.log")
    assert [len(request.accepted) for request in requests] == [14, 12, 6, 8, 11]
    # An answer has 48 tokens: the first is from prefill; rounds without drafts are not counted.
    assert all(46 <= request.n_tokens + 1 <= 48 for request in requests)
    assert [sum(request.drafted) for request in requests] == [99, 84, 41, 58, 87]
    assert requests[2].drafted.count(1) == 1 and requests[2].accepted == requests[2].drafted


FAULTS = {
    "first draft only": Request((1,) * 150 + (0,) * 150, (3,) * 300),
    "": Request((0, 1, 2, 3) * 75, (3,) * 300),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_identified_from_counts(fault):
    expected = [fault] if fault else []
    for k, more in ((None, []), (4, ["K ignored"])):
        found = find_faults([FAULTS[fault]], k=k)
        assert [row["check"] for row in found] == [*more, *expected]
    assert find_faults([Request((0, 0, 1), (3,) * 3)]) == []  # too few to judge


OFF_BY_ONE = sglang([19, 11, 4, 3, 6, 0], spec_verify_ct=43, spec_accept_token_num=90)
ODD = {
    "no counts in a text": ("no JSON", ["acceptance_histogram"]),
    "one document, damaged in line 3": ('{\n"a": 1,\n"b" 2}', ["line 3"]),
    "totals only": (
        LOGS.joinpath("llama.json").read_text(),
        ["65", "347", "no other K can be known"],
    ),
    "a negative count": (stepwise([-1, 2], [3, 3]), ["per_step_accepted.0", "-1"]),
    "unequal lengths": (stepwise([1, 0, 3], [3, 3]), ["3", "2"]),
    "accepted above drafted": (stepwise([1, 4], [3, 3]), ["4", "3"]),
    "no drafts in any round": ([stepwise([0] * 5, [0] * 5)] * 6, ["nothing was drafted", "6"]),
    "10^10 rounds": (sglang([0, 10_000_000_000]), ["10000000000"]),
    "10^7 drafts in a round": (stepwise([1], [10_000_000]), ["per_step_drafted.0", "10000000"]),
    "many rounds, and many drafts of another": (
        [sglang([999_999, 1]), stepwise([0], [512])],
        ["512001024"],
    ),
    "a histogram that is off by one": (OFF_BY_ONE, ["90", "52"]),
    "steps of more drafts": (stepwise([1, 0, 3], [3, 3, 3], num_draft_tokens=8), ["8", "9"]),
    "a line of totals": (LLAMA.partition(", acceptance rate")[0], ["167 accepted", "-lv 5"]),
    "a mean that is not a number": (LLAMA.replace("2.92", "nan"), ["nan"]),
    "a mean of other rounds": (LLAMA.replace("2.92", "3.92"), ["3.92", "no number of rounds"]),
    "rates of other rounds": (LLAMA.replace("0.483", "0.583"), ["0.583"]),
    "a line of vLLM without its rates": (
        VLLM.partition(", Per-position")[0],
        ["SpecDecoding metrics", "3.03"],
    ),
    "a counter that is not a number": (METRICS.replace("87.0", "NaN"), ["NaN"]),
    "counters of more acceptances than drafts": (METRICS.replace("87.0", "50"), ["50"]),
}
"""Unusable logs, each with the places or values that its error must contain."""


@pytest.mark.parametrize(("log", "named"), ODD.values(), ids=ODD)
def test_an_unusable_log_is_one_error_with_its_file_and_values(tmp_path, log, named):
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


def test_a_round_without_drafts_is_a_plain_step_at_every_k():
    """One of two requests found nothing to draft: its rounds remain plain steps."""
    requests = [Request((0, 0, 0), (0, 0, 0)), Request((2, 2, 2), (2, 2, 2))]
    taus = sweep_log(requests, [SERVER], 2).set_index("k")["tau"]
    assert taus[2] == pytest.approx(12 / 6) and taus[1] < taus[2]
