"""What a run tells about itself: one JSON line a step, and the same for TensorBoard."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, in order; a last line that a crash has torn is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "step" in entry:
            lines.append(entry)
    return lines


class MetricsLog:
    """Appends the metrics of a run to its folder; written by one rank.

    A run that continues from `resumed_step` first drops what was told about later steps: those steps are taken again.
    """

    def __init__(self, folder: Path, resumed_step: int = 0, tensorboard: bool = False) -> None:
        self._path = folder / METRICS_FILE
        self._drop_after(resumed_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            # Takes a second to import, and only one rank of a run that wants it needs it.
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=resumed_step + 1)

    def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
        """Tell `values` about `step`; a value that is not finite stands as null, as JSON has no other word for it."""
        entry = {"step": step, **{name: _json_number(value) for name, value in values.items()}}
        self._file.write(json.dumps(entry) + "\n")
        # A run can be killed at any moment; what it has told should then be there to read.
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, float(value), step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _drop_after(self, step: int) -> None:
        kept = [entry for entry in read_metrics(self._path) if entry["step"] <= step]
        # Replaced in one go: a crash here leaves the old file or the new one.
        new = self._path.with_suffix(".new")
        new.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
        os.replace(new, self._path)


def _json_number(value: float | int | bool) -> float | int | bool | None:
    return value if math.isfinite(value) else None
