"""Clusters: devices, the links of a host and of the network, read from TOML or known by name."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.io.files import parse_toml, read_text
from penstock.settings.declare import suggestion

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
class Cluster:
    """Equal devices in equal hosts; ranks fill the hosts in order.

    >>> Cluster.named("h100", 16).num_hosts
    2
    """

    name: str
    num_devices: int
    devices_per_host: int
    device: Device
    #: between devices of a host
    host: DeviceLink
    #: between hosts
    network: DeviceLink
    source: str = ""

    def __post_init__(self) -> None:
        for key, number in (("devices_per_host", self.devices_per_host), ("num_devices", self.num_devices)):
            if number > MOST_DEVICES:
                raise ClusterError(f"{key} is too large; the planner takes at most {MOST_DEVICES} devices")
        if self.num_devices < 1:
            raise ClusterError(f"a cluster has at least 1 device, not {self.num_devices}")
        if self.num_devices > self.devices_per_host and self.num_devices % self.devices_per_host:
            raise ClusterError(
                f"{self.num_devices} devices do not fill hosts of {self.devices_per_host}; "
                f"{self.num_devices // self.devices_per_host * self.devices_per_host} or "
                f"{-(-self.num_devices // self.devices_per_host) * self.devices_per_host} would"
            )

    @property
    def num_hosts(self) -> int:
        return -(-self.num_devices // self.devices_per_host)

    @classmethod
    def named(cls, name: str, num_devices: int | None = None) -> Cluster:
        """A cluster of hosts that are built in; by default one host.

        Raises: ClusterError naming the nearest known host.
        """
        known = hosts()
        if name not in known:
            raise unknown(name, known, "host")
        return replace(known[name], num_devices=known[name].devices_per_host if num_devices is None else num_devices)

    @classmethod
    def read(cls, path: str | Path, num_devices: int | None = None) -> Cluster:
        """Read a cluster's TOML file; `num_devices` replaces the number in the file.

        Raises: ClusterError for a file that cannot be read, an unknown key, or a number that cannot be.
        """
        try:
            table = parse_toml(read_text(path))
        except OSError as error:
            raise ClusterError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
        except ValueError as error:
            raise ClusterError(f"{path} is not TOML: {error}") from None
        try:
            found = from_table(table, Path(path).stem, num_devices)
            known = sorted({dtype for host in hosts().values() for dtype in host.device.peak_flops} | {"fp64"})
            for dtype in found.device.peak_flops:
                if dtype not in known:
                    raise unknown(dtype, known, "dtype of device.peak_tflops")
            return found
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from None

    def link(self, size: int, stride: int) -> DeviceLink:
        """The link by which each of `size` ranks, `stride` apart, reaches the others of its group.

        Within a host it is the host's. Between hosts, the members that a host has use their network links together, as
        rings over several adapters do.
        """
        if size * stride <= self.devices_per_host or self.num_hosts == 1:
            return self.host
        members = max(1, min(size, self.devices_per_host // stride))
        bandwidth = self.network.bandwidth / self.network.shared_by * members
        return replace(self.network, bandwidth=min(self.host.bandwidth, bandwidth))


def unknown(name: str, known: Iterable[str], what: str) -> ClusterError:
    """The error for an unknown name, with the nearest known one."""
    known = list(known)
    near = suggestion(name, known, otherwise="")
    return ClusterError(f"no {what} is called {name!r}; {f'{near} ' if near else ''}there are {', '.join(known)}")


@cache
def hosts() -> dict[str, Cluster]:
    """The hosts that are built in, by name, each as a cluster of one."""
    table = tomllib.loads((files("penstock.planner") / "hosts.toml").read_text(encoding="utf-8"))
    return {name: from_table(own, name) for name, own in table.items()}


_SECTIONS: dict[str, dict[str, type]] = {
    "": {"host_type": str, "num_devices": int, "devices_per_host": int, "source": str},
    "device": {"memory_gib": float, "memory_bandwidth_gb_s": float, "peak_tflops": dict},
    "host": {"bandwidth_gb_s": float, "latency_us": float, "shared_by": int},
    "network": {"bandwidth_gb_s": float, "latency_us": float, "shared_by": int},
}


def from_table(table: Mapping[str, Any], name: str, num_devices: int | None = None) -> Cluster:
    """Make a cluster of a TOML table; `host_type` names a built-in host whose values it changes.

    Raises: ClusterError for an unknown key, one that is missing, or a value that cannot be.
    """
    values = _values(table)
    base = Cluster.named(values["host_type"]) if "host_type" in values else None

    def value(key: str, default: Any) -> Any:
        if key in values:
            return values[key]
        if default is None:
            raise ClusterError(f"{key} is missing; give it, or host_type = one of {', '.join(hosts())}")
        return default

    def link(section: str, own: DeviceLink | None) -> DeviceLink:
        return DeviceLink(
            value(f"{section}.bandwidth_gb_s", own and own.bandwidth / 1e9) * 1e9,
            value(f"{section}.latency_us", own and own.latency_s * 1e6) * 1e-6,
            value(f"{section}.shared_by", own.shared_by if own else 1),
        )

    device = base and base.device
    peaks = {key: flops * 1e12 for key, flops in values.get("device.peak_tflops", {}).items()}
    devices_per_host = value("devices_per_host", base and base.devices_per_host)
    return Cluster(
        name,
        num_devices or value("num_devices", devices_per_host),
        devices_per_host,
        Device(
            {**(device.peak_flops if device else {}), **peaks} or value("device.peak_tflops", None),
            value("device.memory_gib", device and device.memory_bytes / _GIB) * _GIB,
            value("device.memory_bandwidth_gb_s", device and device.memory_bandwidth / 1e9) * 1e9,
        ),
        link("host", base and base.host),
        link("network", base and base.network),
        value("source", base.source if base else ""),
    )


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table's values by dotted name, each of its type and above 0."""
    found: dict[str, Any] = {}
    for key, given in table.items():
        if key in _SECTIONS and key and not isinstance(given, Mapping):
            raise ClusterError(f"{key} takes a section [{key}] with values of its own, not {given!r}")
        section = key if key in _SECTIONS and isinstance(given, Mapping) else ""
        for inner, value in given.items() if section else ((key, given),):
            if inner not in _SECTIONS[section]:
                known = _SECTIONS[section] if section else {**_SECTIONS[""], **dict.fromkeys(list(_SECTIONS)[1:])}
                raise unknown(inner, known, f"key of {section or 'a cluster'}")
            full = f"{section}.{inner}" if section else inner
            found[full] = _checked(full, value, _SECTIONS[section][inner])
    return found


def _checked(name: str, value: Any, kind: type) -> Any:
    if kind is dict:
        if not isinstance(value, Mapping) or not value:
            raise ClusterError(f"{name} takes a table of peaks by dtype, such as {{bf16 = 989.0}}, not {value!r}")
        return {key: _checked(f"{name}.{key}", one, float) for key, one in value.items()}
    if kind is str:
        if not isinstance(value, str):
            raise ClusterError(f"{name} takes a text, not {value!r}")
        return value
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole or (kind is float and isinstance(value, float))) or not (0 < value < math.inf):
        raise ClusterError(f"{name} takes {'a whole number' if kind is int else 'a number'} above 0, not {value!r}")
    return kind(value)
