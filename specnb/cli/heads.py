"""`specnb heads`: the options of trained heads; `specnb.medusa` does the work."""

from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from specnb.cli.show import App
from specnb.errors import require_known
from specnb.io import cache_dir

app = App(help="Trained heads: train them, convert their files.", no_args_is_help=True)
TARGET = "smollm2-135m?backend=hf&dtype=auto&exact=False"


@app.command(short_help="Train heads for a frozen model, or resume training.")
def train(
    kind: Literal["medusa", "hydra", "jump", "eagle"] = "medusa",
    preset: str = "cpu",
    target: str = TARGET,
    work: Path | None = None,
    out: Path | None = None,
    batches: int = 64,
    n_heads: int = 4,
    n_layers: int = 1,
    draft_vocab: int = 8192,
    steps: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    teacher: float | None = None,
    seed: int | None = None,
) -> None:
    """Train heads for a frozen backbone. Stop it at any time: the same command resumes from the last checkpoint."""
    from specnb.lm.load import load
    from specnb.measure.experiment import ProgressBar
    from specnb.medusa import checkpoint
    from specnb.medusa import train as training
    from specnb.medusa.jump import KINDS
    from specnb.medusa.rollouts import train_jump

    options = {"kind": kind, "n_heads": n_heads, "n_layers": n_layers, "draft_vocab": draft_vocab}
    recipe = training.recipe(
        preset, kind, steps=steps, batch_size=batch_size, peak_lr=learning_rate, teacher=teacher, seed=seed
    )
    work = work or cache_dir() / "medusa"
    text, run = work / "text", work / "runs" / "-".join(map(str, (preset, *options.values())))
    out = out or run / "heads"
    checkpoint.require_free(out)  # before a model is opened for nothing
    with closing(load(target)) as model:
        config = training.config_for(model, **options)
        with ProgressBar() as progress:
            rows = training.write_training_text(model, text, batches, progress)
        print(f"text: {rows.tokens.size:,} tokens, {rows.n_own:,} of them the backbone's own, in {text}")
        heads: Any = training.make_heads(model, config, rows, recipe.seed)
        with ProgressBar() as progress:

            def on_step(step: int, loss: float, figures: dict[str, Any]) -> None:
                progress(step, recipe.steps, f"loss {loss:.3f}, top-1 by head {figures['top1']}")

            fit = train_jump if kind in KINDS else training.train
            log = fit(heads, recipe, text, run, on_step=on_step)
        print(f"heads: step {log[-1]['step']}: held-out top-1 by head {log[-1]['top1']}")
        facts = {"preset": preset} | training.training_facts(heads, recipe, log, text)
        with training.exporting(heads, out, facts) as folder:
            training.write_card(folder, facts)
        print(f"export: {out}")


@app.command(short_help="Convert heads between three layouts of files.")
def convert(
    path: str,
    to: str,
    out: Path,
    backbone: str = "smollm2-135m",
) -> None:
    """Convert trained heads from one layout to another, and print what was read and what was written."""
    from specnb.lm.load import load
    from specnb.medusa import checkpoint
    from specnb.medusa.nets import backbone_of

    # before a model is opened for nothing
    require_known("layout", to, checkpoint.LAYOUTS)
    checkpoint.open_heads(path)
    checkpoint.require_free(out)
    with closing(load(backbone, backend="hf")) as model:
        heads, report = checkpoint.load_trained_heads(path, backbone_of(model))
        print(report)
        for sentence in checkpoint.write_layout(heads, out, to):
            print(f"  written: {sentence}")
    print(f"written to {out}, layout {to}")
