"""Hosts for the tests: network namespaces that a switch joins, or, where there are none, agents on this machine.

Two of them train; the third holds the store at which torchrun's agents meet, and trains nothing.
"""

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
# How long an agent waits for others that have ended before they came; torchrun's default is 600 s.
JOIN_TIMEOUT_S = 120
_LINK, _SWITCH = "link", "switch"


@dataclass(frozen=True)
class Rendezvous:
    """Where the agents of a run meet: `nodes` as torchrun's --nnodes takes them, and each agent's processes.

    endpoint: of a store on another host; "127.0.0.1:0" for one that the only agent holds.
    """

    endpoint: str
    nodes: str
    num_processes: int
    max_restarts: int = 0
    shutdown_timeout_s: int = 30


@dataclass(frozen=True)
class Host:
    """A namespace with its own address; without one, this machine."""

    address: str = LOOPBACK
    namespace: str | None = None

    def start(self, meet: Rendezvous, *arguments: str, command: str = "train") -> Started:
        """An agent on this host, and the run or other command that it is to start."""
        settings = {
            # A host counts as lost after as many missed words, and those that are there wait this long for others.
            # On a machine with much else to do one that lives may miss some: two halves of a run then start alone.
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 8,
            "last_call_timeout": 3,
            "join_timeout": JOIN_TIMEOUT_S,
            "is_host": int(meet.endpoint.endswith(":0")),
        }
        launcher = [
            *self._inside(),
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-id", "run"),
            *("--nnodes", meet.nodes, "--nproc-per-node", str(meet.num_processes)),
            *("--rdzv-endpoint", meet.endpoint, "--local-addr", self.address),
            *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items())),
            *("--max-restarts", str(meet.max_restarts), "--shutdown-timeout", str(meet.shutdown_timeout_s)),
        ]
        environ = {
            "GLOO_SOCKET_IFNAME": "lo" if self.namespace is None else _LINK,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return Started(list(arguments), environ, launcher, command)

    def run(self, *command: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end."""
        return subprocess.run([*self._inside(), *command], capture_output=True, text=True, timeout=limit_s)

    @contextlib.contextmanager
    def store(self) -> Iterator[str]:
        """A store on this host; yields its endpoint, and ends it as a script would."""
        launcher = [*self._inside(), sys.executable]
        with Started([f"{self.address}:0"], {"OMP_NUM_THREADS": "1"}, launcher, command="store") as held:
            assert isinstance(held.process, subprocess.Popen) and held.process.stdout is not None
            yield f"{self.address}:{held.process.stdout.readline().split()[-1]}"
            held.process.terminate()
            ended = held.end(limit_s=60)
        assert ended.exit_code == 0, ended.err

    def cut_off(self) -> None:
        """Pull its cable."""
        _ip("-n", str(self.namespace), "link", "set", "dev", _LINK, "down")

    def connect(self) -> None:
        _ip("-n", str(self.namespace), "link", "set", "dev", _LINK, "up")

    def _inside(self) -> list[str]:
        return [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]


@contextlib.contextmanager
def three_hosts() -> Iterator[tuple[Host, Host, Host]]:
    """Three namespaces with an address each; they are gone, with all that runs in them, when the block ends."""
    names = [f"penstock-{os.getpid()}-{letter}" for letter in "abc"]
    hosts = [Host(f"10.77.0.{1 + place}", name) for place, name in enumerate(names)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", names[2], "link", "add", _SWITCH, "type", "bridge")
        _ip("-n", names[2], "link", "set", "dev", _SWITCH, "up")
        for name in names[:2]:
            ends = ("netns", name, "type", "veth", "peer", "name", name[-1], "netns", names[2])
            _ip("link", "add", "name", _LINK, *ends)
            _ip("-n", names[2], "link", "set", "dev", name[-1], "master", _SWITCH, "up")
        for host, name in zip(hosts, names, strict=True):
            device = _SWITCH if name == names[2] else _LINK
            _ip("-n", name, "address", "add", f"{host.address}/24", "dev", device)
            _ip("-n", name, "link", "set", "dev", "lo", "up")
            _ip("-n", name, "link", "set", "dev", device, "up")
        yield hosts[0], hosts[1], hosts[2]
    finally:
        for name in names:
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


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
