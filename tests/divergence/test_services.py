"""Services with faults that nobody planted in the package, and sound ones that look odd, on drafts of other makers."""

import math
from contextlib import ExitStack, contextmanager

import pandas as pd
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specnb.divergence import local, report
from specnb.divergence.deploy import planted
from specnb.divergence.investigate import investigate, made_up
from specnb.divergence.ownership import Before
from specnb.divergence.planting import forward_replaced, replaced
from specnb.divergence.setups import NEIGHBOUR, OWN
from specnb.errors import InputError

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LLAMA4 = {
    "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 8,
    "intermediate_size_mlp": 48, "no_rope_layers": [1, 0],
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16, "rope_theta": 1e4,
}  # fmt: skip
DOWN = "layers.1.mlp.down_proj"


def made(kind, seed=0, **options):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | options)).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) * (0.2 if weight.ndim > 1 else 1))
    return model


@pytest.fixture(scope="module")
def draft():
    return made("qwen2")


def target():
    return made("qwen2", seed=5)


def down(model):
    return model.get_submodule(f"model.{DOWN}")


def hands_out_parameters(draft, neighbour):
    """The very objects of the neighbour, as a registry by position hands them out."""
    return swapped(down(draft), "weight", down(neighbour).weight)


def hands_out_modules(draft, neighbour):
    return swapped(draft.model.layers[1].mlp, "down_proj", down(neighbour))


