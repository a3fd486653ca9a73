"""The law of rollback: after a rewind, a recurrent model is as if it had never read the tokens.

For all strategies and families, in torch: the state, the convolution window and the attention
entries after any number of accepted tokens, and greedy decoding over many rounds; in llama.cpp,
which does not expose states, the logits after a rewind, for tiny random hybrids. Planted faults are
detected below.
"""

from contextlib import ExitStack, closing
from functools import cache
from itertools import cycle, product

import numpy as np
import pytest
from transformers.cache_utils import DynamicLayer

from data.models.convert import write_gguf
from specnb.decode.generate import generate
from specnb.draft.base import DrafterBase, Proposal
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm.gguf.model import GgufModel, PlaneRecorder, state_bytes
from specnb.lm.hf import engine as hf_engine
from specnb.lm.hf import record as hf_record
from specnb.lm.hf.engine import recurrent_layers
from specnb.lm.hf.files import quiet
from specnb.lm.hf.model import HfModel
from specnb.lm.rollback import FusedReplay
from specnb.machine import need_bytes
from tests.laws.faults import raising
from tests.tiny_hybrids import GGUFS, hybrid_folder
from tests.tiny_models import VOCAB, hf_model, torch_model

QWEN = "qwen35-grouped.gguf"
FORGETFUL = ("mamba", "falcon_mamba", "jamba")
SINGLE = ("zamba2", "nemotron_h")
"""Families for which transformers 5.23 clamps the time step in blocks, but not in single steps."""
FAMILIES = (
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "mamba2",
    "falcon_h1",
    "bamba",
    "granitemoehybrid",
    "lfm2",
)
FAMILIES += (*SINGLE, *FORGETFUL)
STRATEGIES = ("replay", "snapshots", "fused", "checkpoint", "recompute")
WAYS = {family: STRATEGIES[family in (*FORGETFUL, *SINGLE) :] for family in FAMILIES}
"""Strategies by family; replay needs a recurrence for blocks."""
WAYS |= {
    file: [way for way in STRATEGIES[1:] if way in (auto, *STRATEGIES[2:])]
    for file, auto in GGUFS.items()
}


def some_of(*, one_each=False):
    """Return all pairs of family and strategy. Only slow runs test all of them.

    By default, families other than qwen3_5_text and those of llama.cpp have one strategy
    (`one_each`) or none.
    """
    pairs = []
    for i, (family, ways) in enumerate(WAYS.items()):
        for j, way in enumerate(ways):
            by_default = family in ("qwen3_5_text", *GGUFS) or (one_each and j == i % len(ways))
            pairs.append(pytest.param(family, way, marks=() if by_default else pytest.mark.slow))
    return pairs


LLAMA_CLOSE = 2e-3
"""For logits with a spread of several units: llama.cpp has other kernels for single tokens."""
K = 6
IDS = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 64)]
CLOSE = 5e-4
"""Relative error by float32 rounding between blocks and single steps of these models (1e-4 at most,
also in the reference). A state that is one token off differs by more than 0.1."""


