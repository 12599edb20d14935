"""What the pods of all manifests may do: whether one is root or has a token, and what each reaches in two namespaces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from dynamo.common.config import load
from dynamo.frontend.config import FrontendConfig
from dynamo.worker.config import WorkerConfig
from tests.support.manifests import (
    BASE,
    COMPONENTS,
    DEPLOY,
    NAMESPACES,
    OVERLAYS,
    Manifest,
    Placed,
    of_kind,
    parse,
    pod_containers,
    render,
    render_with,
    workloads,
)
from tests.unit.deploy.test_helm_chart import PLANNED, helm, rendering

AS_ROOT = {"shared-memory"}
"""Init containers that run as root, for the only thing that they do."""
NOT_OURS = {"vllm"}
"""Containers of engine servers, whose images run as root and write into it."""
WITH_TOKEN = {"dynamo-planner"}
"""Workloads whose containers all have a token of the API server."""
FRONTEND, WORKER, ETCD, NATS = (
    {"app.kubernetes.io/name": f"dynamo-{name}", "app.kubernetes.io/part-of": "dynamo"}
    for name in ("frontend", "worker", "etcd", "nats")
)


def pods_of(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the specification of each pod that the manifests make, with the name of what makes it."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest.get("kind"):
            case "Deployment" | "StatefulSet" | "DaemonSet" | "Job":
                yield manifest["metadata"]["name"], spec["template"]["spec"]
            case "InferenceService" if "containers" in spec["predictor"]:
                yield manifest["metadata"]["name"], spec["predictor"]
            case "ServingRuntime":
                yield manifest["metadata"]["name"], spec


def check_rights(manifests: Sequence[Manifest]) -> int:
    """Check the pods of the manifests; return how many there are."""
    pods = list(pods_of(manifests))
    for name, pod in pods:
        if not any(name.endswith(each.removeprefix("dynamo")) for each in WITH_TOKEN):
            assert pod.get("automountServiceAccountToken", False) is False, name
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            context = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
            is_root = container["name"] in AS_ROOT and container in pod.get("initContainers", ())
            if container["name"] not in NOT_OURS:
                assert context["runAsNonRoot"] is not is_root, (name, container["name"])
                assert context["readOnlyRootFilesystem"] is True, (name, container["name"])
            assert context["allowPrivilegeEscalation"] is False, (name, container["name"])
            assert context["capabilities"]["drop"] == ["ALL"], (name, container["name"])
            assert is_root or "add" not in context["capabilities"], (name, container["name"])
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}, (name, container["name"])
            assert not context.get("privileged"), (name, container["name"])
            assert "limits" in container["resources"], (name, container["name"])
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            assert not pod.get(key), (name, key)
    return len(pods)


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS, NAMESPACES], ids=lambda folder: folder.name)
def test_no_pod_of_an_overlay_has_more_rights_than_it_needs(folder: Path) -> None:
    assert check_rights(render(folder)) >= 4


@pytest.mark.parametrize("component", [folder.name for folder in COMPONENTS])
def test_no_pod_has_more_with_a_component(component: str, tmp_path: Path) -> None:
    assert check_rights(render_with(BASE, component, tmp_path)) >= 4


def test_no_pod_of_the_examples_has_more() -> None:
    files = [path for path in sorted(DEPLOY.rglob("*.yaml")) if not {"helm", "k8s"} & set(path.relative_to(DEPLOY).parts)]
    assert sum(check_rights(parse(path.read_text())) for path in files) >= 2


@rendering
def test_no_pod_of_the_chart_has_more() -> None:
    assert check_rights(helm({})) >= 4
    assert check_rights(helm({"planner": PLANNED, "sharedMemory": {"enabled": True}})) >= 5


def test_a_pod_with_more_rights_is_found() -> None:
    for change in ({"allowPrivilegeEscalation": True}, {"runAsNonRoot": False}, {"readOnlyRootFilesystem": False}):
        wrong = json.loads(json.dumps(of_kind(render(BASE), "Deployment")["dynamo-worker"]))
        wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"] |= change
        with pytest.raises(AssertionError):
            check_rights([wrong])


def test_etcd_is_one_whose_leases_and_watches_are_mended() -> None:
    images = [container["image"] for _, pod in pods_of(render(BASE)) for container in pod["containers"]]
    images += re.findall(r"^  etcd: (\S+)$", (DEPLOY / "helm" / "dynamo" / "values.yaml").read_text(), re.MULTILINE)
    versions = [tuple(map(int, found[1].split("."))) for image in images if (found := re.search(r"/etcd:v([0-9.]+)$", image))]
    assert len(versions) == 2
    assert all(version >= (3, 5, 27) for version in versions)


# Two namespaces


@dataclass(frozen=True)
class Peer:
    """A pod, as network policies see it."""

    namespace: str
    labels: Mapping[str, str]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector, of the kinds that the manifests use, selects what has these labels."""
    equal = all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in expressions)
    return equal and all(labels.get(each["key"]) in each["values"] for each in expressions)