@contextmanager
def swapped(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def filled(tensor, values):
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(values)
        try:
            yield
        finally:
            tensor.copy_(before)


def copies_values(draft, neighbour):
    return filled(down(draft).weight, down(neighbour).weight)


@pytest.mark.parametrize("service", [hands_out_parameters, hands_out_modules, copies_values])
def test_a_neighbours_weights_that_became_the_drafts_own_are_the_neighbours(draft, service):
    def deploy(draft, neighbour):
        return ExitStack() if neighbour is None else service(draft, neighbour)

    found = investigate(draft, target(), deploy=deploy, setups=["S0", "S1", "S2", "S3"])
    assert found.first.module == DOWN and found.cause_known and found.causes[0].name == "IDENTITY"
    assert f"neighbour:model.{DOWN}.weight" in found.line and "S0 S1 clean; S2 S3 wrong" in found.line
    assert (found.setups().query("setup in ['S2', 'S3']")["foreign"] == 1).all()


@pytest.fixture(scope="module")
def tied():
    return made("llama", seed=3, tie_word_embeddings=True)  # of 0, the planted head is drawn as the embedding is


def untied(weight):
    """A service that gives the head a parameter of its own, as one that loads a checkpoint twice does."""

    def deploy(draft, neighbour):
        return swapped(draft.lm_head, "weight", nn.Parameter(weight.detach().clone()))

    return deploy


@pytest.mark.parametrize("how", [planted("random_head"), untied(torch.ones(64, 32).cumsum(0))], ids=["drawn", "other"])
def test_a_tied_head_that_is_another_is_the_heads_fault(tied, how):
    found = investigate(tied, deploy=how, setups=["S0"])
    assert found.first.module == "lm_head" and found.cause_known and found.causes[0].name == "HEAD"


def test_a_tied_head_that_is_the_neighbours_is_told_by_its_values(tied):
    def deploy(draft, neighbour):
        return ExitStack() if neighbour is None else untied(neighbour.lm_head.weight)(draft, neighbour)

    found = investigate(tied, made("llama", seed=5, tie_word_embeddings=True), deploy=deploy, setups=["S0", "S2", "S3"])
    assert found.first.module == "lm_head" and found.cause_known and found.causes[0].name == "IDENTITY"
    assert "neighbour:model.embed_tokens.weight" in found.line


def test_a_tied_head_that_is_read_as_it_should_be_is_not_to_blame(tied):
    assert investigate(tied, deploy=untied(tied.lm_head.weight), setups=["S0"]).verdict == "SOUND"

    def biased(draft, neighbour):
        return forward_replaced(draft.lm_head, lambda run, *args: run(*args) + torch.arange(64) % 3)

    found = investigate(tied, deploy=biased, setups=["S0"])
    assert found.first.module == "lm_head" and found.cause_known and found.causes[0].name == "COMPUTATION"


@pytest.mark.parametrize("chosen", [1, 3])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_router_that_chooses_more_or_fewer_is_wrong_before_its_experts(kind, chosen):
    draft = made(kind, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    path = {"mixtral": "layers.1.mlp.gate", "gpt_oss": "layers.1.mlp.router"}[kind]
    router = draft.model.get_submodule(path)
    found = investigate(draft, deploy=lambda draft, _: swapped(router, "top_k", chosen), setups=["S0"])
    assert found.first.module == path and found.cause_known and found.causes[0].name == "ROUTING", found.line


@contextmanager
def loaded_in_half(draft, neighbour):
    """As a loader with a dtype makes it: buffers of angles stay as they are."""
    with ExitStack() as until:
        for one in draft.parameters():
            until.enter_context(swapped(one, "data", one.data.bfloat16()))
        yield


@pytest.mark.parametrize(
    "half", [lambda *_: torch.autocast("cpu", torch.bfloat16), loaded_in_half], ids=["auto", "all"]
)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss"])
def test_half_precision_is_no_fault_wherever_it_is(kind, half):
    """Autocast leaves some modules of a class alone, and experts are chosen otherwise at near ties."""
    draft = made(kind, head_dim=8, num_local_experts=8, num_experts_per_tok=2)
    found = investigate(draft, deploy=half, setups=["S0", "S0w"])
    assert found.verdict == "PRECISION_ONLY" and "bfloat16" in found.reason, found.line

    def with_a_fault(draft, neighbour):
        until = ExitStack()
        until.enter_context(half(draft, neighbour))
        until.enter_context(forward_replaced(draft.model.norm, lambda run, *args: 1.5 * run(*args).flip(-1)))
        return until

    found = investigate(draft, deploy=with_a_fault, setups=["S0"])
    assert found.verdict == "DIVERGENT" and "norm" in {*found.nodes()["module"]}, found.line


def test_weights_in_another_order_are_told_to_be_harmless():
    """Neurons that stand elsewhere in all three matrices: other weights, and the same logits."""
    draft = made("llama")
    mlp = draft.model.layers[1].mlp

    @contextmanager
    def turned(draft, neighbour):
        with ExitStack() as until:
            for one, axis in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
                until.enter_context(swapped(one.weight, "data", one.weight.data.roll(1, axis)))
            yield

    found = investigate(draft, deploy=turned, setups=["S0"])
    assert found.verdict == "DIVERGENT" and found.causes[0].name == "WEIGHTS"
    assert "that does not explain refused drafts" in found.line
    wrong = investigate(
        draft, deploy=lambda *_: swapped(down(draft).weight, "data", down(draft).weight.data.roll(1, 0))
    )
    assert wrong.verdict == "DIVERGENT" and "explain" not in wrong.line

    def scaled(draft, neighbour):
        return filled(down(draft).weight, 1.3 * down(draft).weight)

    in_half = investigate(draft.bfloat16(), deploy=scaled, setups=["S0"])
    assert in_half.verdict == "DIVERGENT" and "explain" not in in_half.line, "a tenth is no rounding of bfloat16"


def test_values_that_anybody_may_have_are_nobodys(draft):
    """A bias that is lost is zeros, and so may a neighbour's be: that does not make it the neighbour's."""
    neighbour = target()
    bias = draft.model.layers[1].self_attn.k_proj.bias
    nn.init.zeros_(neighbour.model.layers[1].self_attn.k_proj.bias)
    found = investigate(draft, neighbour, deploy=lambda draft, _: swapped(bias, "data", torch.zeros_like(bias)))
    assert found.first.module == "layers.1.self_attn.k_proj"
    assert found.causes[0].name == "WEIGHTS" and not found.setups()["foreign"].any()


def test_the_drafts_own_values_in_a_wrong_place_are_not_a_neighbours():
    """A copy beside it has the same ones."""
    draft, neighbour = made("qwen2"), target()

    def of_another_layer(draft, neighbour):
        first = draft.model.layers[0].mlp.down_proj.weight
        return ExitStack() if neighbour is None else swapped(down(draft), "weight", nn.Parameter(first.data.clone()))

    def of_both(draft, neighbour):
        """Doubled in both models, and taken back in one."""
        if neighbour is None:
            return ExitStack()
        with torch.no_grad():
            down(neighbour).weight.mul_(2)
        return swapped(down(draft).weight, "data", 2 * down(draft).weight.data)

    for deploy in (of_another_layer, of_both):
        found = investigate(draft, neighbour, deploy=deploy, setups=["S0", "S1"])
        assert found.first.module == DOWN and not found.case.foreign, found.line


def test_parameters_that_both_have_had_from_the_beginning_are_the_drafts():
    draft, shared = made("qwen2"), target()
    draft.lm_head = shared.lm_head
    draft.model.embed_tokens = shared.model.embed_tokens
    before = Before(draft, shared, meant={}, own=OWN, other=NEIGHBOUR)
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & {*before._theirs}
    found = investigate(draft, shared)
    assert found.verdict == "SOUND" and found.coverage.complete, found.line


def test_positions_as_complex_numbers_are_compared_like_others():
    draft = made("llama4_text", **LLAMA4)
    assert investigate(draft, setups=["S0", "S0w"]).verdict == "SOUND"

    def conjugated(draft, neighbour):
        return forward_replaced(draft.model.rotary_emb, lambda original, *args: original(*args).conj())

    def turned(draft, neighbour):
        """As if all positions were three further."""
        angle = 3 * draft.model.rotary_emb.inv_freq
        turn = torch.polar(torch.ones_like(angle), angle)
        return forward_replaced(draft.model.rotary_emb, lambda original, *args: original(*args) * turn)

    found = investigate(draft, deploy=conjugated, setups=["S0"])
    assert found.first.module == "rotary_emb" and found.causes[0].name == "POSITION"
    offset = investigate(draft, deploy=turned, setups=["S0"])
    assert offset.verdict == "PRECISION_ONLY" and "one number off" in offset.line


@contextmanager
def rows_of_one_head(draft, neighbour):
    """The keys' norm forgets one head where as many tokens are fed as there are heads."""
    norm = draft.model.layers[1].self_attn.k_norm

    def forgetful(original, x):
        out = original(x)
        return out * torch.tensor([0.0, 1.0]).view(1, 2, 1, 1) if x.shape[2] == 2 else out

    with forward_replaced(norm, forgetful):
        yield


@pytest.mark.parametrize("prompt", [2, 12])
def test_as_many_tokens_as_heads_are_told_apart(prompt):
    """Gemma normalises (sequences, heads, tokens, features), and nothing but other steps says which axis is which."""
    draft = made("gemma3_text", head_dim=8, sliding_window=8)
    script = made_up(draft, prompt=prompt, tokens=22, k=1)  # in blocks of five the last has two
    sound = investigate(draft, script=script, setups=["S0", "S0w"])
    assert sound.verdict == "SOUND" and not any("k_norm" in one for one in sound.coverage.left_out), sound.line
    found = investigate(draft, script=script, deploy=rows_of_one_head, setups=["S0", "S0w"])
    assert found.first.module == "layers.1.self_attn.k_norm", found.line


def test_what_sound_runs_do_not_agree_on_is_not_called_sound():
    """Angles that depend on how many tokens are fed at once: any others would pass."""
    draft = made("phi3", original_max_position_embeddings=16, rope_parameters=LONGROPE)

    def rolled(draft, neighbour):
        return forward_replaced(
            draft.model.rotary_emb, lambda f, *args, **options: tuple(x.roll(1, -1) for x in f(*args, **options))
        )

    for deploy in (rolled, None):
        found = investigate(draft, deploy=deploy, setups=["S0"])
        assert found.verdict == "INCONCLUSIVE", found.line
        assert "rotary_emb is" in found.reason and "give a shorter text" in found.reason
        assert "too far apart to judge it: rotary_emb" in report.text(found)


@contextmanager
def two_rows(draft, neighbour):
    original = draft.forward

    def forward(input_ids, **options):
        out = original(input_ids=input_ids.repeat(2, 1), **options)
        out.logits = out.logits[:1]
        return out

    with replaced(draft, "forward", forward):
        yield


@contextmanager
def beside_another_row(draft, neighbour):
    """Gate and up exchanged, in a batch of two."""
    mlp = draft.model.layers[1].mlp
    gate, up = mlp.gate_proj, mlp.up_proj
    with two_rows(draft, neighbour), swapped(mlp, "gate_proj", up), swapped(mlp, "up_proj", gate):
        yield


def test_a_model_of_which_nothing_inside_was_compared_has_no_known_cause(draft):
    found = investigate(draft, deploy=beside_another_row, setups=["S0"])
    assert found.verdict == "DIVERGENT" and not found.cause_known
    assert f"the model itself or in one of {len(found.hidden)} modules that could not be compared" in found.line
    assert "no parameters" not in found.line
    assert "one row, whole and unpadded" in investigate(draft, deploy=two_rows, setups=["S0"]).reason


@contextmanager
def logits_as(draft, change):
    original = draft.forward

    def forward(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    with replaced(draft, "forward", forward):
        yield


def test_logits_that_are_rounded_at_last_are_rounding_and_others_are_not(draft):
    def verdict(change):
        return investigate(draft, deploy=lambda draft, _: logits_as(draft, change), setups=["S0"]).verdict

    noise = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert verdict(torch.Tensor.bfloat16) == verdict(lambda x: x.half().float()) == "PRECISION_ONLY"
    assert verdict(lambda x: x * (1 + 1e-3 * noise)) == "DIVERGENT"  # as small, and no rounding


def test_logits_in_a_wider_type_are_the_same_logits(draft):
    half = made("qwen2").to(torch.bfloat16)
    found = investigate(half, deploy=lambda draft, _: logits_as(draft, torch.Tensor.float), setups=["S0", "S0w"])
    assert found.verdict == "SOUND" and found.inert and found.repeats


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x: nn.functional.pad(x, (0, 3)), r"logits of 67 tokens, as it was loaded of 64"),
        (lambda x: x[0], r"the shape \(64,\): let the service give \(sequences, tokens, vocabulary\)"),
        (lambda x: x[:, :0], r"the shape \(0, 64\): .* of the last token at least"),
    ],
)
def test_logits_of_another_form_are_refused(draft, change, told):
    with pytest.raises(InputError, match=told):
        investigate(draft, deploy=lambda draft, _: logits_as(draft, change), setups=["S0"])


