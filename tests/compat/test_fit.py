"""One decision: what the verdict says is what the loader does, for each way there is."""

from functools import cache

import pytest

from specnb.compat import shelf
from specnb.compat.check import OF_WAY, check
from specnb.compat.description import Family, tokens_of
from specnb.compat.read import describe
from specnb.draft.token_map import Way, fit
from specnb.draft.translate import fitted
from specnb.errors import VocabularyMismatch
from specnb.lm import toy

SMALL = ("smollm2", "gpt-neox", "mpt", "phi-3", "bert-bge")
CONSTRUCTED = [  # way, target, draft: pairs whose drafters are really made
    (Way.SAME, "gpt-neox", "mpt"),
    (Way.SLICING, "qwen2", "qwen2.5"),
    (Way.TOKENS, "smollm2", "phi-3"),
    (Way.STRINGS, "deepseek-v4", "falcon"),
    (Way.NONE, "gpt-2", "bert-bge"),
]


described = cache(shelf.describe)


def carrying(name):
    """A model with the vocabulary and the tokenizer of a family; nothing is computed with it."""
    family = Family(described(name))
    model = toy.ToyLM(lambda _: pytest.fail("a token was fed"), family.vocab, name=name)
    model.encode = family.encode
    return model


def taken(model, target):
    """The way that the loader takes."""
    try:
        drafter = fitted(model, target)
    except VocabularyMismatch as error:
        assert "--drafter lookup" in str(error)
        return Way.NONE
    return drafter.translation.way if drafter.translation else Way.SAME


@pytest.mark.parametrize(("way", "target", "draft"), CONSTRUCTED)
def test_the_drafter_is_the_one_of_the_verdict(way, target, draft):
    report = check(described(target), described(draft))
    assert report.way is way and report.verdict is OF_WAY[way]
    assert taken(carrying(draft), carrying(target)) is way


def test_a_forced_way_is_taken_whatever_the_verdict():
    target, draft = carrying("gpt-2"), carrying("bert-bge")
    for way in ("tokens", "strings"):
        assert fitted(draft, target, way).translation.way == way


@pytest.mark.model
def test_without_a_tokenizer_the_longest_piece_first_tells_the_same():
    """A shelf list has no merge rules: what it is said to use of the other's tokens, against the real tokenizer."""
    real, listed = tokens_of(describe("smollm2-135m")), tokens_of(described("smollm2"))
    assert real.sample != listed.sample
    for name in SMALL[1:]:
        other = tokens_of(described(name))
        for a, b in ((fit(real, other), fit(listed, other)), (fit(other, real), fit(other, listed))):
            assert a.way is b.way
            uses = [f.overlap.target_uses for f in (a, b)]
            assert None in uses or abs(uses[0] - uses[1]) < 0.03, name
