"""The `LanguageModel` contract for all engines: rejected input, logits, and exact rewinds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.errors import CapacityError, EngineError, InputError, RewindError
from specnb.lm import toy
from specnb.lm.base import LanguageModel
from specnb.lm.gguf import binding
from specnb.lm.gguf.model import GgufModel
from specnb.lm.hf import engine as hf_engine
from specnb.lm.hf.model import HfModel
from specnb.lm.hf.product import Product
from tests.tiny_models import VOCAB, llama_gguf, torch_folder

N_CTX = 48
PAST = [5, 6, 7]
ENGINES = ("toy", "gguf", "torch")
BAD_FORWARDS = [
    ([], None, InputError),
    ([4, -1], None, InputError),
    ([VOCAB], None, InputError),
    ([5.5], None, InputError),
    ([5, 6], 3, InputError),
    ([5] * (N_CTX - len(PAST) + 1), 0, CapacityError),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One model per engine; torch and llama.cpp split inputs into chunks of eight tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding, "MAX_BATCH", 8)
        patch.setattr(hf_engine, "PREFILL_WIDTH", 8)
        opened = {
            "toy": toy.ToyLM(
                toy.markov(VOCAB, order=2)._logits_of, toy.letters(VOCAB), n_ctx=N_CTX
            ),
            "gguf": GgufModel.open(llama_gguf(folder / "m.gguf"), n_ctx=N_CTX, threads=1),
            "torch": HfModel.open(torch_folder(folder / "m"), n_ctx=N_CTX),
        }
        yield opened
    for model in opened.values():
        model.close()


@pytest.fixture(params=ENGINES)
def model(models, request):
    models[request.param].reset()
    return models[request.param]


def steps(model, ids):
    model.reset()
    return np.concatenate([model.forward([i]) for i in ids])


def check_holds_past(model):
    """Check that the state is exactly PAST: the next logits equal those after a fresh PAST."""
    assert model.n_past == 3
    np.testing.assert_array_equal(model.forward([8]), steps(model, [*PAST, 8])[-1:])


def test_engines_implement_the_protocol_and_keep_the_state_on_bad_calls(model):
    assert isinstance(model, LanguageModel)
    assert model.caps.n_ctx == N_CTX and model.caps.rewind == "crop" and model.vocab.size == VOCAB
    assert model.caps.max_width == (8 if model.caps.engine == "llama.cpp" else N_CTX)
    steps(model, [*PAST, 9])
    model.rewind(1)
    for ids, n_logits, error in BAD_FORWARDS:
        with pytest.raises(error):
            model.forward(ids, n_logits)
    for n in (4, -1, 10**9, 1.5):
        with pytest.raises(RewindError, match=f"{n} tokens.*holds 3"):
            model.rewind(n)
    check_holds_past(model)


@pytest.mark.parametrize("name", ENGINES)
@given(
    pieces=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 10)),
        min_size=1,
        max_size=5,
    )
)
def test_any_sequence_of_passes_and_rewinds_equals_single_steps(models, name, pieces):
    """Up to the last token of the context. Returned rows are not overwritten by later calls."""
    model = models[name]
    model.reset()
    rng = np.random.default_rng(0)
    held = []
    kept = {}
    for fed, n_rows, forgotten in pieces:
        new = rng.integers(3, VOCAB, min(fed, N_CTX - 1 - len(held))).tolist()
        if new:
            n_rows = min(n_rows, len(new))
            rows = model.forward(new, n_rows)
            assert rows.shape == (n_rows, VOCAB) and rows.dtype == np.float32
            held += new
            kept |= zip(range(len(held) - n_rows, len(held)), rows, strict=True)
        back = min(forgotten, len(held))
        model.rewind(back)
        held = held[: len(held) - back]
        kept = {at: row for at, row in kept.items() if at < len(held)}
    assert model.n_past == len(held)
    kept[len(held)] = model.forward([9])[0]
    expected = steps(model, [*held, 9])
    for at, row in kept.items():
        np.testing.assert_allclose(row, expected[at], atol=1e-4)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["gguf", "torch"])
def test_a_failed_forward_pass_restores_the_state(models, name, error):
    """It fails in the second chunk, or in a layer that has already stored the tokens."""
    model = models[name]
    steps(model, PAST)
    api = binding.load_library().api
    decode = api.llama_decode

    def fail(*_):
        raise error("no memory")

    def fail_later(context, batch):
        code = decode(context, batch)
        if batch.n_tokens == 8:
            return code
        return -3 if error is RuntimeError else fail()

    raised = EngineError if error is RuntimeError else error
    with pytest.MonkeyPatch.context() as patch, pytest.raises(raised):
        patch.setattr(api, "llama_decode", fail_later)
        patch.setattr(Product, "multiply", fail)
        model.forward([9] * 12, 0)
    check_holds_past(model)
