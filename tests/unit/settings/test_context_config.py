"""What context-parallel ranks cannot share is refused when the settings are read."""

from dataclasses import replace

import pytest

from penstock.engine.folders.run_check import check_run
from penstock.engine.folders.run_parts import check_parts
from penstock.settings import ConfigError, ContextForm, DataConfig, ModelConfig, ParallelConfig, RunConfig


def test_sequences_shorter_than_ranks_are_refused_with_what_is_possible() -> None:
    config = RunConfig(data=DataConfig(sequence_length=4), parallel=ParallelConfig(cp=8))
    with pytest.raises(ConfigError, match=r"sequence_length = 4 .* parallel\.cp = 8 .* at most parallel\.cp = 4"):
        check_run(config)
    check_run(replace(config, parallel=ParallelConfig(cp=4)))


def test_heads_that_cannot_be_exchanged_are_refused_before_anything_starts() -> None:
    config = RunConfig(
        model=ModelConfig(num_heads=4, num_kv_heads=2),
        data=DataConfig(cache=None),
        parallel=ParallelConfig(cp=4, attention=ContextForm.ALL_TO_ALL),
    )
    with pytest.raises(ValueError, match=r"cp=4; possible are cp = 1, 2, or attention = 'ring'"):
        check_parts(check_run(config))


def test_the_form_of_attention_is_no_part_of_a_runs_identity() -> None:
    configs = [RunConfig(parallel=ParallelConfig(cp=cp, attention=ContextForm.ALL_TO_ALL)) for cp in (1, 2)]
    assert RunConfig().identity() == configs[0].identity() == configs[1].identity()
