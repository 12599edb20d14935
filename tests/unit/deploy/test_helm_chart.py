"""The Helm chart: its values fit its schema, and with the defaults it installs what `deploy/k8s/base` does.

Rendering needs the package helm-python-sdk (244 MB), in an environment of its own whose Python HELM_PYTHON names:

    python -m venv /tmp/helm && /tmp/helm/bin/pip install helm-python-sdk==0.2.2
    HELM_PYTHON=/tmp/helm/bin/python pytest tests/unit/deploy/test_helm_chart.py
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dynamo.common.config import load
from dynamo.frontend.config import FrontendConfig, RouterMode
from dynamo.worker.config import WorkerConfig
from tests.support.manifests import (
    BASE,
    DEPLOY,
    Manifest,
    Placed,
    manifest_files,
    of_kind,
    parse,
    pod_containers,
    pod_names,
    render,
    workloads,
)

CHART = DEPLOY / "helm" / "dynamo"
DEFAULTS: Mapping[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Mapping[str, Any] = json.loads((CHART / "values.schema.json").read_text())
PYTHON = os.environ.get("HELM_PYTHON") or (sys.executable if find_spec("helm_python") else None)
SECRETS = {
    "dynamo-nats-auth": {"frontend-password": "pf", "worker-password": "pw"},
    "keys": {"keys.yaml": "[]"},
    "front-tls": {"tls.crt": "certificate", "tls.key": "key"},
}

PLANNED: Mapping[str, Any] = {"enabled": True, "deployments": {"smollm2": "default"}}
MONITORED: Mapping[str, Any] = {"podMonitor": {"enabled": True, "apiKeySecret": "metrics-key"}}

rendering = pytest.mark.skipif(
    PYTHON is None, reason="helm-python-sdk is not installed; HELM_PYTHON can name a Python that has it"
)

_HASHED_NAME = re.compile(r"^(dynamo(?:-nats)?)-[a-z0-9]{10}$")
_RENDER = """
import json, sys
from helm_python import chart
path, values = sys.argv[1], json.loads(sys.argv[2])
report = chart.lint(path, values, strict=True)
with chart.Chart.load(path) as loaded:
    rendered = loaded.render(values, name=sys.argv[3], namespace="dynamo")
