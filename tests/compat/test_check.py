"""Verdicts, findings and other engines' checks: small descriptions, and the report's table."""

import json
from dataclasses import replace
from functools import cache

import pytest

from specnb.compat.check import Severity, Verdict, check, matrix
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
    ("draft", "verdict", "llama", "hf"),
    [
        (made(*ABC), Verdict.DROP_IN, True, True),
        (made(*ABC, padding=3), Verdict.SLICING, True, False),  # padding is not a mismatch
        # both engines are wrong to refuse it
        (
            made(*ABC, padding=200),
            Verdict.SLICING,
            False,
            False,
        ),
        (made(*ABC, b"<new>"), Verdict.SLICING, True, False),
        # transformers is wrong to accept it
        (
            made(*ABC[:6], b"?", *ABC[7:]),
            Verdict.TRANSLATION,
            False,
            True,
        ),
        # llama.cpp does not compare ids below 5
        (
            made(b"?", *ABC[1:]),
            Verdict.TRANSLATION,
            True,
            True,
        ),
        (made(*[p + p for p in ABC]), Verdict.IMPOSSIBLE, False, True),
        (made(*ABC[::-1], kind="wpm"), Verdict.IMPOSSIBLE, False, True),
        (CONTROL, Verdict.IMPOSSIBLE, False, True),  # control tokens never match text
        (replace(PLAIN, vocab=None), Verdict.UNKNOWN, None, True),
        (replace(PLAIN, tokenizer=lacking_letters), Verdict.DROP_IN, True, True),
    ],
)
def test_the_verdict_and_the_checks_of_other_engines(draft, verdict, llama, hf):
    report = check(replace(PLAIN, tokenizer=lambda _: []), draft)
    assert (report.verdict, report.llama_cpp.accepts, report.transformers.accepts) == (
        verdict,
        llama,
        hf,
    )
    assert report.verdict in report.summary()


@pytest.mark.parametrize(
    ("change", "topic", "severity"),
    [
        *(({key.lower(): 1}, key, Severity.NOTE) for key in ("BOS", "EOS", "PAD", "EOT")),
        *(({key: True}, key, Severity.NOTE) for key in ("add_bos", "add_eos")),
        ({"added": frozenset({3})}, "added tokens", Severity.NOTE),
        ({"n_ctx": 8}, "context length", Severity.NOTE),
        ({"mask": frozenset({11})}, "modified draft", Severity.LOWERS),
        ({"state": State.HYBRID}, "state of the draft", Severity.BREAKS),
        ({"tokenizer": lambda text: [1]}, "same text, other ids", Severity.LOWERS),
    ],
)
def test_each_difference_is_one_finding_with_both_values_and_a_remedy(change, topic, severity):
    base = replace(
        PLAIN,
        bos=0,
        eos=0,
        pad=0,
        eot=0,
        added=frozenset({2}),
        n_ctx=16,
        state=State.ATTENTION,
        tokenizer=lambda text: [0],
    )
    usual = topics(check(base, base))
    report = check(base, replace(base, **change))
    (new,) = topics(report) - usual
    (finding,) = (f for f in report.findings if f.topic == topic)
    assert (
        new == topic
        and finding.severity == severity
        and finding.target != finding.draft
        and finding.remedy
    )
    assert report.verdict == Verdict.DROP_IN


def test_a_report_predicts_acceptance_unless_the_reach_is_unknown():
    report = check(described("smollm2"), described("gpt-2"))
    assert (
        report.way == "tokens"
        and 0.9 < report.reach < 1
        and f"{report.reach:.1%}" in report.expectation(7)
    )
    assert check(PLAIN, PLAIN).reach == 1.0 and "5.00 tokens" in check(PLAIN, PLAIN).expectation()
    for draft in (replace(PLAIN, vocab=None), made(*ABC[::-1])):
        assert check(PLAIN, draft).expectation() == "", (
            "no tokenizer here could write the ordinary text"
        )


