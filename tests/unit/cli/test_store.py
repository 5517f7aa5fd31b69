"""`penstock store` listens where it is told to, and nowhere else; mistakes are one sentence."""

import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.processes import store
from penstock.cli.processes.store import _listener


@pytest.mark.parametrize(
    ("endpoint", "sentence"),
    [
        ("login1", "'login1' is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400"),
        (":29400", "':29400' is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400"),
        ("127.0.0.1:65536", "'127.0.0.1:65536' is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400"),
        ("127.0.0.1:٢٩٤٠٠", "'127.0.0.1:٢٩٤٠٠' is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400"),
        ("192.0.2.1:29400", "cannot listen at 192.0.2.1:29400: cannot assign requested address"),
    ],
)
def test_an_endpoint_at_which_nothing_can_listen_is_refused(
    endpoint: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", endpoint]) == 2
    assert capsys.readouterr().err == f"penstock: {sentence}\n"


def test_an_endpoint_that_is_taken_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["store", f"127.0.0.1:{port}"]) == 2
    assert capsys.readouterr().err == f"penstock: cannot listen at 127.0.0.1:{port}: address already in use\n"


LOOPBACK, OF_NETWORK = "127.0.1.1", "127.0.0.1"  # the second stands for an address of the host's network


def resolving(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    """Let the host's name stand for these addresses, as its /etc/hosts may have it; addresses stay what they are."""
    of_system = socket.getaddrinfo

    def rows(host: str, port: int, type: int) -> list[Any]:
        return [row for name in (places if host == "hosta" else [host]) for row in of_system(name, port, type=type)]

    monkeypatch.setattr(socket, "getaddrinfo", rows)


@pytest.mark.parametrize("places", [(LOOPBACK,), ("::1", LOOPBACK)])
def test_a_name_that_other_hosts_cannot_reach_is_refused(
    places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, *places)
    with pytest.raises(ValueError) as refused:
        _listener("hosta:0").close()
    assert str(refused.value) == (
        f"hosta is {places[0]} on this host (see /etc/hosts), where no other host reaches the store; "
        "give the host's address in the network of the run, or 0.0.0.0:0 for all networks"
    )


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "[::1]"])
def test_a_loopback_that_is_asked_for_is_taken(address: str) -> None:
    with _listener(f"{address}:0") as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_of_several_addresses_of_a_name_one_is_taken_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, LOOPBACK, OF_NETWORK)
    monkeypatch.setattr(store, "_is_loopback", lambda place: place == LOOPBACK)
    with _listener("hosta:0") as listener:
        assert listener.getsockname()[0] == OF_NETWORK


def test_the_store_is_at_its_address_alone_until_it_is_told_to_end() -> None:
    command = [sys.executable, "-m", "penstock", "store", "127.0.0.2:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as held:
        try:
            assert held.stdout is not None
            *words, port = held.stdout.readline().split()
            assert words == ["listening", "on", "127.0.0.2", "port"]
            socket.create_connection(("127.0.0.2", int(port)), timeout=10).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(port)), timeout=10)
            held.send_signal(signal.SIGTERM)
            assert held.wait(timeout=60) == 0
        finally:
            held.kill()
