"""Greedy texts of other engines: a token is the most likely one, a near-tie, or a fault."""

import json
from dataclasses import replace

import pytest

from specnb.decode.generate import generate
from specnb.divergence.foreign import ForeignText, audit_texts, read_texts
from specnb.errors import InputError
from specnb.lm import toy
from tests.measure.test_pair import PLAIN, PROMPT, near


def audited(model, *outputs, other=None):
    return audit_texts(
        model, [ForeignText(prompt=PROMPT, output=output) for output in outputs], other
    )


def test_the_targets_own_text_is_identical_and_one_wrong_token_is_one_fork():
    """Tokens are forced: those after a fork are judged in its context and are no forks."""
    target = toy.markov(5, order=2, seed=3)
    plain = generate(target, PROMPT, max_new_tokens=20).token_ids
    (own,) = audited(target, plain).sources
    assert (own.verdict, own.forks, own.tokens) == ("identical", 0, 20)
    changed = (*plain[:7], (plain[7] + 1) % 5)
    behind = generate(target, PROMPT + changed, max_new_tokens=12).token_ids
    result = audited(target, changed + behind)
    (source,) = result.sources
    assert (source.verdict, source.forks, source.first.strip()) == ("hard", 1, "token 7")
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("gap", "noise", "of_other", "verdict", "code"),
    [
        (0.2, 0.125, None, "near ties", 0),
        (0.3, 0.125, None, "hard", 1),
        (0.2, 0.8, None, "inconclusive", 125),
        (0.2, 0.0, None, "inconclusive", 125),
        (3.0, 0.0, None, "hard", 1),
        (0.2, 0.0, 0.125, "near ties", 0),
    ],
)
def test_a_margin_is_compared_with_the_noise_of_the_target_or_other_model(
    gap, noise, of_other, verdict, code
):
    """Rows have a range of 5. Blocks change them by the noise of the target or the other model."""
    other = None if of_other is None else near(gap, of_other)
    result = audited(near(gap, noise), (*PLAIN[:2], 3, *[1] * 4), PLAIN, other=other)
    source = result.sources[0]
    measured = of_other or noise
    assert (source.verdict, source.forks, result.exit_code) == (verdict, 1, code)
    assert source.margin == pytest.approx(gap, rel=1e-3)
    known = verdict != "inconclusive" and measured
    assert result.limit == (pytest.approx(2 * measured, rel=0.1) if known else None)


@pytest.mark.parametrize(
    ("plain_forks", "verdict", "new"), [(0, "hard", 40), (1, "hard", 39), (38, "near ties", 2)]
)
def test_near_ties_that_are_more_frequent_with_drafts_are_a_fault(plain_forks, verdict, new):
    """In 40 texts, the control has `plain_forks`, the drafted source one each, all within noise."""
    rows = [("plain", "", str(i), 3 if i < plain_forks else 2) for i in range(40)]
    rows += [("drafted", "plain", str(i), 3) for i in range(40)]
    texts = [
        ForeignText(source=source, control=control, id=i, prompt=PROMPT, output=(*PLAIN[:2], x, 1))
        for source, control, i, x in rows
    ]
    source = audit_texts(near(0.01, 0.125), texts).sources[-1]
    assert (source.verdict, source.forks, source.new) == (verdict, 40, new)


class Surrounding(toy.ToyLM):
    """A tokenizer that adds BOS, or a space (SentencePiece), before a text, and EOS after it."""

    before, after = (), ()

    def encode(self, text, *, special=True):
        space = [4] if "space" in self.before else []
        bos = [0] if special and "bos" in self.before else []
        return [*bos, *space, *super().encode(text), *(self.after if special else ())]


@pytest.mark.parametrize("before", [(), ("bos",), ("space",), ("bos", "space")], ids=str)
@pytest.mark.parametrize("after", [(), (1,)], ids=str)
def test_an_output_given_as_text_continues_its_prompt(before, after):
    """Encoded alone, it would have a BOS, a space or an EOS that the target did not generate."""
    target = toy.markov(5, order=2, seed=3)
    target.__class__, target.before, target.after = Surrounding, before, after
    target.vocab = replace(
        target.vocab, pieces=(b"a", b"b", b"c", b"\n", b" "), add_bos="bos" in before
    )
    plain = generate(target, "abc", max_new_tokens=24)
    (own,) = audit_texts(target, [ForeignText(prompt="abc", output=plain.text)]).sources
    assert (own.verdict, own.tokens, own.forks) == ("identical", 24, 0)
    for output, shown in (("a!b", "'a!b'"), ("a\ud800", "ud800")):
        with pytest.raises(InputError, match=shown):
            audit_texts(target, [ForeignText(prompt="abc", output=output)])


def test_lines_without_ids_are_compared_with_the_control_of_their_prompt(tmp_path):
    """Each text forks as its control does, so no fork is new."""
    forking = {"prompt": PROMPT, "output": (*PLAIN[:2], 3, 1)}
    other = {"prompt": (*PROMPT, 1), "output": (1,)}
    sources = {"source": "plain"}, {"source": "drafted", "control": "plain"}
    lines = [source | text for text in (forking, other, forking, other) for source in sources]
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    drafted = audit_texts(near(0.01, 0.125), read_texts(file)).sources[1]
    assert (drafted.source, drafted.texts, drafted.new) == ("drafted", 2, 0) and drafted.forks >= 2


@pytest.mark.parametrize("line", ["", '{"prompt": "a"}', '{"prompt": [0], "output": {}}', "{"])
def test_a_file_without_valid_texts_is_refused_with_its_name(line, tmp_path):
    (tmp_path / "texts.jsonl").write_text(line)
    with pytest.raises(InputError, match=r"texts\.jsonl"):
        read_texts(tmp_path / "texts.jsonl")


@pytest.mark.parametrize(
    ("output", "says"), [((), "no output token"), ((1,) * 5_000, "n_ctx"), ((99,), "99")]
)
def test_outputs_that_cannot_be_judged_are_refused(output, says):
    with pytest.raises(InputError, match=says):
        audited(near(1.0, 0.0), output)
