"""The planner's manifests: its rights are enough and no more, and workers are scaled by nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import kubernetes_validate
import pytest
import trustme

from dynamo.common.config import load
from dynamo.common.discovery import Instance
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.planner.config import PlannerConfig
from dynamo.planner.executors.base import ExecutorFailed
from dynamo.planner.executors.kubernetes.executor import open_kubernetes
from dynamo.planner.executors.options import ExecutorKind, KubernetesOptions
from dynamo.planner.pools import Decision
from dynamo.worker.config import WorkerConfig
from tests.support.certificates import issue, write_ca
from tests.support.kubernetes_api import KubernetesApiServer, serving_kubernetes_api
from tests.support.manifests import (
    BASE,
    DEPLOY,
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

SECRETS = {
    "dynamo-nats-auth": {"frontend-password": "pf", "worker-password": "pw"},
    "dynamo-client-tls": {"tls.crt": "certificate", "tls.key": "key", "ca.crt": "authority"},
}
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
folders = pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda folder: folder.name)


def planner_of(manifests: Sequence[Manifest]) -> Manifest:
    return next(manifest for name, manifest in of_kind(manifests, "Deployment").items() if name.endswith("-planner"))


def planner_config(manifests: Sequence[Manifest], folder: Path) -> PlannerConfig:
    """What the planner makes of its flags, variables and files."""
    [container] = pod_containers(planner_of(manifests)["spec"]["template"], "planner-0", manifests, SECRETS)
    placed = Placed(container, folder, {})
    placed.write_files()
    program, *flags = placed.command
    assert program == "dynamo-planner"
    config = load(PlannerConfig, flags, {**placed.environment, **IN_A_POD}, program=program)
    assert (config.status.host, config.status.port) == ("0.0.0.0", container.port("status"))
    assert config.nats.password == "pf" and config.nats.inbox_prefix == "_INBOX_frontend", "the login is that of frontends"
    return config


def test_overlays_with_a_planner_fit_the_schema_and_its_policies_let_it_reach_what_it_needs(tmp_path: Path) -> None:
    manifests = render_with(BASE, "planner", tmp_path)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    policies = of_kind(manifests, "NetworkPolicy")
    planner = planner_of(manifests)["spec"]["template"]["metadata"]["labels"]
    egress = policies["dynamo-planner"]["spec"]["egress"]
    reached = {port["port"]: rule.get("to") for rule in egress for port in rule["ports"]}
    assert reached.keys() == {2379, 4222, 443, 6443} and reached[443] is None is reached[6443]
    for server, port in (("etcd", 2379), ("nats", 4222)):
        assert reached[port][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": f"dynamo-{server}"}
        spec = policies[f"dynamo-{server}-planner"]["spec"]
        [rule] = spec["ingress"]
        assert rule["from"][0]["podSelector"]["matchLabels"].items() <= planner.items()
        assert [entry["port"] for entry in rule["ports"]] == [port]
    assert planner["app.kubernetes.io/part-of"] == "dynamo", "everything else is denied"


@folders
def test_the_planner_alone_has_a_token_and_nothing_else_says_how_many_workers_there_are(folder: Path, tmp_path: Path) -> None:
    manifests = render_with(folder, "planner", tmp_path)
    for workload in workloads(manifests):
        pod = workload["spec"]["template"]["spec"]
        name = workload["metadata"]["name"]
        assert pod["automountServiceAccountToken"] is (name == "dynamo-planner")
        assert of_kind(manifests, "ServiceAccount")[pod["serviceAccountName"]]["automountServiceAccountToken"] is False
        if "worker" in name:
            assert "replicas" not in workload["spec"]
    [context] = [container["securityContext"] for container in planner_of(manifests)["spec"]["template"]["spec"]["containers"]]
    assert context["readOnlyRootFilesystem"] is True and context["capabilities"] == {"drop": ["ALL"]}
    assert of_kind(manifests, "ClusterRole") == {}


@folders
def test_the_planner_understands_its_flags_and_sees_the_same_fleet_as_workers(folder: Path, tmp_path: Path) -> None:
    manifests = render_with(folder, "planner", tmp_path)
    config = planner_config(manifests, tmp_path / "planner")
    shared = next(found["data"] for name, found in of_kind(manifests, "ConfigMap").items() if "nats" not in name)
    assert config.namespace == shared["DYN_NAMESPACE"]
    assert ",".join(config.etcd.endpoints) == shared["DYN_ETCD_ENDPOINTS"]
    assert ",".join(config.nats.servers) == shared["DYN_NATS_SERVERS"]
    for path in filter(None, (config.etcd.tls_ca_file, config.nats.tls_key_file)):
        assert Path(path).exists(), "the files of overlays/tls are mounted"


def test_the_overlay_for_another_model_in_the_documentation_does_what_it_says(tmp_path: Path) -> None:
    page = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
    [overlay] = [text for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "components/planner" in text]
    (tmp_path / "kustomization.yaml").write_text(overlay.replace("../..", os.path.relpath(DEPLOY / "k8s", tmp_path)))
    config = planner_config(render(tmp_path), tmp_path / "planner")
    assert [(str(entry.pool), entry.name) for entry in config.executor.kubernetes.deployments] == [("chat", "dynamo-worker")]
    assert (config.goals.ttft_ms, config.goals.itl_ms) == (2000, 50)


@folders
def test_workers_register_the_names_of_their_pods(folder: Path, tmp_path: Path) -> None:
    manifests = render_with(folder, "planner", tmp_path)
    for workload in workloads(manifests):
        if "worker" in workload["metadata"]["name"]:
            [container] = pod_containers(workload["spec"]["template"], "dynamo-worker-7d9c5b-x2x4k", manifests, SECRETS)
            placed = Placed(container, tmp_path / workload["metadata"]["name"], {})
            placed.write_files()
            config = load(WorkerConfig, placed.command[1:], placed.environment, program="dynamo-worker")
            assert config.process_name == "dynamo-worker-7d9c5b-x2x4k"


async def test_the_role_permits_what_the_flags_need_and_no_more(tmp_path: Path) -> None:
    manifests = render_with(BASE, "planner", tmp_path)
    await check_rights(manifests, tmp_path, "dynamo-worker", Pool("smollm2"))


@rendering
async def test_the_role_of_the_chart_permits_what_the_flags_need_and_no_more(tmp_path: Path) -> None:
    chart = helm({"planner": PLANNED}, release="blue")
    await check_rights(chart, tmp_path, "blue-worker", Pool("smollm2"))


async def check_rights(manifests: Sequence[Manifest], folder: Path, worker: str, pool: Pool) -> None:
    """Scale a fleet with the rights of the Role that the planner's account is bound to."""
    [role] = of_kind(manifests, "Role").values()
    [binding] = of_kind(manifests, "RoleBinding").values()
    account = planner_of(manifests)["spec"]["template"]["spec"]["serviceAccountName"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "dynamo"}]
    authority = trustme.CA()
    server = KubernetesApiServer(role["rules"])
    workload, foreign = (server.add_workload("deployments", name, 3) for name in (worker, "another"))
    pods = [pod.name for pod in server.pods_of(workload)]
    card = ModelCard(name=pool.model, kind=ModelKind.TENSOR)
    instances = [
        Instance(id=InstanceId(number), endpoint=Endpoint(), subject="s", card=card, started_at=0.0, process=pod)
        for number, pod in enumerate(pods)
    ]
    write_ca(authority, folder / "ca.crt")
    (folder / "token").write_text("first-token")
    with serving_kubernetes_api(server, issue(authority, folder, "server")):
        options = planner_config(manifests, folder / "planner").executor
        assert options.kind is ExecutorKind.KUBERNETES
        assert [(entry.pool, entry.name) for entry in options.kubernetes.deployments] == [(pool, worker)]
        here = {"host": "127.0.0.1", "port": server.port, "service_account": folder, "namespace": "dynamo"}
        own = KubernetesOptions(deployments=options.kubernetes.deployments, **here)
        executor = open_kubernetes(own, lambda: instances)
        await executor.carry_out([Decision(pool=pool, instances=2, leave=(InstanceId(1),))])
        await executor.close()
        server.reconcile()
        assert [pod.name for pod in server.pods_of(workload)] == [pods[0], pods[2]]
        others = open_kubernetes(
            KubernetesOptions(
                statefulsets=(), deployments=tuple(type(entry)(entry.pool, foreign.name) for entry in own.deployments), **here
            ),
            lambda: instances,
        )
        with pytest.raises(ExecutorFailed, match='"another" is forbidden'):
            await others.carry_out([Decision(pool=pool, instances=1)])
        await others.close()
    used = {(verb, path.rsplit("/", 1)[-1] if path.endswith(("scale", "pods")) else "pods") for verb, path in server.calls}
    granted = {
        (verb.replace("list", "get"), resource.rpartition("/")[2])
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == used, "no right without a use"


@rendering
def test_the_chart_has_the_planner_of_the_component(tmp_path: Path) -> None:
    chart = helm({"planner": PLANNED | {"minInstances": 2, "maxInstances": 16, "ttftMilliseconds": 2000}})
    component = render_with(BASE, "planner", tmp_path)
    for manifest in chart:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    assert of_kind(chart, "Role")["dynamo-planner"]["rules"] == of_kind(component, "Role")["dynamo-planner"]["rules"]
    ours, theirs = (planner_of(manifests)["spec"] for manifests in (chart, component))
    [our_container], [their_container] = (spec["template"]["spec"]["containers"] for spec in (ours, theirs))
    assert set(our_container["args"]) == set(their_container["args"])
    for name in ("command", "env", "ports", "resources", "securityContext", "livenessProbe", "readinessProbe", "startupProbe"):
        assert our_container[name] == their_container[name]
    assert ours["replicas"] == theirs["replicas"]
    assert "replicas" not in of_kind(chart, "Deployment")["dynamo-worker"]["spec"]
    assert of_kind(chart, "NetworkPolicy").keys() == of_kind(component, "NetworkPolicy").keys()


@rendering
def test_the_chart_scales_the_pools_that_serve_a_model(tmp_path: Path) -> None:
    pool = {"models": ["sim"], "resources": {"requests": {"cpu": 1}}}
    pools = {"default": None, "prefill": pool, "decode": pool, "fixed": pool}
    planner = {"enabled": True, "deployments": {"sim:prefill": "prefill", "sim:decode": "decode"}}
    manifests = helm({"pools": pools, "planner": planner, "etcd": {"enabled": False, "endpoints": ["http://e:2379"]}})
    assert of_kind(manifests, "Role")["dynamo-planner"]["rules"][0]["resourceNames"] == [
        "dynamo-worker-decode",
        "dynamo-worker-prefill",
    ]
    replicas = {name: "replicas" in found["spec"] for name, found in of_kind(manifests, "Deployment").items() if "worker" in name}
    assert replicas == {"dynamo-worker-prefill": False, "dynamo-worker-decode": False, "dynamo-worker-fixed": True}
    options = planner_config(manifests, tmp_path).executor
    assert {str(entry.pool): entry.name for entry in options.kubernetes.deployments} == {
        "sim (prefill)": "dynamo-worker-prefill",
        "sim (decode)": "dynamo-worker-decode",
    }


def test_scalers_follow_the_number_that_is_decided() -> None:
    """A threshold of 1 makes as many pods as instances are wanted, and a planner that is away changes nothing."""
    [scaled] = of_kind(parse((DEPLOY / "keda" / "planner.yaml").read_text()), "ScaledObject").values()
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["metricType"] == "AverageValue"
    assert (trigger["metadata"]["threshold"], trigger["metadata"]["activationThreshold"]) == ("1", "0")
    assert trigger["metadata"]["ignoreNullValues"] == "false", "no planner would be no workers"
    assert scaled["spec"]["minReplicaCount"] == 0
    [hpa] = of_kind(parse((DEPLOY / "keda" / "planner-hpa.yaml").read_text()), "HorizontalPodAutoscaler").values()
    [metric] = hpa["spec"]["metrics"]
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    behaviour = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behaviour == hpa["spec"]["behavior"]
    assert {behaviour[way]["stabilizationWindowSeconds"] for way in ("scaleUp", "scaleDown")} == {0}, "the planner waits itself"