def opened(family, way="auto", **options):
    return hf_model(family, rollback=way, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The models of GGUFS as float32 files for llama.cpp."""
    folder = tmp_path_factory.mktemp("hybrids")
    with quiet():
        folders = {name: hybrid_folder(folder / name, name.removesuffix(".gguf")) for name in GGUFS}
        return {
            name: write_gguf(path, folder / f"{name}.f32", dtype="f32")
            for name, path in folders.items()
        }


@pytest.fixture(scope="module")
def llama(files):
    """Opens each combination of family, strategy and options once in llama.cpp."""
    with ExitStack() as models:

        @cache
        def open_once(family, way, **options):
            model = GgufModel.open(files[family], threads=1, kv="f32", rollback=way, **options)
            return models.enter_context(closing(model))

        yield open_once


@pytest.fixture
def opener(llama):
    """Opens a family in its engine."""
    return lambda family, way, **options: (llama if family in GGUFS else opened)(
        family, way, **options
    )


def state_of(model):
    """Return the whole state of the next forward pass, by name."""
    seen = {}
    for index, layer in recurrent_layers(model._engine.cache):
        for i in layer.conv_states:
            # while recording, the window is wider than the kernel
            if layer.conv_states[i] is not None:
                seen[f"{index}.conv{i}"] = layer.conv_states[i][..., -layer.conv_kernel_size[i] :]
            if layer.recurrent_states[i] is not None:
                seen[f"{index}.state{i}"] = layer.recurrent_states[i]
    for index, layer in enumerate(model._engine.cache.layers):
        if isinstance(layer, DynamicLayer):
            length = layer.get_seq_length()
            assert length == model._engine.n_held
            seen |= {
                f"{index}.keys": layer.keys[:, :, :length],
                f"{index}.values": layer.values[:, :, :length],
            }
    return {name: tensor.float().numpy().copy() for name, tensor in seen.items()}


def feed(model, *steps):
    """Reset, then feed each list of tokens and rewind by each int; return the remaining tokens."""
    model.reset()
    text = []
    for step in steps:
        if isinstance(step, int):
            model.rewind(step)
            text = text[: len(text) - step]
        else:
            model.forward(step)
            text = text + step
    return text


def apart(model, plain, text, n_prompt=9):
    """Compare a model with `plain`, which is fed the prompt as a block, then single tokens.

    Returns the relative differences of the states and of the next logits, by name; in llama.cpp the
    largest difference of the next logits.
    """
    feed(plain, text[:n_prompt], *([token] for token in text[n_prompt:]))
    assert model.n_past == plain.n_past
    if isinstance(model, GgufModel):
        return {
            "logits": max(
                np.abs(model.forward(ids) - plain.forward(ids)).max() for ids in ([4, 8], [15])
            )
        }
    if isinstance(model.rollback, FusedReplay):  # pending tokens are processed in the next pass
        for each in (model, plain):
            each.forward([9])
    found = state_of(model)
    expected = state_of(plain)
    assert found.keys() == expected.keys()
    found["logits"], expected["logits"] = model.forward([4, 8]), plain.forward([4, 8])
    return {
        name: np.linalg.norm(found[name] - values) / np.linalg.norm(values)
        for name, values in expected.items()
    }


def check_same(model, plain, text, n_prompt=9):
    found = apart(model, plain, text, n_prompt)
    assert max(found.values()) < (LLAMA_CLOSE if isinstance(model, GgufModel) else CLOSE), found


@pytest.mark.parametrize(("family", "way"), some_of(one_each=True))
def test_the_state_after_any_number_of_accepted_tokens_equals_plain_decoding(family, way, opener):
    model = opener(family, way)
    assert model.caps.rewind == way and (
        family not in GGUFS or opener(family, "auto").caps.rewind == GGUFS[family]
    )
    plain = opener(family, "recompute", n_ctx=500)
    # prompts longer and shorter than the window
    for n, accepted in [*product([9], range(K + 1)), *product([2], (0, 1, K))]:
        # the last token of the prompt is in the state before the first round, not before the second
        rounds = IDS[n : n + K], K - accepted, [IDS[40], *IDS[20 : 20 + K]], K - accepted
        check_same(model, plain, feed(model, IDS[:n], *rounds), n)


@pytest.mark.parametrize(("family", "way"), some_of())
def test_a_draft_model_rewinds_its_single_steps(family, way, opener):
    """Each round has several passes and one rewind. At the end, one more token is rewound."""
    model = opener(family, way)
    plain = opener(family, "recompute", n_ctx=500)
    drafts = [[token] for token in IDS[20 : 20 + K]]
    rounds = [step for accepted in (0, 2, K - 1) for step in (*drafts, K - accepted)]
    # the last rewind goes to before the boundary
    check_same(model, plain, feed(model, IDS[:9], *rounds, 1))


class Scripted(DrafterBase):
    """Drafts the target's continuation; the script sets the number of correct tokens per round."""

    name = "scripted"

    def __init__(self, truth, n_right):
        self._truth = truth
        self._script = cycle(n_right)

    def start(self, tokens):
        self._n_prompt = len(tokens)

    def propose(self, tokens, k, picker):
        wanted, right = next(self._script)
        ahead = self._truth[len(tokens) - self._n_prompt :][: min(k, wanted)]
        return Proposal(tuple(t if i < right else (t + 1) % VOCAB for i, t in enumerate(ahead)))


ROUNDS = [(6, 6), (6, 0), (0, 0), (4, 2), (6, 5), (1, 0), (6, 0), (6, 0), (1, 1), (3, 1)]
"""Drafted and correct tokens per round: all, none, no drafts, some. 15 of 36 draft tokens are
correct: 2.5 tokens per round."""


def decoded(model, drafter=None, *, tokens, k=K):
    return generate(model, IDS[:9], drafter=drafter, k=k, max_new_tokens=tokens, ignore_eog=True)


def check_decoding(model, *, tokens):
    """Check that speculative greedy decoding by ROUNDS gives the tokens of plain decoding."""
    truth = decoded(model, tokens=tokens).token_ids
    made = decoded(model, Scripted(truth, ROUNDS), tokens=tokens)
    assert made.token_ids == truth and 0 < made.accepted_tokens < made.total_draft_tokens
    return made


@pytest.mark.parametrize(("family", "way"), some_of())
def test_greedy_decoding_equals_plain_decoding(family, way, opener):
    model = opener(family, way, n_ctx=256)
    check_decoding(model, tokens=150 if family in GGUFS else 60)
    assert model.rollback.nbytes < 2**20
    if family in GGUFS:
        cost = model.rollback.cost
        assert (cost.recomputed == 0) == (way != "recompute")
        if way == "fused":
            assert cost.fused > 0 and cost.n_restored > 0
        if way == "snapshots":
            assert cost.taken_back > 0 and cost.refed <= K  # only the first round spans decodes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "way"), [(f, way) for f in WAYS for way in WAYS[f] if way != "recompute"]
)
def test_greedy_decoding_over_a_thousand_rounds(family, way, opener):
    model = opener(family, way, n_ctx=4096)
    assert (
        len(check_decoding(model, tokens=2600).rounds) >= 1000
        and model.rollback.cost.recomputed == 0
    )


