"""The example for Slurm, and what all examples for clusters share: bash, torchrun and Penstock take their commands."""

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.elastic
from torch.distributed.run import config_from_args, get_args_parser

from penstock.cli.train import read_arguments
from penstock.engine.folders.run_check import check_run
from penstock.settings import RunConfig

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples/slurm/train.sbatch"
RUN = str(ROOT / "examples/tiny.toml")
# Time for a step of a minute, another in which all ranks hear of the signal, and as much to save; then for torchrun to
# end what is left, and itself.
FINISH_S, END_S = 180, 30


def what_torchrun_starts(words: list[str]) -> tuple[Any, RunConfig]:
    """How torchrun understands a command, and the run that Penstock understands."""
    launch, _, module = config_from_args(get_args_parser().parse_args(words))
    assert module[:4] == ["-u", "-m", "penstock", "train"]
    return launch, check_run(read_arguments([RUN, *module[5:]]).config)


def assert_keeps_its_word(launch: Any, config: RunConfig, notice_s: int) -> None:
    """The run fits all hosts, and those that may be left; it meets at a store that none of them holds.

    `notice_s`: how long before its end the launcher is told.
    """
    assert launch.rdzv_backend == "c10d" and launch.max_restarts > 0
    assert launch.rdzv_configs["is_host"] == "0"
    assert launch.min_nodes < launch.max_nodes
    for num_hosts in range(launch.min_nodes, launch.max_nodes + 1):
        world_size = num_hosts * launch.nproc_per_node
        fitted = check_run(config.fit(world_size))
        fitted.parallel.check(world_size)
        assert fitted.parallel.pp == config.parallel.pp
    assert config.parallel.world_size == launch.max_nodes * launch.nproc_per_node
    assert FINISH_S <= launch.shutdown_timeout <= notice_s - END_S


def assert_known_to_torch(names: set[str]) -> None:
    """A variable that nobody reads would be set in vain."""
    elastic = Path(torch.distributed.elastic.__file__).parent
    sources = "".join(path.read_text() for path in elastic.rglob("*.py"))
    assert names and all(f'"{name}"' in sources for name in names)


def options(words: Iterable[str]) -> dict[str, str]:
    """Options of Slurm's commands by name; "" for one without a value."""
    found = [re.fullmatch(r"--([\w-]+)(?:=(\S+))?", word) for word in words]
    assert found and all(found), words
    return {option[1]: option[2] or "" for option in found if option is not None}


def options_of_script() -> dict[str, str]:
    return options(re.findall(r"^#SBATCH (.*)$", SLURM.read_text(), re.MULTILINE))


# Stand-ins for Slurm's commands and the store. The store notes what it is told, and would go on for a minute; salloc
# tells its options, and what it was left of the job of the script.
STAND_INS = {
    "hostname": "echo login1",
    "penstock": 'printf "%s\\n" "$@" > "$TOLD"; echo listening on 192.0.2.1 port 20041; exec sleep 60',
    "salloc": 'env | grep ^SLURM_; printf "%s\\n" "$@"',
}


def run_the_script(tmp_path: Path, words: Iterable[str], **others: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the example with stand-ins, some of them `others`."""
    for name, body in (STAND_INS | others).items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TOLD": str(tmp_path / "told"),
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_JOB_ID": "41",
    }
    return subprocess.run(["bash", str(SLURM), *words], env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.shows(150)
def test_the_slurm_script_starts_a_run_on_the_hosts_it_asks_for(tmp_path: Path):
    # It ends although the store would go on: its pipes are read to their end.
    done = run_the_script(tmp_path, [RUN, "--parallel.pp", "8", "--parallel.dp", "2"])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told").read_text().split() == ["store", "login1:20041"]
    place, left, *lines = done.stdout.splitlines()
    assert place == "listening on 192.0.2.1 port 20041"
    assert left == "SLURM_CONF=/etc/slurm.conf"
    srun, torchrun = lines.index("srun"), lines.index("torchrun")
    hosts, step, batch = options(lines[:srun]), options(lines[srun + 1 : torchrun]), options_of_script()
    launch, config = what_torchrun_starts(lines[torchrun + 1 :])
    assert (launch.rdzv_endpoint, launch.run_id) == ("login1:20041", "41-0")
    # Hosts and GPUs are asked for by the second job alone; the script's own trains nothing.
    assert launch.nproc_per_node == int(hosts["gpus-per-node"]) and launch.max_nodes == int(hosts["nodes"])
    assert batch["nodes"] == batch["ntasks"] == "1" and not any("gpu" in option for option in batch)
    assert hosts["ntasks-per-node"] == "1" and hosts["cpus-per-task"] == step["cpus-per-task"]
    # A lost host ends neither the job nor its step; the loss of the one that holds the store queues the script again.
    assert "no-kill" in hosts and step.keys() >= {"no-kill", "kill-on-bad-exit"} and "requeue" in batch
    assert step["kill-on-bad-exit"] == "0"
    signal, notice_s = hosts["signal"].split("@")
    assert signal == "TERM"
    assert_keeps_its_word(launch, config, int(notice_s))
    assert batch.keys() | hosts.keys() <= OPTIONS


def test_the_slurm_script_asks_for_no_host_where_its_store_cannot_start(tmp_path: Path):
    said = "penstock: cannot listen at login1:20041: address already in use"
    done = run_the_script(tmp_path, [RUN], penstock=f'echo "{said}" >&2; exit 2')
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{said}\n")


# Those of the manuals of sbatch and salloc that a training job may want; a misspelt one would fail on a cluster.
OPTIONS = {
    *("account", "constraint", "cpus-per-task", "error", "exclusive", "export", "gpus", "gpus-per-node", "job-name"),
    *(
        "mem",
        "no-kill",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "output",
        "partition",
        "qos",
        "requeue",
        "signal",
        "time",
    ),
}


@pytest.mark.shows(150)
def test_the_slurm_script_is_bash_and_says_how_it_is_started():
    text = SLURM.read_text()
    done = subprocess.run(["bash", "-n", str(SLURM)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    # Its first lines are the command that starts it, with options that the test above passes on.
    assert re.search(
        r"^#   sbatch examples/slurm/train\.sbatch run\.toml --parallel\.pp 8 --parallel\.dp 2$", text, re.M
    )
    assert_known_to_torch(set(re.findall(r"^export (\w+)=", text, re.MULTILINE)))
