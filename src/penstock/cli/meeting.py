"""The meeting of a run's processes: at the store that rank 0 opens, in the round of one start, under its secret."""

import errno
import hashlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.group import Group, agree

# Set by torchrun where its agents, which outlive the workers, lend them their store.
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
SECRET = "PENSTOCK_SECRET"
"""The environment variable with a secret of the run, the same on all its hosts."""
_BACKLOG = 4096
_PLACE = "penstock/rounds"
_POLL_S = 0.01
_ATTEMPT_S = 5.0


class Missing(ValueError):
    """Some processes of the group, or the store at which they meet, were not there in time."""


def join(group: Group, timeout_s: float, secret: str = "") -> Store:
    """Meet the other processes of the group at a store that no process of an earlier start shares.

    Where there is a secret of the run, all keys lie under it: who lacks it cannot guess them.

    Raises: Missing, naming what did not come in time; ValueError where the secrets of the hosts differ, or rank 0
        cannot open the store.
    """
    if group.world_size == 1:
        return HashStore()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = group.address, str(group.port)
    deadline = time.monotonic() + timeout_s
    store = agree_on_round(_store_of(group, timeout_s), group.rank, group.world_size, deadline - time.monotonic())
    # It says whether secrets are equal, and not where the keys lie.
    sign = hashlib.blake2b(os.fsencode(secret), person=b"sign").hexdigest()
    signs = [theirs["sign"] for theirs in agree(store, group, "secret", {"sign": sign})]
    if others := [rank for rank, theirs in enumerate(signs) if theirs != signs[0]]:
        raise ValueError(
            f"{SECRET} of rank {others[0]} is not that of rank 0; set it to the same text on all hosts, or on none"
        )
    return PrefixStore(hashlib.blake2b(os.fsencode(secret)).hexdigest(), store) if secret else store


def secret_of(environ: Mapping[str, str]) -> str:
    """The secret of the run, or an empty text where it has none.

    Raises: ValueError if it is given and empty, as by a program that could not make one.
    """
    if environ.get(SECRET) == "":
        raise ValueError(f"{SECRET} is empty; give it a text that is hard to guess, or leave it out")
    return environ.get(SECRET, "")


def _store_of(group: Group, timeout_s: float) -> Store:
    """The store that rank 0 opens, or torchrun's agents lend."""
    opens = group.rank == 0 and os.environ.get(_AGENTS_STORE) != str(True)
    place = f"{group.address}:{group.port}"
    deadline = time.monotonic() + timeout_s
    listener = None
    if opens:
        try:
            listener = _listen(group.address, group.port).detach()
        except OSError as error:
            raise ValueError(
                f"rank 0 cannot open the run's store at {place}: {_reason(error)}; give another MASTER_PORT"
            ) from None
    else:
        _reach(group, deadline)
    stores: list[Store | RuntimeError] = []

    def connect() -> None:
        try:
            store = TCPStore(
                group.address,
                group.port,
                group.world_size,
                is_master=opens,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        except RuntimeError as error:
            stores.append(error)
        else:
            stores.append(store)

    # Whatever else may listen there need never answer, and PyTorch itself would wait for it without a limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if not stores or isinstance(stores[0], RuntimeError):
        raise Missing(f"what listens at {place} is not the run's store; is MASTER_PORT another program's?")
    return stores[0]


def _listen(address: str, port: int) -> socket.socket:
    """Listen at the address at which the others look, on no other network of this host.

    Where it is not one of this host's own (a cluster's service), or a name for this host's loopback (as some operators
    call the first host alone, and Debian each host itself), nothing says by which network the others come: then on all.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for family, _, _, _, place in found:
        if place[0] != address and ip_address(place[0]).is_loopback:
            continue
        try:
            return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def _reach(group: Group, deadline: float) -> None:
    """Wait until something listens where the store should be; PyTorch itself would print a page at each attempt."""
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((group.address, group.port), max(0.1, min(left, _ATTEMPT_S))).close()
            return
        except OSError as error:
            if left <= 0:
                raise Missing(
                    f"rank {group.rank} found no store at {group.address}:{group.port} in time ({_reason(error)}); "
                    "rank 0 opens it at MASTER_ADDR and MASTER_PORT, which all hosts must reach"
                ) from None
        time.sleep(min(0.1, max(0.0, left)))


def _reason(error: OSError) -> str:
    """The reason of an error, without the place that some add in brackets."""
    return (error.strerror or str(error)).partition(" (")[0].lower()


# A group that torchrun restarts keeps one store for all its rounds: values that an earlier round left there must not be
# taken for this round's.


def agree_on_round(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """The part of a store that belongs to the processes that call this now, and to no earlier ones.

    Each process leaves a unique word. Rank 0 answers every word it finds with the round's name, even words left by
    processes that have ended; only a live process acknowledges the answer.

    Raises: Missing; on rank 0 it names the ranks that did not arrive.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        name = uuid.uuid4().hex
        _greet_all(store, name, set(range(1, world_size)), deadline)
    else:
        word = uuid.uuid4().hex
        store.set(f"{_PLACE}/word/{rank}", word)
        try:
            # No time at all would mean no limit.
            store.wait([f"{_PLACE}/answer/{word}"], timedelta(seconds=max(_POLL_S, timeout_s)))
        except RuntimeError:
            raise Missing(f"rank {rank} was not answered by rank 0 of the run in time") from None
        name = store.get(f"{_PLACE}/answer/{word}").decode()
        store.set(f"{_PLACE}/{name}/thanks/{rank}", "")
    return PrefixStore(f"{_PLACE}/{name}", store)


def _greet_all(store: Store, name: str, missing: set[int], deadline: float) -> None:
    """Answer the ranks in turns, each as often as its word changes, until all have thanked."""
    answered: dict[int, bytes] = {}
    while missing:
        for rank in sorted(missing):
            if rank in answered and store.check([f"{_PLACE}/{name}/thanks/{rank}"]):
                missing.discard(rank)
            elif store.check([f"{_PLACE}/word/{rank}"]):
                word = store.get(f"{_PLACE}/word/{rank}")
                if answered.get(rank) != word:
                    store.set(f"{_PLACE}/answer/{word.decode()}", name)
                    answered[rank] = word
        if missing and time.monotonic() > deadline:
            raise Missing(f"rank(s) {', '.join(map(str, sorted(missing)))} of the run did not come in time")
        time.sleep(_POLL_S)
