# transformers is dynamic, and reading its 2,700 files takes longer than all else: all types are
# unknown here.
from typing import Any

def __getattr__(name: str) -> Any: ...
