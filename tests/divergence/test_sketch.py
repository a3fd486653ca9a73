"""Digests, statistics and sketches: what they tell, and what means and cosines do not."""

import math

import numpy as np
import pytest
import torch

from specnb.divergence.difference import gain, relative_l2
from specnb.divergence.tensors import Prints, digest, digest_bytes, fingerprints, signs, token_rows


def random(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def fingerprint(values, token_axis=-1):
    """That of one tensor."""
    many = fingerprints(torch.as_tensor(values)[None], token_axis)
    statistics = {name: column[0] for name, column in many.statistics.items()}
    return Prints(statistics, *(None if part is None else part[0] for part in (many.tokens, many.token_l2)))


def test_digest_sees_the_order_of_rows_the_dtype_and_the_shape_and_not_the_memory():
    x = random(6, 8)
    others = [x[torch.tensor([1, 0, 2, 3, 4, 5])], x.reshape(8, 6), x.view(torch.int32), x.double()]
    assert digest(x) not in {digest(other) for other in others}
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))
    assert digest(x.t().contiguous().t()) == digest(x) == digest_bytes("float32", (6, 8), x.numpy().data)
    assert digest(x[:, ::2]) == digest(x[:, ::2].contiguous())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_any_dtype_and_any_shape_has_a_fingerprint(dtype):
    for shape in [(), (3,), (2, 5, 7)]:
        x = random(*shape).to(dtype)
        assert len(digest(x)) == 32
        assert np.isfinite(list(fingerprint(x).statistics.values())).all()
        assert not shape or np.isfinite(fingerprint(x, 0).tokens).all()


def test_signs_are_even_and_never_change():
    drawn = signs(4096)
    assert abs(drawn.mean()) < 0.01
    assert np.abs(drawn.T.astype(float) @ drawn / 4096 - np.eye(64)).max() < 0.1
    # traces of other machines and versions must stay comparable
    assert (drawn[0, :12] > 0).astype(int).tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1]
    assert np.array_equal(signs(10), drawn[:10])


def errors_of(kind, count=60):
    """Pairs (a, b) of tokens (40, 512), each off by 0.1 of its norm, and errors that a poor sketch is wrong about."""
    rng = np.random.default_rng(7)
    for _ in range(count):
        a = rng.standard_normal((40, 512)).astype(np.float32)
        error = np.zeros_like(a)
        if kind == "spread":
            error = rng.standard_normal(a.shape)
        elif kind == "few features":
            error[:, rng.integers(512, size=8)] = rng.standard_normal(8)
        elif kind == "all alike":
            error += 1
        error *= 0.1 * np.linalg.norm(a, axis=1, keepdims=True) / np.linalg.norm(error, axis=1, keepdims=True)
        yield a, (a + error).astype(np.float32)


@pytest.mark.parametrize("kind", ["spread", "few features", "all alike"])
def test_relative_error_is_told_within_its_standard_error_whatever_the_shape_of_the_error(kind):
    seen = []
    for a, b in errors_of(kind):
        left, right = fingerprint(a, 0), fingerprint(b, 0)
        seen.append((relative_l2(left.tokens, right.tokens, left.token_l2) - 0.1) / (0.1 / math.sqrt(2 * 16)))
    if kind == "all alike":  # one error, and so one estimate
        assert np.abs(seen).max() < 3
    else:
        assert abs(np.mean(seen)) < 0.3 and 0.8 < np.std(seen) < 1.2


def test_gain_tells_a_scale_that_the_cosine_cannot_see():
    a = random(30, 100)
    value, error = gain(fingerprint(a, 0).tokens, fingerprint(1.02 * a, 0).tokens)
    assert value.shape == (30,) and np.allclose(value, 1.02, atol=1e-5) and error.max() < 1e-5
    noisy = [
        gain(*(fingerprint(x, 0).tokens for x in (a, 1.02 * a + 0.3 * random(30, 100, seed=s)))) for s in (1, 2, 3)
    ]
    z = np.concatenate([(value - 1.02) / error for value, error in noisy])
    assert abs(z.mean()) < 0.4 and 0.7 < z.std() < 1.4


def test_statistics_are_blind_to_permuted_rows_and_sketches_are_not():
    a = random(32, 64)
    left, right = fingerprint(a, 0), fingerprint(a.flip(0), 0)
    assert left.statistics["std"] == pytest.approx(right.statistics["std"], rel=1e-6)
    assert (relative_l2(left.tokens, right.tokens, left.token_l2) > 0.3).all()
    assert np.allclose(left.tokens, right.tokens[::-1], atol=1e-5)  # one row's sketch does not depend on its place


@pytest.mark.parametrize("size", [1, 16, 17, 4097])
def test_a_sketch_is_linear_and_sees_the_last_value(size):
    a, b = random(1, size), random(1, size, seed=1)
    parts = [fingerprint(x, 0).tokens for x in (a, b, a + 2 * b)]
    assert np.allclose(parts[0] + 2 * parts[1], parts[2], atol=1e-5 * math.sqrt(size))
    last = a.clone()
    last[0, -1] += 100
    assert np.allclose(np.abs(fingerprint(last, 0).tokens - parts[0]), 100 / 4, rtol=1e-3)


