"""Runs over several hosts: a process is killed, a host is lost, the network is cut; training goes on, or says why not.

Hosts are agents of torchrun that meet by its c10d rendezvous; where the network is cut, they are network namespaces.
"""

import re
import select
import signal
import time
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.e2e.hosts import LOOPBACK, Host, Rendezvous, either_hosts, two_hosts, why_no_hosts, world_size_of
from tests.e2e.test_train_refusals import free_port
from tests.e2e.training import Started, exact_metrics, last_step, wait_until, write_run

STEPS = 80


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all steps in this process that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("reference")
    assert main(["train", str(write_run(folder, "run", STEPS)), "--parallel.pp", "1"]) == 0
    return folder / "run"


def test_a_killed_process_is_started_again_and_training_goes_on_bit_for_bit(tmp_path: Path, reference: Path):
    file, output = str(write_run(tmp_path, "run", STEPS)), tmp_path / "run"
    meet = Rendezvous(LOOPBACK, 0, nodes="1", num_processes=2, max_restarts=1)
    with Host().start(meet, file) as agent:
        wait_until(lambda: last_step(output) >= 12, agent)
        agent.signal(signal.SIGKILL, ranks=[1])
        ended = agent.end()
    assert ended.exit_code == 0, ended.err
    saved = re.search(r"continuing .* after step (\d+)", ended.out)
    assert saved and int(saved[1]) >= 10, ended.out
    assert exact_metrics(output) == exact_metrics(reference)


def test_a_lost_host_is_done_without_until_it_comes_back(tmp_path: Path, reference: Path):
    """Each host holds one of two pipelines; one is lost, and later there again."""
    file, output = str(write_run(tmp_path, "run", STEPS)), tmp_path / "run"
    # Long enough for either host to come late; what is told is held against the reference as far as that goes.
    words = ["--train.steps", "100000", "--optimizer.num_decay_steps", str(STEPS), "--parallel.pp", "2"]
    words += ["--parallel.dp", "2", "--parallel.elastic", "true"]
    with either_hosts() as (here, there):
        meet = Rendezvous(here.address, free_port(), nodes="1:2", num_processes=2, max_restarts=3)

        def train_together(stays: Started, other: Started) -> None:
            wait_until(lambda: [*map(world_size_of, stays.workers() + other.workers())] == [4] * 4, stays)
            before = last_step(output)
            wait_until(lambda: last_step(output) >= before + 7, stays)

        with here.start(meet, file, *words) as stays:
            with there.start(meet, file, *words) as goes:
                train_together(stays, goes)
                goes.kill()
                before = last_step(output)
                wait_until(lambda: [*map(world_size_of, stays.workers())] == [2, 2], stays)
                wait_until(lambda: last_step(output) >= before + 5, stays)
            with there.start(meet, file, *words) as returns:
                train_together(stays, returns)
                stays.signal(signal.SIGTERM)
                ended = stays.end_of_agent()
    assert len(re.findall(r"continuing .* after step \d+", ended.out)) >= 2, ended
    assert "and saved; the same command continues from there" in ended.out
    expected = exact_metrics(reference)
    told = {key: number for key, number in exact_metrics(output).items() if key in expected}
    assert len(told) > 5 * 15
    # Sums of fp32 in another order, carried on through the steps.
    assert all(float(told[key]) == pytest.approx(float(expected[key]), rel=1e-3, abs=1e-9) for key in told)


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_when_the_network_is_cut_every_process_says_so_and_a_restart_goes_on_bit_for_bit(
    tmp_path: Path, reference: Path
):
    timeout_s = 5.0
    file, output = str(write_run(tmp_path, "run", 100 * STEPS)), tmp_path / "run"
    words = ["--parallel.pp", "4", "--optimizer.num_decay_steps", str(STEPS)]
    with two_hosts() as (here, there, cable):
        meet = Rendezvous(here.address, 29400, nodes="2", num_processes=2)
        limit = ["--parallel.timeout_s", str(timeout_s)]
        with here.start(meet, file, *words, *limit) as first, there.start(meet, file, *words, *limit) as second:
            wait_until(lambda: last_step(output) >= 12, first)
            assert len(first.workers() + second.workers()) == 4
            cable.cut()
            cut_at = time.monotonic()
            while first.workers() + second.workers():
                assert time.monotonic() < cut_at + 60, "a process waits for ever"
                select.select([], [], [], 0.01)
            taken_s = time.monotonic() - cut_at
            told = first.stop() + second.stop()
        # The watchdog allows the backend's own timeout a margin of 2 s; the rest is this machine's own.
        assert taken_s < timeout_s + 2 + 15
        in_action = []
        for rank in range(4):
            [line] = [line for line in told.splitlines() if line.startswith(f"penstock: process {rank}:")]
            everybody = r"processes 0-1 \(.* at 10\.77\.0\.\d\), 2-3 \(.* at 10\.77\.0\.\d\)"
            doing = rf"(in \d[FBI]\d+ for .* rank \d|while the ranks .*, among {everybody}: gave up)"
            assert re.search(rf"rank {rank}, step \d+: {doing}", line), line
            in_action += re.findall(rf"rank {rank}, step \d+: in \d[FBI]\d+", line)
        # Whoever needed a process of the other host has asked it, and says that it is out of reach.
        assert re.search(r"not reachable: processe?s? [\d-]+ \(.* at 10\.77\.0\.\d\)", told), told
        # Who was cut off from a neighbour in the pipeline names the link; a collective has no one link.
        if in_action:
            assert re.search(r"(activations|gradients) from rank \d to rank \d", told), told

        cable.mend()
        words += ["--train.steps", str(STEPS)]
        with here.start(meet, file, *words) as first, there.start(meet, file, *words) as second:
            ended = [first.end_of_agent(), second.end_of_agent()]
    assert {one.exit_code for one in ended} in ({0}, {0, None}), ended
    assert f"done after step {STEPS}," in ended[0].out
    saved = re.search(r"continuing .* after step (\d+)", ended[0].out)
    assert saved and int(saved[1]) >= 10, ended[0].out
    assert exact_metrics(output) == exact_metrics(reference)
