"""The GGUF of a transformers folder, made once: what `?backend=llama` opens."""

from pathlib import Path

from filelock import FileLock

from specnb.lm.convert.to_gguf import TEXTS, check_dtype, write_gguf
from specnb.lm.download import files_digest, need_space
from specnb.paths import cache_dir

CONVERSION = 1
"""Part of the file's name: raise it when the conversion changes, and older files are made again."""

READ = ("config.json", *TEXTS, "*.safetensors")


def converted(folder: Path, dtype: str) -> Path:
    """The cached GGUF of the model in `folder`; another one for other weights, texts or `dtype` (see `write_gguf`)."""
    check_dtype(dtype)
    files = [path for pattern in READ for path in sorted(folder.glob(pattern))]
    digest = files_digest(files)
    made = cache_dir() / "converted" / f"{folder.resolve().name}-{digest[:16]}-{CONVERSION}.{dtype}.gguf"
    if not made.is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{made}.lock"):
            if not made.is_file():
                need_space(made.parent, 2 * sum(path.stat().st_size for path in files))
                write_gguf(folder, made, dtype=dtype)
    return made
