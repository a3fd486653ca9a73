"""Capturing changes nothing, sees what ran, and tells whose weights an operation read."""

from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from specnb.divergence import capture as trace_builder
from specnb.divergence.capture import TraceBuilder, capture
from specnb.divergence.tensors import Step, digest, step_of
from specnb.divergence.trace import Trace, canonical
from specnb.errors import InputError

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])


def seeded(model, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    return model.to(dtype).eval()


def moe(seed=0, experts=8, layers=2, dtype=torch.float32):
    config = GptOssConfig(
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=4,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        sliding_window=8,
        attn_implementation="eager",
    )
    return seeded(GptOssForCausalLM(config), seed, dtype)


def llama(dtype=torch.float32):
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    return seeded(LlamaForCausalLM(config), 1, dtype)


@torch.no_grad()
def generate(model, prompt=PROMPT, steps=3):
    """Logits of the prompt and of some tokens after it, with a cache."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [moe, llama])
def test_capturing_changes_no_bit_of_the_logits(make, dtype):
    model = make(dtype=dtype)
    plain = generate(model)
    with capture(model, full="mlp"):
        seen = generate(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, generate(model), strict=True))


def test_what_is_written_down_is_what_plain_hooks_see():
    model, seen = moe(), []
    for path, module in model.named_modules():
        if "proj" in path or path.endswith("norm"):
            module.register_forward_hook(
                lambda m, args, out, path=path: seen.append((path, digest(args[0]), digest(out)))
            )
    trace = traced(model)
    rows = trace.tensors[trace.tensors["name"].isin(["out", "input", "hidden_states"])].set_index(
        ["module", "role", "step"]
    )
    steps = {}
    for path, given, gave in seen:
        step = steps[path] = steps.get(path, -1) + 1
        short = path.removeprefix("model.")
        assert rows.loc[(short, "in", step), "digest"] == given
        assert rows.loc[(short, "out", step), "digest"] == gave
    assert len(seen) == 4 * (2 * (4 + 2) + 1)


def test_operands_stand_under_the_names_of_the_signature():
    trace = traced(moe())
    first = trace.rows(step=1)

    def names(module, role):
        return first[(first["module"] == module) & (first["role"] == role)]["name"].tolist()

    position = ["position_embeddings.0", "position_embeddings.1"]
    assert names("layers.0.self_attn", "in") == ["hidden_states", *position, "attention_mask", "position_ids"]
    assert names("layers.0.mlp.experts", "in") == ["hidden_states", "router_indices", "routing_weights"]
    assert names("layers.0.mlp.router", "out") == ["out", "out.1", "out.2"]
    assert names("layers.0.self_attn", "state") == ["keys", "values"]
    assert names("", "out") == ["out.logits"]
    chosen = first[(first["module"] == "layers.0.mlp.router") & (first["name"] == "out.2")].iloc[0]
    assert chosen["dtype"] == "int64" and chosen["shape"] == (1, 4)


def test_tokens_have_their_axis_and_their_position():
    trace = traced(moe())
    got = {
        (r.step, r.module, r.name): (r.token_axis, r.first_position, r.shape)
        for r in trace.tensors.itertuples()
        if r.role != "in"
    }
    assert got[0, "layers.1", "out"] == (1, 0, (1, 10, 32))
    assert got[2, "layers.1", "out"] == (1, 11, (1, 1, 32))
    assert got[2, "layers.1.mlp.experts", "out"] == (0, 11, (1, 32))
    assert got[2, "layers.1.self_attn", "keys"] == (2, 0, (1, 2, 12, 8))
    assert got[2, "layers.0.self_attn", "keys"] == (2, 5, (1, 2, 7, 8))  # the sliding layer has forgotten five
    assert trace.array(trace.rows(step=2, name="keys")["row"].iloc[1], "tokens").shape == (12, 16)
    assert [s["token_ids"] for s in trace.facts["steps"]] == [PROMPT[0].tolist(), [7], [8], [9]]


def test_sequences_of_a_batch_stand_one_after_the_other():
    model = moe()
    both = torch.cat([PROMPT, PROMPT.flip(1)])
    trace, alone = (traced(model, lambda m, p=p: generate(m, p, 0)) for p in (both, PROMPT.flip(1)))
    for module in ("layers.0.mlp.experts", "layers.0.self_attn"):
        rows = [t.rows(module=module, role="out", name="out")["row"].iloc[0] for t in (trace, alone)]
        second = trace.array(rows[0], "tokens")[10:]
        assert second == pytest.approx(alone.array(rows[1], "tokens"), abs=1e-3)


def test_inputs_come_before_what_is_inside_and_outputs_after():
    trace = traced(moe())
    order = trace.rows(step=0).groupby(["module", "role"])["order"].agg(["min", "max"])
    inside = [order.loc["layers.0.self_attn.q_proj", role]["min"] for role in ("in", "out")]
    assert order.loc[("layers.0.self_attn", "in"), "max"] < inside[0] < inside[1]
    assert (
        inside[1] < order.loc[("layers.0.self_attn", "state"), "min"] < order.loc[("layers.0.self_attn", "out"), "min"]
    )
    assert order.loc[("layers.0", "out"), "max"] < order.loc[("layers.1", "in"), "min"]


def resolves(draft, target, layer):
    """The experts of the draft compute with the weights of the target's layer, as a registry by position has it."""
    experts, foreign = draft.model.layers[layer].mlp.experts, target.model.layers[layer].mlp.experts
    experts.forward = MethodType(type(foreign).forward, foreign)
    return lambda: experts.__dict__.pop("forward")


def test_weights_of_another_model_are_seen_where_they_are_used():
    draft, target = moe(), moe(seed=1, experts=16, layers=3)
    right = traced(draft, known={"target": target})
    restore = resolves(draft, target, 1)
    wrong = traced(draft, known={"target": target})
    restore()
    assert set(right.params["owner"]) == {"draft"}
    foreign = wrong.params[wrong.params["owner"] != "draft"]
    assert set(foreign["module"]) == {"layers.1.mlp.experts"}
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    assert set(foreign["owner_path"]) == {f"model.layers.1.mlp.experts.{name}" for name in names}
    assert set(foreign["digest"]) == {digest(p) for p in target.model.layers[1].mlp.experts.parameters()}
    # one row for each call, not for each expert
    assert len(foreign) == 4 * 4


def test_every_module_with_weights_of_its_own_is_seen_to_read_them():
    model = moe()
    used = traced(model).params.groupby("module")["owner_path"].agg(set)
    for path, module in model.named_modules():
        own = {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        assert own <= used.get(path.removeprefix("model."), set()), path


def test_a_parameter_that_no_known_model_has_is_unknown_and_keeps_its_digest():
    model = llama()
    other = nn.Parameter(torch.randn(48, 32, generator=torch.Generator().manual_seed(5)))
    with capture(model) as builder:
        model.model.layers[1].mlp.up_proj.weight = other
        generate(model, steps=0)
    found = builder.trace().params.query("module == 'layers.1.mlp.up_proj'").iloc[0]
    assert (found["owner"], found["owner_path"], found["digest"]) == ("?", "?", digest(other))


def test_a_weight_changed_in_place_between_steps_has_another_digest():
    model = llama()
    weight = model.model.layers[0].mlp.gate_proj.weight
    with capture(model) as builder, torch.no_grad():
        generate(model, steps=0)
        weight.mul_(1.02)
        generate(model, steps=0)
    used = builder.trace().params.query("module == 'layers.0.mlp.gate_proj'")
    assert used["digest"].nunique() == 2 and used["object_id"].nunique() == 1
    assert used["digest"].iloc[1] == digest(weight)


def test_tied_weights_are_one_object():
    used = traced(llama()).params.query("step == 0").set_index("module")
    assert used.loc["lm_head", "object_id"] == used.loc["embed_tokens", "object_id"]


class Spoils(nn.Module):
    """Changes what it is given in place, after the hook has seen it."""

    def forward(self, x):
        return x.mul_(2)


class Overwritten(nn.Module):
    """A workspace: between the two readers something writes into it behind torch's count of versions."""

    def __init__(self):
        super().__init__()
        self.writer, self.reader = nn.Identity(), nn.Identity()

    def forward(self, x):
        work = self.writer(x.clone())
        work.data[1] = 9
        return self.reader(work)


def test_what_is_seen_is_what_was_there_at_the_hook():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    trace = traced(Spoils(), lambda m: m(x), full="")
    given, gave = (trace.rows(role=role).iloc[0] for role in ("in", "out"))
    assert given["digest"] == digest(before) and gave["digest"] == digest(2 * before)
    assert torch.equal(torch.from_numpy(trace.array(given["row"], "full")), before)


def test_a_buffer_written_behind_torchs_back_is_not_taken_for_what_it_was():
    trace = traced(Overwritten(), lambda m: m(torch.zeros(3, 4)))
    wrote, read = trace.rows(module="writer", role="out").iloc[0], trace.rows(module="reader", role="in").iloc[0]
    assert (wrote["storage"], wrote["version"]) == (read["storage"], read["version"])
    assert wrote["digest"] != read["digest"] and (wrote["max"], read["max"]) == (0, 9)


def test_an_output_that_is_the_next_input_is_measured_once(monkeypatch):
    measured = []
    plain = TraceBuilder._measure_stack
    monkeypatch.setattr(TraceBuilder, "_measure_stack", lambda self, s: (measured.extend(s), plain(self, s)))
    trace = traced(llama(), lambda m: generate(m, steps=0))
    assert len(measured) < 0.6 * len(trace.tensors)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.times = nn.Linear(4, 4), 0

    def forward(self, x):
        self.times += 1
        y = self.inner(x)
        if self.times == 2:
            raise ValueError("the forward fails")
        return y


def hooks_of(model):
    return [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_hooks_go_away_after_an_error_and_a_failed_forward_shifts_nothing():
    model, x = Fails(), torch.ones(2, 4)
    with capture(model) as builder:
        model(x)
        with pytest.raises(ValueError, match="the forward fails"):
            model(x)
        model(x)
    trace = builder.trace()
    assert len(trace.rows(module="inner", role="in")) == 3
    assert trace.rows(module="", role="out")["step"].tolist() == [0, 2]
    assert set(trace.params["module"]) == {"inner"}
    with pytest.raises(RuntimeError, match="outside"), capture(model):
        raise RuntimeError("outside")
    assert not hooks_of(model)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_copy_that_fails_leaves_no_half_row_and_the_trace_is_saved(tmp_path, monkeypatch):
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(KeyboardInterrupt), capture(model, tmp_path / "trace", full=""):
        model(x)
        monkeypatch.setattr(trace_builder, "_Waiting", interrupted)
        model(torch.zeros(2, 4))
    trace = Trace.load(tmp_path / "trace")
    assert {*trace.tensors["step"]} == {0} and (trace.tensors["digest"] != "").all()
    assert {int(name.partition(".")[0]) for name in trace.arrays} <= {*trace.tensors["row"]}


def interrupted(*args):
    raise KeyboardInterrupt


def test_a_module_called_twice_in_a_step_has_two_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(self.inner(x))

    def run(model):
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))

    trace = traced(Twice(), run)
    assert trace.rows(module="inner", role="in")[["step", "call"]].values.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert len(trace.params) == 8  # weight and bias of each call


@dataclass
class Answer:
    states: torch.Tensor
    more: dict


class Nested(nn.Module):
    def forward(self, x, *rest, pair, flag=False, scale=1.0, **kwargs):
        return Answer(x + pair[1]["b"], {"k": (rest[0], [kwargs["extra"]])})


def test_nested_arguments_and_outputs_have_dotted_names():
    one = torch.ones(2, 3)

    def run(model):
        for scale in (0.5, 2.0, 0.5):
            model(one, one * 2, pair=(one, {"b": one}), scale=scale, extra=one * 3)

    trace = traced(Nested(), run)
    assert trace.rows(step=0, role="in")["name"].tolist() == ["x", "rest.0", "pair.0", "pair.1.b", "extra"]
    assert trace.rows(step=0, role="out")["name"].tolist() == ["out.states", "out.more.k.0", "out.more.k.1.0"]
    assert trace.facts["scalars"] == {":scale": ["0.5", "2.0"]}


def test_only_the_chosen_modules_are_written_and_only_the_chosen_tensors_kept(tmp_path):
    model = moe(dtype=torch.bfloat16)
    trace = traced(model, modules=r"layers\.0\.mlp", full="router")
    assert set(trace.tensors["module"]) == {f"layers.0.mlp{x}" for x in ("", ".router", ".experts")}
    kept = [key for key in trace.arrays if key.endswith(".full")]
    assert {trace.tensors["module"][int(key.partition(".")[0])] for key in kept} == {"layers.0.mlp.router"}
    assert "layers.1.mlp.experts" in set(trace.params["module"])  # weights are followed everywhere
    assert trace.facts["modules"]["written"] == 3 and not trace.facts["modules"]["never_called"]
    read = Trace.load(trace.save(tmp_path))
    assert read.tensors.equals(trace.tensors) and read.params.equals(trace.params)


def test_the_target_running_in_the_same_block_leaves_no_rows():
    draft, target = moe(), moe(seed=1, experts=16)

    def run(model):
        generate(target, steps=0)
        generate(model, steps=0)

    beside = traced(draft, run, known={"target": target})
    assert beside.tensors["digest"].tolist() == traced(draft, lambda m: generate(m, steps=0)).tensors["digest"].tolist()
    assert set(beside.params["owner"]) == {"draft"}


def test_a_compiled_model_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    for compiled in (torch.compile(model, backend="eager"), nn.Sequential(torch.compile(model[0], backend="eager"))):
        with pytest.raises(InputError, match="run it eagerly"), capture(compiled):
            pass
    model[0].compile(backend="eager")
    with pytest.raises(InputError, match=r"'0' \(Linear\) is compiled"), capture(model):
        pass
    assert not hooks_of(model)


def test_names_of_modules_lose_their_prefix_but_never_their_difference():
    assert canonical(["", "model", "model.layers.0", "draft_model.model.norm", "lm_head"]) == {
        "": "",
        "model": "model",
        "model.layers.0": "layers.0",
        "draft_model.model.norm": "norm",
        "lm_head": "lm_head",
    }
    for twins in (["model.norm", "draft_model.norm"], ["model.norm", "model.model.norm"]):
        assert canonical(twins) == {path: path for path in twins}


def test_steps_are_told_from_flat_and_from_embedded_inputs():
    states, positions = torch.zeros(6, 8), torch.arange(20, 26)
    assert step_of(0, {"positions": positions, "hidden_states": states}) == Step(0, 1, 6, 20, [], flat=True)
    flat = {"input_ids": torch.arange(3), "positions": torch.tensor([4, 5, 6])}
    assert step_of(1, flat) == Step(1, 1, 3, 4, [0, 1, 2], flat=True)
    embedded = {"attention_mask": torch.ones(2, 9), "inputs_embeds": torch.zeros(2, 4, 8)}
    assert step_of(2, embedded) == Step(2, 2, 4, 0, [])
    assert step_of(3, {}) == Step(3, 1, 0, 0, [])


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((2, 5), 1),
        ((2, 5, 32), 1),
        ((1, 5, 8), 1),
        ((2, 4, 5, 8), 2),
        ((2, 1, 5, 12), 2),
        ((10, 32), 0),
        ((32,), -1),
        ((), -1),
    ],
)
def test_the_token_axis_is_found_in_the_known_layouts(shape, axis):
    assert Step(0, 2, 5, 0, []).token_axis("in", "x", shape) == axis


