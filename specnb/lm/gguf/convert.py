"""A transformers folder as a GGUF file, so that llama.cpp runs the same weights: recurrent and hybrid families first.

transformers loads the model, in float32; the GGUF names of its tensors are the gguf package's. The models are those
whose torch and llama.cpp code were compared, logit by logit (tests/lm/test_to_gguf.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specnb.errors import InputError, require_known
from specnb.io import cache_dir, digest, file_digest, read_json, writing
from specnb.lm.gguf.binding import FILE_TYPES
from specnb.lm.gguf.families import FAMILIES, Family, Key
from specnb.lm.gguf.tokenizer import tokenizer_keys
from specnb.lm.zoo import made_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("f16", "f32", "bf16")
FEED_FORWARD = ("mlp.up_proj.weight", "feed_forward.w3.weight")
CONVERSION = 1
"""Part of the file's name: raise it when the conversion changes, and older files are made again."""


def converted(folder: Path, dtype: str) -> Path:
    """The cached GGUF of the model in `folder`; another one for other files in it or `dtype` (see `write_gguf`)."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sha256 = digest([file_digest(path) for path in files])
    dest = cache_dir() / "converted" / f"{folder.resolve().name}-{sha256[:16]}-{CONVERSION}.{dtype}.gguf"
    n_bytes = 2 * sum(path.stat().st_size for path in files)
    return made_once(dest, lambda partial: write_gguf(folder, partial, dtype=dtype), n_bytes=n_bytes)


def write_gguf(folder: Path, dest: Path, *, dtype: str = "f16") -> Path:
    """Write the model in `folder` (config.json, safetensors, tokenizer) to the GGUF file `dest`; returns `dest`.

    `dtype` of the matrices: "f16", "f32" or "bf16"; vectors and convolutions stay float32, as llama.cpp's kernels read
    them. Raises InputError for a model, config or tokenizer that llama.cpp would compute otherwise, for values that
    `dtype` does not hold, and for a `dest` that cannot be written; LoadError for files that transformers cannot read,
    MemoryShortError for a model that is too large in float32.
    """
    require_known("dtype", dtype, DTYPES)
    kind = read_json(folder / "config.json").get("model_type")
    if kind not in FAMILIES:
        known = f"known are {', '.join(FAMILIES)}; llama.cpp's own convert_hf_to_gguf.py knows others"
        raise InputError(f"{folder} has the model_type {kind!r:.80}: {known}")
    import torch

    from specnb.lm.hf.files import load, vocabulary

    model, tokenizer = load(str(folder), dtype=torch.float32, device="cpu", n_ctx=0, revision="main")
    if tokenizer is None:
        raise InputError(f"{folder} has no tokenizer.json: save the tokenizer into it with save_pretrained")
    family, config = FAMILIES[kind], model.config
    keys = {f"{family.arch}.{key}": value for key, value in family.keys(config).items()}
    # asked for of Mamba too, which has none; LFM2's is not its config's `intermediate_size`
    widths = [w.shape[0] for name, w in model.state_dict().items() if name.endswith(FEED_FORWARD)] or [0]
    keys[f"{family.arch}.feed_forward_length"] = widths[0]
    keys |= {"general.name": folder.resolve().name, "general.file_type": FILE_TYPES[dtype]}
    keys |= tokenizer_keys(tokenizer, vocabulary(tokenizer, config, model.generation_config))
    with writing(dest):
        _write(dest, family.arch, keys, _tensors(model, family, dtype))
    return dest


def _tensors(model: "PreTrainedModel", family: Family, dtype: str) -> Iterator[tuple[str, np.ndarray, str]]:
    """GGUF name, values in float32 and type in the file of each tensor. A tied output is the embedding."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(number for number, name in MODEL_ARCH_NAMES.items() if name == family.arch)
    names, changes = get_tensor_name_map(arch, model.config.num_hidden_layers), family.changes(model.config)
    for source, weight in model.state_dict().items():
        if source != "lm_head.weight" or not model.config.tie_word_embeddings:
            name = names.get_name(source.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
            change = next((change for ending, change in changes.items() if source.endswith(ending)), lambda w: w)
            yield name, change(weight).contiguous().numpy(), dtype if weight.dim() == 2 else "f32"


def _write(dest: Path, arch: str, keys: Mapping[str, Key], tensors: Iterable[tuple[str, np.ndarray, str]]) -> None:
    """InputError for values that are not finite, or that float16 does not reach."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer = GGUFWriter(dest, arch)
    # each key with the type that llama.cpp's loader asks for: gguf-py has no method for some of the names
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        add.get(type(value), writer.add_array)(key, value)
    for name, values, dtype in tensors:
        kind = GGMLQuantizationType[dtype.upper()]
        with np.errstate(over="ignore"):
            packed = quantize(values, kind)
        if not np.isfinite(values).all() or (dtype == "f16" and not np.isfinite(packed).all()):
            raise InputError(f"{name} has values that {dtype} does not hold: damaged, or write it with dtype='f32'")
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
