"""`penstock score MODEL FILE.jsonl`: each token's log-probability, and each text's perplexity."""

import os
import sys
from collections.abc import Sequence

from penstock.cli.launch import Group, find_group, launch
from penstock.cli.score_arguments import read_arguments

MODULE = "penstock.cli.score"


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError, OSError: the model, the texts or the output can not be used; nothing has been started or written.
    """
    arguments = read_arguments(words)
    if arguments.output.exists():
        raise ValueError(f"{arguments.output} exists already and was left as it is; give another --output")
    if not arguments.output.parent.is_dir():
        raise ValueError(f"cannot write {arguments.output}: there is no folder {arguments.output.parent}")
    group = find_group(os.environ)
    if group is not None and group.world_size != arguments.world_size:
        raise ValueError(
            f"{group.origin} has {group.world_size} processes, but --pp {arguments.pp} x --dp {arguments.dp} x --cp "
            f"{arguments.cp} x --tp {arguments.tp} is {arguments.world_size}; make them equal"
        )
    from penstock.cli.score_worker import check, run_worker

    if group is None and arguments.world_size > 1:
        # All that can be known now is told here: the workers would each take seconds to find it out.
        check(arguments)
        return launch(words, arguments.world_size, arguments.num_threads, MODULE, "continues where it was stopped")
    return run_worker(arguments, group or Group.alone())


if __name__ == "__main__":  # how `launch` starts workers
    from penstock.cli.main import run_as_script

    sys.exit(run_as_script(main))
