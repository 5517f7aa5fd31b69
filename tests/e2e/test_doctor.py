"""`penstock doctor`, and the groups that a dry run prints: what the layout says, and links that carry."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.processes.measure import _description
from penstock.planner import Cluster
from penstock.planner.cluster import from_table
from penstock.settings import Layout
from tests.e2e.training import result_of, run, write_run


def test_the_groups_of_a_layout_are_printed_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--pp", "2", "--dp", "2", "--tp", "2", "--ep", "2", "--no-links", "--json"]) == 0
    told, layout = json.loads(capsys.readouterr().out), Layout(pp=2, dp=2, tp=2, ep=2)
    assert told["links"] is None
    times = told["products_us"]
    assert {"fp32", "int8-weights", "int4"} <= times.keys() and all(time_us > 0 for time_us in times.values())
    expected = {
        "pipelines (pp)": layout.groups("pp"),
        "sharing layers (tp)": layout.groups("tp"),
        "sharing experts (ep)": layout.expert_groups(),
        "summing gradients (dp x cp)": layout.groups("dp", "cp"),
    }
    assert told["groups"] == json.loads(json.dumps(expected))
    assert main(["doctor", "--pp", "2", "--dp", "64", "--no-links"]) == 0
    told = capsys.readouterr().out
    assert "0 1   2 3   4 5   6 7   and 60 more" in told and "0 2 ... 126" in told


def test_a_ring_of_local_processes_is_tested() -> None:
    links = result_of(run("--tp", "2", "--device", "cpu", "--json", command="doctor"))["links"]
    assert len(links["hosts"]) == 2 and links["device"] == "cpu"
    assert links["word_s"] > 0 and links["block_bytes_per_s"] > 0


def test_a_dry_run_prints_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path, "run", 8)
    layout = ["--parallel.pp", "2", "--parallel.dp", "2", "--parallel.tp", "2"]
    assert main(["train", str(file), "--dry-run", "--json", *layout]) == 0
    shared = json.loads(capsys.readouterr().out)
    assert shared["groups"]["sharing layers (tp)"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert main(["train", str(file), "--dry-run", "--json", *layout[:4]]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert shared["num_parameters"] == whole["num_parameters"]
    # All but the norms are divided.
    for ours, theirs in zip(shared["stages"], whole["stages"], strict=True):
        assert 0.5 <= ours["num_parameters"] / theirs["num_parameters"] < 0.53


def test_the_measured_machines_are_a_cluster_that_plans_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.toml"
    measured = result_of(run("--pp", "2", "--device", "cpu", "--measure", str(path), "--json", command="doctor"))
    cluster = Cluster.read(path)
    assert (cluster.num_devices, cluster.devices_per_host, cluster.num_hosts) == (2, 2, 1)
    assert cluster.device.peak("fp32") == 1e12 * measured["links"]["cluster"]["device"]["peak_tflops"]["fp32"] > 1e8
    assert cluster.device.memory_bandwidth > 1e8 and cluster.device.memory_bytes > 2**20
    assert cluster.host.bandwidth > 1e6 and 0 < cluster.host.latency_s < 1
    assert "was not measured" in cluster.source
    before = path.read_bytes()
    for words, message in (
        (["--measure", str(path)], "--force"),
        (["--measure", str(path), "--no-links"], "leave out one of them"),
        (["--measure", str(tmp_path / "other.toml"), "--pp", "1"], "at least two processes"),
    ):
        assert main(["doctor", *words]) == 2
        assert message in capsys.readouterr().err
    assert path.read_bytes() == before


def test_the_slowest_of_all_processes_count_and_adapters_are_shared() -> None:
    """Two hosts of two processes: the second place of each has no ring of its own while the first is alone."""

    def row(peak: float, near: float, together: float, alone: float | None = None) -> dict[str, Any]:
        table = {"peaks": {"fp32": peak}, "bandwidth": 2e9, "memory": 2.0**31, "near": [near, 1e-6]}
        return {**table, "together": [together, 2e-5], **({"alone": [alone, 1e-5]} if alone else {})}

    rows = [row(3e12, 9e9, 1.1e9, 2e9), row(2e12, 8e9, 1e9), row(3e12, 9e9, 1e9, 2.1e9), row(3e12, 9e9, 1.2e9)]
    found = from_table(_description(rows, 2, 2), "two hosts")
    assert (found.num_devices, found.num_hosts, found.device.peak("fp32")) == (4, 2, 2e12)
    assert (found.host.bandwidth, found.network.bandwidth, found.network.shared_by) == (8e9, 2e9, 2)
    assert found.network.latency_s == pytest.approx(1e-5)
