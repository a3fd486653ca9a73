"""A progress bar for measurements that call back before each step."""

from typing import Self

from tqdm import tqdm


class ProgressBar:
    """Use as `with ProgressBar() as progress: run(params, progress=progress)`; the bar goes to stderr and away again.

    Plain text rather than a widget: an executed notebook then carries no widget state.
    """

    def __enter__(self) -> Self:
        self._bar = tqdm(leave=False, bar_format="{percentage:3.0f}% {bar:30} {n_fmt}/{total_fmt} {desc}")
        return self

    def __call__(self, done: int, total: int, step: str) -> None:
        self._bar.total, self._bar.n = total, done
        self._bar.set_description_str(step)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
