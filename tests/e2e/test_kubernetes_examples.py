"""The examples for Kubernetes: published schemas know every field, and the commands start the run they are meant to."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.test_cluster_examples import (
    ROOT,
    assert_keeps_its_word,
    assert_known_to_torch,
    what_torchrun_starts,
)

FOLDER = ROOT / "examples/kubernetes"
DOCKERFILE = ROOT / "Dockerfile"
DOCUMENTS = {
    (path.name, document["kind"]): document
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}
# Models of the package kubeflow-trainer-api, made from the published schemas of Kubernetes, JobSet and Trainer.
POD = "IoK8sApiCoreV1PodTemplateSpec"
MODELS = {
    ("v1", "Service"): "IoK8sApiCoreV1Service",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
}
# What these models lack: PyTorchJob of the training operator 1.9, and Kubernetes' Deployment, as far as it is used.
REPLICAS = {"replicas": int, "restartPolicy": ("Always", "Never", "OnFailure", "ExitCode"), "template": POD}
ELASTIC = {
    **dict.fromkeys(("minReplicas", "maxReplicas", "maxRestarts", "rdzvPort"), int),
    **dict.fromkeys(("rdzvHost", "rdzvId"), str),
    "rdzvBackend": ("c10d", "etcd", "etcd-v2"),
    "rdzvConf": [{"key": str, "value": str}],
}
SHAPES: dict[tuple[str, str], Any] = {
    ("kubeflow.org/v1", "PyTorchJob"): {
        "nprocPerNode": str,
        "elasticPolicy": ELASTIC,
        "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
    },
    ("apps/v1", "Deployment"): {
        "replicas": int,
        "strategy": {"type": ("Recreate", "RollingUpdate")},
        "selector": {"matchLabels": {"app": str}},
        "template": POD,
    },
}


def misfits(value: Any, shape: Any, place: str) -> list[str]:
    """The places at which a value does not have the shape: a model's name, a type, possible values, a list, fields."""
    if isinstance(shape, str):
        return differences(value, read_by(shape, value), place)
    if isinstance(shape, list):
        return [misfit for part in value for misfit in misfits(part, shape[0], place)]
    if isinstance(shape, Mapping):
        unknown = [f"{place}.{name} is no field" for name in value if name not in shape]
        return unknown + [
            misfit for name in value if name in shape for misfit in misfits(value[name], shape[name], f"{place}.{name}")
        ]
    fits = value in shape if isinstance(shape, tuple) else type(value) is shape
    return [] if fits else [f"{place} = {value!r}"]


def read_by(model: str, value: Any) -> Any:
    """What a model makes of a value: it refuses wrong types, and drops what it does not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    try:
        return getattr(models, model).from_dict(value).to_dict()
    except ValueError as error:
        return f"refused: {error}"


def differences(ours: Any, theirs: Any, place: str) -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = sorted(ours.keys() | theirs.keys())
        return [found for name in names for found in differences(ours.get(name), theirs.get(name), f"{place}.{name}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{place}[{index}]")]
    return [] if ours == theirs else [f"{place}: {ours!r} is read as {theirs!r}"]


def misfits_of(document: Mapping[str, Any]) -> list[str]:
    kind = (document["apiVersion"], document["kind"])
    if kind in MODELS:
        return misfits(document, MODELS[kind], document["kind"])
    outside = [name for name in document if name not in ("apiVersion", "kind", "metadata", "spec")]
    return outside + misfits(document["spec"], SHAPES[kind], document["kind"])


@pytest.mark.parametrize("name", DOCUMENTS, ids=" ".join)
@pytest.mark.shows(150)
def test_every_field_is_one_of_the_published_schema(name: tuple[str, str]) -> None:
    assert misfits_of(DOCUMENTS[name]) == []


def store_endpoint() -> str:
    """Where the service is that leads to the store's pod."""
    service, deployment = DOCUMENTS["store.yaml", "Service"], DOCUMENTS["store.yaml", "Deployment"]
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (port,) = service["spec"]["ports"]
    assert (
        service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    )
    assert_uses_the_image_that_was_built(container)
    assert container["command"] == ["penstock", "store", f"0.0.0.0:{port['port']}"]
    return f"{service['metadata']['name']}:{port['port']}"


def user_of_the_image() -> int:
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE.read_text(), re.MULTILINE)
    return int(user)


