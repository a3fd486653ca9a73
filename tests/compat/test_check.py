"""Verdicts, findings and other engines' checks: small descriptions, and the report's table."""

import json
from dataclasses import replace
from functools import cache

import pytest

from specnb.compat.check import BESIDE_TOKENS, Severity, Verdict, check, matrix
from specnb.compat.description import Description, State
from specnb.compat.read import read_shelf
from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary

described = cache(read_shelf)


def made(*pieces, name="m", padding=0, kind="bpe", **more):
    vocab = Vocabulary(
        pieces=(*pieces, *[b""] * padding), kind=kind, eog=frozenset(more.pop("eog", ()))
    )
    common = {
        "n_tokens": len(pieces),
        "vocab_size": len(pieces) + padding,
        "add_bos": False,
        "add_eos": False,
    }
    return Description(name=name, source="test", vocab=vocab, **(common | more))


ABC = [bytes([97 + i]) for i in range(12)]
PLAIN = made(*ABC)


def topics(report, least=Severity.NOTE):
    return {f.topic for f in report.findings if f.severity >= least}


CONTROL = replace(PLAIN, vocab=Vocabulary(tuple(ABC[::-1]), special=frozenset(range(12))))


def lacking_letters(_text):
    raise InputError("no token for '推'")


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (made(*ABC), (Verdict.DROP_IN, True, True)),
        (made(*ABC, padding=3), (Verdict.SLICING, True, False)),  # padding is not a mismatch
        (made(*ABC, padding=200), (Verdict.SLICING, False, False)),  # both engines are wrong
        (made(*ABC, b"<new>"), (Verdict.SLICING, True, False)),
        # transformers is wrong to accept it
        (made(*ABC[:6], b"?", *ABC[7:]), (Verdict.TRANSLATION, False, True)),
        # llama.cpp does not compare ids below 5
        (made(b"?", *ABC[1:]), (Verdict.TRANSLATION, True, True)),
        (made(*[p + p for p in ABC]), (Verdict.IMPOSSIBLE, False, True)),
        (made(*ABC[::-1], kind="wpm"), (Verdict.IMPOSSIBLE, False, True)),
        (CONTROL, (Verdict.IMPOSSIBLE, False, True)),  # control tokens never match text
        (replace(PLAIN, vocab=None), (Verdict.UNKNOWN, None, True)),
        (replace(PLAIN, tokenizer=lacking_letters), (Verdict.DROP_IN, True, True)),
    ],
)
def test_the_verdict_and_the_checks_of_other_engines(draft, expected):
    report = check(replace(PLAIN, tokenizer=lambda _: []), draft)
    engines = report.llama_cpp.accepts, report.transformers.accepts
    assert (report.verdict, *engines) == expected and report.verdict in report.summary()


@pytest.mark.parametrize(
    ("field", "value", "topic", "severity"),
    [
        *((key.lower(), 1, key, Severity.NOTE) for key in ("BOS", "EOS", "PAD", "EOT")),
        *((key, True, key, Severity.NOTE) for key in ("add_bos", "add_eos")),
        ("added", frozenset({3}), "added tokens", Severity.NOTE),
        ("n_ctx", 8, "context length", Severity.NOTE),
        ("mask", frozenset({11}), "modified draft", Severity.LOWERS),
        ("state", State.HYBRID, "state of the draft", Severity.BREAKS),
        ("tokenizer", lambda text: [1], "same text, other ids", Severity.LOWERS),
    ],
)
def test_each_difference_is_one_finding_with_both_values_and_a_remedy(
    field, value, topic, severity
):
    facts = {"added": frozenset({2}), "n_ctx": 16, "state": State.ATTENTION}
    facts |= dict.fromkeys(("bos", "eos", "pad", "eot"), 0)
    base = replace(PLAIN, tokenizer=lambda text: [0], **facts)
    usual = topics(check(base, base))
    report = check(base, replace(base, **{field: value}))
    (finding,) = (f for f in report.findings if f.topic not in usual)
    assert (finding.topic, finding.severity) == (topic, severity)
    assert finding.target != finding.draft and finding.remedy
    assert report.verdict == Verdict.DROP_IN