print(json.dumps({"lint": report, "rendered": rendered}))
"""


def helm(values: Mapping[str, Any], release: str = "dynamo") -> tuple[Manifest, ...]:
    """The chart rendered as a release; lint must find nothing. Raises CalledProcessError for values it refuses."""
    assert PYTHON is not None
    command = [PYTHON, "-c", _RENDER, str(CHART), json.dumps(values), release]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    done.check_returncode()
    response = json.loads(done.stdout)
    serious = [
        message for message in response["lint"].get("messages", ()) if message.get("severity", 0) not in ("INFO", "info", 1)
    ]
    assert not serious, serious
    return tuple(found for text in response["rendered"].values() for found in parse(text))


def merged(*changes: Mapping[str, Any]) -> dict[str, Any]:
    def into(target: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in change.items():
            target[name] = into(target[name], value) if isinstance(value, dict) and isinstance(target.get(name), dict) else value
        return target

    values = copy.deepcopy(dict(DEFAULTS))
    for change in changes:
        into(values, change)
    return values


def test_the_defaults_fit_the_schema() -> None:
    jsonschema.validate(DEFAULTS, SCHEMA)


@pytest.mark.parametrize(
    "change",
    [
        {"frontend": {"routerMode": "best"}},
        {"frontend": {"replicas": 3}},
        {"frontend": {"extraArgs": ["router-mode=kv"]}},
        {"frontend": {"httpTls": True}},
        {"frontend": {"apiKeysSecret": "Keys"}},
        {"pools": {"default": {"models": []}}},
        {"pools": {"Default_": {"models": ["echo"], "resources": {"requests": {"cpu": 1}}}}},
        {"etcd": {"enabled": False}},
        {"etcd": {"replicas": 2}},
        {"nats": {"enabled": False, "servers": ["nats.example:4222"]}},
        {"nats": {"auth": {"workerUser": 'w"'}}},
        {"tracing": {"endpoint": "collector:4317"}},
        {"frontend": {"canaryWaitSeconds": -1}},
        {"images": {"registry": "registry.example"}},
        {"log": {"format": "xml"}},
        {"planner": {"enabled": True}},
        {"planner": {"deployments": {"a model": "default"}}},
        {"planner": {"deployments": {"m:both": "default"}}},
        {"sharedMemory": {"path": "/var/lib/kubelet"}},
        {"sharedMemory": {"path": "/dev/shm/.."}},
        {"sharedMemory": {"size": "256"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_cannot_work(change: Mapping[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(change), SCHEMA)


def test_the_schema_knows_the_router_modes() -> None:
    modes = SCHEMA["properties"]["frontend"]["properties"]["routerMode"]["enum"]
    assert set(modes) == {mode.value for mode in RouterMode}


def test_nats_is_configured_as_in_the_base() -> None:
    templated = (CHART / "files" / "nats.conf").read_text()
    for role in ("frontend", "worker"):
        templated = templated.replace(f"{{{{ .Values.nats.auth.{role}User | quote }}}}", f'"{role}"')
    assert templated == (BASE / "platform" / "nats" / "nats.conf").read_text()


@rendering
def test_the_defaults_install_what_the_base_does() -> None:
    ours = {(found["kind"], found["metadata"]["name"]): found for found in helm({})}
    theirs = {(found["kind"], name_of(found)): found for found in render(BASE) if found["kind"] != "Namespace"}
    assert ours.keys() == theirs.keys()
    for key, found in ours.items():
        assert comparable(found) == comparable(theirs[key]), key


@rendering
def test_a_release_of_another_name_has_its_own_names_throughout() -> None:
    manifests = helm(MONITORED | {"tracing": {"endpoint": "http://collector:4317"}}, release="blue")
    assert all(found["metadata"]["name"].startswith("blue") for found in manifests)
    services = of_kind(manifests, "Service")
    [etcd, nats] = [of_kind(manifests, "StatefulSet")[f"blue-{name}"] for name in ("etcd", "nats")]
    members = [f"{name}.{etcd['spec']['serviceName']}" for name in pod_names(etcd)]
    advertised = [advertised_hosts(etcd, name, manifests) for name in pod_names(etcd)]
    assert advertised == [{member} for member in members]
    [container] = pod_containers(etcd["spec"]["template"], "blue-etcd-0", manifests, SECRETS)
    assert hosts_in(container.environment["CLUSTER_MEMBERS"]) == set(members)
    assert hosts_in(of_kind(manifests, "ConfigMap")["blue-nats"]["data"]["cluster.conf"]) == {
        f"{name}.{nats['spec']['serviceName']}" for name in pod_names(nats)
    }
    requested = hosts_in("\n".join(of_kind(manifests, "ConfigMap")["blue"]["data"].values()))
    assert requested == {"blue-etcd", "blue-nats", "collector"}
    assert {"blue-etcd", "blue-nats", etcd["spec"]["serviceName"], nats["spec"]["serviceName"]} <= services.keys()


@rendering
def test_the_users_of_nats_are_those_that_frontends_and_workers_give(tmp_path: Path) -> None:
    manifests = helm({"nats": {"auth": {"frontendUser": "front", "workerUser": "back"}}})
    users = re.findall(
        r"user: (\S+), password: \$NATS_(\w+)_PASSWORD", of_kind(manifests, "ConfigMap")["dynamo-nats"]["data"]["nats.conf"]
    )
    assert users == [('"front"', "FRONTEND"), ('"back"', "WORKER")]
    given = {config.nats.user for config in configs_of(manifests, tmp_path)}
    assert given == {"front", "back"}


@rendering
def test_with_tracing_processes_know_the_collector_and_may_reach_it(tmp_path: Path) -> None:
    manifests = helm({"tracing": {"endpoint": "http://collector.traces:4317"}})
    configs = configs_of(manifests, tmp_path)
    assert {config.trace.otlp_endpoint for config in configs} == {"http://collector.traces:4317"}
    [rule] = of_kind(manifests, "NetworkPolicy")["dynamo-tracing"]["spec"]["egress"]
    assert rule["to"][0]["podSelector"]["matchLabels"] == DEFAULTS["tracing"]["collectorLabels"]
    assert [port["port"] for port in rule["ports"]] == [4317]


@rendering
def test_the_chart_monitors_what_the_monitors_of_the_base_do() -> None:
    ours = of_kind(helm(MONITORED | {"planner": PLANNED}), "PodMonitor")
    theirs = of_kind(parse((DEPLOY / "prometheus" / "monitors.yaml").read_text()), "PodMonitor")

    def endpoints(monitors: Mapping[str, Manifest]) -> dict[str, list[tuple[str, str]]]:
        return {
            name: [(found["port"], found["path"]) for found in monitor["spec"]["podMetricsEndpoints"]]
            for name, monitor in monitors.items()
        }

    assert endpoints(ours) == endpoints(theirs)
    elsewhere = helm(MONITORED | {"etcd": {"enabled": False, "endpoints": ["http://etcd.example:2379"]}})
    assert of_kind(elsewhere, "PodMonitor").keys() == {"dynamo-frontend", "dynamo-worker"}


@rendering
def test_without_canaries_instances_are_not_asked(tmp_path: Path) -> None:
    configs = configs_of(helm({"frontend": {"canaryWaitSeconds": 0}}), tmp_path)
    assert [config.serving.canary.wait_s for config in configs if isinstance(config, FrontendConfig)] == [None]


@rendering
@pytest.mark.parametrize(
    "change",
    [
        {"frontend": {"tlsSecret": "front-tls", "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}}},
        {"frontend": {"tlsSecret": "front-tls", "httpTls": True}},
        {"frontend": {"apiKeysSecret": "keys"}},
        {
            "etcd": {"enabled": False, "endpoints": ["https://etcd.example:2379"]},
            "nats": {"enabled": False, "servers": ["nats://n:4222"]},
        },
        {"etcd": {"replicas": 1, "storageClass": "fast"}, "nats": {"replicas": 1}},
        {"networkPolicies": False, "images": {"registry": "registry.example/", "pullSecrets": ["pull"]}},
        {
            "pools": {
                "gpu": {
                    "models": ["/models/a.gguf", "echo"],
                    "maxSurge": 0,
                    "extraArgs": ["--max-num-seqs=8"],
                    "env": [{"name": "DYN_CONTEXT_LENGTH", "value": "4096"}],
                    "resources": {"requests": {"cpu": 2, "nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 1}},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "nodeSelector": {"gpu": "a"},
                    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                }
            }
        },
    ],
    ids=lambda change: ",".join(change),
)
def test_other_values_make_valid_objects_that_our_programs_understand(change: Mapping[str, Any], tmp_path: Path) -> None:
    manifests = helm(change)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    configs = configs_of(manifests, tmp_path)
    assert {type(config) for config in configs} == {FrontendConfig, WorkerConfig}
    for config in configs:
        assert config.grpc.wanted if isinstance(config, FrontendConfig) else config.models


@rendering
def test_with_http_over_tls_probes_and_scrapes_use_it_too() -> None:
    manifests = helm({"frontend": {"tlsSecret": "front-tls", "httpTls": True, "apiKeysSecret": "keys"}} | MONITORED)
    [frontend] = [found for found in workloads(manifests) if found["metadata"]["name"] == "dynamo-frontend"]
    [container] = frontend["spec"]["template"]["spec"]["containers"]
    assert {container[probe]["httpGet"]["scheme"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {"HTTPS"}
    assert {"DYN_HTTP_TLS_CERT_FILE", "DYN_API_KEYS_FILE"} <= {variable["name"] for variable in container["env"]}
    [endpoint] = of_kind(manifests, "PodMonitor")["dynamo-frontend"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["authorization"]["credentials"] == {"name": "metrics-key", "key": "key"}


@rendering
def test_with_shared_memory_frontends_and_workers_have_a_folder_of_the_node_in_common(tmp_path: Path) -> None:
    manifests = helm({"sharedMemory": {"enabled": True, "size": "1Gi"}})
    for deployment in of_kind(manifests, "Deployment").values():
        kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
        pod = deployment["spec"]["template"]["spec"]
        assert {"path": "/dev/shm/dynamo", "type": "DirectoryOrCreate"} in [volume.get("hostPath") for volume in pod["volumes"]]
        [first], [container] = pod["initContainers"], pod["containers"]
        assert first["image"] == container["image"]
        paths = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "shared-memory"]
        assert paths == ["/var/run/dynamo-shared-memory"]
    configs = configs_of(manifests, tmp_path)
    assert {type(config) for config in configs} == {FrontendConfig, WorkerConfig}
    assert {(config.shared_memory.dir.name, config.shared_memory.size) for config in configs} == {
        ("var-run-dynamo-shared-memory", 2**30)
    }


@rendering
def test_values_that_the_schema_refuses_are_refused_by_helm() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        helm({"frontend": {"routerMode": "best"}})
    assert "routerMode" in refused.value.stderr


def configs_of(manifests: Sequence[Manifest], folder: Path) -> list[FrontendConfig | WorkerConfig]:
    """What our processes make of their flags, variables and files."""
    configs: list[FrontendConfig | WorkerConfig] = []
    kinds: Mapping[str, type[FrontendConfig | WorkerConfig]] = {"dynamo-frontend": FrontendConfig, "dynamo-worker": WorkerConfig}
    for workload in workloads(manifests):
        for container in pod_containers(workload["spec"]["template"], "pod-0", manifests, SECRETS):
            placed = Placed(container, folder / workload["metadata"]["name"], {})
            placed.write_files()
            program, *flags = placed.command
            if program in kinds:
                configs.append(load(kinds[program], flags, placed.environment, program=program))
    return configs


def advertised_hosts(etcd: Manifest, pod: str, manifests: Sequence[Manifest]) -> set[str]:
    """Under which names a member tells others to reach it."""
    [container] = pod_containers(etcd["spec"]["template"], pod, manifests, SECRETS)
    return set().union(*(hosts_in(flag) for flag in container.command if "advertise" in flag))


def hosts_in(text: str) -> set[str]:
    return set(re.findall(r"\w+://([^:/\s]+)", text))


def name_of(manifest: Manifest) -> str:
    """Without the hash that kustomize appends to generated names."""
    name: str = manifest["metadata"]["name"]
    return name.rpartition("-")[0] if manifest["kind"] == "ConfigMap" else name


def comparable(manifest: Manifest) -> object:
    """A manifest without what differs by the tool: labels, annotations, generated names, comments in files, explicit defaults."""
    if manifest["kind"] == "ConfigMap":
        return {name: without_comments(text) for name, text in manifest_files(manifest).items()}
    return normal(manifest["spec"] if "spec" in manifest else {k: v for k, v in manifest.items() if k != "metadata"})


def normal(value: object) -> object:
    match value:
        case dict():
            return {
                key: normal(found)
                for key, found in value.items()
                if key not in ("labels", "annotations", "imagePullPolicy", "app.kubernetes.io/instance", "dynamo.ai/pool")
                and (key, found) != ("type", "ClusterIP")
            }
        case list():
            kept = [item for item in value if not (isinstance(item, dict) and item.get("key") == "app.kubernetes.io/instance")]
            return [normal(item) for item in kept]
        case str():
            return _HASHED_NAME.sub(r"\1", value.strip())
    return value


def without_comments(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
