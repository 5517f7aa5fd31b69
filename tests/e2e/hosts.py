"""Hosts for the tests: agents of torchrun on this one, or two network namespaces that nothing but a cable joins."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.training import Started

LOOPBACK = "127.0.0.1"
_LINK = "link"


@dataclass(frozen=True)
class Rendezvous:
    """Where the agents of a run meet: `nodes` as torchrun's --nnodes takes them, and each agent's processes."""

    address: str
    port: int
    nodes: str
    num_processes: int
    max_restarts: int = 0


@dataclass(frozen=True)
class Host:
    """A namespace with its own address; without one, this machine. One host of a run holds the agents' store."""

    address: str = LOOPBACK
    namespace: str | None = None
    holds_store: bool = True

    def start(self, meet: Rendezvous, *arguments: str) -> Started:
        """An agent on this host, and the run it is to start."""
        inside = [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]
        settings = {
            "is_host": int(self.holds_store),
            # A host counts as lost after as many missed words, and those that are there wait this long for others.
            # On a machine with much else to do one that lives may miss some: two halves of a run then start alone.
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 8,
            "last_call_timeout": 3,
        }
        launcher = [
            *inside,
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-id", "run"),
            *("--nnodes", meet.nodes, "--nproc-per-node", str(meet.num_processes)),
            *("--rdzv-endpoint", f"{meet.address}:{meet.port}", "--local-addr", self.address),
            *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items())),
            *("--max-restarts", str(meet.max_restarts)),
        ]
        environ = {
            "GLOO_SOCKET_IFNAME": "lo" if self.namespace is None else _LINK,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return Started(list(arguments), environ, launcher)


class Cable:
    """What joins the two hosts; it can be cut."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def cut(self) -> None:
        _ip("-n", self._namespace, "link", "set", "dev", _LINK, "down")

    def mend(self) -> None:
        _ip("-n", self._namespace, "link", "set", "dev", _LINK, "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host, Cable]]:
    """Two namespaces with an address each; they are gone, with all that runs in them, when the block ends."""
    names = [f"penstock-{os.getpid()}-{letter}" for letter in "ab"]
    hosts = [Host("10.77.0.1", names[0]), Host("10.77.0.2", names[1], holds_store=False)]
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = ("netns", names[0], "type", "veth", "peer", "name", _LINK, "netns", names[1])
        _ip("link", "add", "name", _LINK, *ends)
        for host, name in zip(hosts, names, strict=True):
            _ip("-n", name, "address", "add", f"{host.address}/24", "dev", _LINK)
            _ip("-n", name, "link", "set", "dev", "lo", "up")
            _ip("-n", name, "link", "set", "dev", _LINK, "up")
        yield hosts[0], hosts[1], Cable(names[0])
    finally:
        for name in names:
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextlib.contextmanager
def either_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts of their own where this machine can make them; else two agents on this one."""
    if why_no_hosts() is not None:
        yield Host(), Host(holds_store=False)
        return
    with two_hosts() as (here, there, _):
        yield here, there


def why_no_hosts() -> str | None:
    """The reason why this machine cannot make two hosts; None if it can."""
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"penstock-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this machine does not allow network namespaces"
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return None


def world_size_of(pid: int) -> int | None:
    """The size of the group that a process was started in."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"WORLD_SIZE="):
                return int(entry.partition(b"=")[2])
    return None


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
