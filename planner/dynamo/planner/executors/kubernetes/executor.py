"""Decisions as numbers of replicas of Deployments and StatefulSets.

Numbers are absolute, and nothing is retried here: the next decision, seconds later, is the retry. Before a Deployment gets fewer
pods, those that are to end are annotated with a deletion cost, which its ReplicaSet follows among pods that are ready. Which pod
an instance is in says its registration, where the pod's name is in the worker's environment as POD_NAME. A StatefulSet ends the
pod with the highest number in any case.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynamo.common.config import ConfigError
from dynamo.common.discovery import Instance
from dynamo.common.errors import InvalidRequest
from dynamo.common.http.client import HttpClient
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.processes import in_order_of_leaving, instances_per_process, processes_for, processes_of
from dynamo.planner.executors.base import ExecutorFailed
from dynamo.planner.executors.kubernetes.api import ApiRefused, ApiUnreachable, Kind, KubernetesApi, Scale
from dynamo.planner.executors.kubernetes.service_account import ServiceAccount
from dynamo.planner.executors.options import KubernetesOptions
from dynamo.planner.pools import Decision

log = logging.getLogger(__name__)

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
MARKED = "dynamo.ai/leaves-first"
"""Beside the deletion cost, so that only costs of our own are taken away again."""
MAX_MARKED = 100
"""Pods that are marked for one decision: more that end at once are Kubernetes' choice."""
_READ_TIMEOUT_S = 5.0
_TIMEOUT_S = 15.0
"""For one set of decisions."""
_FORBIDDEN = 403
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class ScaledWorkload:
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


def open_kubernetes(options: KubernetesOptions, registrations: Callable[[], Iterable[Instance]]) -> KubernetesExecutor:
    """Return an executor for the API server of the options. Does not wait for it. Raises ConfigError."""
    account = ServiceAccount(options.service_account)
    host = f"[{options.host}]" if options.host and ":" in options.host else options.host
    try:
        http = HttpClient(f"https://{host}:{options.port}", timeout_s=_READ_TIMEOUT_S, tls=account.tls)
    except InvalidRequest as error:
        raise ConfigError(f"--kubernetes-host {options.host!r} with --kubernetes-port {options.port} is no address") from error
    workloads = {entry.pool: ScaledWorkload(Kind.DEPLOYMENT, entry.name) for entry in options.deployments}
    workloads |= {entry.pool: ScaledWorkload(Kind.STATEFULSET, entry.name) for entry in options.statefulsets}
    api = KubernetesApi(http, account, options.namespace or account.namespace())
    return KubernetesExecutor(api, workloads, registrations)


class KubernetesExecutor:
    """Scales the workloads of pools."""

    def __init__(
        self,
        api: KubernetesApi,
        workloads: Mapping[Pool, ScaledWorkload],
        registrations: Callable[[], Iterable[Instance]],
        *,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._api = api
        self._workloads = workloads
        self._registrations = registrations
        self._clock = clock
        self._timeout_s = timeout_s
        self._quiet_until = 0.0
        """Until when the API server wants to be left alone."""
        self._noted: set[str] = set()
        """What was logged once."""

    async def carry_out(self, decisions: Sequence[Decision]) -> None:
        if (rest_s := self._quiet_until - self._clock()) > 0:
            raise ExecutorFailed(f"the API server of Kubernetes is overloaded, and wants no calls for {rest_s:.0f} s")
        failures: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                for decision in decisions:
                    failures += await self._carry_out(decision)
        except TimeoutError:
            failures.append(f"the API server of Kubernetes did not respond within {self._timeout_s:g} s")
        except ApiUnreachable as error:
            failures.append(str(error))
        if failures:
            raise ExecutorFailed("; ".join(failures))

    async def current(self, pools: Collection[Pool]) -> Mapping[Pool, int]:
        registrations = list(self._registrations())
        wanted: dict[Pool, int] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                for pool in pools:
                    if (workload := self._workloads.get(pool)) is not None:
                        scale = await self._api.scale(workload.kind, workload.name)
                        wanted[pool] = scale.spec.replicas * instances_per_process(registrations, pool)
        except TimeoutError:
            raise ExecutorFailed(f"the API server of Kubernetes did not respond within {self._timeout_s:g} s") from None
        except (ApiRefused, ApiUnreachable) as error:
            raise ExecutorFailed(str(error)) from error
        return wanted

    async def close(self) -> None:
        self._api.close()

    async def _carry_out(self, decision: Decision) -> list[str]:
        """Scale the workload of a decision; return why that failed. Raises ApiUnreachable, and ApiRefused if it is overloaded."""
        workload = self._workloads.get(decision.pool)
        if workload is None:
            self._note_once(f"'{decision.pool}' is not scaled: no --kubernetes-deployment or --kubernetes-statefulset names it")
            return []
        try:
            await self._scale(workload, decision)
        except ApiRefused as error:
            if error.retry_after_s:
                self._quiet_until = self._clock() + error.retry_after_s
                raise ApiUnreachable(str(error)) from error
            return [f"{workload} cannot be scaled: {error}"]
        return []

    async def _scale(self, workload: ScaledWorkload, decision: Decision) -> None:
        registrations = list(self._registrations())
        replicas = processes_for(decision.instances, instances_per_process(registrations, decision.pool))
        scale = await self._api.scale(workload.kind, workload.name)
        excess = scale.spec.replicas - replicas
        if excess == 0:
            return
        if excess > 0 and workload.kind is Kind.DEPLOYMENT:
            leaving = in_order_of_leaving(decision.leave, processes_of(registrations))
            await self._mark_or_note(workload, scale, leaving[: min(excess, MAX_MARKED)])
        await self._api.set_replicas(workload.kind, workload.name, replicas, scale.metadata.resource_version)
        log.info("%s: %d replicas instead of %d: %s", workload, replicas, scale.spec.replicas, decision.reason)

    async def _mark_or_note(self, workload: ScaledWorkload, scale: Scale, leaving: Sequence[str]) -> None:
        """Mark the pods that are to end, unless that is not permitted: it is worth caches, no request depends on it."""
        try:
            await self._mark(scale, leaving)
        except ApiRefused as error:
            if error.status != _FORBIDDEN:
                raise
            self._note_once(f"Kubernetes chooses which pods of {workload} end, as they may not be marked: {error}")

    async def _mark(self, scale: Scale, leaving: Sequence[str]) -> None:
        if not scale.status.selector:
            return
        pods = {pod.name: pod for pod in await self._api.pods(scale.status.selector) if pod.deletion_timestamp is None}
        own = [name for name in leaving if name in pods]
        costs = {name: str(rank - len(own)) for rank, name in enumerate(own)}  # the first to end costs least
        patches: dict[str, dict[str, str | None]] = {}
        for name, pod in pods.items():
            present = pod.annotations or {}
            if name in costs and (present.get(DELETION_COST), present.get(MARKED)) != (costs[name], "true"):
                patches[name] = {DELETION_COST: costs[name], MARKED: "true"}
            elif name not in costs and MARKED in present:
                patches[name] = {DELETION_COST: None, MARKED: None}
        for name, patch in patches.items():
            await self._annotate(name, patch)

    async def _annotate(self, pod: str, annotations: Mapping[str, str | None]) -> None:
        try:
            await self._api.annotate_pod(pod, annotations)
        except ApiRefused as error:
            if error.status != _NOT_FOUND:  # it has ended meanwhile
                raise

    def _note_once(self, text: str) -> None:
        """Log what does not change from one decision to the next."""
        if text not in self._noted and len(self._noted) < 1000:
            self._noted.add(text)
            log.warning("%s", text)
