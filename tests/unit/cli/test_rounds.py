"""Rounds of a group that is started again and again over one store, and settings that fit the size of a group."""

import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from penstock.cli.processes.session import agree_on_round
from penstock.engine.folders.run_check import check_run
from penstock.settings import ParallelConfig, RunConfig, TrainConfig

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]


def a_store() -> Store:
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def meet(store: Store, world_size: int) -> list[Store]:
    """What each rank of a new round is given, all of them coming at once."""
    given: dict[int, Store] = {}

    def come(rank: int) -> None:
        given[rank] = agree_on_round(store, rank, world_size, timeout_s=20.0)

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(world_size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return [given[rank] for rank in range(world_size)]


def test_each_round_has_a_place_of_its_own_whatever_earlier_ones_left():
    store = a_store()
    # A round that ended before rank 0 had come: its words are never thanked for.
    for rank in (1, 2):
        with pytest.raises(ValueError, match="of the run"):
            agree_on_round(store, rank, 3, timeout_s=0.0)
    for number, world_size in enumerate((3, 3, 2, 4)):
        places = meet(store, world_size)
        assert not any(place.check(["word"]) for place in places)
        places[-1].set("word", str(number))
        assert [place.get("word").decode() for place in places] == [str(number)] * world_size


def test_ranks_that_do_not_come_are_named():
    store, start = a_store(), time.monotonic()
    thread = threading.Thread(target=agree_on_round, args=(store, 2, 4, 20.0))
    thread.start()
    with pytest.raises(ValueError, match=r"rank\(s\) 1, 3 of the run did not come"):
        agree_on_round(store, 0, 4, timeout_s=1.0)
    thread.join()
    assert time.monotonic() - start < 20


def settings(**parallel: object) -> RunConfig:
    config = RunConfig(parallel=ParallelConfig(**parallel), train=TrainConfig(num_microbatches=4))  # type: ignore[arg-type]
    return replace(config, data=replace(config.data, num_sequences=16))


@pytest.mark.parametrize(("world_size", "dp", "num_microbatches"), [(8, 4, 4), (4, 2, 8), (2, 1, 16), (16, 8, 2)])
def test_an_elastic_run_keeps_its_pipelines_and_the_size_of_its_microbatches(
    world_size: int, dp: int, num_microbatches: int
):
    config = settings(pp=2, dp=4, elastic=True).fit(world_size)
    assert (config.parallel.pp, config.parallel.dp, config.train.num_microbatches) == (2, dp, num_microbatches)
    assert config.parallel.world_size == world_size
    assert check_run(config).identity() == settings(pp=2, dp=4).identity()


@pytest.mark.parametrize(("config", "world_size"), [(settings(pp=2, dp=4), 4), (settings(pp=2, dp=4, elastic=True), 3)])
def test_other_groups_are_left_to_be_refused(config: RunConfig, world_size: int):
    assert config.fit(world_size) == config


def test_an_elastic_run_divides_its_loss_by_all_tokens():
    config = settings(pp=2, dp=4, elastic=True)
    with pytest.raises(ValueError, match=r"parallel.elastic with train.normalize = 'dp' .*\"global\" is possible"):
        check_run(replace(config, train=replace(config.train, normalize="dp")))
