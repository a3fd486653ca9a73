"""What llama.cpp needs to open a GGUF: checks beforehand, the model, its context, and what they can do."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from specnb.errors import InputError, LoadError
from specnb.lm.gguf import binding
from specnb.lm.memory import Need, kv_bytes, quota_cores, require

if TYPE_CHECKING:
    from specnb.lm.gguf.tensors import Watch

KV_TYPES = {"f32": (0, 4), "f16": (1, 2)}
"""KV cache types: ggml's number and bytes per value."""

DEFAULT_N_CTX = 4096
MAX_BATCH = 512
LIMITS = {"n_ctx": 2**31 - 1 - MAX_BATCH, "threads": 512, "gpu_layers": 2**31 - 1, "fixed_width": MAX_BATCH}
"""Of the options: positions and layers are 32-bit integers in llama.cpp, and far more threads crash it."""


def available_cores() -> int:
    """Physical cores this process may use: more threads than that make verification slower."""
    physical = psutil.cpu_count(logical=False) or 1
    try:
        allowed = len(psutil.Process().cpu_affinity())
    except AttributeError:  # macOS has no affinity
        allowed = physical
    return max(1, min(physical, allowed, math.ceil(quota_cores() or physical)))


def check_file(path: Path) -> None:
    """Refuse what is no GGUF file, before llama.cpp sees it."""
    if not path.is_file():
        raise InputError(f"no such model file: {path}")
    with path.open("rb") as f:
        magic = f.read(4)
    if magic != b"GGUF":
        raise LoadError(f"{path} is not a GGUF file (it starts with {magic!r}): fetch or convert it again")


def gpu_share(path: Path, gpu_layers: int) -> float:
    """What part of a model `gpu_layers` put on the GPU: those of its layers, the output being one of them."""
    if not gpu_layers:
        return 0.0
    with binding.header(path) as model:
        layers = binding.metadata(model, f"{binding.metadata(model, 'general.architecture')}.block_count")
    return min(1.0, gpu_layers / (int(layers or 0) + 1))


def require_room(name: str, weights: int, state: int, share: float, *, loaded: bool = False) -> None:
    """MemoryShortError unless the bytes fit: the `share` of them on the GPU, if its room is known, the rest here.

    Weights that are `loaded` are no longer free on the GPU; here they are pages of the file, which count as free.
    """
    require(Need(round((1 - share) * weights), round((1 - share) * state)), name=name)
    if share and (free := binding.gpu_free_bytes()) is not None:
        need = Need(0 if loaded else round(share * weights), round(share * state))
        require(need, name=name, device="the GPU", free=free)


def open_model(path: Path, gpu_layers: int) -> object:
    """llama_model_load_from_file; LoadError with llama.cpp's own reason."""
    lib = binding.library()
    params = lib.api.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    lib.errors.clear()
    model = lib.api.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise LoadError(f"llama.cpp cannot open {path}: {'; '.join(lib.errors) or 'it gives no reason'}")
    return model


def open_context(
    model: object,
    n_ctx: int,
    kv: str,
    threads: int,
    flash_attention: bool,
    planes: int = 0,
    watch: "Watch | None" = None,
) -> object:
    """llama_init_from_model: one sequence, every entry kept, equal threads for all widths.

    `planes` snapshots of a recurrent state are asked for; architectures that have none get none.
    """
    lib = binding.library()
    params = lib.api.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = params.n_ubatch = min(MAX_BATCH, n_ctx)
    params.n_seq_max = 1
    params.n_rs_seq = planes
    # width 1 and wider forwards take their threads from two fields; unequal ones would tilt T(n)/T(1)
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = KV_TYPES[kv][0]
    params.flash_attn_type = 1 if flash_attention else 0
    params.swa_full = True  # sliding-window layers keep every entry, so that a rewind is exact
    params.no_perf = True
    if watch is not None:  # llama.cpp takes it now or never
        params.cb_eval = watch.callback
    lib.errors.clear()
    context = lib.api.llama_init_from_model(model, params)
    if not context:
        raise LoadError(f"llama.cpp cannot make a context of {n_ctx} tokens: {'; '.join(lib.errors) or 'no reason'}")
    if not lib.api.llama_get_memory(context) or lib.api.llama_model_has_encoder(model):
        lib.api.llama_free(context)
        raise LoadError("this model is an encoder, not a causal language model: it predicts no next token")
    return context


def state_bytes(model: object, n_ctx: int, kv: str, planes: int = 0) -> int:
    """Bytes of the KV cache and of the recurrent states with their `planes`, each counted as if all layers had it."""
    api = binding.library().api
    heads, kv_heads = api.llama_model_n_head(model), api.llama_model_n_head_kv(model)
    recurrent = _recurrent_bytes(model) * (1 + planes)
    if heads < 1 or kv_heads < 1:
        return recurrent
    return recurrent + kv_bytes(
        n_layers=api.llama_model_n_layer(model),
        n_kv_heads=kv_heads,
        head_dim=api.llama_model_n_embd(model) // heads,
        n_ctx=n_ctx,
        bytes_per_value=KV_TYPES[kv][1],
    )


def _recurrent_bytes(model: object) -> int:
    """Of one plane: inner size x state size a layer, in float32 whatever the weights are; 0 where no key says so."""
    arch = binding.metadata(model, "general.architecture") or ""
    sizes = [binding.metadata(model, f"{arch}.ssm.{key}") or "" for key in ("inner_size", "state_size")]
    if not all(size.isdigit() for size in sizes):
        return 0
    return binding.library().api.llama_model_n_layer(model) * int(sizes[0]) * int(sizes[1]) * 4


def weight_type(model: object) -> str:
    """The weight type as the header states it, by its name in FILE_TYPES."""
    number = binding.metadata(model, "general.file_type") or ""
    names = {str(v): k for k, v in binding.FILE_TYPES.items()}
    return names.get(number, f"ftype{number}" if number else "unknown")


def recurrent(model: object) -> bool:
    """Whether some layers keep a recurrent state."""
    api = binding.library().api
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))