class Heads(nn.Module):
    """Two heads of a token's features, before or behind the tokens."""

    def __init__(self, transposed):
        super().__init__()
        self.norm, self.transposed = nn.LayerNorm(3), transposed

    def forward(self, hidden_states):
        heads = hidden_states.view(1, -1, 2, 3)
        return self.norm(heads.transpose(1, 2) if self.transposed else heads)


@pytest.mark.parametrize(("transposed", "axis"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("lengths", [(2,), (5, 2), (2, 5, 1)])
def test_as_many_heads_as_tokens_are_no_tokens(transposed, axis, lengths):
    trace = traced(Heads(transposed), lambda model: [model(torch.randn(1, n, 6)) for n in lengths])
    assert trace.rows(module="norm")["token_axis"].tolist() == [axis] * 2 * len(lengths)


def test_one_capture_that_is_paused_leaves_another_listening():
    draft, target, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(1, 4)
    with capture(draft) as mine, capture(target, tag="target") as theirs:
        draft(x)
        with mine.paused():
            target(x)
            draft(x)
        draft(x)
    assert mine.trace().tensors["step"].nunique() == 2 and mine.trace().params["owner_path"].nunique() == 2
    assert {*theirs.trace().params["owner_path"]} == {"weight", "bias"}


def test_weights_that_a_custom_operation_looks_up_by_itself_are_seen():
    draft, target = nn.Linear(4, 4), nn.Linear(4, 4)

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = draft

        def forward(self, x):
            return torch.ops.specnb_test.looked_up([x], 1)

    with torch.library._scoped_library("specnb_test", "FRAGMENT") as library:
        library.define("looked_up(Tensor[] given, int which) -> Tensor")
        library.impl("looked_up", lambda given, which: (draft, target)[which](*given), "CompositeExplicitAutograd")
        model, x = Hidden(), torch.ones(2, 4)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with capture(model, known={"target": target}) as builder, mode():
                out = model(x)
            params = builder.trace().params
            assert sorted(params["owner"] + ":" + params["owner_path"]) == ["target:bias", "target:weight"]
            assert torch.equal(out, target(x))


def test_a_trace_is_saved_where_it_was_asked_for_also_after_an_error(tmp_path):
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="engine died"), capture(model, tmp_path / "trace") as builder:
        model(torch.ones(1, 2))
        raise RuntimeError("engine died")
    assert Trace.load(tmp_path / "trace").tensors.equals(builder.trace().tensors)


class Engine(nn.Module):
    """The model as flat engines have it: no batch, positions given, the head outside of forward."""

    def __init__(self):
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, input_ids, positions):
        return self.mlp(self.embed(input_ids))


