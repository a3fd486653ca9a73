"""Services with faults that the package does not plant, and sound but unusual ones."""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

from specnb.divergence.causes import gather
from specnb.divergence.faults.planting import change_values, replace_forward, replaced
from specnb.divergence.investigate import investigate, text
from specnb.errors import InputError
from tests.benchmarks.divergence_score.controls import swapped
from tests.benchmarks.divergence_score.faults import FAULTS
from tests.divergence.lab import patched
from tests.tiny_models import torch_model

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
KINDS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": {},
    "gpt2": OLD,
    "gptj": OLD | {"rotary_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
    "qwen3_moe": MOE | {"head_dim": 8},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
    },
}
"""Small drafts that differ in norms, windows, experts and position encodings."""
DOWN = "layers.1.mlp.down_proj"
slow = pytest.mark.slow


def made(kind, seed=0, **options):
    return torch_model(kind, seed=seed, **KINDS[kind] | options).eval()


def tied():  # another seed than that of a newly drawn head, or both would be equal
    return made("llama", seed=3, tie_word_embeddings=True)


def down(model):
    return model.get_submodule(f"model.{DOWN}")


# --- services with a fault ------------------------------------------------------------------------


def of_neighbour(service):
    """Return a service that acts only next to a neighbor."""
    return lambda draft, neighbour: ExitStack() if neighbour is None else service(draft, neighbour)


@contextmanager
def counts_on_after_a_rejection(draft, neighbour):
    """Shift positions by one from the first rejection on."""
    original, most, late = draft.forward, 0, 0

    def forward(input_ids, past_key_values=None, **options):
        nonlocal most, late
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        late = 0 if past_key_values is None else late or int(held < most)
        most = held + input_ids.shape[1]
        ids = torch.arange(held, most)[None] + late
        return original(
            input_ids=input_ids, past_key_values=past_key_values, position_ids=ids, **options
        )

    with replaced(draft, "forward", forward):
        yield


WRONG = {  # a draft, a service, the set-ups to run, and the module and cause to be named
    "values copied": (
        lambda: made("qwen2"),
        of_neighbour(lambda d, n: change_values({down(d).weight: down(n).weight})),
        "S0 S1 S2",
        DOWN,
        "IDENTITY",
    ),
    "tied head drawn": (tied, FAULTS["random_head"], "S0", "lm_head", "HEAD"),
    "head biased": (
        tied,
        patched("lm_head", lambda x: x + torch.arange(64) % 3),
        "S0",
        "lm_head",
        "COMPUTATION",
    ),
    "one expert of two": (
        lambda: made("gpt_oss", num_experts_per_tok=2),
        lambda d, _: swapped(d.model.layers[1].mlp.router, "top_k", 1),
        "S0",
        "layers.1.mlp.router",
        "ROUTING",
    ),
    "other frequencies": (
        lambda: made("qwen2"),
        lambda d, _: change_values({d.model.rotary_emb.inv_freq: d.model.rotary_emb.inv_freq**0.5}),
        "S0",
        "rotary_emb",
        "POSITION",
    ),
    "longer angles": (
        lambda: made("qwen2"),
        lambda d, _: replaced(d.model.rotary_emb, "attention_scaling", 1.1),
        "S0",
        "rotary_emb",
        "COMPUTATION",
    ),
    "positions counted on": (
        lambda: made("qwen2"),
        counts_on_after_a_rejection,
        "S0 S0w",
        "model",
        "POSITION",
    ),
    "complex angles turned back": (
        lambda: made("llama4_text"),
        patched("model.rotary_emb", torch.conj),
        "S0",
        "rotary_emb",
        "POSITION",
    ),
}
QUICK = (
    "values copied",
    "tied head drawn",
    "head biased",
    "one expert of two",
    "other frequencies",
)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=slow) for name in WRONG]
)
def test_the_wrong_module_is_named_with_its_cause(name):
    draft, service, setups, module, cause = WRONG[name]
    found = investigate(draft(), deploy=service, setups=setups.split())
    assert found.first.module == module and found.causes[0].name == cause, found.line
    foreign = gather(found.lab, found.outcomes)["foreign read"]
    assert found.cause_known and (cause == "IDENTITY") == bool(foreign), found.line


