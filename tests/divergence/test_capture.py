"""Captures change nothing, record every call, and identify whose weights an operation read."""

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from specnb.divergence.capture import capture
from specnb.divergence.capture.tensors import digest_tensor
from specnb.divergence.pair import make
from specnb.divergence.trace import Alignment, Key, ModuleTrace
from specnb.errors import InputError
from tests.tiny_models import torch_model

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])


@pytest.fixture(scope="module")
def moe():
    return make("draft")


@pytest.fixture
def llama():
    return torch_model(tie_word_embeddings=True).eval()


@torch.no_grad()
def generate(model, prompt=PROMPT, steps=3):
    """Return the logits of the prompt and of `steps` further tokens, with a cache."""
    out = model(prompt, use_cache=True)
    logits = [out.logits]
    for token in range(7, 7 + steps):
        ids = torch.full((len(prompt), 1), token)
        out = model(ids, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return logits


def traced(model, run=generate, **options):
    with capture(model, **options) as builder:
        run(model)
    return builder.trace()


def prefill(model):
    generate(model, steps=0)


# --- recorded tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [make("draft"), torch_model().to(torch.bfloat16).eval()], ids=["moe", "llama"]
)
def test_logits_during_and_after_a_capture_are_bit_identical(model):
    plain = generate(model)
    with capture(model):
        seen = generate(model)
    for logits in (seen, generate(model)):
        assert all(torch.equal(a, b) for a, b in zip(plain, logits, strict=True))


def test_operands_have_the_names_and_order_of_the_signature(moe):
    first = traced(moe, states=True).rows(step=1)
    for module, role, names in (
        ("layers.0.mlp.experts", "in", ["hidden_states", "router_indices", "routing_weights"]),
        ("layers.0.mlp.router", "out", ["out", "out.1", "out.2"]),
        ("layers.0.self_attn", "state", ["keys", "values"]),
    ):
        rows = first[(first["module"] == module) & (first["role"] == role)]
        assert rows["name"].tolist() == names


def test_a_digest_depends_on_values_dtype_and_shape_not_on_memory_layout():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    others = (x.flip(0), x.reshape(8, 6), x.view(torch.int32), x.double())
    assert digest_tensor(x) not in map(digest_tensor, others)
    assert digest_tensor(torch.zeros(2)) != digest_tensor(-torch.zeros(2))
    for strided in (x.t(), x[:, ::2]):
        assert digest_tensor(strided) == digest_tensor(strided.contiguous())


def test_tensors_are_aligned_along_the_text(moe):
    trace = traced(moe, lambda model: generate(model, torch.arange(17)[None]), states=True)
    whole = Alignment(trace).whole
    for module, axis, shape in (
        ("layers.1", 1, (20, 1, 64)),
        ("layers.1.mlp.experts", 0, (20, 64)),
    ):
        tensor = whole[Key(module, 0, "out", "out")]
        assert (tensor.axis, tensor.values.shape, len(tensor.gaps)) == (axis, shape, 0)
    keys = trace.rows(step=2, role="state", name="keys").set_index("module")["shape"]
    assert keys["layers.1.self_attn"] == (1, 2, 19, 16)
    assert keys["layers.0.self_attn"] == (1, 2, 15, 16)  # the sliding layer has dropped four
    assert [s["token_ids"] for s in trace.facts["steps"]] == [list(range(17)), [7], [8], [9]]


class Writes(nn.Module):
    """Changes its input in place, without changing its version counter."""

    def forward(self, x):
        x.data[1] = 9
        return x


def test_tensors_are_recorded_as_they_were_at_the_hook():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    trace = traced(nn.Sequential(nn.Identity(), Writes()), lambda model: model(x))
    given = trace.rows(module="0", role="out")["digest"].item()
    assert given == digest_tensor(before)
    assert torch.equal(torch.from_numpy(trace.arrays[given]), before)
    wrote = trace.rows(module="1", role="out")["digest"].item()
    assert trace.arrays[wrote].max() == 9


@dataclass
class Answer:
    states: torch.Tensor
    more: dict


class Nested(nn.Module):
    def forward(self, x, *rest, pair, scale=1.0, **kwargs):
        return Answer(x + pair[1]["b"], {"k": (rest[0], [kwargs["extra"]])})


def test_nested_arguments_and_outputs_have_dotted_names():
    x = torch.ones(2, 3)

    trace = traced(
        Nested(), lambda model: model(x, x * 2, pair=(x, {"b": x}), scale=0.5, extra=x * 3)
    )
    for role, names in (
        ("in", "x rest.0 pair.0 pair.1.b extra"),
        ("out", "out.states out.more.k.0 out.more.k.1.0"),
    ):
        assert trace.rows(role=role)["name"].tolist() == names.split()
    inner = nn.Linear(4, 4)
    twice = traced(nn.Sequential(inner, inner), lambda m: [m(torch.ones(2, 4)) for _ in range(2)])
    calls = twice.rows(module="0", role="in")[["step", "call"]]
    assert calls.values.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert len(twice.params) == 8  # weight and bias of each call