def admits(peers: Sequence[Mapping[str, Any]], own: str, other: Peer) -> bool:
    """Return whether a rule with these peers, in the namespace `own`, includes a pod."""
    for peer in peers:
        in_namespace = other.namespace == own
        if "namespaceSelector" in peer:
            in_namespace = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace})
        if in_namespace and selects(peer.get("podSelector", {}), other.labels):
            return True
    return not peers


def may_connect(manifests: Sequence[Manifest], source: Peer, target: Peer, port: int) -> bool:
    """Return whether network policies let a pod connect to a port of another one."""
    for direction, subject, other, key in (("Egress", source, target, "to"), ("Ingress", target, source, "from")):
        mine = [
            manifest["spec"]
            for manifest in manifests
            if manifest["kind"] == "NetworkPolicy"
            and manifest["metadata"]["namespace"] == subject.namespace
            and selects(manifest["spec"]["podSelector"], subject.labels)
            and direction in manifest["spec"]["policyTypes"]
        ]
        rules = [rule for spec in mine for rule in spec.get(direction.lower(), ())]
        allowed = any(
            port in {each["port"] for each in rule["ports"]} and admits(rule.get(key, ()), subject.namespace, other)
            for rule in rules
        )
        if mine and not allowed:
            return False
    return True


frontends, workers = Peer("dynamo", FRONTEND), Peer("dynamo-workers", WORKER)
etcd, nats = Peer("dynamo", ETCD), Peer("dynamo", NATS)
prometheus = Peer("monitoring", {"app": "prometheus"})


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        (frontends, etcd, 2379),
        (frontends, nats, 4222),
        (workers, etcd, 2379),
        (workers, nats, 4222),
        (etcd, etcd, 2380),
        (nats, nats, 6222),
        (prometheus, workers, 9090),
        (prometheus, frontends, 8000),
    ],
)
def test_in_two_namespaces_processes_reach_what_they_need(source: Peer, target: Peer, port: int) -> None:
    assert may_connect(render(NAMESPACES), source, target, port)


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        (workers, frontends, 8000),
        (workers, etcd, 2380),
        (workers, nats, 6222),
        (workers, workers, 9090),
        (frontends, workers, 9090),
        (Peer("dynamo-workers", {"app": "another"}), nats, 4222),
        (Peer("dynamo-workers", FRONTEND), nats, 4222),
        (Peer("dynamo", WORKER), nats, 4222),
        (Peer("elsewhere", WORKER), etcd, 2379),
        (prometheus, nats, 4222),
        (workers, Peer("elsewhere", NATS), 4222),
    ],
)
def test_in_two_namespaces_processes_reach_nothing_else(source: Peer, target: Peer, port: int) -> None:
    assert not may_connect(render(NAMESPACES), source, target, port)