def assert_uses_the_image_that_was_built(container: Mapping[str, Any]) -> None:
    """Where nothing is said, Kubernetes asks a registry for an image that is called latest."""
    assert (container["image"], container["imagePullPolicy"]) == ("penstock:latest", "IfNotPresent")


def assert_pods_fit(pod: Mapping[str, Any]) -> int:
    """Pods have what they mount, and stay away from the store's host; returns how long they may take to end."""
    (container,) = pod["spec"]["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    (apart,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = DOCUMENTS["store.yaml", "Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert apart == {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    assert pod["spec"]["securityContext"] == {"fsGroup": user_of_the_image()}
    assert_uses_the_image_that_was_built(container)
    return pod["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.shows(150)
def test_the_pytorch_job_starts_a_run_on_the_hosts_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DOCUMENTS["train.yaml", "PyTorchJob"]["spec"]
    policy, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    notice_s = assert_pods_fit(worker["template"])
    (container,) = worker["template"]["spec"]["containers"]
    # What the operator sets for torchrun.
    for name, value in {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"{policy['rdzvHost']}:{policy['rdzvPort']}",
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{entry['key']}={entry['value']}" for entry in policy["rdzvConf"]),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }.items():
        monkeypatch.setenv(name, value)
    program, *words = container["command"]
    assert container["name"] == "pytorch" and program == "torchrun"
    launch, config = what_torchrun_starts(words)
    assert launch.rdzv_endpoint == store_endpoint()
    assert launch.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    assert launch.max_nodes == worker["replicas"]
    assert config.output.startswith("/runs/")
    assert_keeps_its_word(launch, config, notice_s)
    assert_known_to_torch({entry["name"] for entry in container["env"]})


@pytest.mark.shows(150)
def test_the_train_job_starts_a_run_on_the_hosts_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, job = DOCUMENTS["trainjob.yaml", "TrainingRuntime"], DOCUMENTS["trainjob.yaml", "TrainJob"]
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # The names by which the controller finds job and container.
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated["template"]["spec"]["template"]
    assert [container["name"] for container in pod["spec"]["containers"]] == ["node"]
    notice_s, trainer = assert_pods_fit(pod), job["spec"]["trainer"]
    # What the controller sets for torchrun; it refuses a job that sets these itself.
    for name, value in {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "penstock-node-0-0.penstock",
        "PET_MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    program, *words = trainer["command"]
    assert program == "torchrun"
    launch, config = what_torchrun_starts(words)
    assert launch.rdzv_endpoint == store_endpoint()
    assert launch.nproc_per_node == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert launch.max_nodes == trainer["numNodes"]
    assert config.output.startswith("/runs/")
    assert_keeps_its_word(launch, config, notice_s)
    names = {entry["name"] for entry in trainer["env"]}
    assert_known_to_torch(names)
    assert not any(name.startswith("PET_") for name in names)


@pytest.mark.shows(150)
def test_the_dockerfile_copies_all_that_an_installation_takes(tmp_path: Path) -> None:
    """Docker itself is not at hand: its COPYs are made by hand, and a wheel is built of them; the demo is there too."""
    text = DOCKERFILE.read_text()
    assert re.search(r"^FROM python:3\.1[1-4]", text, re.MULTILINE)
    assert re.search(r"^RUN pip install .*--constraint constraints\.txt '\.\[all\]'$", text, re.MULTILINE)
    copied = re.findall(r"^COPY (.+) (\S+)$", text, re.MULTILINE)
    assert copied
    for sources, target in copied:
        for source in sources.split():
            subprocess.run(["cp", "-r", ROOT / source, tmp_path / target], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    done = subprocess.run([*build, "wheels", "."], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.startswith("penstock-")
    (demo,) = re.findall(r'^CMD \["python", "(.+)"\]$', text, re.MULTILINE)
    assert (tmp_path / demo).is_file() and (tmp_path / "examples/tiny.toml").is_file()
    # What Docker is not given cannot be copied.
    given = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source for sources, _ in copied for source in sources.split()} == given
    # The jobs name the image that these lines build, and say so.
    for_gpus = "docker build --tag penstock --build-arg TORCH=cu130 ."
    assert for_gpus in text and "ARG TORCH=cpu" in text
    assert all(for_gpus in (FOLDER / name).read_text() for name in ("train.yaml", "trainjob.yaml"))