def feeds(model, call):
    for start, end in ((0, 5), (5, 6), (6, 7)):
        model.head(call(torch.arange(start, end), torch.arange(start, end))[-1:])


@pytest.mark.parametrize("forward", [False, True])
def test_a_step_is_one_call_of_the_model_however_an_engine_calls_it(forward):
    model = Engine()
    with capture(model) as builder:
        feeds(model, model.forward if forward else model)
    trace = builder.trace()
    assert [(s["length"], s["first_position"]) for s in trace.facts["steps"]] == [(5, 0), (1, 5), (1, 6)]
    assert trace.rows(module="", role="out")["step"].tolist() == [0, 1, 2]
    heads = trace.rows(module="head", role="out")
    assert heads["step"].tolist() == [0, 1, 2] and heads["first_position"].tolist() == [4, 5, 6]
    assert set(heads["token_axis"]) == {0}
    assert not trace.facts["modules"]["never_called"] and "forward" not in vars(model)


def test_a_module_that_is_run_without_the_model_makes_steps_of_its_own_ids():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Engine()

        def forward(self, x):
            raise AssertionError

    model = Outer()
    with capture(model) as builder:
        feeds(model.inner, model.inner)
    assert [(s["length"], s["first_position"]) for s in builder.trace().facts["steps"]] == [(5, 0), (1, 5), (1, 6)]