@slow
def test_modules_on_which_sound_runs_disagree_are_inconclusive():
    """LongRoPE angles depend on the number of tokens fed at once, so wrong angles would pass."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
    }
    draft = made("phi3", original_max_position_embeddings=16, rope_parameters=rope)
    found = investigate(draft, setups=["S0"])
    assert (
        found.verdict == "INCONCLUSIVE"
        and "rotary_emb" in found.reason
        and "rotary_emb" in text(found)
    )


def two_rows(draft, neighbour):
    def run(original, input_ids, **options):
        out = original(input_ids=input_ids.repeat(2, 1), **options)
        out.logits = out.logits[:1]
        return out

    return replace_forward(draft, run)


@slow
def test_the_cause_is_unknown_if_no_inner_module_was_compared():
    draft = made("qwen2", seed=1)
    mlp = draft.model.layers[1].mlp

    @contextmanager
    def beside_another_row(draft, neighbour):
        """Exchange the gate and up projections, in a batch of two."""
        gate, up = mlp.gate_proj, mlp.up_proj
        with (
            two_rows(draft, neighbour),
            swapped(mlp, "gate_proj", up),
            swapped(mlp, "up_proj", gate),
        ):
            yield

    found = investigate(draft, deploy=beside_another_row, setups=["S0"])
    assert (
        found.verdict == "DIVERGENT"
        and not found.cause_known
        and str(len(found.hidden)) in found.line
    )
    assert investigate(draft, deploy=two_rows, setups=["S0"]).verdict == "INCONCLUSIVE"


# --- sound but unusual services -------------------------------------------------------------------


@contextmanager
def loaded_in_half(draft, neighbour):
    """Convert the parameters, as a loader with a dtype does; RoPE buffers are unchanged."""
    with ExitStack() as until:
        for one in draft.parameters():
            until.enter_context(swapped(one, "data", one.data.bfloat16()))
        yield


def autocast(draft, neighbour):
    """Return an autocast: it skips some modules, and other experts are chosen at near-ties."""
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "half"), [("gpt_oss", loaded_in_half), pytest.param("gemma2", autocast, marks=slow)]
)
def test_a_service_in_lower_precision_is_inconclusive_with_a_remedy(kind, half):
    found = investigate(made(kind), deploy=half, setups=["S0"])
    assert found.verdict == "INCONCLUSIVE" and found.exit_code == 125, found.line
    assert "computes in bfloat16" in found.reason and "--dtype" in found.reason


def test_a_draft_loaded_in_half_precision_is_judged():
    draft = made("gpt_oss").bfloat16()
    assert investigate(draft, setups=["S0"]).verdict == "SOUND"
    broken = patched("model.norm", lambda states: 1.5 * states.flip(-1))
    found = investigate(draft, deploy=broken, setups=["S0"])
    assert found.verdict == "DIVERGENT" and found.first.module == "norm", found.line


@slow
def test_permuted_neurons_are_reported_as_harmless():
    """Permuting the neurons in all three matrices changes the weights but not the logits."""
    draft = made("llama")
    mlp = draft.model.layers[1].mlp

    weights = ((mlp.gate_proj.weight, 0), (mlp.up_proj.weight, 0), (mlp.down_proj.weight, 1))

    def investigated(draft, values):
        return investigate(draft, deploy=lambda *_: change_values(values), setups=["S0"])

    found = investigated(draft, {weight: weight.data.roll(1, axis) for weight, axis in weights})
    assert found.verdict == "DIVERGENT" and found.causes[0].name == "WEIGHTS" and found.reason
    in_half = investigated(draft.bfloat16(), {down(draft).weight: 1.3 * down(draft).weight})
    assert in_half.verdict == "DIVERGENT" and not in_half.reason, "a third is no rounding"


@slow
def test_parameters_shared_from_the_start_count_as_the_drafts():
    draft = made("qwen2")
    shared = made("qwen2", seed=5)
    draft.lm_head, draft.model.embed_tokens = shared.lm_head, shared.model.embed_tokens
    found = investigate(draft, shared)
    assert found.verdict == "SOUND" and found.coverage.complete, found.line


def logits_as(change):
    def changed(out):
        out.logits = change(out.logits)
        return out

    return patched("", changed)


def test_rounded_logits_are_inconclusive_and_wrong_ones_divergent():
    draft = made("qwen2")
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0))

    def verdict(change):
        return investigate(draft, deploy=logits_as(change), setups=["S0"]).verdict

    assert verdict(torch.Tensor.bfloat16) == verdict(lambda x: x.half().float()) == "INCONCLUSIVE"
    assert verdict(lambda x: x * (1 + 1e-3 * noise)) == "DIVERGENT"  # as small, but not rounding
    assert verdict(lambda x: 0 * x) == "DIVERGENT"
    draft.bfloat16()
    assert verdict(torch.Tensor.float) == "SOUND"


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda x: nn.functional.pad(x, (0, 3)), "67"),
        (lambda x: x[0], r"\(64,\)"),
        (lambda x: x[:, :0], r"\(0, 64\)"),
    ],
)
def test_logits_of_another_shape_are_refused(change, value):
    with pytest.raises(InputError, match=value):
        investigate(made("qwen2"), deploy=logits_as(change), setups=["S0"])


def test_router_ties_and_rounding_do_not_count_as_unsteady(divergence_lab):
    assert divergence_lab.unsteady.empty


QUICK_SOUND = ("gpt_oss", torch.bfloat16)
SOUND = [(kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [pytest.param(*sound, marks=[] if sound == QUICK_SOUND else slow) for sound in SOUND],
)
def test_sound_drafts_of_all_architectures_are_sound(kind, dtype):
    found = investigate(*(made(kind, seed).to(dtype) for seed in (0, 5)))
    assert found.verdict == "SOUND" and found.coverage.complete, found.line
