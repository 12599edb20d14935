"""The options of executors. Use with `group("Executor", default=ExecutorOptions)`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dynamo.common.config import group, option, parse_port
from dynamo.common.model_card import Role
from dynamo.common.names import parse_name
from dynamo.common.scaling.pool import Pool

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts the token of a pod's service account, and the certificate of the API server's authority."""
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


class ExecutorKind(StrEnum):
    TARGETS = "targets"
    """A program that follows the key with the targets in etcd."""
    KUBERNETES = "kubernetes"
    VIRTUAL = "virtual"
    """A program that follows the keys of NVIDIA Dynamo's virtual connector."""
    NONE = "none"
    """An autoscaler that reads the metric `dynamo_planner_target_instances`."""


@dataclass(frozen=True, slots=True)
class ScaledObject:
    """What runs the processes of a pool in Kubernetes."""

    pool: Pool
    name: str


def parse_pool(text: str) -> Pool:
    """Return the pool of `MODEL` or `MODEL:ROLE`. Raises ValueError with the end of a sentence."""
    model, colon, role = text.partition(":")
    if colon and role not in Role._value2member_map_:
        raise ValueError(f"names the role {role!r}; there are {', '.join(Role)}")
    return Pool(parse_name(model), Role(role) if colon else Role.AGGREGATED)


def parse_scaled_object(text: str) -> ScaledObject:
    pool, equals, name = text.partition("=")
    if not equals or not _OBJECT_NAME.fullmatch(name):
        raise ValueError("is not of the form MODEL=NAME or MODEL:ROLE=NAME, as in chat:prefill=dynamo-worker-prefill")
    return ScaledObject(parse_pool(pool), name)


def _object_name(text: str) -> str:
    if not _OBJECT_NAME.fullmatch(text):
        raise ValueError("is not the name of an object in Kubernetes")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """Which objects of Kubernetes are scaled, and by which API server."""

    deployments: tuple[ScaledObject, ...] = option(
        (),
        flags=("--kubernetes-deployment",),
        env=("DYN_PLANNER_KUBERNETES_DEPLOYMENTS",),
        file_key="planner.kubernetes.deployments",
        repeatable=True,
        parse=parse_scaled_object,
        metavar="MODEL[:ROLE]=NAME",
        help="The Deployment that runs the workers of a model, or of one of its roles. Repeatable.",
    )
    statefulsets: tuple[ScaledObject, ...] = option(
        (),
        flags=("--kubernetes-statefulset",),
        env=("DYN_PLANNER_KUBERNETES_STATEFULSETS",),
        file_key="planner.kubernetes.statefulsets",
        repeatable=True,
        parse=parse_scaled_object,
        metavar="MODEL[:ROLE]=NAME",
        help="The same for a StatefulSet, which always ends the pod with the highest number. Repeatable.",
    )
    namespace: str | None = option(
        None,
        flags=("--kubernetes-namespace",),
        env=("DYN_PLANNER_KUBERNETES_NAMESPACE", "POD_NAMESPACE"),
        file_key="planner.kubernetes.namespace",
        parse=_object_name,
        metavar="NAME",
        help="Namespace of Kubernetes that these are in; default: that of the service account.",
    )
    host: str | None = option(
        None,
        flags=("--kubernetes-host",),
        env=("DYN_PLANNER_KUBERNETES_HOST", "KUBERNETES_SERVICE_HOST"),
        file_key="planner.kubernetes.host",
        metavar="HOST",
        help="Host of the API server, which speaks HTTPS; pods have the variable.",
    )
    port: int = option(
        443,
        flags=("--kubernetes-port",),
        env=("DYN_PLANNER_KUBERNETES_PORT", "KUBERNETES_SERVICE_PORT"),
        file_key="planner.kubernetes.port",
        parse=parse_port,
        help="Port of the API server.",
    )
    service_account: Path = option(
        SERVICE_ACCOUNT,
        flags=("--kubernetes-service-account",),
        env=("DYN_PLANNER_KUBERNETES_SERVICE_ACCOUNT",),
        file_key="planner.kubernetes.service_account",
        metavar="FOLDER",
        help="Folder with the files `token`, `ca.crt` and `namespace` of a service account; read again when they change.",
    )

    def __post_init__(self) -> None:
        _check_once("--kubernetes-deployment and --kubernetes-statefulset", (*self.deployments, *self.statefulsets))


def _check_once(flags: str, objects: Iterable[ScaledObject]) -> None:
    pools: set[Pool] = set()
    names: set[str] = set()
    for entry in objects:
        if entry.pool in pools:
            raise ValueError(f"{flags} name two objects for {entry.pool}")
        if entry.name in names:
            raise ValueError(f"{flags} name '{entry.name}' twice, whose replicas two pools would set")
        pools.add(entry.pool)
        names.add(entry.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """Who carries out what is decided."""

    kind: ExecutorKind = option(
        ExecutorKind.TARGETS,
        flags=("--executor",),
        env=("DYN_PLANNER_EXECUTOR",),
        file_key="planner.executor",
        parse=ExecutorKind,
        help="Who starts and ends instances: `targets`, a program that follows the key with the targets in etcd, as dynamo-local "
        "does; `kubernetes`; `virtual`, a program written for NVIDIA Dynamo's virtual connector; `none`, an autoscaler that "
        "reads the metric dynamo_planner_target_instances. The key is written in any case.",
    )
    virtual_model: str | None = option(
        None,
        flags=("--virtual-model",),
        env=("DYN_PLANNER_VIRTUAL_MODEL",),
        file_key="planner.virtual_model",
        parse=parse_name,
        metavar="MODEL",
        help="With --executor virtual, whose keys hold the numbers of one model: which one; default: the only one.",
    )
    virtual_wait_s: float = option(
        1800.0,
        flags=("--virtual-wait-s",),
        env=("DYN_PLANNER_VIRTUAL_WAIT_S", "SCALING_MAX_WAIT_TIME"),
        file_key="planner.virtual_wait_s",
        minimum=0,
        maximum=86_400,
        help="With --executor virtual, how long a decision that is not acknowledged holds back the next one.",
    )
    kubernetes: KubernetesOptions = group("Kubernetes", default=KubernetesOptions)

    def __post_init__(self) -> None:
        if self.kind is ExecutorKind.KUBERNETES:
            if not self.kubernetes.deployments and not self.kubernetes.statefulsets:
                raise ValueError("--executor kubernetes needs a --kubernetes-deployment or --kubernetes-statefulset")
            if not self.kubernetes.host:
                raise ValueError("--executor kubernetes runs in a pod, or needs --kubernetes-host")
