"""Runs a user's script on several ranks, each a process with the variables that torchrun would give it."""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tests.fork_server import Forked, run_script

LOOPBACK = "127.0.0.1"
# Below those that systems give to whoever asks for any port: else another test's socket could come first.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    while True:
        with contextlib.closing(socket.socket()) as found, contextlib.suppress(OSError):
            found.bind((LOOPBACK, random.SystemRandom().choice(_PORTS)))
            return found.getsockname()[1]


def in_folder(folder: Path | None, program: Callable[..., int], *arguments: object) -> int:
    """Run a forked program in this folder; without one, where the tests run."""
    if folder is not None:
        os.chdir(folder)
    return program(*arguments)


def run_ranks_of(
    script: Path, num_ranks: int, *arguments: str, folder: Path | None = None, limit_s: float = 1500.0
) -> str:
    """What the script's ranks write to standard output, in their order; all must end well.

    folder: where they run; left out, where the tests do.
    """
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
    shared = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        # As under torchrun, whose agents' store the ranks join.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(num_ranks),
    }
    ranks = [
        Forked(
            in_folder,
            folder,
            run_script,
            str(script),
            arguments,
            environ=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + limit_s
    try:
        # The others would wait for one that ended badly.
        while any(rank.poll() is None for rank in ranks) and all(rank.poll() in (None, 0) for rank in ranks):
            assert time.monotonic() < deadline, f"still at work after {limit_s} s"
            time.sleep(0.02)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    texts = [rank.communicate(limit_s) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(err for _, err in texts)
    return "".join(out for out, _ in texts)
