"""Runs over several hosts: a process is killed, a host is lost, the network is cut; training goes on, or says why not.

Hosts are agents of torchrun, in network namespaces of their own; they meet at the store of a third.
"""

import os
import re
import select
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.engine.training.trainer import TrainResult
from penstock.runtime.stage import Stage
from tests.e2e.hosts import LOOPBACK, Host, Rendezvous, three_hosts, why_no_hosts, world_size_of
from tests.e2e.training import Started, exact_metrics, has_saved, last_step, wait_until, write_run

pytestmark = pytest.mark.subject(
    "src/penstock/cli/**/*.py",
    "src/penstock/engine/**/*.py",
    "src/penstock/parallel/*.py",
    "src/penstock/runtime/**/*.py",
)

STEPS = 80


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all steps in this process that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("reference")
    assert main(["train", str(write_run(folder, "run", STEPS)), "--parallel.pp", "1"]) == 0
    return folder / "run"


def test_a_killed_process_is_started_again_and_training_goes_on_bit_for_bit(tmp_path: Path, reference: Path):
    file, output = str(write_run(tmp_path, "run", STEPS)), tmp_path / "run"
    # More than one: another program may take the port that torchrun has found free for the processes' store.
    meet = Rendezvous(f"{LOOPBACK}:0", nodes="1", num_processes=2, max_restarts=5)
    with Host().start(meet, file) as agent:
        wait_until(lambda: last_step(output) >= 12 and has_saved(output, 10), agent)
        agent.signal(signal.SIGKILL, ranks=[1])
        ended = agent.end()
    assert ended.exit_code == 0, ended.err
    saved = re.search(r"continuing .* after step (\d+)", ended.out)
    assert saved and int(saved[1]) >= 10, ended.out
    assert exact_metrics(output) == exact_metrics(reference)


class Pause:
    """Makes steps last: all of the next test then fits into the reference's steps."""

    def on_step(self, *_: object) -> None:
        select.select([], [], [], 0.5)


pause = Pause()


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
@pytest.mark.shows(150)
def test_either_host_may_be_lost_and_come_back_and_either_may_be_drained(tmp_path: Path, reference: Path):
    """Each host holds one of two pipelines."""
    file, output = str(write_run(tmp_path, "run", STEPS)), tmp_path / "run"
    words = ["--parallel.pp", "2", "--parallel.dp", "2", "--parallel.elastic", "true", "--checkpoint.every", "2"]
    words += ["--watch.callbacks", f"{__name__}:pause"]

    def train(*agents: Started) -> None:
        """Wait until these agents train, together and without others."""
        world_size = 2 * len(agents)
        for agent in agents:
            wait_until(lambda agent=agent: [*map(world_size_of, agent.workers())] == [world_size] * 2, agent)
        before = last_step(output)
        wait_until(lambda: last_step(output) >= before + 3, agents[0])

    with three_hosts() as (first, second, third), third.store() as endpoint:
        meet = Rendezvous(endpoint, nodes="1:2", num_processes=2, max_restarts=10)
        with second.start(meet, file, *words) as there:
            with first.start(meet, file, *words) as here:
                train(here, there)
                here.stop()
                first.cut_off()
                train(there)
                first.connect()
            with first.start(meet, file, *words) as here:
                train(there, here)
                there.stop()
                second.cut_off()
                train(here)
                second.connect()
                with second.start(meet, file, *words) as there_again:
                    train(here, there_again)
                    here.signal(signal.SIGTERM)
                    drained = here.end_of_agent()
                    train(there_again)
                    there_again.signal(signal.SIGTERM)
                    stopped = there_again.end_of_agent()
    for ended in (drained, stopped):
        assert "and saved; the same command continues from there" in ended.out, ended
    # Whoever was not drained has not taken the run for complete.
    assert re.search(r"continuing .* after step \d+", stopped.out), stopped
    told, expected = exact_metrics(output), exact_metrics(reference)
    steps = {step for step, _ in told}
    assert len(steps) >= 15 and set(told) <= set(expected), "the reference ends too early"
    # Sums of fp32 in another order, carried on through the steps.
    assert all(float(told[key]) == pytest.approx(float(expected[key]), rel=1e-3, abs=1e-9) for key in told)


