"""`penstock store` listens where it is told to, and nowhere else; mistakes are one sentence."""

import signal
import socket
import subprocess
import sys

import pytest

from penstock.cli.main import main


@pytest.mark.parametrize(
    ("endpoint", "sentence"),
    [
        ("login1", "'login1' is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400"),
        (":29400", "':29400' is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400"),
        ("127.0.0.1:65536", "'127.0.0.1:65536' is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400"),
        ("127.0.0.1:٢٩٤٠٠", "'127.0.0.1:٢٩٤٠٠' is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400"),
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
    assert (
        capsys.readouterr().err
        == f"penstock: cannot listen at 127.0.0.1:{port}: address already in use; give another port\n"
    )


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
