"""A progress bar for measurements that call back before each step."""

from tqdm import tqdm


class ProgressBar(tqdm):
    """Use as `with ProgressBar() as progress: run(params, progress=progress)`; the bar goes to stderr and away again.

    Plain text rather than a widget: an executed notebook then carries no widget state.
    """

    def __init__(self) -> None:
        super().__init__(leave=False, bar_format="{percentage:3.0f}% {bar:30} {n_fmt}/{total_fmt} {desc}")

    def __call__(self, done: int, total: int, step: str) -> None:
        self.total, self.n = total, done
        self.set_description_str(step)