@pytest.mark.parametrize("batch", [1, 2])
def test_logits_of_the_last_token_alone_stand_at_its_position(batch):
    model = llama()
    prompt = PROMPT.repeat(batch, 1)
    trace = traced(model, lambda m: m.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0))
    logits = trace.rows(module="", role="out")
    assert logits["shape"].tolist() == [(batch, 1, 64)] * 3
    assert logits["first_position"].tolist() == [9, 10, 11] and set(logits["token_axis"]) == {1}


def test_rows_padded_on_the_left_are_counted_by_their_slots():
    model = llama()
    ids, mask = torch.tensor([[0, 0, 5, 6], [4, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    steps = traced(model, lambda m: m.generate(ids, **options)).facts["steps"]
    assert [s["first_position"] for s in steps] == [0, 4, 5]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.ones(2, 3, device="meta"), "on meta"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8), "quantised"),
        (lambda: Wrapper(torch.ones(2, 3)), "Wrapper"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_torch_cannot_read_is_named_and_the_model_runs_on(make, why):
    given = make()
    trace = traced(nn.Identity(), lambda m: m(given))
    assert trace.tensors.empty and trace.facts["unread"] == {":in:input": why, ":out:out": why}


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@contextmanager
def operation(schema, **kernels):
    """A custom operation with these kernels by dispatch key."""
    with torch.library._scoped_library("specnb_test", "FRAGMENT") as library:
        library.define(schema)
        for key, kernel in kernels.items():
            library.impl(schema.partition("(")[0], kernel, key)
        yield torch.ops.specnb_test


class Runs(nn.Module):
    """Runs a function of its weight and of what it is given."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.eye(4))

    def forward(self, x):
        return self.function(x, self.weight)


def test_a_custom_operation_computes_in_autocasts_type_as_it_does_without_capture():
    with operation("product(Tensor x, Tensor w) -> Tensor", CPU=torch.mm) as ops:
        model, x = Runs(ops.product), torch.rand(2, 4)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
                plain = model(x)
                with capture(model):
                    seen = model(x)
            assert seen.dtype == plain.dtype == dtype and torch.equal(seen, plain)
        with torch.no_grad(), capture(model):
            assert model(x).dtype == torch.float32


def test_weights_whose_memory_was_exchanged_stay_their_owners_and_their_old_memory_does_not():
    model = nn.Linear(64, 64)
    with torch.no_grad(), capture(model) as builder:
        model(torch.ones(1, 64))
        model.weight.data = model.weight.data.clone()
        model(torch.ones(1, 64))
        model.to(torch.float64)
        model(torch.ones(1, 64, dtype=torch.float64))
    params = builder.trace().params
    assert (
        set(params["owner"]) == {"draft"}
        and params.groupby("step")["owner_path"].agg(set).tolist() == [{"weight", "bias"}] * 3
    )
    assert params[params["owner_path"] == "weight"]["dtype"].tolist() == ["float32", "float32", "float64"]
    bare = Runs(lambda x, w: x @ x.T + 1)
    bare.weight.data = torch.zeros(64, 64)
    with torch.no_grad(), capture(bare) as builder:
        bare.weight.data = torch.zeros(1)  # its memory is anybody's now
        for _ in range(30):
            bare(torch.rand(64, 64))
    assert builder.trace().params.empty


def test_a_weight_that_an_operation_wrote_to_has_another_digest():
    def add(w):
        w.add_(1)

    with operation("write(Tensor(a!) w) -> ()", CPU=add) as ops, torch.no_grad():
        model, x = nn.Linear(4, 4), torch.ones(1, 4)
        with capture(model) as builder:
            model(x)
            ops.write(model.weight)
            model(x)
            model.weight.data.add_(1)
            model(x)
        params = builder.trace().params
        assert params[params["owner_path"] == "weight"]["digest"].nunique() == 3
        assert params[params["owner_path"] == "bias"]["digest"].nunique() == 1
