"""The law of rollback: after a rewind, a recurrent model is as if it never had the tokens.

For all strategies and families, in torch: the state, the convolution window and the attention
entries after any number of accepted tokens, and greedy decoding over many rounds; in llama.cpp,
which does not expose states, the logits after a rewind, for tiny random hybrids. Planted faults are
detected below.
"""

from contextlib import ExitStack, closing
from functools import cache
from itertools import product

import numpy as np
import pytest
from transformers.cache_utils import DynamicLayer

from data.models.convert import write_gguf
from specnb.decode.generate import generate
from specnb.draft.base import DrafterBase, Picker, Proposal
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm.gguf.model import GgufModel, PlaneRecorder, state_bytes
from specnb.lm.hf import engine as hf_engine
from specnb.lm.hf import record as hf_record
from specnb.lm.hf.engine import KeptPastLayer, recurrent_layers
from specnb.lm.hf.files import quiet
from specnb.lm.hf.model import HfModel
from specnb.lm.rollback import FusedReplay
from specnb.machine import need_bytes
from specnb.records import Generation
from tests.tiny_hybrids import GGUFS, hybrid_folder
from tests.tiny_models import VOCAB, torch_model

QWEN = "qwen35-grouped.gguf"
FORGETFUL = ("mamba", "falcon_mamba", "jamba")
SINGLE = ("zamba2", "nemotron_h")
"""Families for which transformers 5.23 clamps the time step in blocks, but not in single steps."""
FAMILIES = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "mamba2", "falcon_h1", "bamba", "granitemoehybrid", "lfm2")
FAMILIES += (*SINGLE, *FORGETFUL)
STRATEGIES = ("replay", "snapshots", "fused", "checkpoint", "recompute")
PAIRS = [
    (family, way) for family in FAMILIES for way in STRATEGIES if way != "replay" or family not in (*FORGETFUL, *SINGLE)
]
LLAMA_PAIRS = [(f, way) for f in GGUFS for way in STRATEGIES[1:] if way != "snapshots" or GGUFS[f] == way]


def some_of(shift: int) -> list:
    """All pairs. By default, llama.cpp and qwen3_5_text, and one strategy per other family."""
    ways = {family: [way for of, way in PAIRS if of == family] for family in FAMILIES}
    default = {(family, of[(i + shift) % len(of)]) for i, (family, of) in enumerate(ways.items())}
    return LLAMA_PAIRS + [
        pytest.param(*pair, marks=() if pair in default or pair[0] == "qwen3_5_text" else pytest.mark.slow)
        for pair in PAIRS
    ]


LLAMA_CLOSE = 2e-3
"""For logits with a spread of several: llama.cpp's kernels for one and several tokens differ."""
K = 6
IDS = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 64)]
CLOSE = 5e-4
"""Relative error by float32 rounding between blocks and single steps of these models (1e-4 at most,
also in the reference). A state that is one token off differs by more than 0.1."""


