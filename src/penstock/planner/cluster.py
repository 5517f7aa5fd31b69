"""Clusters: devices, the links of a host and of the network, read from TOML or known by name."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.io.files import parse_toml, read_text
from penstock.settings.declare import match, mismatch, suggestion

_GIB = 2**30

MOST_DEVICES = 10_000_000
"""Devices of a cluster, at most: the divisors of more take too long to try."""


class ClusterError(ValueError):
    """A cluster that cannot be, or that is not known."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process's share of a CPU."""

    #: dtype -> operations of dense matrix products in a second
    peak_flops: Mapping[str, float]
    memory_bytes: float
    #: bytes in a second
    memory_bandwidth: float

    def __hash__(self) -> int:
        return hash((*self.peak_flops.items(), self.memory_bytes, self.memory_bandwidth))

    @classmethod
    def slowest(cls, devices: Sequence[Device]) -> Device:
        """A device that is in each respect as the least of some."""
        if len(devices) == 1:
            return devices[0]
        common = [dtype for dtype in devices[0].peak_flops if all(dtype in one.peak_flops for one in devices)]
        return cls(
            {dtype: min(one.peak_flops[dtype] for one in devices) for dtype in common},
            min(one.memory_bytes for one in devices),
            min(one.memory_bandwidth for one in devices),
        )

    def peak(self, dtype: str) -> float:
        """The peak of a dtype.

        Raises: ClusterError naming the dtypes that the device has.
        """
        if dtype not in self.peak_flops:
            raise ClusterError(f"the device has no peak for {dtype!r}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class DeviceLink:
    """The link of one device, each way."""

    #: bytes in a second
    bandwidth: float
    latency_s: float
    #: devices of a host that use it together
    shared_by: int = 1


@dataclass(frozen=True)
class Hosts:
    """A number of equal hosts."""

    number: int
    devices_per_host: int
    device: Device
    #: between devices of a host
    host: DeviceLink
    #: between hosts
    network: DeviceLink

    @property
    def num_devices(self) -> int:
        return self.number * self.devices_per_host

    def sharing(self, link: DeviceLink) -> int:
        """The devices of a host that share a link when all of them use it."""
        return min(link.shared_by, self.devices_per_host)


@dataclass(frozen=True)
class Cluster:
    """Devices in hosts; ranks fill the hosts in order.

    >>> Cluster.named("h100", 16).num_hosts
    2
    """

    name: str
    #: the hosts in order, by kind
    kinds: tuple[Hosts, ...]

    def __post_init__(self) -> None:
        if not 0 < self.num_devices <= MOST_DEVICES:
            raise ClusterError(f"a cluster has 1 to {MOST_DEVICES} devices, not {self.num_devices}")

    @property
    def num_devices(self) -> int:
        return sum(kind.num_devices for kind in self.kinds)

    @property
    def num_hosts(self) -> int:
        return sum(kind.number for kind in self.kinds)

    @property
    def smallest_host(self) -> int:
        """The devices of the smallest host."""
        return min(kind.devices_per_host for kind in self.kinds)

    @property
    def memory_bytes(self) -> float:
        """The memory of a device, on average."""
        return sum(kind.num_devices * kind.device.memory_bytes for kind in self.kinds) / self.num_devices

    def peak(self, dtype: str) -> float:
        """The peak of a device, on average. Raises: as `Device.peak`."""
        return sum(kind.num_devices * kind.device.peak(dtype) for kind in self.kinds) / self.num_devices

    @classmethod
    def named(cls, name: str, num_devices: int | None = None) -> Cluster:
        """A cluster of hosts that are built in; by default one host.

        Raises: ClusterError naming the nearest known host.
        """
        return from_table({"host_type": name}, name, num_devices)

    @classmethod
    def read(cls, path: str | Path, num_devices: int | None = None) -> Cluster:
        """Read a cluster's TOML file; `num_devices` replaces the number in the file.

        Raises: ClusterError for a file that cannot be read, an unknown key, or a number that cannot be.
        """
        try:
            return from_table(parse_toml(read_text(path)), Path(path).stem, num_devices)
        except OSError as error:
            raise ClusterError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from None
        except ValueError as error:
            raise ClusterError(f"{path} is not TOML: {error}") from None


def unknown(name: str, known: Iterable[str], what: str) -> ClusterError:
    """The error for an unknown name, with the nearest known one."""
    known = list(known)
    near = suggestion(name, known, otherwise="")
    return ClusterError(f"no {what} is called {name!r}; {f'{near} ' if near else ''}there are {', '.join(known)}")


@cache
def hosts() -> dict[str, dict[str, Any]]:
    """The hosts that are built in: by name their values, by dotted names."""
    tables = tomllib.loads((files("penstock.planner") / "hosts.toml").read_text(encoding="utf-8"))
    return {name: _values(table, _OF_CLUSTER) for name, table in tables.items()}


_LINK = {"bandwidth_gb_s": float, "latency_us": float, "shared_by": int}
# The values of a host, by dotted names, with their types; those of a cluster alone, and of tables [[hosts]] alone.
_OF_HOST: dict[str, Any] = {
    "host_type": str,
    "devices_per_host": int,
    "device.memory_gib": float,
    "device.memory_bandwidth_gb_s": float,
    "device.peak_tflops": Mapping,
    **{f"{part}.{key}": kind for part in ("host", "network") for key, kind in _LINK.items()},
}
_OF_CLUSTER = {**_OF_HOST, "num_devices": int, "source": str}
_OF_HOSTS = {**_OF_HOST, "number": int}
_DTYPES = ("fp64", "fp32", "bf16", "fp16", "fp8", "fp4")


def from_table(table: Mapping[str, Any], name: str, num_devices: int | None = None) -> Cluster:
    """Make a cluster of a TOML table; `host_type` names a built-in host whose values it changes.

    Each of its tables [[hosts]] is a number of hosts in order, for which it changes the values of the rest of the file.
    Of such hosts `num_devices` takes the first.

    Raises: ClusterError for an unknown key, one that is missing, or a value that cannot be.
    """
    values = _values({key: value for key, value in table.items() if key != "hosts"}, _OF_CLUSTER)
    tables = table.get("hosts", [{}])
    if not isinstance(tables, list) or not tables or not all(isinstance(one, Mapping) for one in tables):
        raise ClusterError(f"hosts takes tables [[hosts]] with a number of hosts and what differs, not {tables!r}")
    kinds = [_hosts({**values, **_values(one, _OF_HOSTS)}) for one in tables]
    wanted: int = num_devices or values.get("num_devices", sum(kind.num_devices for kind in kinds))
    if "hosts" not in table:
        kinds = [replace(kinds[0], number=-(-wanted // kinds[0].devices_per_host))]
    if first := _first(kinds, wanted):
        return Cluster(name, first)
    raise ClusterError(
        f"{wanted} devices do not fill hosts of {', '.join(str(kind.devices_per_host) for kind in kinds)} in their "
        f"order, which have {sum(kind.num_devices for kind in kinds)} devices"
    )


def _first(kinds: Iterable[Hosts], num_devices: int) -> tuple[Hosts, ...]:
    """The first hosts that so many devices fill, or a part of the first one; none if they do not."""
    found: list[Hosts] = []
    for kind in kinds:
        number, rest = divmod(num_devices, kind.devices_per_host)
        if not found and not number:
            return (replace(kind, number=1, devices_per_host=num_devices),)
        if number < kind.number and rest:
            return ()
        if number := min(number, kind.number):
            num_devices -= number * kind.devices_per_host
            if found and replace(found[-1], number=kind.number) == kind:
                number += found.pop().number
            found.append(replace(kind, number=number))
    return () if num_devices else tuple(found)


def _hosts(values: Mapping[str, Any]) -> Hosts:
    """Make equal hosts of a table's values, and where it names a built-in host, of that one's others."""
    base: Mapping[str, Any] = {}
    if (host_type := values.get("host_type")) is not None:
        if host_type not in hosts():
            raise unknown(host_type, hosts(), "host")
        base = hosts()[host_type]
    peaks = {**base.get("device.peak_tflops", {}), **values.get("device.peak_tflops", {})}
    values = {**base, **values}
    for key in _OF_HOST:
        if key not in values and not key.endswith(("host_type", "shared_by")):
            raise ClusterError(f"{key} is missing; give it, or host_type = one of {', '.join(hosts())}")
    link, network = (
        DeviceLink(
            values[f"{part}.bandwidth_gb_s"] * 1e9,
            values[f"{part}.latency_us"] * 1e-6,
            values.get(f"{part}.shared_by", 1),
        )
        for part in ("host", "network")
    )
    device = Device(
        {dtype: tflops * 1e12 for dtype, tflops in peaks.items()},
        values["device.memory_gib"] * _GIB,
        values["device.memory_bandwidth_gb_s"] * 1e9,
    )
    return Hosts(values.get("number", 1), values["devices_per_host"], device, link, network)


def _values(table: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The table's values by dotted name, each of its type and above 0."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        inner = value.items() if key in ("device", "host", "network") and isinstance(value, Mapping) else None
        found |= {key: value} if inner is None else {f"{key}.{name}": one for name, one in inner}
    for name, value in found.items():
        if name not in kinds:
            raise unknown(name, kinds, "key of a cluster")
        found[name] = _checked(name, value, kinds[name])
    for dtype, peak in found.get("device.peak_tflops", {}).items():
        if dtype not in _DTYPES:
            raise unknown(dtype, _DTYPES, "dtype of device.peak_tflops")
        _checked(f"device.peak_tflops.{dtype}", peak, float)
    return found


def _checked(name: str, value: Any, kind: Any) -> Any:
    matches, taken = match(kind, value)
    if not matches:
        raise ClusterError(mismatch(name, value, kind))
    if isinstance(taken, int | float) and not 0 < taken < math.inf:
        raise ClusterError(f"{name} takes a number above 0, not {value!r}")
    return taken