# target, draft, verdict, llama.cpp accepts, topics other than tokens; comments: the report's reason
REPORT = [
    ("qwen2.5-coder-32b", "qwen2.5-0.5b-instruct", Verdict.SLICING, True, set()),  # works
    (
        "deepseek-r1-distill-qwen-32b",
        "pard-deepseek-r1-distill-qwen-1.5b",
        Verdict.SLICING,
        True,
        {"modified draft"},
    ),
    # "vocab mismatch"
    (
        "deepseek-r1-distill-qwen-32b",
        "deepseek-r1-distill-qwen-1.5b",
        Verdict.SLICING,
        True,
        set(),
    ),
    # "token mismatch"
    (
        "deepseek-r1-distill-qwen-32b",
        "qwen2.5-0.5b-instruct",
        Verdict.TRANSLATION,
        False,
        set(),
    ),
    (
        "qwen3-coder-480b-a35b-instruct",
        "pard-qwen3-0.6b",
        Verdict.DROP_IN,
        True,
        {"modified draft"},
    ),
    # "BOS token mismatch"
    (
        "qwen3-coder-480b-a35b-instruct",
        "qwen3-0.6b",
        Verdict.DROP_IN,
        True,
        set(),
    ),
    ("qwen2.5-72b", "qwen2.5-0.5b-instruct", Verdict.SLICING, True, set()),  # to be tried next
    ("qwen2.5-72b-instruct", "qwen2.5-0.5b-instruct", Verdict.SLICING, True, set()),
    (
        "qwen3-next-80b-a3b-instruct",
        "pard-qwen3-0.6b",
        Verdict.DROP_IN,
        True,
        {"modified draft", "state of the target"},
    ),
]


def test_the_verdict_on_every_row_of_the_reports_table():
    """152,064 and 151,936 differ by padding, R1 and Qwen2.5 in an added BOS and seven ids."""
    reports = [check(described(target), described(draft)) for target, draft, *_ in REPORT]
    for report, (_, _, verdict, llama, beside) in zip(reports, REPORT, strict=True):
        assert (report.verdict, report.llama_cpp.accepts) == (verdict, llama)
        assert (
            topics(report) & {"modified draft", "state of the target", "state of the draft"}
            == beside
        )
        assert ("From memory" in report.summary()) is bool(report.from_memory)
    padded, other = reports[2:4]
    (rows,) = (f for f in padded.findings if f.topic == "vocab_size")
    assert (rows.target, rows.draft, rows.severity) == ("152064", "151936", Severity.NOTE)
    assert padded.ids.n_different == 0 and topics(padded, Severity.LOWERS) == set()
    assert (other.ids.first_difference, other.ids.n_different) == (151643, 7)


def test_a_matrix_has_a_row_for_each_ordered_pair_of_different_models():
    table = matrix([described(name) for name in ("gpt-neox", "mpt", "qwen2.5")])
    same_ids = table[table["verdict"] == Verdict.DROP_IN]
    assert (
        len(table) == 6
        and same_ids["target"].tolist() == ["gpt-neox", "mpt"] == same_ids["draft"].tolist()[::-1]
    )
    for models in ([PLAIN], [PLAIN, PLAIN]):
        with pytest.raises(InputError, match=r"\bm\b"):
            matrix(models)


def test_a_report_is_plain_json_and_its_counts_exclude_padding():
    report = check(made(b"a", b"b", b"c", padding=2), made(b"a", b"x", b"b", b"y", name="other"))
    document = json.loads(json.dumps(report.to_json()))
    assert (
        document["verdict"] == "needs translation"
        and document["findings"][0]["severity"] == "breaks"
    )
    ids = document["ids"]
    assert (ids["first_difference"], ids["n_different"]) == (1, 2)
    assert ids["examples"] == [[1, "62", "78"], [2, "63", "62"]]
    shares = [document["overlap"][name] for name in ("shared", "of_target", "of_draft")]
    assert shares == pytest.approx([2, 2 / 3, 0.5])