def opened(family: str, way: str = "auto", *, seed: int = 0, n_ctx: int = 64, **options) -> HfModel:
    model = torch_model(family, seed=seed, max_position_embeddings=n_ctx)
    return HfModel(model, None, name=family, n_ctx=n_ctx, rollback=way, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The models of GGUFS as llama.cpp files."""
    folder = tmp_path_factory.mktemp("hybrids")
    with quiet():
        folders = {name: hybrid_folder(folder / name, name.removesuffix(".gguf")) for name in GGUFS}
        return {name: write_gguf(path, folder / f"{name}.f32", dtype="f32") for name, path in folders.items()}


@pytest.fixture(scope="module")
def llama(files):
    """Opens each family, strategy and options once in llama.cpp."""
    with ExitStack() as models:

        @cache
        def open_once(family, way, **options):
            model = GgufModel.open(files[family], threads=1, kv="f32", rollback=way, **options)
            return models.enter_context(closing(model))

        def emptied(family, way="auto", **options):
            open_once(family, way, **options).reset()
            return open_once(family, way, **options)

        yield emptied


@pytest.fixture
def opener(llama):
    """Opens a family in its engine."""
    return lambda family, way, **options: (llama if family in GGUFS else opened)(family, way, **options)


def state_of(model: HfModel) -> dict[str, np.ndarray]:
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
            own = isinstance(layer, KeptPastLayer)
            seen[f"{index}.keys"] = layer.keys[:, :, :length] if own else layer.keys
            seen[f"{index}.values"] = layer.values[:, :, :length] if own else layer.values
    return {name: tensor.float().numpy().copy() for name, tensor in seen.items()}


def apart(model: HfModel, plain: HfModel) -> dict[str, float]:
    """Return the relative differences of two states and of their logits, by name."""
    if isinstance(model.rollback, FusedReplay):  # pending tokens are processed in the next pass
        for each in (model, plain):
            each.forward([9])
    found, expected = state_of(model), state_of(plain)
    assert found.keys() == expected.keys()
    found["logits"], expected["logits"] = model.forward([4, 8]), plain.forward([4, 8])
    return {name: np.linalg.norm(found[name] - values) / np.linalg.norm(values) for name, values in expected.items()}


def check_same(model: HfModel | GgufModel, plain: HfModel | GgufModel) -> None:
    """Compare the states in torch, and the next logits in llama.cpp."""
    assert model.n_past == plain.n_past
    if isinstance(model, GgufModel):
        for ids in ([4, 8], [15]):
            np.testing.assert_allclose(model.forward(ids), plain.forward(ids), atol=LLAMA_CLOSE)
    else:
        found = apart(model, plain)
        assert max(found.values()) < CLOSE, found


def check_rounds(model, plain) -> None:
    """Two rounds, all numbers of accepted tokens; prompts shorter and longer than the window."""
    for prompt, accepted in product((2, 9), range(K + 1)):
        for each in (model, plain):
            each.reset()
            each.forward(IDS[:prompt])
        # first round: the prompt's last token is already in the state
        model.forward(IDS[prompt : prompt + K])
        model.rewind(K - accepted)
        again = [IDS[40], *IDS[20 : 20 + K]]
        model.forward(again)
        model.rewind(K - accepted)
        for token in (*IDS[prompt : prompt + accepted], *again[: accepted + 1]):
            plain.forward([token])
        check_same(model, plain)


def check_single_steps(model, plain) -> None:
    """As in ModelDrafter: several passes per round, a rewind, and a rewind of an earlier token."""
    for each in (model, plain):
        each.forward(IDS[:9])
    for accepted in (0, 2, K - 1):
        for token in IDS[20 : 20 + K]:
            model.forward([token])
        model.rewind(K - accepted)
        for token in IDS[20 : 20 + accepted]:
            plain.forward([token])
    for each in (model, plain):
        each.rewind(1)  # before the boundary: no pass since
    check_same(model, plain)


def interrupted(*_args) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("family", "way"), some_of(0))
def test_the_state_after_any_number_of_accepted_tokens_equals_plain_decoding(family, way, opener):
    model = opener(family, way)
    assert model.caps.rewind == way and (family not in GGUFS or opener(family, "auto").caps.rewind == GGUFS[family])
    check_rounds(model, opener(family, "recompute", n_ctx=500))


@pytest.mark.parametrize(("family", "way"), some_of(1))
def test_a_draft_model_rewinds_its_single_steps(family, way, opener):
    check_single_steps(opener(family, way), opener(family, "recompute", n_ctx=500))


class Scripted(DrafterBase):
    """Drafts the target's continuation; the script sets the number of correct tokens per round."""

    name, vocab = "scripted", None

    def __init__(self, truth: list[int], n_right: list[tuple[int, int]]) -> None:
        self._truth, self._script, self._round = truth, n_right, 0

    def start(self, tokens) -> None:
        self._prompt = len(tokens)

    def propose(self, tokens, k: int, picker: Picker) -> Proposal:
        wanted, right = self._script[self._round % len(self._script)]
        self._round += 1
        at = len(tokens) - self._prompt
        ahead = self._truth[at : at + min(k, wanted)]
        return Proposal(tuple(t if i < right else (t + 1) % VOCAB for i, t in enumerate(ahead)))

    def commit(self, tokens) -> None: ...

    def close(self) -> None: ...


ROUNDS = [(6, 6), (6, 0), (0, 0), (4, 2), (6, 5), (1, 0), (6, 0), (6, 0), (1, 1), (3, 1)]
"""Drafted and correct tokens per round: all, none, no drafts, some. 15 of 36 draft tokens are
correct: 2.5 tokens per round."""


def decoded(model, drafter=None, *, tokens: int, k: int = K) -> Generation:
    return generate(model, IDS[:9], drafter=drafter, k=k, max_new_tokens=tokens, ignore_eog=True)


def check_decoding(model, *, tokens: int) -> Generation:
    """Check that speculative greedy decoding by ROUNDS gives the tokens of plain decoding."""
    truth = decoded(model, tokens=tokens).token_ids
    made = decoded(model, Scripted(truth, ROUNDS), tokens=tokens)
    assert made.token_ids == truth and 0 < made.accepted_tokens < made.total_draft_tokens
    return made


@pytest.mark.parametrize(("family", "way"), some_of(2))
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
@pytest.mark.parametrize(("family", "way"), [pair for pair in (*PAIRS, *LLAMA_PAIRS) if pair[1] != "recompute"])
def test_greedy_decoding_over_a_thousand_rounds(family, way, opener):
    model = opener(family, way, n_ctx=4096)
    assert len(check_decoding(model, tokens=2600).rounds) >= 1000 and model.rollback.cost.recomputed == 0


@pytest.mark.parametrize(
    ("family", "way", "least"),
    [("qwen3_5_text", "auto", 1.0), *((QWEN, way, 0.9) for way in ("snapshots", "fused", "checkpoint"))],
)
def test_a_hybrid_draft_model_drafts_for_a_hybrid_target(family, way, least, opener):
    """Both models rewind, the draft model over single steps; nearly all drafts are accepted."""
    target, twin = opener(family, "auto", n_ctx=256), opener(family, way, n_ctx=400)
    truth = decoded(target, tokens=60).token_ids
    drafts = [(twin, True), *([(opened(family, n_ctx=256, seed=5), False)] if family not in GGUFS else [])]
    for draft, same_weights in drafts:
        made = decoded(target, ModelDrafter(draft), tokens=60, k=4)
        assert made.token_ids == truth and (made.acceptance_rate >= least) == same_weights
        assert draft.rollback.cost.recomputed == target.rollback.cost.recomputed == 0


# --- planted faults, each a known mistake ---------------------------------------------------------


def left_ahead(part: str):
    """Roll back all but `part`: states (transformers' Cache.crop) or windows (llama.cpp 28120)."""

    def take_back(recorder, n: int) -> None:
        layers = [layer for _, layer in recurrent_layers(recorder._engine.cache)]
        ahead = [getattr(layer, part)[0].clone() for layer in layers]
        hf_record.TorchRecorder.take_back(recorder, n)
        for layer, tensor in zip(layers, ahead, strict=True):
            getattr(layer, part)[0] = tensor

    return take_back


def off_by(n: int):
    """Return a replay of one token too few, or too many."""

    def take_back(recorder, taken: int) -> None:
        right = recorder._state_at
        recorder._state_at = lambda index, base, kept: right(index, base, kept + n)
        hf_record.TorchRecorder.take_back(recorder, taken)

    return take_back


def check_fault_is_seen(model: HfModel, plain: HfModel) -> None:
    for each in (model, plain):
        each.forward(IDS[:9])
    model.forward(IDS[20 : 20 + K])
    model.rewind(K - 2)
    plain.forward(IDS[20:22])
    assert apart(model, plain)["logits"] > 0.1


@pytest.mark.parametrize("way", ["replay", "snapshots"])
@pytest.mark.parametrize("fault", [left_ahead("recurrent_states"), left_ahead("conv_states"), off_by(-1), off_by(1)])
def test_a_wrong_state_or_window_is_detected(way, fault):
    model, plain = opened("qwen3_5_text", way), opened("qwen3_5_text", "recompute")
    model.rollback._recorder.take_back = lambda n: fault(model.rollback._recorder, n)
    check_fault_is_seen(model, plain)


@pytest.mark.parametrize("way", ["checkpoint", "fused"])
def test_a_checkpoint_without_windows_is_detected(way, monkeypatch):
    model, plain = opened("qwen3_5_text", way), opened("qwen3_5_text", "recompute")

    def put_back(saved, cache) -> None:
        for index, (_, states) in saved.layers.items():
            cache.layers[index].recurrent_states = {i: state.clone() for i, state in states.items()}

    monkeypatch.setattr(hf_engine.SavedState, "put_back", put_back)
    check_fault_is_seen(model, plain)


def changed(*_args) -> None:
    raise TypeError("a kernel takes other arguments now")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (left_ahead("conv_states"), "does not restore the earlier state"),
        (changed, "fails: .*a kernel takes"),
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


def listeners(net) -> set[str]:
    return {name for name, module in net.named_modules() if "forward" in vars(module)}


@pytest.mark.parametrize("family", (*FORGETFUL, *SINGLE))
def test_replay_rejects_a_family_without_a_recurrence_and_auto_runs_token_by_token(family):
    with pytest.raises(InputError, match="use rollback=snapshots"):
        opened(family, "replay")
    model = opened(family)
    assert model.caps.rewind == "snapshots" and "token by token" in model.caps.details["steps"]


@pytest.mark.parametrize(
    ("family", "way"),
    [("qwen3_5_text", way) for way in STRATEGIES] + [(QWEN, way) for way in STRATEGIES[2:]],
)
def test_an_interrupted_rollback_leaves_no_wrong_state(family, way, opener, monkeypatch):
    model, plain = opener(family, way), opener(family, "recompute", n_ctx=500)
    model.forward(IDS[:9])
    model.forward(IDS[20:26])
    broken = "take_back" if way in ("replay", "snapshots") else "feed" if way != "fused" else "restore"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model.rollback._recorder if broken == "take_back" else model._engine, broken, interrupted)
        model.rewind(3)
    assert model.n_past == 0
    for each in (model, plain):
        each.forward(IDS[:9])
    check_same(model, plain)


