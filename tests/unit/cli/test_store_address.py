"""A run's store listens where the others look for it and nowhere else, and its keys lie under the run's secret."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.processes.meeting import Group
from penstock.cli.processes.session import join
from tests.e2e.scripts import free_port

LISTENING = "0A"


@pytest.fixture(autouse=True)
def environment_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    yield


def both_join(address: str, port: int, secret: str = "") -> list[Store]:
    with ThreadPoolExecutor(2) as threads:
        joined = [
            threads.submit(join, Group(rank, 2, rank, address, port, "a test"), 30.0, secret) for rank in range(2)
        ]
        return [store.result() for store in joined]


def listening_at(port: int) -> set[str]:
    """The addresses at which this process listens on a port, as the system writes them."""
    ours = {os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if is_open(number)}
    rows = [row.split() for net in ("tcp", "tcp6") for row in Path(f"/proc/net/{net}").read_text().splitlines()[1:]]
    return {
        row[1].split(":")[0]
        for row in rows
        if row[3] == LISTENING and row[1].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in ours
    }


def is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


@pytest.mark.shows(149)
@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.1", "0100007F"), ("127.0.0.2", "0200007F"), ("localhost", "00000000")]
)
def test_the_store_listens_at_the_address_of_the_run_alone(address: str, expected: str):
    port = free_port()
    stores = both_join(address, port)
    assert listening_at(port) == {expected}
    stores[1].set("from rank 1", "word")
    assert stores[0].get("from rank 1") == b"word"


@pytest.mark.shows(149)
def test_keys_lie_under_the_secret_of_the_run():
    port = free_port()
    first, second = both_join("127.0.0.1", port, "known to the run")
    stranger = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    # Where this start of the run has its keys, anyone can read.
    place = next(key for key in stranger.list_keys() if key.endswith("penstock/secret/all")).removesuffix("secret/all")
    forged = f"{place}settings/1"
    stranger.set(forged, "forged")
    assert not first.check(["penstock/settings/1"])
    second.set("penstock/settings/1", "true")
    assert first.get("penstock/settings/1") == b"true"
    assert stranger.get(forged) == b"forged"
