"""The GGUF of a transformers folder, made once: what `?backend=llama` opens."""

from pathlib import Path

from specnb.lm.cache import files_digest, made_once
from specnb.lm.convert.to_gguf import TEXTS, check_dtype, write_gguf
from specnb.paths import cache_dir

CONVERSION = 1
"""Part of the file's name: raise it when the conversion changes, and older files are made again."""

READ = ("config.json", *TEXTS, "*.safetensors")


def converted(folder: Path, dtype: str) -> Path:
    """The cached GGUF of the model in `folder`; another one for other weights, texts or `dtype` (see `write_gguf`)."""
    check_dtype(dtype)
    files = [path for pattern in READ for path in sorted(folder.glob(pattern))]
    digest = files_digest(files)
    dest = cache_dir() / "converted" / f"{folder.resolve().name}-{digest[:16]}-{CONVERSION}.{dtype}.gguf"
    n_bytes = 2 * sum(path.stat().st_size for path in files)
    return made_once(dest, lambda partial: write_gguf(folder, partial, dtype=dtype), n_bytes=n_bytes)