# --- owners of weights ----------------------------------------------------------------------------


def test_unknown_weights_are_digested_and_freed_and_tied_ones_share_a_path(llama):
    layer = llama.model.layers[1].mlp.up_proj
    other = nn.Parameter(torch.randn(48, 32))
    expected = digest_tensor(other)
    gone = weakref.ref(other)
    own = layer.weight
    with capture(llama) as builder:
        layer.weight = other
        prefill(llama)
        layer.weight = own
        del other
        assert gone() is None  # weights that are loaded for one call must not accumulate
    used = builder.trace().params.set_index("module")
    row = used.loc["layers.1.mlp.up_proj"]
    assert (row["owner"], row["owner_path"], row["digest"]) == ("?", "?", expected)
    assert used.loc["lm_head", "owner_path"] == used.loc["embed_tokens", "owner_path"]


def test_a_modified_weight_keeps_its_owner_and_gets_a_new_digest():
    def exchange(w):
        w.data = 3 * w.data

    model = nn.Linear(64, 64)
    x = torch.ones(1, 64)
    with capture(model) as builder, torch.no_grad():
        for change in (torch.clone, lambda w: w.mul_(2), lambda w: w.data.add_(1), exchange):
            change(model.weight)
            model(x)
        model.to(torch.float64)(x.double())
    params = builder.trace().params
    digests = params.groupby("owner_path")["digest"].nunique()
    assert set(params["owner"]) == {"draft"} and dict(digests) == {"weight": 5, "bias": 2}
    assert params["digest"].iloc[-1] in {digest_tensor(weight) for weight in model.parameters()}


# --- errors ---------------------------------------------------------------------------------------


class Fails(nn.Module):
    def forward(self, x):
        if x.isnan().any():
            raise ValueError("the forward fails")
        return x


def test_errors_remove_the_hooks_and_do_not_shift_later_steps(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Fails())
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="outside"), capture(model, tmp_path / "trace"):
        model(x)
        with pytest.raises(ValueError):
            model(x * torch.nan)
        model(x)
        raise RuntimeError("outside")
    trace = ModuleTrace.load(tmp_path / "trace")
    assert len(trace.rows(module="0", role="in")) == 3
    assert trace.rows(module="", role="out")["step"].tolist() == [0, 2]
    for module in model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks)
    assert "forward" not in vars(model)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_compiled_model_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    inside = nn.Sequential(nn.Linear(2, 2))
    inside[0].compile(backend="eager")
    for compiled in (torch.compile(model, backend="eager"), inside):
        with pytest.raises(InputError), capture(compiled):
            pass
    assert not inside[0]._forward_hooks


# --- steps and the token axis ---------------------------------------------------------------------


class Engine(nn.Module):
    """A model as engines run it: no batch axis, explicit positions, the head outside of forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mlp = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids, positions):
        return self.mlp(self.embed(input_ids))


@pytest.mark.parametrize("how", ["__call__", "forward"])
def test_each_call_of_the_model_or_of_its_forward_is_one_step(how):
    engine = Engine()
    with capture(engine) as builder:
        for start, end in ((0, 5), (5, 6), (6, 7)):
            tokens = torch.arange(start, end)
            engine.head(getattr(engine, how)(tokens, tokens)[-1:])
    trace = builder.trace()
    steps = [(step["length"], step["first_position"]) for step in trace.facts["steps"]]
    assert steps == [(5, 0), (1, 5), (1, 6)]
    heads = Alignment(trace).whole[Key("head", 0, "out", "out")]
    assert heads.values.shape == (7, 20) and heads.gaps.tolist() == [0, 1, 2, 3]
    assert trace.rows(module="head", role="out")["step"].tolist() == [0, 1, 2]
    assert not trace.facts["modules"]["never_called"]
    assert "forward" not in vars(engine)


class Heads(nn.Module):
    """Splits features into two heads; their axis comes before or after the token axis."""

    def __init__(self, transposed):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.transposed = transposed

    def forward(self, hidden_states):
        heads = hidden_states.view(1, -1, 2, 3)
        return self.norm(heads.transpose(1, 2) if self.transposed else heads)


@pytest.mark.parametrize(("transposed", "axis"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("lengths", [(5, 2), (2, 5, 1)])
def test_a_head_axis_is_not_taken_for_a_token_axis_of_equal_length(transposed, axis, lengths):
    trace = traced(Heads(transposed), lambda model: [model(torch.randn(1, n, 6)) for n in lengths])
    assert Alignment(trace).whole[Key("norm", 0, "out", "out")].axis == axis
