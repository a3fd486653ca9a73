"""A transformers folder as a GGUF file, so that llama.cpp runs the same weights: recurrent and hybrid families first.

Tensors are read, changed and written one by one: memory holds the largest of them, not the model. The models are
those whose torch and llama.cpp code were compared, logit by logit (tests/lm/test_to_gguf.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from specnb.errors import InputError, SpecnbError, did_you_mean
from specnb.io import read_json
from specnb.lm.cache import files_digest, made_once
from specnb.lm.gguf.binding import FILE_TYPES
from specnb.lm.gguf.families import FAMILIES, Key, Plan, Weight
from specnb.lm.gguf.tokenizer import tokenizer_keys
from specnb.paths import cache_dir

DTYPES = ("f16", "f32", "bf16")
MAX_TEXT_BYTES = 64 << 20
CONVERSION = 1
"""Part of the file's name: raise it when the conversion changes, and older files are made again."""

READ = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "*.safetensors",
)


def converted(folder: Path, dtype: str) -> Path:
    """The cached GGUF of the model in `folder`; another one for other weights, texts or `dtype` (see `write_gguf`)."""
    check_dtype(dtype)
    files = [path for pattern in READ for path in sorted(folder.glob(pattern))]
    digest = files_digest(files)
    dest = cache_dir() / "converted" / f"{folder.resolve().name}-{digest[:16]}-{CONVERSION}.{dtype}.gguf"
    n_bytes = 2 * sum(path.stat().st_size for path in files)
    return made_once(dest, lambda partial: write_gguf(folder, partial, dtype=dtype), n_bytes=n_bytes)


def write_gguf(folder: Path | str, dest: Path | str, *, dtype: str = "f16") -> Path:
    """Write the model in `folder` (config.json, safetensors, tokenizer) to the GGUF file `dest`; returns `dest`.

    `dtype` of the matrices: "f16", "f32" or "bf16"; vectors and convolutions stay float32.

    Raises InputError for an unknown dtype; a `model_type` other than FAMILIES or a config that llama.cpp computes
    otherwise; missing, left over or misshapen tensors; values that are not finite, or not in 16 bits; a tokenizer
    that llama.cpp splits otherwise (see `tokenizer_keys`); a `dest` that cannot be written. Raises LoadError for
    files that transformers or safetensors cannot read.
    """
    folder, dest = Path(folder).expanduser(), Path(dest).expanduser()
    check_dtype(dtype)
    with _single_error(folder):
        plan, keys = _describe(folder)
        with ExitStack() as stack:
            read = _tensors(folder, plan, stack)
            _write(dest, folder.resolve().name, plan, keys, dtype, read)
    return dest


def check_dtype(dtype: str) -> None:
    """Refuse what `write_gguf` does not write."""
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: {did_you_mean(str(dtype), DTYPES)}known are {', '.join(DTYPES)}")


@contextmanager
def _single_error(folder: Path) -> Iterator[None]:
    """Broken files make safetensors, tokenizers and transformers raise nearly any class."""
    try:
        yield
    except SpecnbError:
        raise
    except OSError as error:
        raise InputError(f"cannot convert {folder}: {error}") from error
    except Exception as error:
        from specnb.lm.hf.files import load_error

        raise load_error(str(folder), error) from error


def _describe(folder: Path) -> tuple[Plan, dict[str, Key]]:
    """The plan of the model and the keys of its tokenizer; no weight is read."""
    raw = read_json(folder / "config.json", MAX_TEXT_BYTES)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(
            f"{folder} has the model_type {kind!r:.80}: known are {', '.join(FAMILIES)}; "
            "llama.cpp's own convert_hf_to_gguf.py knows many others"
        )
    if not (folder / "tokenizer.json").exists():
        raise InputError(f"{folder} has no tokenizer.json: save the tokenizer into it with save_pretrained")
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from specnb.lm.hf.files import quiet, vocabulary

    with quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        plan = FAMILIES[kind](config)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        has_generation = (folder / "generation_config.json").exists()
        generation = GenerationConfig.from_pretrained(folder) if has_generation else None
    return plan, tokenizer_keys(tokenizer, vocabulary(tokenizer, config, generation))


def _tensors(folder: Path, plan: Plan, stack: ExitStack) -> Callable[[Weight], np.ndarray]:
    """A reader of the planned tensors as float32, after checking that the files hold exactly those."""
    from safetensors import safe_open

    where: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = stack.enter_context(safe_open(path, framework="pt"))
        where |= dict.fromkeys(file.keys(), file)
    if not where:
        raise InputError(f"{folder} has no model.safetensors: weights in other forms are not read")
    wanted = {weight.source for weight in plan.weights}
    if missing := sorted(wanted - set(where)):
        raise InputError(f"{folder} lacks {len(missing)} tensors of its config (the first: {missing[0]})")
    if left := sorted(name for name in set(where) - wanted if not name.startswith(plan.skipped)):
        raise InputError(f"{folder} has {len(left)} tensors beyond its config (the first: {left[0]:.100})")
    for weight in plan.weights:
        if (shape := tuple(where[weight.source].get_slice(weight.source).get_shape())) != weight.shape:
            raise InputError(f"{folder}: {weight.source} has the shape {shape}, its config says {weight.shape}")

    def read(weight: Weight) -> np.ndarray:
        tensor = where[weight.source].get_tensor(weight.source)
        if not tensor.is_floating_point():
            raise InputError(f"{folder}: {weight.source} is {tensor.dtype}: quantised weights are not read")
        return tensor.float().numpy()

    return read


def _write(
    dest: Path, name: str, plan: Plan, keys: Mapping[str, Key], dtype: str, read: Callable[[Weight], np.ndarray]
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(dest, plan.arch)
    # each key with the type that llama.cpp's loader asks for: gguf-py has no method for some of the names
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    general = {"general.name": name, "general.file_type": FILE_TYPES[dtype]}
    try:
        for key, value in {**general, **{f"{plan.arch}.{k}": v for k, v in plan.keys.items()}, **keys}.items():
            add.get(type(value), writer.add_array)(key, value)
        for weight in plan.weights:
            kind = _type(weight, dtype)
            n_bytes = int(np.prod(weight.written_shape, dtype=np.int64)) * (4 if kind == "f32" else 2)
            # numpy's type is only looked at for packed bytes; the true one is the last argument
            raw_dtype = GGMLQuantizationType[kind.upper()]
            writer.add_tensor_info(weight.name, weight.written_shape, np.dtype(np.float32), n_bytes, raw_dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight in plan.weights:
            writer.write_tensor_data(_values(weight, dtype, read(weight)))
    finally:
        writer.close()


def _type(weight: Weight, dtype: str) -> str:
    return "f32" if weight.exact else dtype


def _values(weight: Weight, dtype: str, tensor: np.ndarray) -> np.ndarray:
    """The bytes to write. InputError for values that are not finite, or that float16 does not reach."""
    from gguf import GGMLQuantizationType, quantize

    changed = (weight.change(tensor) if weight.change else tensor).reshape(weight.written_shape)
    changed = np.ascontiguousarray(changed, dtype=np.float32)
    kind = _type(weight, dtype)
    with np.errstate(over="ignore"):
        packed = quantize(changed, GGMLQuantizationType[kind.upper()])
    if not np.isfinite(changed).all() or (kind == "f16" and not np.isfinite(packed).all()):
        raise InputError(f"{weight.source} has values that {kind} does not hold: damaged, or write it with dtype='f32'")
    return packed
