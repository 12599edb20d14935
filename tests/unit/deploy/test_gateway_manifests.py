"""The manifests of the endpoint picker: what the gateway, the picker, the workers and the pods say of one another agrees."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest

from dynamo.common.config import load
from dynamo.frontend.config import FrontendConfig
from dynamo.worker.config import WorkerConfig
from tests.support.manifests import DEPLOY, Manifest, Placed, of_kind, pod_containers, render

FOLDER = DEPLOY / "gateway" / "kubernetes"
EXTENSIONS = ("InferencePool", "HTTPRoute")
"""Kinds whose definitions are not Kubernetes' own."""
SECRETS = {
    "dynamo-nats-auth": {"frontend-password": "pf", "worker-password": "pw"},
    "dynamo-picker-tls": {"tls.crt": "certificate", "tls.key": "key"},
}


@pytest.fixture
def manifests() -> tuple[Manifest, ...]:
    return render(FOLDER)


def deployment(manifests: tuple[Manifest, ...], name: str) -> Manifest:
    template: Manifest = of_kind(manifests, "Deployment")[name]["spec"]["template"]
    return template


def test_they_fit_the_schema_of_kubernetes(manifests: tuple[Manifest, ...]) -> None:
    checked = [manifest for manifest in manifests if manifest["kind"] not in EXTENSIONS]
    assert len(checked) > 6
    for manifest in checked:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_a_pool_names_the_pods_the_port_and_the_picker_and_the_route_names_the_pool(manifests: tuple[Manifest, ...]) -> None:
    [pool] = of_kind(manifests, "InferencePool").values()
    [route] = of_kind(manifests, "HTTPRoute").values()
    assert (pool["apiVersion"], route["apiVersion"]) == ("inference.networking.k8s.io/v1", "gateway.networking.k8s.io/v1")
    spec, engine = pool["spec"], deployment(manifests, "qwen")
    assert set(spec) == {"selector", "targetPorts", "endpointPickerRef"}
    assert spec["selector"]["matchLabels"].items() <= engine["metadata"]["labels"].items()
    [vllm, _] = engine["spec"]["containers"]
    assert [port["number"] for port in spec["targetPorts"]] == [port["containerPort"] for port in vllm["ports"]] == [8000]
    picker = spec["endpointPickerRef"]
    service = of_kind(manifests, "Service")[picker["name"]]
    assert [port["port"] for port in service["spec"]["ports"]] == [picker["port"]["number"]]
    assert picker["failureMode"] in ("FailOpen", "FailClose") and picker["kind"] == "Service"
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool["metadata"]["name"]}
    ]


def test_the_picker_understands_its_flags_and_has_no_rights(manifests: tuple[Manifest, ...], tmp_path: Path) -> None:
    template = deployment(manifests, "dynamo-picker")
    [container] = pod_containers(template, "dynamo-picker-0", manifests, SECRETS)
    placed = Placed(container, tmp_path, {})
    placed.write_files()
    config = load(FrontendConfig, placed.command[1:], placed.environment, program=placed.command[0])
    options = config.endpoint_picker
    assert options.enabled and (options.host, options.port) == ("0.0.0.0", container.port("picker"))
    assert options.port_tls.files is not None and config.nats.password == "pf"
    assert not config.grpc.wanted and config.http.port == container.port("http")
    [service] = of_kind(manifests, "Service").values()
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["automountServiceAccountToken"] is False
    assert not {manifest["kind"] for manifest in manifests} & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


def test_the_worker_beside_a_server_registers_the_address_of_the_pod(manifests: tuple[Manifest, ...], tmp_path: Path) -> None:
    template = deployment(manifests, "qwen")
    beside = {**template["spec"], "containers": [each for each in template["spec"]["containers"] if each["name"] == "worker"]}
    [worker] = pod_containers({**template, "spec": beside}, "qwen-0", manifests, SECRETS)
    placed = Placed(worker, tmp_path, {})
    placed.write_files()
    config = load(WorkerConfig, placed.command[1:], placed.environment, program=placed.command[0])
    assert config.remote.urls == ("http://127.0.0.1:8000",) and config.remote.pod_ip
    assert config.remote.kv_events == ("tcp://127.0.0.1:5557",)
    events = next(flag for flag in template["spec"]["containers"][0]["args"] if flag.startswith("--kv-events-config"))
    assert '"endpoint":"tcp://127.0.0.1:5557"' in events


def test_policies_let_the_picker_and_the_workers_reach_their_servers(manifests: tuple[Manifest, ...]) -> None:
    policies = of_kind(manifests, "NetworkPolicy")
    for name, ports in (("dynamo-picker", {9002, 8000}), ("qwen", {8000, 9090})):
        spec = policies[name]["spec"]
        assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == ports
        reached = {rule["ports"][0]["port"]: rule["to"][0]["podSelector"]["matchLabels"] for rule in spec["egress"]}
        assert reached == {
            2379: {"app.kubernetes.io/name": "dynamo-etcd"},
            4222: {"app.kubernetes.io/name": "dynamo-nats"},
        }
        for server in ("etcd", "nats"):
            [rule] = policies[f"dynamo-{server}-gateway"]["spec"]["ingress"]
            [expression] = rule["from"][0]["podSelector"]["matchExpressions"]
            assert name in expression["values"]
