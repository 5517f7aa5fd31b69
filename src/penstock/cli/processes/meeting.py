"""The group of processes that torchrun, Slurm, Kubernetes or our own launcher has made, and the store they share."""

import contextlib
import errno
import math
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = "127.0.0.1"
LAUNCHER_PID = "PENSTOCKLAUNCHER_PID"
"""The environment variable that names, for workers that we launched ourselves, the process that did."""

_OURS = "this launch"
_BACKLOG = 4096
# How long a process tries to reach the store that it has opened itself; torch's limit is five minutes.
_STORE_LIMIT_S = 20.0
# How long a process leaves it to another to report their mistake: a loaded machine may still be starting that one.
_OTHERS_WAIT_S = 20.0


@dataclass(frozen=True)
class Group:
    """This process's place in the run, and the address at which all meet.

    origin: names the maker of the group. num_local: processes on this host; None if unknown.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    origin: str
    num_local: int | None = None

    @property
    def is_on_one_host(self) -> bool:
        """True if all processes are known to be on this host."""
        return self.is_ours or self.num_local == self.world_size

    @property
    def is_ours(self) -> bool:
        """True for a group of our own launcher, which passes each signal on to all processes."""
        return self.origin == _OURS or self.world_size == 1

    @classmethod
    def alone(cls) -> "Group":
        """The group of a run of one process."""
        return cls(rank=0, world_size=1, local_rank=0, address=LOOPBACK, port=0, origin="this process")


def find_group(environ: Mapping[str, str]) -> Group | None:
    """Find the group that this process was started in, if any.

    torchrun and Kubernetes' training operators set RANK and WORLD_SIZE; Slurm's srun sets variables of its own.

    Raises:
        ValueError: such a variable is set but is not a possible number, or related ones are missing.
    """
    group = _find_group(environ)
    if group is not None and not group.rank < group.world_size:
        raise ValueError(f"rank {group.rank} is not one of {group.world_size}; ranks count from 0")
    if group is not None and not 0 < group.port < 2**16:
        raise ValueError(f"MASTER_PORT = {group.port} is no port; 1 to 65535 are possible")
    return group


def _find_group(environ: Mapping[str, str]) -> Group | None:
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return Group(
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK", "0"),
            address=_text(environ, "MASTER_ADDR"),
            port=_number(environ, "MASTER_PORT"),
            origin=_OURS if LAUNCHER_PID in environ else "the group this process was started in",
            num_local=_number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None,
        )
    # A Slurm batch script has a rank as well, but only steps started by srun have a step's variables.
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        job = _number(environ, "SLURM_JOB_ID", "0")
        num_hosts, num_tasks = _number(environ, "SLURM_STEP_NUM_NODES", "0"), _number(environ, "SLURM_STEP_NUM_TASKS")
        return Group(
            rank=_number(environ, "SLURM_PROCID"),
            world_size=num_tasks,
            local_rank=_number(environ, "SLURM_LOCALID", "0"),
            address=environ.get("MASTER_ADDR") or _first_host(_text(environ, "SLURM_STEP_NODELIST")),
            # Every process of a job must find the same port before they meet, so the job's number decides.
            port=_number(environ, "MASTER_PORT", str(20000 + job % 20000)),
            origin="this Slurm step",
            num_local=num_tasks if num_hosts == 1 else None,
        )
    return None


def find_group_of(sizes: Mapping[str, int]) -> tuple[Group | None, int]:
    """Find the group of this process, if any, for a layout with these sizes by axis; also returns their product.

    Raises: ValueError as `find_group` does, and for a group of another size.
    """
    group, world_size = find_group(os.environ), math.prod(sizes.values())
    if group is not None and group.world_size != world_size:
        words = " x ".join(f"--{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"{group.origin} has {group.world_size} processes, but {words} is {world_size}; make them equal"
        )
    return group, world_size


def leave_report_to_first(environ: Mapping[str, str]) -> None:
    """Leave a mistake that all processes of this host make before they meet to the first of them to report.

    The others wait to be ended, as torchrun and our own launcher do once one process has failed. Returns in the first
    process; in others only after a while: then the first has not failed, or nobody ends the others.
    """
    with contextlib.suppress(ValueError):
        group = find_group(environ)
        if group is not None and group.local_rank > 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            time.sleep(_OTHERS_WAIT_S)


def listen(address: str, port: int) -> socket.socket:
    """Listen at the address at which the others look for a store, on no other network of this host.

    Where it is not one of this host's own (a cluster's service), or a name for this host's loopback (as some operators
    call the first host alone, and Debian each host itself), nothing says by which network the others come: then on all.

    Raises: ValueError where nothing can listen there.
    """
    try:
        for family, *_, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
            if place[0] != address and ip_address(str(place[0]).partition("%")[0]).is_loopback:
                continue
            try:
                return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        raise ValueError(f"cannot listen at {address}:{port}: {reason(error)}; give another port") from None


def reason(error: OSError) -> str:
    """The reason of an error, without the place that some add in brackets."""
    return (error.strerror or str(error)).partition(" (")[0].lower()


def store_at(listener: socket.socket) -> "Store":
    """The store at which processes meet, for as long as the returned object lives; it takes over the listener."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = listener.getsockname()[:2]
    limit = timedelta(seconds=_STORE_LIMIT_S)
    descriptor = listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor)


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default) if default is not None else _text(environ, name)
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"the environment variable {name} = {text!r} is not a number")
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ValueError(f"RANK or SLURM_PROCID is set, but not {name}; start the run with torchrun, srun or plainly")
    return environ[name]


def _first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: ``node[03-07,9],other`` gives ``node03``."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\](.*?)(?:,|$))?", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST = {nodes!r} names no host")
    return found[1] + (found[2] or "") + (found[3] or "")
