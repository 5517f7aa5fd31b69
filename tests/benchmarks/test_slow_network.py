"""The slow network keeps to its rate and leaves nothing behind; a refusal says what it needs."""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest
from benchmarks.slow_network import Host, NoSlowNetwork, SlowNetwork

PORT, RATE_BITS = 40000, 80e6


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def receive(host: Host, ready: threading.Event, got: list[tuple[int, float]]) -> None:
    host.enter()
    with socket.create_server((host.address, PORT)) as server:
        ready.set()
        connection, _ = server.accept()
        num_bytes, start = 0, 0.0
        with connection:
            while part := connection.recv(1 << 16):
                start = start or time.perf_counter()
                num_bytes += len(part)
        got.append((num_bytes, time.perf_counter() - start))


def send(host: Host, address: str, num_bytes: int) -> None:
    host.enter()
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(bytes(num_bytes))


def test_bytes_keep_to_the_rate_and_nothing_is_left_behind():
    network = SlowNetwork(f"{RATE_BITS / 1e6:.0f}mbit")
    names = [host.namespace for host in network.hosts]
    num_bytes, got, ready = 2_000_000, [], threading.Event()
    with ExitStack() as stack:
        try:
            stack.enter_context(network)
        except NoSlowNetwork as refusal:
            pytest.skip(str(refusal))
        assert all(name in namespaces() for name in names)
        # Namespaces belong to threads: this one stays where it is.
        taking = threading.Thread(target=receive, args=(network.hosts[1], ready, got))
        taking.start()
        assert ready.wait(10)
        giving = threading.Thread(target=send, args=(network.hosts[0], network.hosts[1].address, num_bytes))
        giving.start()
        for thread in (giving, taking):
            thread.join(30)
    assert not any(name in namespaces() for name in names)
    ((received, time_s),) = got
    assert received == num_bytes
    # The bucket lets its first 256 KB through at once.
    assert time_s > 0.9 * 8 * (num_bytes - 256_000) / RATE_BITS


def test_a_benchmark_that_is_told_to_end_takes_its_hosts_down():
    program = (
        "from benchmarks.slow_network import *\n"
        "import time\n"
        "with SlowNetwork():\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            pytest.skip("no slow network here")
        assert f"-{process.pid}-a" in namespaces()
        process.terminate()
    assert f"-{process.pid}-" not in namespaces()
    assert process.returncode == 128 + signal.SIGTERM
