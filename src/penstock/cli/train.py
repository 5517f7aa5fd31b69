"""`penstock train RUN.toml`: check the settings, then start the workers of the run, or be one of them."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from penstock.cli.launch import Group, find_group, launch
from penstock.cli.train_arguments import TrainArguments, read_arguments
from penstock.engine.run_check import check, with_pretrained
from penstock.engine.runs import check_folder
from penstock.settings import check_world


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError: the settings, the data or the output folder can not be used; nothing has been started or written.
    """
    arguments = read_arguments(argv)
    arguments = replace(arguments, config=check(with_pretrained(arguments.config)))
    config = arguments.config
    if arguments.switches.dry_run:
        from penstock.cli.dry_run import show

        show(config, as_json=arguments.switches.json)
        return 0
    group = find_group(os.environ)
    if group is not None:
        config = check(config.fit(group.world_size))
        check_world(config, group.world_size, group.origin)
        arguments = replace(arguments, config=config)
        return _work(arguments, group)
    # All that can be known now is checked here: the workers would each take seconds to find it out.
    check_folder(config, fresh=arguments.switches.fresh, resume=arguments.switches.resume)
    if config.parallel.world_size == 1:
        return _work(arguments, Group.alone())
    from penstock.engine.run_parts import check_parts

    check_parts(config)
    return launch(argv, config.parallel.world_size, config.parallel.num_threads)


def _work(arguments: TrainArguments, group: Group) -> int:
    from penstock.cli.train_worker import run_worker

    return run_worker(arguments, group)


if __name__ == "__main__":  # how `launch` starts workers
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(2)