def other_frequencies(draft, neighbour):
    inv_freq = draft.model.rotary_emb.inv_freq
    return filled(inv_freq, inv_freq**0.5)


def longer_angles(draft, neighbour):
    return replaced(draft.model.rotary_emb, "attention_scaling", 1.1)


@contextmanager
def counts_on_after_a_rejection(draft, neighbour):
    """Positions are one too far from the first rejection on."""
    original, most, late = draft.forward, 0, 0

    def forward(input_ids, past_key_values=None, **options):
        nonlocal most, late
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        late = 0 if past_key_values is None else late or int(held < most)
        most = held + input_ids.shape[1]
        ids = torch.arange(held, most)[None] + late
        return original(input_ids=input_ids, past_key_values=past_key_values, position_ids=ids, **options)

    with replaced(draft, "forward", forward):
        yield


@pytest.mark.parametrize(
    ("deploy", "cause"),
    [(other_frequencies, "POSITION"), (longer_angles, "COMPUTATION"), (counts_on_after_a_rejection, "POSITION")],
)
def test_wrong_angles_wrong_lengths_and_wrong_positions_are_told_apart(draft, deploy, cause):
    found = investigate(draft, deploy=deploy)
    assert "rotary_emb" in found.line and found.causes[0].name == cause and found.cause_known