@pytest.mark.parametrize(
    ("family", "way", "options", "least", "most"),
    [
        ("qwen3_5_text", "auto", {}, 1.0, 1.0),
        ("qwen3_5_text", "auto", {"seed": 5}, 0.0, 0.99),
        *((QWEN, way, {}, 0.9, 1.0) for way in ("snapshots", "fused", "checkpoint")),
    ],
)
def test_a_hybrid_draft_model_drafts_for_a_hybrid_target(family, way, options, least, most, opener):
    """Both models rewind, the draft model over single steps.

    If their weights are equal, nearly all draft tokens are accepted.
    """
    target = opener(family, "auto", n_ctx=256)
    draft = opener(family, way, n_ctx=400, **options)
    made = decoded(target, ModelDrafter(draft), tokens=60, k=4)
    assert draft.rollback.cost.recomputed == target.rollback.cost.recomputed == 0
    assert (
        made.token_ids == decoded(target, tokens=60).token_ids
        and least <= made.acceptance_rate <= most
    )


# --- planted faults, each a known bug -------------------------------------------------------------


right_take_back = hf_record.TorchRecorder.take_back


def left_ahead(part):
    """Roll back all but `part`: states (transformers' Cache.crop) or windows (llama.cpp 28120)."""

    def take_back(recorder, n):
        layers = [layer for _, layer in recurrent_layers(recorder._engine.cache)]
        ahead = [getattr(layer, part)[0].clone() for layer in layers]
        right_take_back(recorder, n)
        for layer, tensor in zip(layers, ahead, strict=True):
            getattr(layer, part)[0] = tensor

    return take_back


def off_by(n):
    """Return a rollback that keeps `n` tokens too many (too few if negative)."""

    def take_back(recorder, taken):
        right = recorder._state_at
        recorder._state_at = lambda index, base, kept: right(index, base, kept + n)
        right_take_back(recorder, taken)

    return take_back


def without_windows(saved, cache):
    for index, (_, states) in saved.layers.items():
        cache.layers[index].recurrent_states = {i: state.clone() for i, state in states.items()}


TAKE_BACKS = (left_ahead("recurrent_states"), left_ahead("conv_states"), off_by(-1), off_by(1))
FAULTS = [
    (way, hf_record.TorchRecorder, "take_back", f)
    for way in ("replay", "snapshots")
    for f in TAKE_BACKS
]
FAULTS += [
    (way, hf_engine.SavedState, "put_back", without_windows) for way in ("checkpoint", "fused")
]