class LongStep:
    """In the second step rank 1 computes, and rank 0 waits, for longer than a rank waits for one that is gone."""

    def on_step(self, taken: TrainResult) -> None:
        patch, backward = pytest.MonkeyPatch(), Stage.backward

        def late(*arguments: Any) -> Any:
            patch.undo()
            select.select([], [], [], 6.0)
            return backward(*arguments)

        if taken.step == 1 and os.environ["RANK"] == "1":
            patch.setattr(Stage, "backward", late)


long_step = LongStep()


@pytest.mark.shows(150)
def test_a_run_that_is_told_to_end_finishes_a_long_step_and_saves(tmp_path: Path):
    file, output = str(write_run(tmp_path, "run", STEPS)), tmp_path / "run"
    meet = Rendezvous(f"{LOOPBACK}:0", nodes="1", num_processes=2, max_restarts=5)
    with Host().start(meet, file, "--watch.callbacks", f"{__name__}:long_step") as agent:
        wait_until(lambda: last_step(output) == 1, agent)
        agent.signal(signal.SIGTERM)
        ended = agent.end()
    # Where the signal comes in the middle of a step, all ranks hear of it with the next.
    assert re.search(r"stopped after step [23] and saved; the same command continues from there", ended.out), ended
    assert any((output / "checkpoints").iterdir())


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
@pytest.mark.shows(150)
def test_when_the_network_is_cut_every_process_says_so_and_a_new_start_goes_on_bit_for_bit(
    tmp_path: Path, reference: Path
):
    """Also where the launcher is to restart them, and so ends the others once one of its own has ended."""
    timeout_s = 5.0
    file, output = str(write_run(tmp_path, "run", 100 * STEPS)), tmp_path / "run"
    words = ["--parallel.pp", "4", "--optimizer.num_decay_steps", str(STEPS)]
    with three_hosts() as (here, there, third), third.store() as endpoint, third.store() as another:
        meet = Rendezvous(endpoint, nodes="2", num_processes=2, max_restarts=3)
        limit = ["--parallel.timeout_s", str(timeout_s)]
        with here.start(meet, file, *words, *limit) as first, there.start(meet, file, *words, *limit) as second:
            wait_until(lambda: last_step(output) >= 12 and has_saved(output, 10), first)
            assert len(first.workers() + second.workers()) == 4
            here.cut_off()
            cut_at = time.monotonic()
            while first.workers() + second.workers():
                assert time.monotonic() < cut_at + 60, "a process waits for ever"
                select.select([], [], [], 0.01)
            taken_s = time.monotonic() - cut_at
            told = first.stop() + second.stop()
        # The watchdog allows the backend's own timeout a margin of 2 s; the rest is this machine's own.
        assert taken_s < timeout_s + 2 + 15
        in_action, lines = [], told.splitlines()
        for rank in range(4):
            [line] = [line for line in lines if re.match(f"penstock: (process {rank}: )?rank {rank}, ", line)]
            everybody = r"processes 0-1 \(.* at 10\.77\.0\.\d\), 2-3 \(.* at 10\.77\.0\.\d\)"
            doing = rf"(in \d[FBI]\d+ for .* rank \d|while the ranks .*, among {everybody}(: gave up|; asked to end))"
            # A message may also be found not taken once the action that had sent it is over.
            sent = r"finished \d\w+ [\d.]+ s ago: (activations|gradients) from rank \d to rank \d were not taken"
            assert re.search(rf"rank {rank}, step \d+: ({doing}|{sent})", line), line
            in_action += re.findall(rf"rank {rank}, step \d+: in \d[FBI]\d+", line)
        # Whoever needed a process of the other host has asked it, and says that it is out of reach.
        assert re.search(r"not reachable: processe?s? [\d-]+ \(.* at 10\.77\.0\.\d\)", told), told
        # Who was cut off from a neighbour in the pipeline names the link; a collective has no one link.
        if in_action:
            assert re.search(r"(activations|gradients) from rank \d to rank \d", told), told

        here.connect()
        meet = replace(meet, endpoint=another)
        words += ["--train.steps", str(STEPS)]
        with here.start(meet, file, *words) as first, there.start(meet, file, *words) as second:
            ended = [first.end_of_agent(), second.end_of_agent()]
    assert {one.exit_code for one in ended} in ({0}, {0, None}), ended
    assert f"done after step {STEPS}," in ended[0].out
    saved = re.search(r"continuing .* after step (\d+)", ended[0].out)
    assert saved and int(saved[1]) >= 10, ended[0].out
    assert exact_metrics(output) == exact_metrics(reference)
