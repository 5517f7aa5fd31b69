"""Processes of a run that cannot meet: each says in one sentence, in time, what is missing."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.cli.processes.meeting import Group, find_group, listen
from penstock.cli.processes.session import SECRET, join, secret_of
from tests.e2e.scripts import free_port

LIMIT_S = 1.0


@pytest.fixture(autouse=True)
def environment_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a program that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refusal(rank: int, port: int, address: str = "127.0.0.1", world_size: int = 3) -> str:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"rank|store|listen") as caught:
        join(Group(rank, world_size, rank, address, port, "a test"), LIMIT_S)
    assert time.monotonic() - began < 20 * LIMIT_S
    return str(caught.value)


@pytest.mark.shows(149)
def test_ranks_that_are_alone_say_who_or_what_is_missing():
    assert refusal(0, free_port()) == "rank(s) 1, 2 of the run did not come in time"
    port = free_port()
    found = refusal(1, port)
    assert found.startswith(f"rank 1 found no store at 127.0.0.1:{port} in time (connection refused); rank 0 opens it")
    assert "no.such.host.invalid:29500 in time (" in refusal(2, 29500, "no.such.host.invalid")


@pytest.mark.shows(149)
def test_a_port_of_another_program_is_said_by_rank_0_and_by_the_others_in_time(silent: int):
    assert refusal(0, silent) == f"cannot listen at 127.0.0.1:{silent}: address already in use; give another port"
    assert refusal(1, silent).startswith(f"what listens at 127.0.0.1:{silent} is not the run's store")


@pytest.mark.shows(149)
@pytest.mark.parametrize("theirs", ["another secret", ""])
def test_another_secret_is_refused_by_all_at_once(theirs: str):
    def refusal_with(secret: str, rank: int, port: int = free_port()) -> str:
        with pytest.raises(ValueError, match=SECRET) as caught:
            join(Group(rank, 3, rank, "127.0.0.1", port, "a test"), 30.0, secret)
        return str(caught.value)

    with ThreadPoolExecutor(3) as threads:
        refusals = list(threads.map(refusal_with, ("ours", "ours", theirs), range(3)))
    said = "PENSTOCK_SECRET of rank 2 is not that of rank 0; set it to the same text on all hosts, or on none"
    assert refusals == [said] * 3
    with pytest.raises(ValueError, match="PENSTOCK_SECRET is empty"):
        secret_of({SECRET: ""})


def test_impossible_places_in_a_group_are_refused():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for changed, message in (({"RANK": "5"}, "rank 5 is not one of 2"), ({"MASTER_PORT": "99999"}, "99999 is no port")):
        with pytest.raises(ValueError, match=message):
            find_group(environ | changed)


@pytest.mark.shows(149)
def test_a_name_that_is_the_hosts_own_loopback_is_listened_to_on_all_networks(monkeypatch: pytest.MonkeyPatch):
    def debian(name: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name if name[0].isdigit() else "127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    port = free_port()
    for address, expected in (("hosta", "0.0.0.0"), ("127.0.1.1", "127.0.1.1")):
        with listen(address, port) as listener:
            assert listener.getsockname()[0] == expected
