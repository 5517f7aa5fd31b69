"""`penstock doctor`: this machine, the groups of a layout, and a test of the links between its ranks."""

import os
import sys
from collections.abc import Sequence

from penstock.cli.doctor_arguments import read_arguments
from penstock.cli.launch import find_group, launch

MODULE = "penstock.cli.doctor"


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises: ValueError for a layout that can not be, or that does not fit the processes there are.
    """
    arguments = read_arguments(words)
    group = find_group(os.environ)
    from penstock.cli.doctor_worker import chosen_layout, run_worker, tell

    layout = chosen_layout(arguments, group)
    if not arguments.links or layout.world_size == 1:
        tell(arguments, layout, None)
        return 0
    if group is None:
        return launch(words, layout.world_size, 1, MODULE, "tests them again")
    return run_worker(arguments, layout, group)


if __name__ == "__main__":  # how `launch` starts workers
    from penstock.cli.main import run_as_script

    sys.exit(run_as_script(main))
