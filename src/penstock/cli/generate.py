"""`penstock generate MODEL [PROMPT ...]`: continues prompts with a saved model."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.commands import refuse_to_overwrite
from penstock.cli.generate_arguments import STANDARD_INPUT, GenerateArguments, read_arguments
from penstock.cli.launch import Group, find_group, launch

MODULE = "penstock.cli.generate"


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError, OSError: the model, the prompts or the output can not be used; nothing has been started or written.
    """
    arguments = read_arguments(words)
    if arguments.output is not None:
        refuse_to_overwrite(arguments.output, force=False)
    group = find_group(os.environ)
    if group is not None and group.world_size != arguments.world_size:
        raise ValueError(
            f"{group.origin} has {group.world_size} processes, but --pp {arguments.pp} x --tp {arguments.tp} is "
            f"{arguments.world_size}; make them equal"
        )
    if group is None and arguments.world_size > 1:
        return _launch(words, arguments)
    from penstock.cli.generate_worker import run_worker

    return run_worker(arguments, group or Group.alone())


def _launch(words: Sequence[str], arguments: GenerateArguments) -> int:
    """Start the workers, once all that can be known now is checked: each would take seconds to find it out."""
    from penstock.cli.generate_worker import check

    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        job, environ = check(arguments), {}
        if not arguments.prompts and arguments.file is None:
            # What stands on standard input can be read once only.
            given = Path(folder) / "prompt.txt"
            given.write_text(job.prompts[0].text or "", encoding="utf-8")
            environ[STANDARD_INPUT] = str(given)
        again = "gives the same answers" if arguments.output is None else "continues where it was stopped"
        return launch(words, arguments.world_size, arguments.num_threads, MODULE, again, environ)


if __name__ == "__main__":  # how `launch` starts workers
    from penstock.cli.main import run_as_script

    sys.exit(run_as_script(main))
