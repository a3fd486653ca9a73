"""Planted faults: each acts where its description says, is found by the lab, and leaves no trace behind."""

import copy
from contextlib import ExitStack

import pytest
import torch

from specnb.divergence import pair as small
from specnb.divergence.faults import FAULTS
from specnb.divergence.investigate import judge
from specnb.divergence.script import run as feed
from specnb.divergence.trace import canonical
from specnb.errors import InputError
from tests.tiny_models import torch_model

IDS = torch.randint(0, 256, (1, 18), generator=torch.Generator().manual_seed(0))
PROMPT, DRAFTED, REJECTED = 12, 4, 3

BENIGN = ("split_k", "uniform_offset")
FOUND = {
    "positional_registry": ("layers.0.mlp.experts", 0, "IDENTITY", "S0 S2"),
    "registry_in_op": ("layers.0.mlp.experts", 0, "IDENTITY", "S0 S2"),
    "shared_buffer": ("layers.0.mlp.experts", 14, "STATE", "S0 S1"),
    "stale_row": ("layers.0.mlp.experts", 12, "STATE", "S0 S2"),
    "foreign_routing": ("layers.0.mlp.router", 0, "ROUTING", "S0 S2"),
    "neighbour_read": ("layers.0.mlp.experts", 0, "STATE", "S0 S1"),
    "expert_scale": ("layers.0.mlp.experts", 0, "WEIGHTS", "S0"),
    "expert_scale_in_op": ("layers.0.mlp.experts", 0, "WEIGHTS", "S0"),
    "experts_permuted": ("layers.0.mlp.experts", 0, "WEIGHTS", "S0"),
    "kv_slot_swap": ("layers.0.self_attn", 5, "KV_SLOT", "S0"),
    "foreign_writer": ("layers.0.self_attn", 14, "KV_SLOT", "S0"),
    "untrimmed": ("layers.0.self_attn", 18, "KV_SLOT", "S0"),
    "overtrimmed": ("layers.0.self_attn", 18, "KV_SLOT", "S0"),
    "overtrimmed_by_two": ("layers.0.self_attn", 18, "KV_SLOT", "S0"),
    "rope_mismatch": ("rotary_emb", 8, "POSITION", "S0"),
    "dummy_tokens": ("", 8, "INPUT", "S0"),
    "random_head": ("lm_head", 0, "HEAD", "S0"),
    "split_k": (None, None, "PRECISION_ONLY", "S0"),
    "uniform_offset": (None, None, "PRECISION_ONLY", "S0"),
}
"""Of each fault: the module that is wrong first, from which token on, its cause, and the set-ups that tell."""


@pytest.fixture(scope="module")
def single():
    return small.pair()


@pytest.fixture(scope="module")
def clean(single):
    """What the pair does without a fault: logits and events."""
    return observed(*single)


@torch.no_grad()
def run(draft, target=None):
    """What an engine does: the target verifies, the draft reads, drafts, is rejected, goes on. Logits (length, V)."""
    if target is not None:
        target(IDS)
    first = draft(IDS[:, :PROMPT], use_cache=True)
    cache = first.past_key_values
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    wrong = (IDS[:, PROMPT : PROMPT + DRAFTED] + 7) % 256
    drafted = draft(torch.cat([IDS[:, PROMPT : PROMPT + 1], wrong[:, 1:]], 1), past_key_values=cache)
    cache.crop(-REJECTED)
    at = PROMPT + DRAFTED - REJECTED
    rest = [draft(IDS[:, at : at + 4], past_key_values=cache).logits]
    rest += [draft(IDS[:, i : i + 1], past_key_values=cache).logits for i in range(at + 4, IDS.shape[1])]
    return torch.cat([first.logits, drafted.logits[:, : DRAFTED - REJECTED], *rest], 1)[0]


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value.clone()]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for inner in values for tensor in tensors(inner)]


def observed(model, target):
    """Logits, and inputs and outputs of every module in the order they come, by plain hooks."""
    events, names = [], canonical(path for path, _ in model.named_modules())

    def hook(path, role):
        def hear(module, args, kwargs, out=None):
            given = {name: value for name, value in kwargs.items() if "mask" not in name}
            events.append((path, role, tensors((args, given) if role == "in" else out)))

        return hear

    with ExitStack() as stack:
        for path, module in model.named_modules():
            before, after = (hook(names[path], role) for role in ("in", "out"))
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        return run(model, target), events


