"""What both engines' models do alike with their way back."""

from specnb.lm.base import check_rewind
from specnb.lm.rollback import Rollback


class GoesBack:
    """A model whose state lies behind a `Rollback`; its class says what a failure leaves, and when it is closed."""

    rollback: Rollback

    def _require_open(self) -> None:
        raise NotImplementedError

    def _go_back(self, n: int) -> None:
        """After a failure: the state of the first `n` tokens again, or none."""
        raise NotImplementedError

    @property
    def n_past(self) -> int:
        self._require_open()
        return self.rollback.n_past

    def rewind(self, n: int) -> None:
        self._require_open()
        n, before = check_rewind(self, n), self.n_past
        try:
            self.rollback.rewind(n)
        except BaseException:  # what brings a state back may run the model, and be interrupted
            self._go_back(before)
            raise

    def reset(self) -> None:
        self._require_open()
        self.rollback.reset()
