"""Work in the background that reports how it ended, and can be asked to stop."""

import threading
from collections.abc import Callable
from typing import Any


class Job(threading.Thread):
    """Runs `work(cancelled)` in a thread of its own, then calls `ended(result, error, was_cancelled)` from there.

    `cancelled()` tells the work that it is to stop soon; an error of the work is handed over, never raised.
    """

    def __init__(
        self,
        work: Callable[[Callable[[], bool]], Any],
        ended: Callable[[Any, BaseException | None, bool], None],
    ) -> None:
        super().__init__(name="specnb-live", daemon=True)  # a kernel that is shut down does not wait for it
        self._work, self._ended = work, ended
        self._cancel = threading.Event()

    def cancel(self) -> None:
        """Ask the work to stop; it ends at its next look."""
        self._cancel.set()

    def run(self) -> None:
        result, error = None, None
        try:
            result = self._work(self._cancel.is_set)
        except BaseException as caught:  # whatever it is, it must reach the reader
            error = caught
        self._ended(result, error, self._cancel.is_set())