@pytest.mark.parametrize(("way", "owner", "name", "fault"), FAULTS)
def test_a_wrong_state_or_window_is_detected(way, owner, name, fault, monkeypatch):
    model = opened("qwen3_5_text", way)
    plain = opened("qwen3_5_text", "recompute")
    monkeypatch.setattr(owner, name, fault)
    text = feed(model, IDS[:9], IDS[20 : 20 + K], K - 2)
    assert apart(model, plain, text)["logits"] > 0.1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (left_ahead("conv_states"), "does not restore the earlier state"),
        (raising(TypeError("a kernel takes other arguments now")), "fails: .*a kernel takes"),
    ],
)
def test_a_broken_strategy_is_not_used_and_leaves_no_changes(monkeypatch, fault, reason):
    net = torch_model("qwen3_5_text")
    plain = HfModel(net, None, name="plain", rollback="checkpoint").forward(IDS)
    before = listeners(net)
    with monkeypatch.context() as patch:
        patch.setattr(hf_record.ActivationRecorder, "take_back", fault)
        with pytest.raises(LoadError, match=f"replay {reason}"):
            HfModel(net, None, name="broken", rollback="replay")
        assert listeners(net) == before
        assert opened("qwen3_5_text").caps.rewind == "snapshots"  # the next exact strategy
    model = HfModel(net, None, name="m", rollback="replay")
    np.testing.assert_array_equal(model.forward(IDS), plain)  # recording changes no result
    with pytest.raises(InputError, match="already has a recorder"):
        HfModel(net, None, name="second", rollback="snapshots")
    model.close()
    assert listeners(net) == before


def listeners(net):
    return {name for name, module in net.named_modules() if "forward" in vars(module)}


@pytest.mark.parametrize("family", (*FORGETFUL, *SINGLE))
def test_families_without_a_recurrence_reject_replay_and_run_token_by_token(family):
    with pytest.raises(InputError, match="use rollback=snapshots"):
        opened(family, "replay")
    model = opened(family)
    assert model.caps.rewind == "snapshots" and "token by token" in model.caps.details["steps"]


@pytest.mark.parametrize(
    ("family", "way"),
    [("qwen3_5_text", way) for way in STRATEGIES] + [(QWEN, way) for way in STRATEGIES[2:]],
)
def test_an_interrupted_rollback_leaves_no_wrong_state(family, way, opener, monkeypatch):
    model = opener(family, way)
    plain = opener(family, "recompute", n_ctx=500)
    feed(model, IDS[:9], IDS[20:26])
    broken = (
        "take_back" if way in ("replay", "snapshots") else "feed" if way != "fused" else "restore"
    )
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        owner = model.rollback._recorder if broken == "take_back" else model._engine
        patch.setattr(owner, broken, raising(KeyboardInterrupt()))
        model.rewind(3)
    assert model.n_past == 0
    model.forward(IDS[:9])
    check_same(model, plain, IDS[:9])


@pytest.mark.parametrize("way", ["replay", "snapshots"])
def test_recordings_are_bounded_and_any_rollback_to_the_boundary_works(way):
    model = opened("qwen3_5_text", way, rollback_depth=4)
    plain = opened("qwen3_5_text", "recompute")
    few = opened("qwen3_5_text", way, rollback_depth=4)
    feed(few, IDS[:9], IDS[9:13])
    cut = ([IDS[20:50]], [[token] for token in IDS[20:50]], [IDS[20:22], IDS[22:50]])
    for pieces, back in product(cut, (3, 30)):
        feed(model, IDS[:9])
        for piece in pieces:
            model.forward(piece)
            assert model.rollback.nbytes <= 2 * few.rollback.nbytes
        model.rewind(back)
        check_same(model, plain, [*IDS[:9], *IDS[20 : 50 - back]])
        assert model.rollback.cost.recomputed == 0


