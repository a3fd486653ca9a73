"""llama.cpp while it computes: the nodes of its graph, shown to Python one by one (`cb_eval`)."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specnb.lm import binding
from specnb.lm.gguf_tensors import Node, ggml


class Decode(NamedTuple):
    """One llama_decode: its tokens (the last `padding` of them fill up), the position of the first, rows of logits."""

    ids: list[int]
    first: int
    rows: int
    padding: int


class Watch:
    """What is shown of a context's decodes: give it to `load` or `GgufModel.open`, then set the three functions.

    `wanted(node)` is asked of every node before it is computed; `seen(node)` is called after those it said yes to, with
    all that came before computed too. `begin(decode)` comes before both. Nothing is asked while `on` is False. What a
    function raises is raised after the decode, of which nothing more is shown; the model goes back to where it was.
    """

    def __init__(self) -> None:
        ggml()  # before a context is made: a callback cannot refuse
        self.on = False
        self.begin: Callable[[Decode], None] = lambda decode: None
        self.wanted: Callable[[Node], bool] = lambda node: False
        self.seen: Callable[[Node], None] = lambda node: None
        self._error: BaseException | None = None
        self._decoding = False
        # held here: llama.cpp calls it as long as the context lives
        self.callback = binding.library().api.ggml_backend_sched_eval_callback(self._called)

    @contextlib.contextmanager
    def decoding(self, ids: Sequence[int], first: int, rows: int, padding: int) -> Iterator[None]:
        """Around one llama_decode. Raises what one of the functions raised."""
        if not self.on:
            yield
            return
        self._error = None  # of a decode that failed by itself nobody took it
        self.begin(Decode([int(i) for i in ids], first, rows, padding))
        self._decoding = True
        try:
            yield
        finally:
            self._decoding = False
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _called(self, address: int, ask: bool, _user_data: object) -> bool:
        """An exception cannot pass through C: it is kept, and the rest of the graph computed in one piece."""
        if self._decoding and self._error is None:
            try:
                node = Node(address)
                if ask:
                    return bool(self.wanted(node))
                self.seen(node)
            except BaseException as error:  # an interrupt too
                self._error = error
        return not ask