@pytest.mark.parametrize(("shape", "axis"), [((5, 12), 0), ((2, 5, 12), 1), ((2, 3, 5, 4), 2), ((7,), -1)])
def test_statistics_are_those_of_numpy_and_a_stack_gives_what_single_tensors_give(shape, axis):
    x = random(3, *shape)
    many = fingerprints(x, axis)
    for i, values in enumerate(x.double().numpy()):
        expected = {"mean": values.mean(), "std": values.std(), "l1": np.abs(values).sum(),
                    "l2": np.linalg.norm(values), "min": values.min(), "max": values.max()}  # fmt: skip
        assert {name: many.statistics[name][i] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-7)
        alone = fingerprint(x[i], axis)
        if axis < 0:
            assert many.tokens is many.token_l2 is alone.tokens is None
        else:
            assert np.allclose(alone.tokens, many.tokens[i], atol=1e-5)
            assert (alone.token_l2**2).sum() == pytest.approx(expected["l2"] ** 2, rel=1e-5)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(
    ("mean", "spread"), [(1000, 0.99), (1, 1e-4), (-1e6, 1), (0, 1), (0.5, 1), (1e-3, 1e-9), (3, 0), (1e4, "by token")]
)
def test_the_spread_is_that_of_numpy_also_around_a_mean_far_larger(mean, spread, axis):
    noise = random(4, 16, 576).double()
    shift = torch.arange(16.0)[:, None] if spread == "by token" else 0
    x = (mean + shift + noise * (0.01 if spread == "by token" else spread)).float()
    statistics, exact = fingerprints(x, axis).statistics, x.double().numpy().reshape(4, -1)
    assert statistics["std"] == pytest.approx(exact.std(1), rel=1e-6, abs=0)
    assert statistics["mean"] == pytest.approx(exact.mean(1), rel=1e-7, abs=1e-7)


def test_integers_that_float32_cannot_hold_are_told_apart_where_their_sums_can_be_held():
    large = torch.tensor([[2**24, 2**24]])
    other = large + torch.tensor([[0, 1]])
    assert (fingerprint(large, 0).tokens != fingerprint(other, 0).tokens).any()
    assert (fingerprint(other, 0).statistics["max"], digest(large) == digest(other)) == (2**24 + 1, False)


def test_tokens_come_batch_by_batch_with_their_heads_together():
    x = random(2, 3, 5, 4)
    rows = token_rows(x[None], 2)[0]
    assert torch.equal(rows[5 + 1], x[1, :, 1].reshape(-1))  # second sequence, second token
    assert fingerprint(x, 2).tokens.shape == (10, 16)


def test_values_that_are_not_finite_are_counted_and_kept_out_of_the_rest():
    x = random(4, 8)
    x[1, 2], x[2, 0], x[3, 3] = math.nan, math.inf, -math.inf
    both = fingerprints(torch.stack([x, random(4, 8, seed=1)]), 0)
    finite = x[x.isfinite()].double().numpy()
    statistics = {name: column[0] for name, column in both.statistics.items()}
    assert (statistics["n_nan"], statistics["n_inf"], both.statistics["n_nan"][1]) == (1, 2, 0)
    assert statistics["mean"] == pytest.approx(finite.mean()) and statistics["std"] == pytest.approx(finite.std())
    assert statistics["l2"] == pytest.approx(np.linalg.norm(finite)) and statistics["max"] == finite.max()
    assert np.allclose(both.tokens[0], fingerprint(x.nan_to_num(0, 0, 0), 0).tokens, atol=1e-5)
    assert np.allclose(both.tokens[1], fingerprint(random(4, 8, seed=1), 0).tokens, atol=1e-5)


@pytest.mark.parametrize(
    "values", [torch.full((1, 1, 6, 6), torch.finfo(torch.float32).min).triu(1), random(1, 1, 3, 5).double() * 1e200]
)
def test_values_too_large_for_a_sum_of_squares_leave_finite_sketches(values):
    prints = fingerprint(values, 2)  # masks hold the lowest float32
    assert np.isfinite(prints.tokens).all() and np.isfinite(prints.token_l2).all()
    assert prints.statistics["l2"] == pytest.approx(np.linalg.norm(values.double())) and not prints.statistics["n_inf"]


@pytest.mark.parametrize(
    ("shape", "axis", "tokens"), [((0,), -1, None), ((2, 0, 4), 1, 0), ((2, 3, 0, 4), 2, 0), ((3, 0), 0, 3)]
)
def test_an_empty_tensor_has_the_statistics_of_no_values(shape, axis, tokens):
    prints = fingerprint(torch.zeros(shape), axis)
    assert prints.statistics["l2"] == 0 and math.isnan(prints.statistics["mean"])
    assert (None if prints.tokens is None else len(prints.tokens)) == tokens
