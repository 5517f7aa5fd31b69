"""The file that `penstock generate --file` writes: each answer as soon as it has ended, in order once all are there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli.unfinished import Unfinished, unfinished_of


class AnswersFile:
    """The answers that are there so far, by their number among all; a call of the same `digest` makes the others.

    fresh: drop what calls that were stopped have left, whatever they were to answer.

    Raises: ValueError if the file can not be written, or what a stopped call has left answers something else.
    """

    def __init__(self, path: Path, digest: str, num_samples: int, fresh: bool = False) -> None:
        self._num_samples = num_samples
        if fresh:
            for left in unfinished_of(path):
                left.unlink()
        self._unfinished = Unfinished(path, digest)
        others = [left for left in unfinished_of(path) if left != self._unfinished.hidden]
        if others:
            if not self._unfinished.lines():
                self._unfinished.hidden.unlink()
            raise ValueError(
                f"{others[0]} holds answers of a stopped call with another model, other prompts or other settings; "
                "repeat that call to finish it, give another --output, or --fresh to drop them"
            )
        whole = self._unfinished.lines()
        self._unfinished.keep(whole)
        self._lines = {self._number(json.loads(line)): line for line in whole}

    @property
    def kept(self) -> list[int]:
        """The numbers of the answers that are there."""
        return sorted(self._lines)

    def write(self, answer: Mapping[str, Any]) -> None:
        """Add an answer; it outlives the process from here on."""
        line = json.dumps(answer, ensure_ascii=False, allow_nan=False)
        self._unfinished.append([line], to_disk=False)
        self._lines[self._number(answer)] = line.encode() + b"\n"

    def close(self) -> None:
        """Let another call go on with it."""
        self._unfinished.close()

    def publish(self) -> None:
        """Give the file its name, and the answers the order of their prompts.

        Raises: ValueError if a file of that name has come into being meanwhile.
        """
        self._unfinished.publish([self._lines[number] for number in self.kept])

    def _number(self, answer: Mapping[str, Any]) -> int:
        return answer["prompt"] * self._num_samples + answer["sample"]