@pytest.mark.parametrize("way", ["replay", "snapshots"])
def test_recordings_are_bounded_and_the_boundary_stays_in_reach(way):
    model, plain = opened("qwen3_5_text", way, rollback_depth=4), opened("qwen3_5_text", "recompute")
    few = opened("qwen3_5_text", way, rollback_depth=4)
    few.forward(IDS[:9])
    few.forward(IDS[9:13])
    for pieces in ([IDS[20:50]], [[token] for token in IDS[20:50]], [IDS[20:22], IDS[22:50]]):
        for back in (3, 30):
            for each in (model, plain):
                each.reset()
                each.forward(IDS[:9])
            for piece in pieces:
                model.forward(piece)
                assert model.rollback.nbytes <= 2 * few.rollback.nbytes
            model.rewind(back)
            if back < 30:
                plain.forward(IDS[20 : 50 - back])
            check_same(model, plain)
            assert model.rollback.cost.recomputed == 0


def test_snapshots_that_do_not_fit_in_memory_are_not_used(monkeypatch):
    monkeypatch.setattr("specnb.machine.free_bytes", lambda _device: 2**40)
    assert opened("mamba", n_ctx=64).caps.rewind == "snapshots"
    monkeypatch.setattr("specnb.machine.free_bytes", lambda _device: 2**20)
    with pytest.raises(MemoryShortError, match="rollback=snapshots for mamba does not fit"):
        opened("mamba", "snapshots")


