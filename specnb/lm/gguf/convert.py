"""A transformers folder as a GGUF file, so that llama.cpp runs the same weights: recurrent and hybrid families first.

Which tensors there are, and their shapes, is what transformers builds of the config; their GGUF names are the gguf
package's. They are read, changed and written one by one: memory holds the largest of them, not the model. The models
are those whose torch and llama.cpp code were compared, logit by logit (tests/lm/test_to_gguf.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specnb.errors import InputError, did_you_mean
from specnb.io import cache_dir, digest, file_digest, read_json, writing
from specnb.lm.gguf.binding import FILE_TYPES
from specnb.lm.gguf.families import FAMILIES, Change, Family, Key
from specnb.lm.gguf.tokenizer import tokenizer_keys
from specnb.lm.zoo import made_once

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("f16", "f32", "bf16")
MAX_TEXT_BYTES = 64 << 20
CONVERSION = 1
"""Part of the file's name: raise it when the conversion changes, and older files are made again."""

READ = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("chat_template.jinja", "*.safetensors"),
)


class Weight(NamedTuple):
    """A tensor of a model: its GGUF name, transformers' name, its shape (a tensor without memory), and its change."""

    name: str
    source: str
    like: "Tensor"
    change: Change

    def kind(self, dtype: str) -> str:
        """Vectors and convolutions stay float32 whatever the file's type is: llama.cpp's kernels read them so."""
        return dtype if self.like.dim() == 2 else "f32"


def converted(folder: Path, dtype: str) -> Path:
    """The cached GGUF of the model in `folder`; another one for other weights, texts or `dtype` (see `write_gguf`)."""
    files = [path for pattern in READ for path in sorted(folder.glob(pattern))]
    sha256 = digest([file_digest(path) for path in files])
    dest = cache_dir() / "converted" / f"{folder.resolve().name}-{sha256[:16]}-{CONVERSION}.{dtype}.gguf"
    n_bytes = 2 * sum(path.stat().st_size for path in files)
    return made_once(dest, lambda partial: write_gguf(folder, partial, dtype=dtype), n_bytes=n_bytes)


def write_gguf(folder: Path, dest: Path, *, dtype: str = "f16") -> Path:
    """Write the model in `folder` (config.json, safetensors, tokenizer) to the GGUF file `dest`; returns `dest`.

    `dtype` of the matrices: "f16", "f32" or "bf16"; vectors and convolutions stay float32. Raises InputError for a
    model, config, weights or tokenizer that llama.cpp would compute otherwise, or that are not whole, and for a `dest`
    that cannot be written; LoadError for files that transformers or safetensors cannot read.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: {did_you_mean(str(dtype), DTYPES)}known are {', '.join(DTYPES)}")
    try:
        family, weights, keys = _describe(folder)
        where = _located(folder, family, weights)
        general = {"general.name": folder.resolve().name, "general.file_type": FILE_TYPES[dtype]}
        with writing(dest):
            _write(dest, family.arch, general | keys, weights, dtype, where)
    except Exception as error:  # broken files make safetensors, tokenizers and transformers raise nearly any class
        from specnb.lm.hf.files import load_error

        raise load_error(str(folder), error) from error
    return dest


def _describe(folder: Path) -> tuple[Family, list[Weight], dict[str, Key]]:
    """The family of the model, its tensors, and the keys of the header; no weight is read."""
    kind = read_json(folder / "config.json", MAX_TEXT_BYTES).get("model_type")
    if kind not in FAMILIES:
        raise InputError(
            f"{folder} has the model_type {kind!r:.80}: known are {', '.join(FAMILIES)}; "
            "llama.cpp's own convert_hf_to_gguf.py knows many others"
        )
    if not (folder / "tokenizer.json").exists():
        raise InputError(f"{folder} has no tokenizer.json: save the tokenizer into it with save_pretrained")
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from specnb.lm.hf.files import quiet, vocabulary

    family = FAMILIES[kind]
    with quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        keys = {f"{family.arch}.{key}": value for key, value in family.keys(config).items()}
        weights = _weights(family, config)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        has_generation = (folder / "generation_config.json").exists()
        generation = GenerationConfig.from_pretrained(folder) if has_generation else None
    return family, weights, keys | tokenizer_keys(tokenizer, vocabulary(tokenizer, config, generation))


def _weights(family: Family, config: Any) -> list[Weight]:
    """The tensors that transformers builds of `config`. A tied output is the embedding."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from specnb.lm.hf.files import skeleton

    arch = next(number for number, name in MODEL_ARCH_NAMES.items() if name == family.arch)
    names, changes = get_tensor_name_map(arch, config.num_hidden_layers), family.changes(config)
    weights = []
    for source, like in skeleton(config).state_dict().items():
        if source != "lm_head.weight" or not config.tie_word_embeddings:
            name = names.get_name(source.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
            change = next((change for ending, change in changes.items() if source.endswith(ending)), lambda w: w)
            weights.append(Weight(name, source, like, change))
    return weights


def _located(folder: Path, family: Family, weights: list[Weight]) -> dict[str, Path]:
    """The file of each tensor, after checking that the files hold exactly these, in their shapes."""
    from safetensors import safe_open

    where: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            where |= dict.fromkeys(file.keys(), path)
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    wanted = {weight.source for weight in weights}
    if missing := sorted(wanted - set(where)):
        raise InputError(f"{folder}/*.safetensors lack {len(missing)} tensors of the config (the first: {missing[0]})")
    # a tied output may be stored all the same
    if left := sorted(name for name in set(where) - wanted if not name.startswith((*family.skipped, "lm_head."))):
        raise InputError(f"{folder} has {len(left)} tensors beyond its config (the first: {left[0]:.100})")
    for weight in weights:
        if shapes[weight.source] != (expected := list(weight.like.shape)):
            raise InputError(f"{folder}: {weight.source} is {shapes[weight.source]}, its config says {expected}")
    return where


def _values(weight: Weight, path: Path) -> np.ndarray:
    """What is written of a tensor, as float32."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(weight.source)
    if not tensor.is_floating_point():
        raise InputError(f"{path}: {weight.source} is {tensor.dtype}: quantised weights are not read")
    return weight.change(tensor.float()).contiguous().numpy()


def _write(
    dest: Path, arch: str, keys: Mapping[str, Key], weights: list[Weight], dtype: str, where: Mapping[str, Path]
) -> None:
    """InputError for values that are not finite, or that float16 does not reach."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer = GGUFWriter(dest, arch)
    # each key with the type that llama.cpp's loader asks for: gguf-py has no method for some of the names
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    try:
        for key, value in keys.items():
            add.get(type(value), writer.add_array)(key, value)
        for weight in weights:
            kind, changed = weight.kind(dtype), weight.change(weight.like)
            n_bytes = changed.numel() * (4 if kind == "f32" else 2)
            # numpy's type is only looked at for packed bytes; the true one is the last argument
            raw_dtype = GGMLQuantizationType[kind.upper()]
            writer.add_tensor_info(weight.name, changed.shape, np.dtype(np.float32), n_bytes, raw_dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight in weights:
            kind, values = weight.kind(dtype), _values(weight, where[weight.source])
            with np.errstate(over="ignore"):
                packed = quantize(values, GGMLQuantizationType[kind.upper()])
            if not np.isfinite(values).all() or (kind == "f16" and not np.isfinite(packed).all()):
                raise InputError(
                    f"{weight.source} has values that {kind} does not hold: damaged, or write it with dtype='f32'"
                )
            writer.write_tensor_data(packed)
    finally:
        writer.close()