def test_a_report_predicts_acceptance_unless_the_reach_is_unknown():
    report = check(described("smollm2"), described("gpt-2"))
    assert 0.9 < report.reach < 1 and f"{report.reach:.1%}" in report.expectation(7)
    assert "5.00 tokens" in check(PLAIN, PLAIN).expectation()
    # no tokenizer, or none that could write the ordinary text
    for draft in (replace(PLAIN, vocab=None), made(*ABC[::-1])):
        assert check(PLAIN, draft).expectation() == ""


SLICED, DROP_IN = (Verdict.SLICING, True), (Verdict.DROP_IN, True)
DEEPSEEK, QWEN = "deepseek-r1-distill-qwen", "qwen2.5-0.5b-instruct"
# target and draft: verdict, llama.cpp accepts, topics other than tokens; comments: report's reason
REPORT = {
    f"qwen2.5-coder-32b {QWEN}": SLICED,  # works
    f"{DEEPSEEK}-32b pard-{DEEPSEEK}-1.5b": (*SLICED, "modified draft"),
    f"{DEEPSEEK}-32b {DEEPSEEK}-1.5b": SLICED,  # "vocab mismatch"
    f"{DEEPSEEK}-32b {QWEN}": (Verdict.TRANSLATION, False),  # "token mismatch"
    "qwen3-coder-480b-a35b-instruct pard-qwen3-0.6b": (*DROP_IN, "modified draft"),
    "qwen3-coder-480b-a35b-instruct qwen3-0.6b": DROP_IN,  # "BOS token mismatch"
    f"qwen2.5-72b {QWEN}": SLICED,  # to be tried next
    f"qwen2.5-72b-instruct {QWEN}": SLICED,
    "qwen3-next-80b-a3b-instruct pard-qwen3-0.6b": (
        *DROP_IN,
        "modified draft",
        "state of the target",
    ),
}


def test_the_verdict_on_every_row_of_the_reports_table():
    """152,064 and 151,936 differ by padding, R1 and Qwen2.5 in an added BOS and seven ids."""
    reports = [check(*map(described, pair.split())) for pair in REPORT]
    for report, (verdict, llama, *beside) in zip(reports, REPORT.values(), strict=True):
        assert (report.verdict, report.llama_cpp.accepts) == (verdict, llama)
        assert topics(report) & {*BESIDE_TOKENS} == {*beside}
        assert ("From memory" in report.summary()) is bool(report.from_memory)
    padded, other = reports[2:4]
    (rows,) = (f for f in padded.findings if f.topic == "vocab_size")
    assert (rows.target, rows.draft, rows.severity) == ("152064", "151936", Severity.NOTE)
    assert padded.ids.n_different == 0 and topics(padded, Severity.LOWERS) == set()
    assert (other.ids.first_difference, other.ids.n_different) == (151643, 7)


def test_a_matrix_has_a_row_for_each_ordered_pair_of_different_models():
    table = matrix([*map(described, ("gpt-neox", "mpt", "qwen2.5"))])
    same_ids = table[table["verdict"] == Verdict.DROP_IN]
    assert same_ids["target"].tolist() == ["gpt-neox", "mpt"] == same_ids["draft"].tolist()[::-1]
    assert len(table) == 6
    for models in ([PLAIN], [PLAIN, PLAIN]):
        with pytest.raises(InputError, match=r"\bm\b"):
            matrix(models)


def test_a_report_is_plain_json_and_its_counts_exclude_padding():
    report = check(made(b"a", b"b", b"c", padding=2), made(b"a", b"x", b"b", b"y", name="other"))
    document = json.loads(json.dumps(report.to_json()))
    assert document["ids"]["examples"] == [[1, "62", "78"], [2, "63", "62"]]
    shares = [document["overlap"][name] for name in ("shared", "of_target", "of_draft")]
    assert shares == pytest.approx([2, 2 / 3, 0.5])
