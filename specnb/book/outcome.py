"""How a headless run ended: `outcome.json`, written last into the folder of the run.

A folder without it holds a run that is still going on, or whose process was killed.
"""

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specnb.errors import InputError, NotebookFailed


class Problem(BaseModel):
    """What ended a run: class name and message of the error, and the cell (zero-based, in the source notebook)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    message: str
    cell: int | None = None


class Outcome(BaseModel):
    """How one run of a notebook ended. `params` are all its parameters, defaults included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    notebook: str
    notebook_sha256: str
    run_id: str
    params: dict[str, Any]
    status: Literal["completed", "failed"]
    error: Problem | None = None
    started: datetime
    ended: datetime
    duration_s: float
    kernel_starts: int = Field(description="2 where the first kernel died before its first reply")
    output: Path = Field(description="the executed notebook; the record of the run lies beside it")

    def raise_for_failure(self) -> "Outcome":
        """Self when the run completed; raises NotebookFailed otherwise."""
        if self.error is None:
            return self
        place = "" if self.error.cell is None else f" in cell {self.error.cell}"
        raise NotebookFailed(
            f"{self.notebook} failed{place}: {self.error.kind}: {self.error.message} (partial notebook: {self.output})"
        )


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome of the run in `folder`; None where no run has ended there. InputError for a damaged file."""
    path = Path(folder) / "outcome.json"
    try:
        return Outcome.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise InputError(f"{path} is not an outcome record ({error}): delete that folder and run it again") from error
