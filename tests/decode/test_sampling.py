"""From logits to a token: temperature, top-k and top-p by brute force, and random draws."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specnb.decode.sampling import Draws, Sampling, argmax
from specnb.errors import NonFiniteLogits

# the second strategy makes ties common, the third differences too small for exp
FINITE = (
    st.floats(-30, 30, width=32) | st.integers(-2, 2).map(float) | st.sampled_from([1e-30, 1e-20])
)
ROWS = st.lists(FINITE | st.just(-math.inf), min_size=1, max_size=9).filter(
    lambda row: max(row) > -math.inf
)
TEMPERATURES = st.floats(1e-3, 100)


def float32(row):
    return np.asarray(row, dtype=np.float32)


def softmax(logits, temperature, kept):
    weights = np.zeros(len(logits))
    weights[kept] = [math.exp((logits[i] - max(logits)) / temperature) for i in kept]
    return weights / math.fsum(weights)


@given(
    row=ROWS,
    temperature=TEMPERATURES,
    top_k=st.integers(0, 10),
    top_p=st.floats(0.01, 0.999) | st.just(1.0),
)
@settings(max_examples=300)
def test_probabilities_equal_a_brute_force_temperature_top_k_and_top_p(
    row, temperature, top_k, top_p
):
    """Mass is compared up to rounding, so at an exact edge both neighboring sets pass."""
    logits = float32(row).tolist()
    ranked = sorted(range(len(row)), key=lambda i: (-logits[i], i))[: top_k or None]
    p = softmax(logits, temperature, ranked)
    got = Sampling(temperature, top_k, top_p).probabilities(float32(row))
    assert got.dtype == np.float64 and got.sum() == pytest.approx(1.0, abs=1e-14)
    assert got[argmax(float32(row))] == got.max() > 0
    kept = [i for i in ranked if got[i] > 0]
    assert kept == ranked[: len(kept)]
    mass = [math.fsum(p[i] for i in ranked[:n]) for n in range(len(ranked) + 1)]
    assert mass[len(kept) - 1] < top_p * (1 + 1e-12)
    assert mass[len(kept)] > top_p * (1 - 1e-12)
    np.testing.assert_allclose(got, softmax(logits, temperature, kept), atol=1e-14)
    edge = Sampling(1.0, top_p=0.5).probabilities(float32([0, 0, 0, 0]))
    assert np.flatnonzero(edge).tolist() == [0, 1], "at an exact edge no further token is taken"
    assert Sampling(0.0).probabilities(float32([1, 3, 3, 2])).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("settings", [Sampling(), Sampling(0.7), Sampling(1.0, 2, 0.5)], ids=str)
@pytest.mark.parametrize(
    ("bad", "places"), [(math.nan, 0), (math.nan, 999), (math.inf, 500), (-math.inf, slice(None))]
)
def test_nan_and_infinity_raise_an_error_with_their_position(settings, bad, places):
    row = np.zeros(1000, dtype=np.float32)
    row[places] = bad
    first = np.arange(1000)[places].min()
    with pytest.raises(NonFiniteLogits, match=rf"{bad} \(first at vocabulary id {first}\)"):
        settings.probabilities(row)


@given(
    weights=st.lists(st.just(0.0) | st.floats(1e-300, 1e6), min_size=1, max_size=8).filter(any),
    u=st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53]),
)
# the product of such a small sum and 0.999... is rounded to the sum, which no edge exceeds
@example(weights=[0.0, 5e-324, 0.0], u=1 - 2**-53)
def test_a_draw_inverts_the_cumulative_weights_and_skips_zeros(weights, u):
    draws = Draws(SimpleNamespace(random=lambda: u))
    got = draws.categorical(np.array(weights))
    total = math.fsum(weights)
    assert weights[got] > 0
    below = math.fsum(weights[:got]) / total
    through = math.fsum(weights[: got + 1]) / total
    assert below - 1e-12 <= u <= through + 1e-12
