"""Two hosts on one machine, joined by one slow link: network namespaces, a veth pair and a token bucket on either end.

Messages cross the kernel's whole network stack at the rate of the link, as between two machines; the benchmark itself
emulates nothing.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

_CLONE_NEWNET = 0x40000000
_NETNS = Path("/var/run/netns")
_PREFIX = "penstock"
INTERFACE = "slow0"
"""Name of the link's interface on either host."""


class NoSlowNetwork(ValueError):
    """This machine does not allow a slow network; the message says what is missing."""


@dataclass(frozen=True)
class Host:
    """One of the two hosts: a network namespace and its address on the link."""

    namespace: str
    address: str

    def enter(self) -> None:
        """Move this thread, and threads that it starts from now on, to the host: their sockets are the host's.

        Raises: NoSlowNetwork if that is not allowed.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with (_NETNS / self.namespace).open() as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise NoSlowNetwork(f"a slow network: host {self.namespace} cannot be entered ({_last_error()})")


class SlowNetwork:
    """Sets the hosts up, and takes them down however the `with` block ends.

    Args:
        rate: of the link in either direction, in words of `tc`: "1gbit", "200mbit".
        queue_ms: length of the queue at either end, as time at that rate; what does not fit is lost and sent again.

    Raises:
        NoSlowNetwork: it cannot be set up here; nothing is left behind.
    """

    #: the two ends of the network
    hosts: tuple[Host, ...]
    #: its bandwidth, and the most time that a packet waits in its queue
    rate: str
    queue_ms: float
    #: takes down what was set up
    _undo: ExitStack

    def __init__(self, rate: str = "1gbit", queue_ms: float = 50.0) -> None:
        self.rate, self.queue_ms = rate, queue_ms
        names = (f"{_PREFIX}-{os.getpid()}-{host}" for host in "ab")
        self.hosts = tuple(Host(name, f"10.77.0.{number}") for number, name in enumerate(names, start=1))
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        _check_allowed()
        _sweep()
        try:
            self._end_on_signals()
            self._set_up()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._undo.close()

    def _end_on_signals(self) -> None:
        """Leave the `with` block on SIGTERM, which by default would end the process and leave the hosts behind."""
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, _leave)
            self._undo.callback(signal.signal, signal.SIGTERM, before)

    def cut(self) -> None:
        """Take the link down."""
        _ip("-n", self.hosts[0].namespace, "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Take it up again."""
        _ip("-n", self.hosts[0].namespace, "link", "set", INTERFACE, "up")

    def set_rate(self, rate: str) -> None:
        """Change the rate of the link, which stays up."""
        self.rate = rate
        for host in self.hosts:
            self._limit(host, "change")

    def _limit(self, host: Host, what: str) -> None:
        limit = ("rate", self.rate, "burst", "256kb", "latency", f"{self.queue_ms:g}ms")
        _run("tc", "-n", host.namespace, "qdisc", what, "dev", INTERFACE, "root", "tbf", *limit)

    def _set_up(self) -> None:
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
            # Deleting a namespace deletes its end of the link, and with that the other end.
            self._undo.callback(_ip, "netns", "delete", host.namespace)
        one, other = (host.namespace for host in self.hosts)
        _ip("link", "add", INTERFACE, "netns", one, "type", "veth", "peer", "name", INTERFACE, "netns", other)
        for host in self.hosts:
            of_host = ("-n", host.namespace)
            _ip(*of_host, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip(*of_host, "link", "set", INTERFACE, "up")
            _ip(*of_host, "link", "set", "lo", "up")
            self._limit(host, "add")


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _check_allowed() -> None:
    if not sys.platform.startswith("linux"):
        raise NoSlowNetwork(f"a slow network needs Linux's network namespaces; this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoSlowNetwork(f"a slow network needs {' and '.join(missing)}, of the package iproute2")
    if os.geteuid() != 0:
        raise NoSlowNetwork("a slow network needs the rights of root, to make network namespaces and a link")


def _sweep() -> None:
    """Remove hosts left by processes that were killed."""
    if not _NETNS.is_dir():
        return
    for path in _NETNS.glob(f"{_PREFIX}-*-[ab]"):
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _ip("netns", "delete", path.name)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        reason = said[0] if said else f"exit code {done.returncode}"
        raise NoSlowNetwork(f"a slow network: `{' '.join(command)}` was refused ({reason})")


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