def test_a_draft_in_training_mode_is_told_so():
    draft = made("gpt2", n_embd=32, n_layer=1, n_head=2, n_positions=64)
    draft.train()
    found = investigate(draft, setups=["S0"])
    assert found.verdict == "DIVERGENT" and "differs from run to run (it is in training mode" in found.line


def test_routers_that_flip_at_a_tie_and_rounding_are_steady(divergence_lab):
    assert divergence_lab.unsteady.empty
    routers = {"layers.0.mlp.router"}
    sound = pd.DataFrame([(at, 0, "out", "out", error, False) for at, error in (
        ("layers.0.mlp.router", 1.0), ("layers.0.mlp", 0.3), ("norm", 0.4), ("lm_head", math.inf)
    )], columns=[*local.WHICH, "error", "discrete"])  # fmt: skip
    assert local.unsteady([sound], routers).index.get_level_values("at").tolist() == ["lm_head", "norm"]


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAKERS = {
    "llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {}, "qwen3": {"head_dim": 8}, "phi3": {}, "smollm3": {},
    "gemma2": {"head_dim": 8, "sliding_window": 8}, "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "cohere2": {"sliding_window": 8}, "olmo2": {}, "stablelm": {}, "starcoder2": {}, "glm4": {"head_dim": 8},
    "exaone4": {"sliding_window": 8}, "nemotron": {}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": OLD, "gptj": OLD | {"rotary_dim": 8}, "gpt_neox": {}, "bloom": {"n_head": 4, "n_layer": 2},
    "mixtral": {"num_local_experts": 4}, "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 24}, "qwen3_moe": MOE | {"head_dim": 8}, "olmoe": MOE,
    "granitemoe": {"num_local_experts": 4}, "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "deepseek_v2": DEEPSEEK, "deepseek_v3": DEEPSEEK, "llama4_text": LLAMA4,
}  # fmt: skip
"""Small drafts of the architectures that people draft with: norms, windows, experts and angles of each kind."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MAKERS)
def test_sound_drafts_of_all_makers_are_sound(kind, dtype):
    found = investigate(*(made(kind, seed, **MAKERS[kind]).to(dtype) for seed in (0, 5)))
    assert found.verdict == "SOUND" and found.coverage.complete, found.line
