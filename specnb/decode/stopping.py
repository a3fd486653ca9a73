"""When a generation ends, decided token by token, so that a block of tokens ends where single steps would."""

from collections.abc import Sequence
from dataclasses import dataclass

from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary
from specnb.records import StopReason


@dataclass(frozen=True)
class StopRules:
    """End at an end-of-generation token (unless `ignore_eog`), after `max_new_tokens`, or once a stop string appears.

    The end-of-generation token is part of the generated ids; a stop string is not part of the text.
    """

    max_new_tokens: int = 128
    stop_strings: tuple[str, ...] = ()
    ignore_eog: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise InputError(f"max_new_tokens must be 0 or more, got {self.max_new_tokens}")
        if any(not s for s in self.stop_strings):
            raise InputError("a stop string must not be empty")
        for s in self.stop_strings:
            require_text(s, "a stop string")


def require_text(text: str, noun: str) -> None:
    """Refuse half a surrogate pair, which has no bytes; a command line gives it for bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(f"{noun} holds {half!a}, which is no text in UTF-8: write whole characters") from error


class Stopping:
    """Counts and reads the tokens of one generation; `reason` is set when it has ended."""

    def __init__(self, rules: StopRules, vocab: Vocabulary) -> None:
        self._rules, self._vocab = rules, vocab
        self._strings = tuple(s.encode() for s in rules.stop_strings)
        self._text = bytearray()
        self._count = 0
        self.reason: StopReason | None = "length" if rules.max_new_tokens == 0 else None

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._rules.max_new_tokens - self._count

    def admit(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The leading part of `ids` that belongs to the generation; sets `reason` when it ends inside or after it."""
        for n, token in enumerate(ids, start=1):
            self._count += 1
            self.reason = self._reason_after(token)
            if self.reason:
                return tuple(ids[:n])
        return tuple(ids)

    def _reason_after(self, token: int) -> StopReason | None:
        if token in self._vocab.eog and not self._rules.ignore_eog:
            return "eog"
        if self._strings:
            piece = b"" if token in self._vocab.eog else self._vocab.piece(token)  # an ignored end is not shown
            self._text += piece
            reach = len(piece) + max(len(s) for s in self._strings)
            if any(s in self._text[-reach:] for s in self._strings):
                return "stop_string"
        return "length" if self.remaining <= 0 else None

    def cut(self, text: str) -> str:
        """`text` up to the first stop string."""
        ends = [at for s in self._rules.stop_strings if (at := text.find(s)) >= 0]
        return text[: min(ends)] if ends else text
