"""Runs a user's script on several ranks, each a process with the variables that torchrun would give it."""

import contextlib
import os
import socket
from pathlib import Path

from tests.fork_server import Forked, run_script

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with contextlib.closing(socket.socket()) as found:
        found.bind((LOOPBACK, 0))
        return found.getsockname()[1]


def run_ranks_of(script: Path, num_ranks: int, *arguments: str, limit_s: float = 300.0) -> str:
    """What the script's ranks write to standard output, in their order; all must end well."""
    shared = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
    }
    ranks = [
        Forked(run_script, str(script), arguments, environ=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    try:
        texts = [rank.communicate(limit_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(err for _, err in texts)
    return "".join(out for out, _ in texts)