def test_in_two_namespaces_processes_find_each_other_with_the_secrets_of_their_own(tmp_path: Path) -> None:
    manifests = render(NAMESPACES)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    namespaces = of_kind(manifests, "Namespace")
    assert set(namespaces) == {"dynamo", "dynamo-workers"}
    assert all(each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted" for each in namespaces.values())
    secrets = {
        "dynamo": {"dynamo-nats-auth": {"frontend-password": "pf", "worker-password": "pw"}},
        "dynamo-workers": {"dynamo-nats-auth": {"worker-password": "pw"}},
    }
    services = {f"{name}.{each['metadata']['namespace']}" for name, each in of_kind(manifests, "Service").items()}
    configs: list[FrontendConfig | WorkerConfig] = []
    for workload in workloads(manifests):
        namespace = workload["metadata"]["namespace"]
        own = [each for each in manifests if each["metadata"].get("namespace") == namespace]
        assert workload["spec"]["template"]["spec"]["serviceAccountName"] in of_kind(own, "ServiceAccount")
        for container in pod_containers(workload["spec"]["template"], "pod-0", own, secrets[namespace]):
            placed = Placed(container, tmp_path / workload["metadata"]["name"], {})
            placed.write_files()
            program, *flags = placed.command
            if program in ("dynamo-frontend", "dynamo-worker"):
                kind = FrontendConfig if program == "dynamo-frontend" else WorkerConfig
                configs.append(config := load(kind, flags, placed.environment, program=program))
                for address in (*config.etcd.endpoints, *config.nats.servers):
                    host = address.partition("//")[2].partition(":")[0]
                    assert (host if "." in host else f"{host}.{namespace}") in services
    [frontend] = [each for each in configs if isinstance(each, FrontendConfig)]
    [worker] = [each for each in configs if isinstance(each, WorkerConfig)]
    assert frontend.namespace == worker.served_endpoint.namespace
    assert (frontend.nats.password, worker.nats.password) == ("pf", "pw")


# Metrics behind a login


def test_metrics_of_workers_are_read_with_a_token_that_the_api_server_knows(tmp_path: Path) -> None:
    manifests = render_with(BASE, "metrics-auth", tmp_path)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    pod = of_kind(manifests, "Deployment")["dynamo-worker"]["spec"]["template"]["spec"]
    worker, proxy = pod["containers"]
    assert [each["name"] for each in pod["containers"] if "api-token" in str(each["volumeMounts"])] == ["metrics-auth"]
    assert "--upstream=http://127.0.0.1:9090/" in proxy["args"]
    assert {each["name"]: each["value"] for each in worker["env"] if "value" in each}["DYN_STATUS_PORT"] == "9090"
    inside = Peer("dynamo", WORKER)
    assert may_connect(manifests, prometheus, inside, proxy["ports"][0]["containerPort"])
    assert not may_connect(manifests, prometheus, inside, 9090)
    assert not of_kind(manifests, "ClusterRole") and not of_kind(manifests, "Role")
    [binding] = of_kind(manifests, "ClusterRoleBinding").values()
    assert binding["roleRef"]["name"] == "system:auth-delegator"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "dynamo"}]


def test_prometheus_may_read_metrics_and_nothing_else() -> None:
    manifests = parse((DEPLOY / "prometheus" / "monitors-auth.yaml").read_text())
    [role] = of_kind(manifests, "ClusterRole").values()
    assert role["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    [binding] = of_kind(manifests, "ClusterRoleBinding").values()
    [subject] = binding["subjects"]
    assert (binding["roleRef"]["name"], subject["name"]) == (role["metadata"]["name"], *of_kind(manifests, "ServiceAccount"))
    for monitor in of_kind(manifests, "PodMonitor").values():
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["authorization"]["credentials"]["key"]
    for manifest in manifests:
        if manifest["kind"] != "PodMonitor":
            kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
