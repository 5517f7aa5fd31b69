"""A rank that is asked to end finishes what can be finished, however long it takes, and else says why it cannot."""

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from penstock.runtime import Recorder, Watchdog, liveness
from penstock.runtime.liveness import Absence, Presence, Process, Processes, ask
from penstock.runtime.recovery import EXIT_CODE
from penstock.schedule import Action, Op

GRACE_S = 0.2
PRESENT = ("rank 1, step 1: in 1F0 for 30.0 s, computes", False)


@dataclass
class World:
    """A rank among two, in the middle of an action; `answer` is the other's."""

    recorder: Recorder = field(default_factory=lambda: Recorder(0))
    answer: Presence | Absence = PRESENT
    num_asked: int = 0
    ended: list[int] = field(default_factory=list)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()

    def ask(asked: Sequence[Process]) -> dict[int, Presence | Absence]:
        world.num_asked += 1
        return {process.rank: world.answer for process in asked}

    monkeypatch.setattr(liveness, "ask", ask)
    monkeypatch.setattr("penstock.runtime.recovery._ASK_AGAIN_S", 0.1)
    monkeypatch.setattr("penstock.runtime.recovery._SAME_SIGNAL_S", 0.1)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    watchdog = Watchdog(world.recorder, timeout_s=2.0, grace_s=GRACE_S, end=world.ended.append)
    watchdog.listen_to_signals()
    members = tuple(Process(rank, f"host{rank}", f"10.0.0.{rank}", 1) for rank in range(2))
    world.recorder.processes = Processes(0, members, (0, 1))
    try:
        yield world
    finally:
        watchdog.close()
        signal.signal(signal.SIGTERM, before)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)


def test_a_long_action_is_finished_while_all_are_there(world: World) -> None:
    record = world.recorder.begin(Action(Op.F, 0, 0))
    os.kill(os.getpid(), signal.SIGTERM)
    # Long after the grace, and several times over.
    wait_until(lambda: world.num_asked >= 3)
    world.recorder.end(record)
    assert world.ended == []


@pytest.mark.parametrize("absence", Absence)
def test_whoever_is_gone_is_named_and_not_waited_for(
    world: World, absence: Absence, capsys: pytest.CaptureFixture[str]
) -> None:
    world.recorder.begin(Action(Op.F, 0, 0))
    world.answer = absence
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: world.ended != [])
    assert world.ended == [EXIT_CODE]
    assert capsys.readouterr().err.endswith(
        f"; asked to end, and this cannot be finished; {absence.value}: process 1 (host1 at 10.0.0.1)\n"
    )


def test_an_act_outside_of_the_program_is_not_waited_for_either(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.answer = Absence.UNREACHABLE
    os.kill(os.getpid(), signal.SIGTERM)
    with world.recorder.collective("agree on the batch"):
        wait_until(lambda: world.ended != [])
    assert "while the ranks agree on the batch" in capsys.readouterr().err


def test_a_second_signal_is_the_last_word(world: World) -> None:
    world.recorder.begin(Action(Op.F, 0, 0))
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: world.num_asked >= 1)
    assert world.ended == []
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: world.ended != [])


def test_whatever_is_not_done_in_the_time_to_end_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    before, ended = signal.signal(signal.SIGTERM, lambda *_: None), []
    watchdog = Watchdog(Recorder(0), timeout_s=2.0, shutdown_timeout_s=0.2, end=ended.append)
    try:
        watchdog.listen_to_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: ended != [])
    finally:
        watchdog.close()
        signal.signal(signal.SIGTERM, before)
    assert ended == [EXIT_CODE]
    assert capsys.readouterr().err.endswith("; asked to end, and not done within 0.2 s\n")


def test_a_process_that_resets_the_connection_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, [Process(1, "here", *listener.getsockname())])
        accepted, _ = listener.accept()
        # Closed at once: the other side gets a reset.
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        assert asked.result() == {1: Absence.ENDED}