def test_snapshots_that_do_not_fit_in_memory_are_not_used(monkeypatch):
    monkeypatch.setattr("specnb.machine.free_bytes", lambda _device: 2**40)
    assert opened("mamba", n_ctx=64).caps.rewind == "snapshots"
    monkeypatch.setattr("specnb.machine.free_bytes", lambda _device: 2**20)
    with pytest.raises(MemoryShortError, match="rollback=snapshots for mamba does not fit"):
        opened("mamba", "snapshots")


# --- llama.cpp: its snapshots, saved states, memory, closing and threads --------------------------


def test_drafts_beyond_the_snapshots_use_the_saved_state(llama):
    model = llama(QWEN, "snapshots", rollback_depth=3)
    plain = llama(QWEN, "recompute")
    check_same(model, plain, feed(model, IDS[:9], IDS[20:21], 0, IDS[21:30], 8))
    assert model.rollback.cost.recomputed == 0 and model.rollback.cost.n_restored == 1


def test_trusting_llama_cpp_about_its_rollback_range_is_detected(llama, files, monkeypatch):
    """For the whole last decode, seq_rm returns True, but the next logits are wrong."""
    model = llama(QWEN, "snapshots")
    plain = llama(QWEN, "recompute")
    monkeypatch.setattr(PlaneRecorder, "reach", property(lambda recorder: recorder.depth))
    assert apart(model, plain, feed(model, IDS[:9], IDS[20:24], 4))["logits"] > 0.5
    with pytest.raises(LoadError, match="no exact rollback: snapshots does not restore"):
        GgufModel.open(files[QWEN], threads=1, rollback="snapshots")
    with closing(GgufModel.open(files[QWEN], threads=1)) as other:
        assert other.caps.rewind == "fused"


def test_saved_states_do_not_outlive_a_reset(llama):
    """In a cleared context, a loaded saved state would silently lack its attention entries."""
    model = llama(QWEN, "checkpoint")
    plain = llama(QWEN, "recompute")
    feed(model, IDS[:9], IDS[9:12])
    check_same(model, plain, feed(model, IDS[30:33], 1))


def test_llama_cpp_uses_snapshots_only_if_their_memory_fits(files, monkeypatch):
    file = files[QWEN]
    model = GgufModel.open(file, threads=1, rollback="snapshots")
    model.forward(IDS[:9])  # an empty state has no size
    one = model._engine.state_bytes
    none, eight, sixteen = (state_bytes(model._model, 512, "f32", n) for n in (0, 8, 16))
    # an upper bound: all layers count as recurrent
    assert 16 * 0.8 * one < sixteen - none < 16 * 2 * one
    model.close()
    with pytest.raises(InputError, match="was closed"):
        str(model.rollback.nbytes)
    room = need_bytes(file.stat().st_size, eight)
    monkeypatch.setattr("specnb.machine.free_bytes", lambda _device: room)
    model = GgufModel.open(file, threads=1, kv="f32")
    assert model.caps.rewind == "fused"
    model.close()
    with pytest.raises(MemoryShortError, match="does not fit on cpu"):
        GgufModel.open(file, threads=1, kv="f32", rollback="snapshots")


def test_more_snapshots_than_llama_cpp_supports_are_rejected(files):
    with pytest.raises(
        InputError, match=r"rollback_depth is 24, but llama\.cpp fails on more than 16 for LFM2"
    ):
        GgufModel.open(files["lfm2.gguf"], threads=1, rollback_depth=24)
    for n_ctx in (2, 4, 17):  # too few tokens per batch for so many planes
        model = GgufModel.open(files["lfm2.gguf"], threads=1, n_ctx=n_ctx)
        assert np.isfinite(model.forward([3, 4])).all()
        model.close()


@pytest.mark.parametrize("family", GGUFS)
def test_results_are_bit_identical_if_the_thread_count_changes(files, family):
    """The number of threads follows the machine's load, so no result may depend on it."""
    first, second = (GgufModel.open(files[family], threads=1, kv="f32") for _ in range(2))
    with closing(first) as alone, closing(second) as paced:
        for at, n in enumerate((9, 1, 4, 1, 2)):
            paced._engine.set_threads(1 + at % 3)
            assert np.array_equal(alone.forward(IDS[:n]), paced.forward(IDS[:n])), f"{n} tokens"
            for model in (alone, paced):
                model.rewind(n // 2)
