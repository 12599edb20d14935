"""The manifests of `deploy/`: valid, understood by our own programs, and in step with how these live."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import distribution, requires
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from dynamo.common.config import load, parse_bytes
from dynamo.common.http.web_pages import OwnHosts
from dynamo.frontend.config import FrontendConfig
from dynamo.worker.config import WorkerConfig
from dynamo.worker.process.engine_factory import choose_engine
from tests.support.manifests import (
    BASE,
    DEPLOY,
    OVERLAYS,
    Files,
    Manifest,
    Placed,
    image_stage,
    of_kind,
    pod_containers,
    pod_names,
    quantity,
    render,
    workloads,
)
from tests.support.shared_libraries import needed_libraries

CERTIFICATE: Files = {"tls.crt": "certificate", "tls.key": "key", "ca.crt": "authority"}
SECRETS: Mapping[str, Files] = {
    "dynamo-nats-auth": {"frontend-password": "pf", "worker-password": "pw"},
    "dynamo-api-keys": {"keys.yaml": "[]"},
    **dict.fromkeys(("dynamo-frontend-tls", "dynamo-client-tls", "dynamo-etcd-tls", "dynamo-nats-tls"), CERTIFICATE),
}
CLOSE_S = 10
"""What a process needs to close after its drain."""
IN_THE_BASE_IMAGE = {
    f"lib{name}" for name in ("c.so.6", "dl.so.2", "gcc_s.so.1", "m.so.6", "pthread.so.0", "rt.so.1", "stdc++.so.6", "z.so.1")
}
PACKAGES = {"libgomp.so.1": "libgomp1"}
"""Packages of Debian, by what they bring."""

folders = pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda folder: folder.name)


def placed(folder: Path, tmp_path: Path) -> Iterator[tuple[Manifest, Placed]]:
    """Every container of every workload, with its files in place."""
    manifests = render(folder)
    for workload in workloads(manifests):
        for container in pod_containers(workload["spec"]["template"], pod_names(workload)[0], manifests, SECRETS):
            found = Placed(container, tmp_path / workload["metadata"]["name"], {})
            found.write_files()
            yield workload, found


def config_of(found: Placed) -> FrontendConfig | WorkerConfig | None:
    """What a process of ours makes of its flags and variables; None for another program."""
    program, *flags = found.command
    match program:
        case "dynamo-frontend":
            return load(FrontendConfig, flags, found.environment, program=program)
        case "dynamo-worker":
            return load(WorkerConfig, flags, found.environment, program=program)
    return None


@folders
def test_frontends_without_keys_answer_to_the_names_of_their_services(folder: Path, tmp_path: Path) -> None:
    services = [name for name in of_kind(render(folder), "Service") if name.startswith("dynamo-frontend")]
    frontends = [config for _, found in placed(folder, tmp_path) if isinstance(config := config_of(found), FrontendConfig)]
    assert services and frontends
    for name, config in itertools.product(services, frontends):
        hosts = OwnHosts(config.http.allowed_hosts, config.http.host)
        for domain in (".dynamo.svc", ".dynamo.svc.cluster.local"):
            assert hosts.include(f"{name}{domain}:8000")
        assert not hosts.include("evil.example")
    assert hosts.include("dynamo-frontend:8000") and hosts.include("dynamo-frontend.dynamo:8000")


def test_all_overlays_are_found() -> None:
    assert {"dev", "disaggregated", "gpu", "repository", "tls"} <= {folder.name for folder in OVERLAYS}


@folders
def test_every_object_fits_the_schema_of_kubernetes(folder: Path) -> None:
    for manifest in render(folder):
        check_schema(json.dumps(manifest))


@cache
def check_schema(manifest: str) -> None:
    """Overlays have most objects in common, and the schemas are read anew for each."""
    kubernetes_validate.validate(json.loads(manifest), kubernetes_validate.latest_version(), strict=True)


def test_the_schema_check_refuses_what_is_wrong() -> None:
    wrong = yaml.safe_load("{apiVersion: apps/v1, kind: Deployment, metadata: {name: x}, spec: {replicas: three}}")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


@folders
def test_our_programs_understand_the_flags_and_variables_they_are_given(folder: Path, tmp_path: Path) -> None:
    configs = [(found, config) for _, found in placed(folder, tmp_path) if (config := config_of(found)) is not None]
    assert {type(config) for _, config in configs} == {FrontendConfig, WorkerConfig}
    namespaces = set()
    for found, config in configs:
        assert config.nats.password in ("pf", "pw")
        assert config.etcd.endpoints != FrontendConfig().etcd.endpoints and config.nats.servers != FrontendConfig().nats.servers
        if isinstance(config, FrontendConfig):
            assert config.grpc.wanted
            assert config.serving.canary.wait_s is not None, "the alert about engines that hang would never see anything"
            assert (found.container.port("http"), found.container.port("grpc")) == (config.http.port, config.grpc.port)
            assert (config.http.host, config.grpc.host) == ("0.0.0.0", "0.0.0.0")
            assert str(config.cache_dir).startswith(str(tmp_path)), "the cache lies outside of what can be written"
            namespaces.add(config.namespace)
        else:
            assert config.models or config.repository.repositories
            namespaces.add(config.served_endpoint.namespace)
    assert len(namespaces) == 1, "frontends do not see the workers"


@folders
def test_a_pod_is_given_the_time_that_its_process_takes_to_stop(folder: Path, tmp_path: Path) -> None:
    for workload, found in placed(folder, tmp_path):
        config = config_of(found)
        grace_s = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        before_s = found.container.spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        match config:
            case FrontendConfig():
                assert before_s > 0 and config.settle_s > 0
                needed_s = before_s + config.settle_s + config.drain_timeout_s + CLOSE_S
                probe = found.container.spec["readinessProbe"]
                assert config.settle_s >= probe["periodSeconds"] * probe["failureThreshold"], "drains before balancers know"
            case WorkerConfig():
                needed_s = config.drain_timeout_s + config.close_timeout_s + CLOSE_S
            case None:
                needed_s = 30
        assert grace_s >= needed_s, workload["metadata"]["name"]


@folders
def test_no_process_has_rights_that_it_does_not_need(folder: Path) -> None:
    manifests = render(folder)
    accounts = of_kind(manifests, "ServiceAccount")
    for workload in workloads(manifests):
        pod = workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert accounts[pod["serviceAccountName"]]["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "Services would become variables that are read as configuration"
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
    assert not of_kind(manifests, "Role") and not of_kind(manifests, "ClusterRole")


@folders
def test_every_container_says_what_it_needs(folder: Path) -> None:
    for workload in workloads(render(folder)):
        for container in workload["spec"]["template"]["spec"]["containers"]:
            resources = container["resources"]
            assert quantity(resources["requests"]["cpu"]) > 0
            assert quantity(resources["requests"]["memory"]) <= quantity(resources["limits"]["memory"])


@folders
def test_no_secret_stands_in_a_manifest_except_in_the_one_for_development(folder: Path) -> None:
    manifests = render(folder)
    assert bool(of_kind(manifests, "Secret")) == (folder.name == "dev")
    for workload in workloads(manifests):
        for container in workload["spec"]["template"]["spec"]["containers"]:
            for variable in container.get("env", ()):
                assert "PASSWORD" not in variable["name"] or "secretKeyRef" in variable["valueFrom"]


@folders
def test_probes_and_services_name_ports_that_containers_have(folder: Path) -> None:
    manifests = render(folder)
    for workload in workloads(manifests):
        for container in workload["spec"]["template"]["spec"]["containers"]:
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in ports
    for service in of_kind(manifests, "Service").values():
        [pods] = [pods for pods in workloads(manifests) if selects(service["spec"]["selector"], pods)]
        ports = {port["name"] for container in pods["spec"]["template"]["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@folders
def test_every_workload_is_covered_by_a_budget_and_by_network_policies(folder: Path) -> None:
    manifests = render(folder)
    policies = of_kind(manifests, "NetworkPolicy").values()
    for workload in workloads(manifests):
        budgets = of_kind(manifests, "PodDisruptionBudget").values()
        assert sum(selects(budget["spec"]["selector"]["matchLabels"], workload) for budget in budgets) == 1
        mine = [policy for policy in policies if selects(policy["spec"]["podSelector"]["matchLabels"], workload)]
        assert {"dynamo-default-deny", "dynamo-dns"} < {policy["metadata"]["name"] for policy in mine}
        allowed = {port["port"] for policy in mine for rule in policy["spec"].get("ingress", ()) for port in rule["ports"]}
        ports = {
            port["containerPort"]
            for container in workload["spec"]["template"]["spec"]["containers"]
            for port in container.get("ports", ())
            if port["name"] != "monitor"  # asked by the kubelet only, which policies let through
        }
        assert allowed == ports, workload["metadata"]["name"]


@folders
def test_with_the_component_for_tracing_processes_know_the_collector_and_may_reach_it(folder: Path, tmp_path: Path) -> None:
    overlay = {
        "resources": [os.path.relpath(folder, tmp_path)],
        "components": [os.path.relpath(DEPLOY / "k8s" / "components" / "tracing", tmp_path)],
        "namespace": "dynamo",
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    endpoints = {
        config.trace.otlp_endpoint for _, found in placed(tmp_path, tmp_path) if (config := config_of(found)) is not None
    }
    assert endpoints == {"http://opentelemetry-collector.observability:4317"}
    policy = of_kind(render(tmp_path), "NetworkPolicy")["dynamo-tracing"]
    kubernetes_validate.validate(policy, kubernetes_validate.latest_version(), strict=True)
    [selector] = policy["spec"]["podSelector"]["matchExpressions"]
    names = {
        workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
        for workload in workloads(render(tmp_path))
        if workload["kind"] == "Deployment"
    }
    assert set(selector["values"]) == names
    assert policy["spec"]["egress"][0]["ports"] == [{"port": 4317, "protocol": "TCP"}]


@folders
def test_with_the_component_for_shared_memory_pods_of_a_node_have_a_private_folder_in_common(
    folder: Path, tmp_path: Path
) -> None:
    overlay = {
        "resources": [os.path.relpath(folder, tmp_path)],
        "components": [os.path.relpath(DEPLOY / "k8s" / "components" / "shared-memory", tmp_path)],
        "namespace": "dynamo",
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    manifests = render(tmp_path)
    [namespace] = of_kind(manifests, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged", "hostPath is refused otherwise"
    variables = next(manifest["data"] for name, manifest in of_kind(manifests, "ConfigMap").items() if "nats" not in name)
    deployments = of_kind(manifests, "Deployment")
    assert len(deployments) >= 2
    for deployment in deployments.values():
        kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
        pod = deployment["spec"]["template"]["spec"]
        [name] = [volume["name"] for volume in pod["volumes"] if volume.get("hostPath", {}).get("path") == "/dev/shm/dynamo"]
        [first] = pod["initContainers"]
        [container] = pod["containers"]
        for part in (first, container):
            assert part["image"].split(":")[0] == container["image"].split(":")[0], "no image that nodes do not have anyway"
            [path] = [mount["mountPath"] for mount in part["volumeMounts"] if mount["name"] == name]
        assert path == variables["DYN_SHARED_MEMORY_DIR"]
        assert f"0o700); os.chown('/shared-memory', {pod['securityContext']['runAsUser']}, " in first["command"][-1]
        size, resources = parse_bytes(variables["DYN_SHARED_MEMORY_SIZE"]), container["resources"]
        room = quantity(resources["limits"]["memory"]) - quantity(resources["requests"]["memory"])
        assert room >= 2 * size, "an arena counts against the limit"


def test_the_overlay_for_another_collector_in_the_documentation_does_what_it_says(tmp_path: Path) -> None:
    page = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
    [overlay] = [text for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "components/tracing" in text]
    (tmp_path / "kustomization.yaml").write_text(overlay.replace("../..", os.path.relpath(DEPLOY / "k8s", tmp_path)))
    endpoints = {
        config.trace.otlp_endpoint for _, found in placed(tmp_path, tmp_path) if (config := config_of(found)) is not None
    }
    assert endpoints == {"http://jaeger.monitoring:4317"}
    [rule] = of_kind(render(tmp_path), "NetworkPolicy")["dynamo-tracing"]["spec"]["egress"]
    assert rule["to"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "jaeger"}


@folders
def test_two_workloads_never_claim_the_same_pods(folder: Path) -> None:
    all_workloads = workloads(render(folder))
    for workload in all_workloads:
        mine = [other for other in all_workloads if selects(workload["spec"]["selector"]["matchLabels"], other)]
        assert mine == [workload]


@folders
def test_workers_are_given_models_that_some_engine_serves(folder: Path, tmp_path: Path) -> None:
    for _, found in placed(folder, tmp_path):
        config = config_of(found)
        if isinstance(config, WorkerConfig):
            for model in config.models:
                assert config.engine is not None or choose_engine(model) is not None


def selects(labels: Mapping[str, str], workload: Manifest) -> bool:
    return labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_the_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_images_start_our_programs_as_a_user_without_rights() -> None:
    for target in ("frontend", "worker"):
        users = re.findall(r"^USER (.*)$", image_stage("runtime") + image_stage(target), re.M)
        assert users[-1] == "65532:65532", target
    uids = {
        workload["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
        for workload in workloads(render(BASE))
        if workload["kind"] == "Deployment"
    }
    assert uids == {65532}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="packages for other systems need other libraries")
@pytest.mark.parametrize("target", ["frontend", "worker"])
def test_images_have_the_shared_libraries_that_their_packages_need(target: str) -> None:
    [extras] = re.findall(r"whl\)\[([a-z,]+)\]", image_stage(f"build-{target}"))
    needed, brought = set[str](), set[str]()
    for name in required("dynamo-serving", frozenset(extras.split(","))):
        for path in distribution(name).files or ():
            if ".so" in path.suffixes:
                needed |= needed_libraries(Path(str(path.locate())))
                brought.add(path.name)
    foreign = {library for library in needed - brought if not library.startswith("ld-linux")} - IN_THE_BASE_IMAGE
    [packages] = re.findall(r"--no-install-recommends (.*?) &&", image_stage(target)) or [""]
    assert {PACKAGES.get(library, library) for library in foreign} == set(packages.split())


def required(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """Packages that are installed with one, by what they say of themselves."""
    names: set[str] = set()
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        for requirement in map(Requirement, requires(name) or ()):
            is_wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
            )
            if is_wanted and requirement.name not in names:
                names.add(requirement.name)
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return names


def test_images_have_what_our_programs_can_use() -> None:
    stages = re.findall(r"^FROM \S+ AS (build-\w+)$(.*?)(?=^FROM )", (DEPLOY / "Dockerfile").read_text(), re.M | re.S)
    installed = {name: set(re.findall(r"whl\)\[([a-z,]+)\]", text)[0].split(",")) for name, text in stages}
    assert installed == {"build-frontend": {"fast", "otel"}, "build-worker": {"llama", "onnx", "otel", "store"}}
    extras = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set().union(*installed.values()) <= extras.keys()