def equal(a, b):
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def first_difference(clean, faulty):
    """The first module whose output differs though its inputs agree; of the root, also when it was fed other inputs."""
    open_calls = []
    for (path, role, a), (_, _, b) in zip(clean, faulty, strict=True):
        same = equal(a, b)
        if role == "in":
            if path == "" and not same:
                return path
            open_calls.append(same)
        elif open_calls.pop() and not same:
            return path
    return None


def bits(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def undisturbed(model, before):
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def inside(position, ranges):
    return any(start <= position and (stop is None or position < stop) for start, stop in ranges)


@pytest.mark.parametrize("name", FOUND)
def test_the_lab_names_module_and_cause(divergence_lab, name):
    module, token, cause, setups = FOUND[name]
    found = judge(divergence_lab, deploy=FAULTS[name], setups=setups.split())
    first = found.first
    assert (first and first.module, first and first.first_token) == (module, token), found.line
    if module is not None:
        assert found.causes[0].name == cause and found.case.bad.setup.id == setups.split()[-1], found.line
    else:
        assert found.verdict == cause, found.line


@pytest.mark.parametrize("name", FAULTS)
def test_fault_acts_first_where_it_says_and_is_gone_after_an_exception(single, clean, name):
    before = [bits(model) for model in single]
    addresses = [parameter.data_ptr() for parameter in single.draft.parameters()]
    with pytest.raises(KeyError), FAULTS[name](*single) as fault:
        faulty, events = observed(*single)
        raise KeyError
    assert (fault.first, fault.cause) == FOUND[name][:3:2]
    if name not in BENIGN:
        assert first_difference(clean[1], events) == fault.first
        wrong = ((faulty - clean[0]).abs().amax(-1) > 1e-4).nonzero().flatten().tolist()
        assert wrong and inside(wrong[0], fault.tokens)
    else:
        assert not torch.equal(faulty, clean[0]) and torch.allclose(faulty, clean[0], atol=1e-3)
    for model, saved in zip(single, before, strict=True):
        undisturbed(model, saved)
    assert [parameter.data_ptr() for parameter in single.draft.parameters()] == addresses


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_wait_are_those_that_say_when_they_acted(divergence_lab, name):
    """One that does not say so would let a fault that never acted count as a case."""
    lab, neighbour = divergence_lab, small.copy_of(divergence_lab.target)
    with FAULTS[name](lab.draft, neighbour) as fault:
        feed(lab.draft, lab.script, before=lambda feed: neighbour(torch.tensor([lab.script.text]), use_cache=False))
    assert bool(fault.struck) == fault.waits


@pytest.mark.parametrize("name", ["kv_slot_swap", "expert_scale", "shared_buffer", "foreign_routing", "neighbour_read"])
def test_fault_is_planted_in_the_layer_asked_for(single, clean, name):
    with FAULTS[name](single.draft, single.target, layer=2) as fault:
        _, events = observed(single.draft, single.target)
    assert "layers.2." in fault.first and first_difference(clean[1], events) == fault.first


def test_swapped_slots_are_wrong_only_between_the_two_and_behind_the_window(single):
    """One layer, so that later layers do not carry the error on; exact up to the order of a sum elsewhere."""
    draft = copy.deepcopy(single.draft)
    draft.model.layers, draft.config.num_hidden_layers = draft.model.layers[:1], 1
    ids = torch.cat([IDS, IDS.flip(-1)], 1)
    with torch.no_grad():
        clean = draft(ids).logits[0]
        with FAULTS["kv_slot_swap"](draft, a=3, b=7) as fault:
            off = (draft(ids).logits[0] - clean).abs().amax(-1)
    assert fault.tokens == ((3, 7), (19, 23))
    wrong = [i for i, value in enumerate(off.tolist()) if value > 1e-3]
    assert wrong == [3, 4, 5, 6, 19, 20, 21, 22]


def test_other_architectures_work_where_they_have_the_part_and_it_fits():
    dense = torch_model("llama").eval()
    ids = IDS % 64
    with torch.no_grad():
        clean = dense(ids).logits
        for name in ("kv_slot_swap", "rope_mismatch", "random_head", "dummy_tokens"):
            with FAULTS[name](dense):
                assert not torch.equal(dense(ids).logits, clean), name
        assert torch.equal(dense(ids).logits, clean)
    single, other = small.pair(), small.make("target", dtype="bfloat16")
    for name, draft, target in (
        ("positional_registry", dense, dense), ("expert_scale", dense, None), ("shared_buffer", dense, dense),
        ("positional_registry", single.target, single.draft), ("positional_registry", single.draft, other),
    ):  # fmt: skip
        with pytest.raises(InputError, match="experts"), FAULTS[name](draft, target):
            pass
