"""What needs other people's resource definitions: the pods inside are valid, and our programs understand them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest

from dynamo.common.config import load
from dynamo.frontend.config import FrontendConfig
from dynamo.worker.config import WorkerConfig
from tests.support.manifests import (
    BASE,
    DEPLOY,
    Container,
    Manifest,
    Placed,
    of_kind,
    parse,
    pod_containers,
    render,
    render_with,
    workloads,
)

SECRETS = {"dynamo-nats-auth": {"frontend-password": "pf", "worker-password": "pw"}}
KSERVE_ONLY = {"minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "timeout", "model"}


def pods() -> Iterator[tuple[str, Manifest]]:
    """The pods that KServe makes of the examples."""
    for path in sorted((DEPLOY / "kserve").glob("*.yaml")):
        for manifest in parse(path.read_text()):
            spec = manifest["spec"].get("predictor", manifest["spec"])
            if "containers" in spec:
                pod = {key: value for key, value in spec.items() if key not in KSERVE_ONLY}
                for other in ("multiModel", "protocolVersions", "supportedModelFormats"):
                    pod.pop(other, None)
                yield (
                    f"{path.stem} {manifest['kind']}",
                    {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod},
                )


PODS = [pytest.param(pod, id=name) for name, pod in pods()]


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_for_kserve_fits_the_schema_of_kubernetes(pod: Manifest) -> None:
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("pod", PODS)
def test_our_programs_understand_a_pod_for_kserve(pod: Manifest, tmp_path: Path) -> None:
    namespaces = set()
    for container in pod_containers(pod, "smollm2-predictor-0", (), SECRETS):
        placed = Placed(container, tmp_path / container.name, {})
        placed.write_files()
        config = load(
            FrontendConfig if container.command[0] == "dynamo-frontend" else WorkerConfig,
            placed.command[1:],
            placed.environment,
            program=container.command[0],
        )
        assert config.nats.password in ("pf", "pw")
        if isinstance(config, FrontendConfig):
            assert container.port("http1") == config.http.port
            assert (container.port("h2c"), config.grpc.host) == (config.grpc.port, "0.0.0.0")
            assert probed(container) == {config.http.port}
            namespaces.add(config.namespace)
        else:
            assert probed(container) == {config.status.port} == {container.port("status")}
            assert config.status.host == "0.0.0.0", "the kubelet asks at the pod's address"
            namespaces.add(config.served_endpoint.namespace)
    assert len(namespaces) == 1


def test_a_runtime_for_kserve_offers_every_protocol_that_it_claims(tmp_path: Path) -> None:
    [runtime] = of_kind(parse((DEPLOY / "kserve" / "runtime.yaml").read_text()), "ServingRuntime").values()
    [frontend, _] = pod_containers({"spec": runtime["spec"]}, "x", (), SECRETS)
    placed = Placed(frontend, tmp_path, {})
    placed.write_files()
    config = load(FrontendConfig, placed.command[1:], placed.environment, program="dynamo-frontend")
    offered = {"v2"} | ({"grpc-v2"} if config.grpc.wanted else set())
    assert set(runtime["spec"]["protocolVersions"]) == offered


def probed(container: Container) -> set[int]:
    """Ports that its probes ask."""
    return {container.port(container.spec[kind]["httpGet"]["port"]) for kind in ("livenessProbe", "readinessProbe")}


def test_monitors_select_pods_and_ports_that_exist(tmp_path: Path) -> None:
    base = workloads(render_with(BASE, "planner", tmp_path))
    for monitor in parse((DEPLOY / "prometheus" / "monitors.yaml").read_text()):
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        [pods] = [found for found in base if labels <= found["spec"]["template"]["metadata"]["labels"].items()]
        ports = {port["name"] for container in pods["spec"]["template"]["spec"]["containers"] for port in container["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_scalers_scale_workloads_that_exist() -> None:
    names = of_kind(render(BASE), "Deployment").keys()
    for path in (DEPLOY / "keda").glob("*.yaml"):
        for manifest in parse(path.read_text()):
            assert manifest["spec"]["scaleTargetRef"]["name"] in names
            if manifest["kind"] == "HorizontalPodAutoscaler":
                kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
