"""Digests and sketches: what they tell, and what means and cosines do not."""

import math

import numpy as np
import pytest
import torch

from specnb.divergence.capture.tensors import digest_tensor, signs, to_numpy
from specnb.divergence.capture.tensors import sketch as sketch_values
from specnb.divergence.tolerances import relative_l2


def random(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def sketch(tensor, token_axis):
    return sketch_values(to_numpy(tensor), token_axis)


def test_digest_sees_the_order_of_rows_the_dtype_and_the_shape_and_not_the_memory():
    x = random(6, 8)
    others = [x[torch.tensor([1, 0, 2, 3, 4, 5])], x.reshape(8, 6), x.view(torch.int32), x.double()]
    assert digest_tensor(x) not in {digest_tensor(other) for other in others}
    assert digest_tensor(torch.zeros(2)) != digest_tensor(-torch.zeros(2))
    assert digest_tensor(x.t().contiguous().t()) == digest_tensor(x) == "30fe840c4f849579d9ade5a4e2543850"
    assert digest_tensor(x[:, ::2]) == digest_tensor(x[:, ::2].contiguous())


def test_signs_are_even_and_never_change():
    drawn = signs(4096)
    assert abs(drawn.mean()) < 0.01
    assert np.abs(drawn.T.astype(float) @ drawn / 4096 - np.eye(64)).max() < 0.1
    # traces of other machines and versions must stay comparable
    assert (drawn[0, :12] > 0).astype(int).tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1]
    assert np.array_equal(signs(10), drawn[:10])


@pytest.mark.parametrize("n_wrong", [512, 8])
def test_relative_error_is_told_within_its_standard_error_whatever_the_shape_of_the_error(n_wrong):
    """Of tokens (2400, 512) `n_wrong` features are wrong, each token by 0.1 of its norm."""
    rng = np.random.default_rng(7)
    a, error = rng.standard_normal((2400, 512)), rng.standard_normal((2400, 512))
    error[rng.permuted(np.tile(np.arange(512) >= n_wrong, (2400, 1)), axis=1)] = 0
    error *= 0.1 * np.linalg.norm(a, axis=1, keepdims=True) / np.linalg.norm(error, axis=1, keepdims=True)
    left, right = (sketch(torch.from_numpy(x).float(), 0) for x in (a, a + error))
    off = (relative_l2(left[0], right[0], left[1]) - 0.1) / (0.1 / math.sqrt(2 * 16))
    assert abs(off.mean()) < 0.3 and 0.8 < off.std() < 1.2


@pytest.mark.parametrize(("shape", "axis"), [((5, 12), 0), ((2, 5, 12), 1), ((2, 3, 5, 4), 2)])
def test_tokens_come_batch_by_batch_with_their_heads_together(shape, axis):
    x = random(*shape)
    many, tokens = sketch(x, axis), x.transpose(1, 2).flatten(2) if axis == 2 else x
    alone = sketch(tokens.reshape(-1, tokens.shape[-1]), 0)
    assert np.allclose(many[0], alone[0], atol=1e-5) and np.allclose(many[1], alone[1], rtol=1e-6)


def test_a_token_that_is_no_number_has_none_and_what_cannot_be_squared_is_bounded():
    x = random(4, 8)
    x[1, 2], x[2, 0] = math.nan, math.inf
    tokens, norms = sketch(x, 0)
    assert np.isnan(tokens).all(axis=1).tolist() == np.isnan(norms).tolist() == [False, True, False, False]
    mask = torch.full((1, 1, 6, 6), torch.finfo(torch.float32).min).triu(1)
    for values in (x[2:], mask, random(1, 1, 3, 5).double() * 1e200):
        assert all(np.isfinite(part).all() for part in sketch(values, values.ndim - 2))
