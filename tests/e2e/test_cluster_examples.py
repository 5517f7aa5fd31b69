"""The examples for clusters: bash, torchrun and Penstock take their commands, for the hosts that they ask for."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.elastic
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from penstock.cli.train import read_arguments
from penstock.engine.run_check import check
from penstock.settings import RunConfig, check_world

ROOT = Path(__file__).parents[2]
SLURM, KUBERNETES = ROOT / "examples/slurm/train.sbatch", ROOT / "examples/kubernetes/train.yaml"
RUN = str(ROOT / "examples/tiny.toml")


def what_torchrun_starts(words: list[str]) -> tuple[Any, RunConfig]:
    """How torchrun understands a command, and the run that Penstock understands."""
    launch, _, module = config_from_args(get_args_parser().parse_args(words))
    assert module[:4] == ["-u", "-m", "penstock", "train"]
    return launch, check(read_arguments([RUN, *module[5:]]).config)


def assert_fits(launch: Any, config: RunConfig) -> None:
    """The run fits all hosts, and those that may be left."""
    assert launch.rdzv_backend == "c10d" and launch.max_restarts > 0
    assert launch.min_nodes < launch.max_nodes
    for num_hosts in range(launch.min_nodes, launch.max_nodes + 1):
        world_size = num_hosts * launch.nproc_per_node
        fitted = check(config.fit(world_size))
        check_world(fitted, world_size, "torchrun")
        assert fitted.parallel.pp == config.parallel.pp
    assert config.parallel.world_size == launch.max_nodes * launch.nproc_per_node


def test_the_slurm_script_starts_a_run_on_the_hosts_it_asks_for(tmp_path: Path):
    # Stand-ins for Slurm's own commands: the list of hosts, and a srun that tells what it is to start.
    for name, body in (("scontrol", 'printf "node07\\nnode08\\n"'), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SLURM.read_text(), re.MULTILINE))
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_NNODES": asked["nodes"],
        "SLURM_JOB_ID": "41",
    }
    words = ["bash", str(SLURM), RUN, "--parallel.pp", "8", "--parallel.dp", "2"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, program, *told = done.stdout.splitlines()
    assert program == "torchrun"
    launch, config = what_torchrun_starts(told)
    assert (launch.rdzv_endpoint, launch.run_id) == ("node07:29400", "41")
    assert launch.nproc_per_node == int(asked["gpus-per-node"]) and launch.max_nodes == int(asked["nodes"])
    assert_fits(launch, config)


# Those of sbatch's manual that a training job may want; a misspelt one would only be seen on a cluster.
SBATCH_OPTIONS = {
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


def test_the_slurm_script_is_bash_and_names_only_options_that_there_are():
    text = SLURM.read_text()
    done = subprocess.run(["bash", "-n", str(SLURM)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    asked = re.findall(r"^#SBATCH --([\w-]+)", text, re.MULTILINE)
    assert len(asked) > 5 and len(asked) == len(re.findall("^#SBATCH", text, re.MULTILINE))
    assert set(asked) <= SBATCH_OPTIONS
    # Its first lines are the command that starts it, with options that the test below passes on.
    assert re.search(
        r"^#   sbatch examples/slurm/train\.sbatch run\.toml --parallel\.pp 8 --parallel\.dp 2$", text, re.M
    )


def test_what_the_examples_set_is_known_to_torch():
    """A variable that nobody reads would be set in vain."""
    job = yaml.safe_load(KUBERNETES.read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    names = {entry["name"] for entry in container["env"]}
    assert names == set(re.findall(r"^export (\w+)=", SLURM.read_text(), re.MULTILINE)) != set()
    elastic = Path(torch.distributed.elastic.__file__).parent
    sources = "".join(path.read_text() for path in elastic.rglob("*.py"))
    assert all(f'"{name}"' in sources for name in names)


def test_the_kubernetes_job_starts_a_run_on_the_hosts_it_asks_for(monkeypatch: pytest.MonkeyPatch):
    job = yaml.safe_load(KUBERNETES.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, policy = job["spec"], job["spec"]["elasticPolicy"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    # What the operator sets for torchrun.
    for name, value in {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"{job['metadata']['name']}-worker-0:23456",
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }.items():
        monkeypatch.setenv(name, value)
    program, *words = container["command"]
    assert container["name"] == "pytorch" and program == "torchrun"
    launch, config = what_torchrun_starts(words)
    assert launch.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    assert launch.max_nodes == worker["replicas"]
    assert config.output.startswith("/runs/")
    assert_fits(launch, config)
