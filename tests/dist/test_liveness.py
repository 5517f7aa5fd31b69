"""Who cannot go on says who is needed, where they are, and which of them do not answer."""

import os
import re
import signal
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from penstock.runtime import PipelineError, Recorder, Watchdog, liveness
from penstock.schedule import Action, Op
from penstock.schedule.recording import CollectiveKind
from tests.dist.launch import run_outcomes

LIMIT = timedelta(seconds=3.0)


def asking(rank: int) -> list[str]:
    """What rank 0 is told: of all ranks, of which 1 has died and 2 stands still; and of rank 3, which computes."""
    recorder, store = Recorder(rank), dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(recorder, timeout_s=60.0)
    # On a busy machine, too, only the one that stands still is silent for so long.
    liveness._LIMIT_S = 6.0
    watchdog.answer_peers(dist.group.WORLD, range(4))
    every, pair = dist.new_group(timeout=LIMIT), dist.new_group([0, 3], timeout=LIMIT)
    assert isinstance(every, dist.ProcessGroup)
    recorder.begin(Action(Op.F, 0, 7))
    store.set(f"pid {rank}", str(os.getpid()))
    dist.barrier()
    if rank == 1:
        os._exit(9)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 3:
        store.wait(["all is told"])
        return []
    told = []
    with pytest.raises(PipelineError) as error, recorder.collective("agree on the batch", every):
        dist.all_reduce(torch.ones(1), group=every)
    told.append(str(error.value))
    work = dist.all_reduce(torch.ones(8), group=pair, async_op=True)
    assert isinstance(pair, dist.ProcessGroup) and work is not None
    with pytest.raises(PipelineError) as error, recorder.collective("finish the gradients"):
        recorder.follow(CollectiveKind.GRADIENTS, 32, work, pair).wait()
    told.append(str(error.value))
    os.kill(int(store.get("pid 2")), signal.SIGKILL)
    store.set("all is told", "")
    watchdog.close()
    return told


def test_a_failed_collective_names_its_members_and_those_that_do_not_answer() -> None:
    outcomes = run_outcomes(4, asking)
    assert [outcome.error is None for outcome in outcomes] == [True, False, False, True], outcomes
    of_all, of_one = outcomes[0].value
    here = re.escape(socket.gethostname())
    assert re.match(rf"rank 0, step 0: while the ranks agree on the batch, among processes 0-3 \({here}\): ", of_all)
    assert re.search(rf"; ended: process 1 \({here}\); reachable but silent: process 2 \({here}\)$", of_all), of_all
    assert re.match(
        "rank 0, step 0: while the ranks finish the gradients, the gradient reduction of 32 bytes that it "
        rf"launched \d\.\d s ago, among processes 0, 3 \({here}\): gave up after",
        of_one,
    ), of_one
    assert re.search(
        rf"; reachable: process 3 \({here}\); process 3 does not wait: rank 3, step 0: in 0F7 for .* computes$",
        of_one,
    ), of_one
