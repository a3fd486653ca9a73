"""A kernel that is this very Python, reached over sockets of its own."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_client import AsyncKernelManager

SOCKET_PATH_BYTES = 95  # "-ipc-1" is added to it; Linux takes 107, macOS 103


@contextmanager
def kernel_manager(kernel_name: str) -> Iterator["AsyncKernelManager"]:
    """A manager for one kernel; with the name `python3` that kernel is this interpreter, whatever is installed.

    A spec named python3 of another environment may lie earlier on Jupyter's path. TCP ports, and socket names in a
    shared folder, collide when several kernels start at once: the sockets lie in a temporary folder of their own,
    removed at the end. Windows, and a temporary folder with too long a name, get TCP.
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager

    specs = KernelSpecManager(kernel_dirs=[]) if kernel_name == NATIVE_KERNEL_NAME else KernelSpecManager()
    with tempfile.TemporaryDirectory(prefix="specnb-", ignore_cleanup_errors=True) as folder:
        file = os.path.realpath(Path(folder) / "k.json")
        ipc = sys.platform != "win32" and len(os.fsencode(file)) <= SOCKET_PATH_BYTES
        yield AsyncKernelManager(
            kernel_name=kernel_name,
            kernel_spec_manager=specs,
            connection_file=file,
            transport="ipc" if ipc else "tcp",
        )