# --- llama.cpp: its snapshots, saved states, memory, closing and threads ------------------------------------------


def test_drafts_beyond_the_snapshots_use_the_saved_state(llama):
    model, plain = llama(QWEN, "snapshots", rollback_depth=3), llama(QWEN, "recompute")
    for each in (model, plain):
        each.forward(IDS[:9])
    model.forward(IDS[20:21])
    model.rewind(0)
    model.forward(IDS[21:30])
    model.rewind(8)
    plain.forward(IDS[20:22])
    check_same(model, plain)
    assert model.rollback.cost.recomputed == 0 and model.rollback.cost.n_restored == 1


def test_a_reach_that_trusts_llama_cpp_is_detected_and_opens_no_model(llama, files, monkeypatch):
    """Planted fault: seq_rm returns True for the whole last decode, and the logits are wrong."""
    model, plain = llama(QWEN, "snapshots"), llama(QWEN, "recompute")
    monkeypatch.setattr(PlaneRecorder, "reach", property(lambda recorder: recorder.depth))
    for each in (model, plain):
        each.forward(IDS[:9])
    model.forward(IDS[20:24])
    model.rewind(4)
    assert np.abs(model.forward([4, 8]) - plain.forward([4, 8])).max() > 0.5
    with pytest.raises(LoadError, match="no exact rollback: snapshots does not restore"):
        GgufModel.open(files[QWEN], threads=1, rollback="snapshots")
    other = GgufModel.open(files[QWEN], threads=1)
    assert other.caps.rewind == "fused"
    other.close()


def test_saved_states_do_not_outlive_a_reset(llama):
    """A saved state loaded into a cleared context silently lacks its attention entries."""
    model, plain = llama(QWEN, "checkpoint"), llama(QWEN, "recompute")
    model.forward(IDS[:9])
    model.forward(IDS[9:12])
    model.reset()
    for each in (model, plain):
        each.forward(IDS[30:33])
        each.rewind(1)
    check_same(model, plain)


def test_memory_for_snapshots_is_checked_and_they_are_dropped_if_it_is_short(files, monkeypatch):
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
    with pytest.raises(InputError, match=r"rollback_depth is 24, but llama\.cpp fails on more than 16 for LFM2"):
        GgufModel.open(files["lfm2.gguf"], threads=1, rollback_depth=24)
    for n_ctx in (2, 4, 17):  # too few tokens per batch for so many planes
        model = GgufModel.open(files["lfm2.gguf"], threads=1, n_ctx=n_ctx)
        assert np.isfinite(model.forward([3, 4])).all()
        model.close()


@pytest.mark.parametrize("family", GGUFS)
def test_the_number_of_threads_changes_no_bit_and_may_change_between_passes(files, family):
    """The number of threads follows the machine's load, so no result may depend on it."""
    alone, paced = (GgufModel.open(files[family], threads=1, kv="f32") for _ in range(2))
    try:
        for at, n in enumerate((9, 1, 4, 1, 2)):
            paced._engine.set_threads(1 + at % 3)
            assert np.array_equal(alone.forward(IDS[:n]), paced.forward(IDS[:n])), f"{n} tokens"
            for model in (alone, paced):
                model.rewind(n // 2)
    finally:
        for model in (alone, paced):
            model.close()
