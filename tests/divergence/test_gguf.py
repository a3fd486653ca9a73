"""A capture of llama.cpp changes nothing, sees what its graph really computes, and shows a fault where it is."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from specnb.divergence.capture import gguf as gguf_capture
from specnb.divergence.capture.gguf import capture_gguf
from specnb.divergence.offline import compare
from specnb.errors import InputError, LoadError
from specnb.lm.gguf import tensors as gguf_tensors
from specnb.lm.load import load
from tests.tiny_models import (
    VOCAB,
    WIDTH,
    _finish,
    _random,
    _writer,
    llama_gguf,
    mamba_gguf,
    sentencepiece_tokens,
)

TEXT = (4, 9, 6, 7, 8, 11, 5, 10, 12, 30)
ONE = np.ones(WIDTH, np.float32)
WHERE = ["step", "module", "call", "role", "name"]


def moe_gguf(path):
    """A llama of two layers with 4 experts, 2 a token."""
    out = _writer(path, "llama", 64, sentencepiece_tokens())
    out.add_head_count(4)
    out.add_head_count_kv(1)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(8)
    out.add_expert_count(4)
    out.add_expert_used_count(2)
    made = _random(0)
    tensors = {"token_embd.weight": made(VOCAB, WIDTH), "output_norm.weight": ONE, "output.weight": made(VOCAB, WIDTH)}
    shapes = {"attn_q": (32, 32), "attn_k": (8, 32), "attn_v": (8, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate_inp": (4, 32), "ffn_gate_exps": (4, 48, 32), "ffn_up_exps": (4, 48, 32)}
    shapes |= {"ffn_down_exps": (4, 32, 48)}
    for layer in range(2):
        tensors |= {f"blk.{layer}.{name}.weight": made(*shape) for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": ONE for name in ("attn_norm", "ffn_norm")}
    return _finish(out, tensors, path)


MAKERS = {"llama": llama_gguf, "mamba": mamba_gguf, "moe": moe_gguf}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return {name: str(make(folder / f"{name}.gguf")) for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def llama(files):
    return files["llama"]


def forwards(model, widths=(6, 1, 3)):
    """The logits of the text in forwards of these widths; of each the last two rows."""
    logits, at = [], 0
    for width in widths:
        logits.append(model.forward(TEXT[at : at + width], min(2, width)))
        at += width
    return logits


def traced(file, run=forwards, **options):
    with capture_gguf(file, **({"threads": 1} | options)) as captured:
        run(captured.model)
    return captured.builder.trace()


def first_difference(sound, wrong, role="out"):
    """Module, name and step of the first tensor of another digest, in the order of time."""
    pairs = sound.rows(role=role).merge(wrong.rows(role=role), on=WHERE, suffixes=("", "_wrong"))
    parted = pairs[pairs["digest"] != pairs["digest_wrong"]].sort_values("order")
    return tuple(parted[["module", "name", "step"]].iloc[0]) if len(parted) else None


def full_of(trace, module, role="out", name="out", step=0, call=0):
    (row,) = trace.rows(module=module, role=role, name=name, step=step, call=call)["row"]
    return trace.array(row, "full")


def test_a_capture_changes_no_bit_of_the_logits(files):
    settings = [(kind, {}) for kind in files] + [("llama", {"flash_attention": True}), ("llama", {"fixed_width": 4})]
    for kind, options in settings:
        with closing(load(files[kind], threads=1, **options)) as model:
            plain = forwards(model)
        with capture_gguf(files[kind], threads=1, full="", **options) as captured:
            seen = forwards(captured.model)
        assert all(np.array_equal(a, b) for a, b in zip(plain, seen, strict=True)), (kind, options)


def test_facts_say_what_was_fed_and_seen(llama):
    facts = traced(llama, fixed_width=4).facts
    steps = [(s["first_position"], s["token_ids"], s["padding"]) for s in facts["steps"]]
    assert steps == [(0, [*TEXT[:6]], 0), (6, [TEXT[6]] * 4, 3), (7, [*TEXT[7:10], TEXT[9]], 1)]
    assert facts["engine"] == "llama.cpp" and facts["ggml"] and "unread" not in facts
    assert facts["modules"]["hooked"] == facts["modules"]["written"] == 38


def test_what_is_written_down_is_what_the_model_computes(llama):
    """Attention and logits made again with numpy from what the trace holds."""
    with capture_gguf(llama, threads=1, full="") as captured:
        captured.model.forward(TEXT[:6])
        logits = captured.model.forward(TEXT[6:])
    trace = captured.builder.trace()

    def of(module, *where, call=0):
        return full_of(trace, module, *where, step=1, call=call)

    q, keys, values = (
        of("layers.1.Qcur", call=1),
        of("layers.1.kq", "state", "keys"),
        of("layers.1.kqv", "state", "values"),
    )
    assert q.shape == (4, 4, 8) and keys.shape == values.shape == (2, 10, 8)
    assert np.array_equal(of("layers.1.Kcur", call=1), keys[:, 6:].swapaxes(0, 1))
    scores = np.einsum("thd,hcd->thc", q, keys.repeat(2, 0))
    np.testing.assert_allclose(of("layers.1.kq"), scores, atol=1e-4)
    visible = np.arange(10) <= np.arange(6, 10)[:, None, None]
    weights = np.exp(scores / np.sqrt(8)) * visible
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(of("layers.1.kq_soft_max"), weights, atol=1e-4)
    np.testing.assert_allclose(of("layers.1.kqv"), np.einsum("thc,hcd->thd", weights, values.repeat(2, 0)), atol=1e-4)
    assert np.array_equal(of("layers.1.kqv_out").reshape(4, 4, 8), of("layers.1.kqv"))
    assert np.array_equal(of("result_output")[-len(logits) :], logits)
    assert np.array_equal(of("embd", "in", "inp_tokens"), TEXT[6:])
    assert np.array_equal(of("layers.1.Qcur", "in", "inp_pos", call=1), range(6, 10))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("flash", [False, True])
def test_a_tensor_has_one_shape_whatever_the_number_of_tokens(kind, flash, files):
    """Widths that are also the number of heads, of key heads, of experts, of features included."""
    shapes = {}
    for width in (*range(1, 9), 16, 32):
        with capture_gguf(files[kind], threads=1, flash_attention=flash) as captured:
            captured.model.forward([5, 6])
            captured.model.forward([4 + i % 20 for i in range(width)])
        for row in captured.builder.trace().rows(step=1).itertuples():
            where, cells = (row.module, row.call, row.role, row.name), 2 + width
            if row.name == "rs_s_copy" or (row.module.endswith(("ssm_conv1d", "ssm_scan")) and row.token_axis < 0):
                continue  # which state of which sequence; a state lies with its tokens in one tensor
            if row.role == "state":
                assert (row.token_axis, row.shape[1], row.first_position) == (1, cells, 0), (width, row)
                continue
            assert (row.token_axis, row.shape[0], row.first_position) == (0, width, 2), (width, row)
            shape = row.shape[1:]
            if "kq_" in row.name or (row.role == "out" and row.module.endswith(("kq", "kq_soft_max"))):
                assert shape[-1] == cells, (width, row)
                shape = shape[:-1]
            assert shapes.setdefault(where, shape) == shape, (width, row)


def test_the_last_layer_goes_on_with_the_rows_that_are_asked_for(llama):
    def run(model):
        model.forward(TEXT[:2])
        model.forward(TEXT[2:9], 3)

    trace = traced(llama, run)
    placed = trace.rows(step=1, role="out").set_index(["module", "call"])
    for module, length, first in (("layers.1.attn_out", 7, 2), ("layers.1.ffn_out", 3, 6), ("result_output", 3, 6)):
        row = placed.loc[module, 0]
        assert (row["shape"][0], row["first_position"]) == (length, first)
        assert trace.array(row["row"], "token_l2").shape == (length,)
    found = compare(trace, traced(llama, run))
    assert found.verdict == "SOUND" and "result_output:out:out" not in found.coverage.left_out


def test_tokens_that_fill_up_a_step_are_not_compared(llama):
    found = compare(traced(llama), traced(llama, fixed_width=4))
    assert found.fork is None and found.coverage.tokens == len(TEXT) and found.verdict == "PRECISION_ONLY"


def test_experts_are_seen(files):
    trace = traced(files["moe"], full="moe_topk|moe_probs")
    chosen, shares = (full_of(trace, f"layers.0.ffn_moe_{name}") for name in ("topk", "probs"))
    assert np.array_equal(chosen, np.argsort(-shares, axis=1)[:, : chosen.shape[1]]) and chosen.shape == (6, 2)
    summed = trace.rows(module="layers.0.ffn_moe_out", role="in", step=0)
    assert set(summed["name"]) == {"layers.0.ffn_moe_weighted", "layers.0.ffn_moe_weighted.1"}  # one view an expert
    read = trace.params[trace.params["owner_path"] == "blk.0.ffn_gate_exps.weight"]
    assert set(read["module"]) == {"layers.0.ffn_moe_gate"} and set(read["owner"]) == {"draft"}


def test_weights_are_told_by_the_bytes_that_were_read(llama, tmp_path, monkeypatch):
    trace = traced(llama)
    assert set(trace.params["owner"]) == {"draft"} and set(trace.params["dtype"]) == {"f32"}
    assert len(set(trace.params["owner_path"])) == len(set(trace.params["object_id"])) == 3 + 2 * 9
    other = with_another(llama, "blk.1.ffn_down.weight", tmp_path / "other.gguf")
    monkeypatch.setattr(gguf_capture, "StoredWeights", lambda path: gguf_tensors.StoredWeights(other))
    told = traced(llama)
    foreign = told.params[told.params["owner"] == "?"]
    assert set(foreign["owner_path"]) == {"blk.1.ffn_down.weight"} and len(foreign) == 3
    assert told.params["digest"].equals(trace.params["digest"])


def with_another(file, name, to):
    """A copy of the file in which one value of a weight is another."""
    stored = gguf_tensors.StoredWeights(Path(file))
    data = bytearray(Path(file).read_bytes())
    place = bytes(data).index(bytes(stored.find(name)))
    data[place + 2] ^= 1
    to.write_bytes(data)
    return to


def test_a_node_that_reads_another_layers_weight_is_named_with_it(llama, monkeypatch):
    """An identity fault: the operation of layer 1 is given layer 0's matrix, all names of the model being right."""
    sound, found, wanted = traced(llama), {}, gguf_capture.NodeBuilder.wanted

    def swapped(self, node):
        if node.name == "ffn_out-0":
            found["matrix"] = node.sources[0].address
        if node.name == "ffn_out-1":
            node._raw.src[0] = found["matrix"]
        return wanted(self, node)

    monkeypatch.setattr(gguf_capture.NodeBuilder, "wanted", swapped)
    wrong = traced(llama)
    assert first_difference(sound, wrong) == ("layers.1.ffn_out", "out", 0)
    assert set(wrong.params[wrong.params["module"] == "layers.1.ffn_out"]["owner_path"]) == {"blk.0.ffn_down.weight"}


@pytest.mark.parametrize("wrong", [{"modules": "layers.(0"}, {"full": "*"}, {"backend": "hf"}], ids=str)
def test_what_cannot_be_captured_is_refused_at_once(llama, wrong):
    with pytest.raises(InputError), capture_gguf(llama, **wrong):
        pass


def test_tensors_of_another_size_are_one_clear_error(monkeypatch):
    monkeypatch.setattr(gguf_tensors, "OBJECT_BYTES", 40)
    with pytest.raises(LoadError, match="lays tensors"):
        gguf_tensors.ggml.__wrapped__()
