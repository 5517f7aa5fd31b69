"""A run on more or fewer processes than its settings name: the pipelines stay as they are, their number changes."""

from dataclasses import replace
from math import ceil

from penstock.engine.config import RunConfig
from penstock.engine.config_file import ConfigError


def check_elastic(config: RunConfig) -> None:
    """Refuse what would change a run's numbers with the number of its processes.

    Raises: ConfigError if the loss is not divided by all tokens of a step.
    """
    if config.parallel.elastic and config.train.normalize != "global":
        raise ConfigError(
            f"parallel.elastic with train.normalize = {config.train.normalize!r} would learn other things from fewer "
            f'processes; "global" is possible'
        )


def fit(config: RunConfig, world_size: int) -> RunConfig:
    """The settings for a group of `world_size` processes, where `parallel.elastic` allows it; else they are unchanged.

    The group's size must be a multiple of one pipeline's. A pipeline that takes over the work of others takes as many
    microbatches more, so that each stays as large as it was, and so does the memory.
    """
    pipeline = config.world_size // config.parallel.dp
    dp = world_size // pipeline
    if not config.parallel.elastic or dp < 1 or dp * pipeline != world_size:
        return config
    num_microbatches = ceil(config.train.num_microbatches * config.parallel.dp / dp)
    return replace(
        config,
        parallel=replace(config.parallel, dp=dp),
        train=replace(config.train, num_microbatches=num_microbatches),
    )
