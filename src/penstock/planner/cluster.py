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
    num_devices: int
    devices_per_host: int
    device: Device
    #: between devices of a host
    host: DeviceLink
    #: between hosts
    network: DeviceLink
    source: str = ""
    #: the hosts in order, where they differ; the values above are then those of the first
    differing: tuple[Hosts, ...] = ()

    def __post_init__(self) -> None:
        for key, number in (("devices_per_host", self.devices_per_host), ("num_devices", self.num_devices)):
            if number > MOST_DEVICES:
                raise ClusterError(f"{key} is too large; the planner takes at most {MOST_DEVICES} devices")
        if self.num_devices < 1:
            raise ClusterError(f"a cluster has at least 1 device, not {self.num_devices}")
        if not self.differing and self.num_devices > self.devices_per_host and self.num_devices % self.devices_per_host:
            raise ClusterError(
                f"{self.num_devices} devices do not fill hosts of {self.devices_per_host}; "
                f"{self.num_devices // self.devices_per_host * self.devices_per_host} or "
                f"{-(-self.num_devices // self.devices_per_host) * self.devices_per_host} would"
            )

    @property
    def kinds(self) -> tuple[Hosts, ...]:
        """The hosts in order, by kind."""
        if self.differing:
            return self.differing
        per_host = min(self.num_devices, self.devices_per_host)
        return (Hosts(self.num_devices // per_host, per_host, self.device, self.host, self.network),)

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
            for dtype in (dtype for kind in found.kinds for dtype in kind.device.peak_flops):
                if dtype not in known:
                    raise unknown(dtype, known, "dtype of device.peak_tflops")
            return found
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from None


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


_Sections = Mapping[str, Mapping[str, type]]
_HOST: _Sections = {
    "device": {"memory_gib": float, "memory_bandwidth_gb_s": float, "peak_tflops": dict},
    "host": {"bandwidth_gb_s": float, "latency_us": float, "shared_by": int},
    "network": {"bandwidth_gb_s": float, "latency_us": float, "shared_by": int},
}
_SECTIONS: _Sections = {"": {"host_type": str, "num_devices": int, "devices_per_host": int, "source": str}, **_HOST}
# Of one of the tables [[hosts]].
_HOSTS: _Sections = {"": {"number": int, "host_type": str, "devices_per_host": int}, **_HOST}


def from_table(table: Mapping[str, Any], name: str, num_devices: int | None = None) -> Cluster:
    """Make a cluster of a TOML table; `host_type` names a built-in host whose values it changes.

    Each of its tables [[hosts]] is a number of hosts in order, for which it changes the values of the rest of the file.
    Of such hosts `num_devices` takes the first.

    Raises: ClusterError for an unknown key, one that is missing, or a value that cannot be.
    """
    values = _values({key: value for key, value in table.items() if key != "hosts"}, _SECTIONS)
    if "hosts" not in table:
        return _of_values(values, name, num_devices)
    tables = table["hosts"]
    if not isinstance(tables, list) or not tables or not all(isinstance(own, Mapping) for own in tables):
        raise ClusterError(f"hosts takes tables [[hosts]] with a number of hosts and what differs, not {tables!r}")
    found: list[Hosts] = []
    for own in tables:
        changed = _values(own, _HOSTS)
        alike = {key: value for key, value in {**values, **changed}.items() if key != "num_devices"}
        one = _of_values(alike, name)
        found.append(Hosts(changed.get("number", 1), one.devices_per_host, one.device, one.host, one.network))
    whole = sum(kind.num_devices for kind in found)
    wanted: int = num_devices or values.get("num_devices", whole)
    if whole > MOST_DEVICES or not (first := _first(found, wanted)):
        raise ClusterError(
            f"{wanted} devices do not fill hosts of {', '.join(str(kind.devices_per_host) for kind in found)} in "
            f"their order, of which there are {sum(kind.number for kind in found)} with {whole} devices"
        )
    one = first[0]
    source = values.get("source", "")
    return Cluster(name, wanted, one.devices_per_host, one.device, one.host, one.network, source, first)


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


def _of_values(values: Mapping[str, Any], name: str, num_devices: int | None = None) -> Cluster:
    """Make a cluster of equal hosts of a table's values."""
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


def _values(table: Mapping[str, Any], sections: _Sections) -> dict[str, Any]:
    """The table's values by dotted name, each of its type and above 0."""
    found: dict[str, Any] = {}
    for key, given in table.items():
        if key in sections and key and not isinstance(given, Mapping):
            raise ClusterError(f"{key} takes a section [{key}] with values of its own, not {given!r}")
        section = key if key in sections and isinstance(given, Mapping) else ""
        for inner, value in given.items() if section else ((key, given),):
            if inner not in sections[section]:
                known = sections[section] if section else {**sections[""], **dict.fromkeys(list(sections)[1:])}
                raise unknown(inner, known, f"key of {section or 'a cluster'}")
            full = f"{section}.{inner}" if section else inner
            found[full] = _checked(full, value, sections[section][inner])
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
