"""Decisions as replicas, with an API server that behaves as that of Kubernetes does."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trustme

from dynamo.common.config import ConfigError
from dynamo.common.discovery import Instance
from dynamo.common.http.client import HttpClient
from dynamo.common.model_card import ModelCard, ModelKind, Role
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.ports import free_ports
from dynamo.common.scaling.pool import Pool
from dynamo.planner.executors.base import ExecutorFailed
from dynamo.planner.executors.kubernetes.api import Kind, KubernetesApi
from dynamo.planner.executors.kubernetes.executor import KubernetesExecutor, ScaledWorkload, open_kubernetes
from dynamo.planner.executors.kubernetes.service_account import ServiceAccount
from dynamo.planner.executors.options import ExecutorKind, ExecutorOptions, KubernetesOptions, ScaledObject
from dynamo.planner.pools import Decision
from tests.support.certificates import Pair, issue, write_ca
from tests.support.kubernetes_api import DELETION_COST, KubernetesApiServer, serving_kubernetes_api

CHAT, PREFILL, DECODE = Pool("chat"), Pool("chat", Role.PREFILL), Pool("chat", Role.DECODE)
RULES = [
    {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": ["workers"], "verbs": ["get", "patch"]},
    {"apiGroups": ["apps"], "resources": ["statefulsets/scale"], "resourceNames": ["decoders"], "verbs": ["get", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]},
]
OVERLOADED = (429, {"retry-after": "7", "content-type": "text/plain"}, b"Too many requests, please try again later.\n")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(authority: trustme.CA, tmp_path: Path) -> Pair:
    return issue(authority, tmp_path, "server")


@pytest.fixture
def account(authority: trustme.CA, tmp_path: Path) -> Path:
    """The folder with what the kubelet gives a pod."""
    folder = tmp_path / "account"
    folder.mkdir()
    write_ca(authority, folder / "ca.crt")
    (folder / "token").write_text("first-token\n")
    (folder / "namespace").write_text("dynamo")
    return folder


@pytest.fixture
def server(certificate: Pair) -> Iterator[KubernetesApiServer]:
    server = KubernetesApiServer(RULES)
    with serving_kubernetes_api(server, certificate):
        yield server


def options(port: int, account: Path) -> KubernetesOptions:
    return KubernetesOptions(
        deployments=(ScaledObject(CHAT, "workers"),),
        statefulsets=(ScaledObject(DECODE, "decoders"),),
        host="127.0.0.1",
        port=port,
        service_account=account,
    )


def executor(server: KubernetesApiServer, account: Path, registrations: Sequence[Instance] = ()) -> KubernetesExecutor:
    return open_kubernetes(options(server.port, account), lambda: registrations)


def registrations(pods: Sequence[str], instances: int = 1, role: Role = Role.AGGREGATED) -> list[Instance]:
    """As many instances in each of `pods`, numbered through."""
    card = ModelCard(name="chat", kind=ModelKind.TENSOR, role=role)
    return [
        Instance(
            id=InstanceId(number),
            endpoint=Endpoint(),
            subject="s",
            card=card,
            started_at=0.0,
            process=pods[number // instances],
            process_instances=instances,
        )
        for number in range(len(pods) * instances)
    ]


def chat(instances: int, *leave: int) -> list[Decision]:
    return [Decision(pool=CHAT, instances=instances, leave=tuple(map(InstanceId, leave)))]


async def test_a_deployment_gets_the_replicas_that_are_decided_and_no_call_more_when_it_has_them(
    server: KubernetesApiServer, account: Path
) -> None:
    workload = server.add_workload("deployments", "workers", 2)
    own = executor(server, account)
    await own.carry_out(chat(5))
    assert workload.replicas == 5
    path = "/apis/apps/v1/namespaces/dynamo/deployments/workers/scale"
    assert server.calls == [("get", path), ("patch", path)]
    await own.carry_out(chat(5))
    assert server.calls[2:] == [("get", path)]
    await own.close()


async def test_all_may_end_and_a_first_one_start(server: KubernetesApiServer, account: Path) -> None:
    workload = server.add_workload("deployments", "workers", 1)
    own = executor(server, account)
    for replicas in (0, 1):
        await own.carry_out(chat(replicas))
        assert workload.replicas == replicas
    await own.close()


async def test_the_pods_whose_instances_are_to_leave_end_and_those_that_stay_are_not_touched(
    server: KubernetesApiServer, account: Path
) -> None:
    workload = server.add_workload("deployments", "workers", 5)
    other = server.add_workload("deployments", "others", 2)
    pods = [pod.name for pod in server.pods_of(workload)]
    own = executor(server, account, [*registrations(pods), *registrations([other.name])])
    await own.carry_out(chat(3, 1, 3, 4))
    assert [server.pods[pod].cost for pod in pods] == [0, -2, 0, -1, 0], "more than end are not marked"
    server.reconcile()
    assert [pod.name for pod in server.pods_of(workload)] == [pods[0], pods[2], pods[4]]
    assert len(server.pods_of(other)) == 2
    await own.close()


async def test_pods_are_marked_before_there_are_fewer(server: KubernetesApiServer, account: Path) -> None:
    workload = server.add_workload("deployments", "workers", 2)
    own = executor(server, account, registrations([pod.name for pod in server.pods_of(workload)]))
    await own.carry_out(chat(1, 0))
    verbs = [(verb, path.rsplit("/", 1)[-1]) for verb, path in server.calls]
    assert [verb for verb in verbs if verb[0] == "patch"][-1] == ("patch", "scale")
    assert ("patch", server.pods_of(workload)[0].name) in verbs
    await own.close()


async def test_marks_of_a_decision_that_was_not_carried_out_are_taken_away_by_the_next(
    server: KubernetesApiServer, account: Path
) -> None:
    workload = server.add_workload("deployments", "workers", 3)
    pods = [pod.name for pod in server.pods_of(workload)]
    server.pods[pods[2]].annotations[DELETION_COST] = "5"  # the operator's own
    first, second = (executor(server, account, registrations(pods)) for _ in range(2))

    def change_meanwhile(verb: str, path: str) -> None:
        if verb == "patch" and path.endswith("/scale"):
            workload.version += 1

    server.on_call = change_meanwhile
    with pytest.raises(ExecutorFailed, match=r"409 Operation cannot be fulfilled on deployments\.apps"):
        await first.carry_out(chat(2, 0))
    assert (server.pods[pods[0]].cost, workload.replicas) == (-1, 3)
    server.on_call = lambda verb, path: None
    await second.carry_out(chat(2, 1))
    assert [server.pods[pod].annotations.get(DELETION_COST) for pod in pods] == [None, "-1", "5"]
    assert workload.replicas == 2
    await first.close()
    await second.close()


async def test_a_pod_with_several_instances_counts_once(server: KubernetesApiServer, account: Path) -> None:
    workload = server.add_workload("deployments", "workers", 3)
    pods = [pod.name for pod in server.pods_of(workload)]
    own = executor(server, account, registrations(pods, instances=4))
    assert await own.current([CHAT, PREFILL]) == {CHAT: 12}
    await own.carry_out(chat(5, 0, 4, 5, 6, 7))  # all of the second, one of the first
    assert workload.replicas == 2 and [server.pods[pod].cost for pod in pods] == [0, -1, 0]
    await own.carry_out(chat(9))
    assert workload.replicas == 3
    await own.close()


async def test_pods_come_in_pages(server: KubernetesApiServer, account: Path) -> None:
    server.page = 2
    workload = server.add_workload("deployments", "workers", 5)
    pods = [pod.name for pod in server.pods_of(workload)]
    own = executor(server, account, registrations(pods))
    await own.carry_out(chat(4, 4))
    assert server.pods[pods[4]].cost == -1
    assert sum(call == ("get", "/api/v1/namespaces/dynamo/pods") for call in server.calls) == 3
    await own.close()


async def test_pages_without_pods_that_each_name_a_next_one_come_to_an_end(server: KubernetesApiServer, account: Path) -> None:
    server.page = 0
    workload = server.add_workload("deployments", "workers", 5)
    own = executor(server, account, registrations([pod.name for pod in server.pods_of(workload)]))
    await own.carry_out(chat(4, 4))
    assert sum(call == ("get", "/api/v1/namespaces/dynamo/pods") for call in server.calls) == 1
    await own.close()


async def test_a_statefulset_is_scaled_and_its_pods_are_not_marked(server: KubernetesApiServer, account: Path) -> None:
    workload = server.add_workload("statefulsets", "decoders", 3)
    own = executor(server, account, registrations([pod.name for pod in server.pods_of(workload)], role=Role.DECODE))
    await own.carry_out([Decision(pool=DECODE, instances=2, leave=(InstanceId(0),))])
    assert workload.replicas == 2
    assert {pod.cost for pod in server.pods.values()} == {0}
    await own.close()


async def test_a_change_by_another_one_is_refused_and_the_next_decision_is_carried_out(
    server: KubernetesApiServer, account: Path
) -> None:
    workload = server.add_workload("deployments", "workers", 2)
    own = executor(server, account)

    def scale_by_hand(verb: str, path: str) -> None:
        if verb == "patch":
            workload.replicas, workload.version = 9, workload.version + 1

    server.on_call = scale_by_hand
    with pytest.raises(ExecutorFailed, match=r"deployments/workers cannot be scaled: PATCH /apis/apps/v1/.*: 409 Operation"):
        await own.carry_out(chat(4))
    assert workload.replicas == 9
    server.on_call = lambda verb, path: None
    await own.carry_out(chat(4))
    assert workload.replicas == 4
    await own.close()


async def test_an_api_server_that_is_overloaded_is_left_alone_for_as_long_as_it_says(
    server: KubernetesApiServer, account: Path
) -> None:
    workload = server.add_workload("deployments", "workers", 2)
    clock = Clock()
    service_account = ServiceAccount(account)
    http = HttpClient(f"https://127.0.0.1:{server.port}", timeout_s=120.0, tls=service_account.tls)
    workloads = {CHAT: ScaledWorkload(Kind.DEPLOYMENT, "workers")}
    own = KubernetesExecutor(KubernetesApi(http, service_account, "dynamo"), workloads, list, clock=clock)
    server.refusals.append(OVERLOADED)
    with pytest.raises(ExecutorFailed, match="429 Too many requests, please try again later"):
        await own.carry_out(chat(4))
    clock.now += 6.5
    with pytest.raises(ExecutorFailed, match="overloaded, and wants no calls for 0 s"):
        await own.carry_out(chat(4))
    assert len(server.calls) == 1
    clock.now += 0.5
    await own.carry_out(chat(4))
    assert workload.replicas == 4
    await own.close()


async def test_an_api_server_that_is_away_takes_the_next_decision_when_it_is_back(account: Path, certificate: Pair) -> None:
    server = KubernetesApiServer(RULES)
    workload = server.add_workload("deployments", "workers", 2)
    [port] = free_ports(1)
    own = open_kubernetes(options(port, account), list)
    with pytest.raises(ExecutorFailed, match="cannot be reached"):
        await own.carry_out(chat(4))
    with pytest.raises(ExecutorFailed, match="cannot be reached"):
        await own.current([CHAT])
    with serving_kubernetes_api(server, certificate, port):
        await own.carry_out(chat(4))
    assert workload.replicas == 4
    await own.close()


async def test_an_api_server_that_is_silent_is_given_up_in_time(server: KubernetesApiServer, account: Path) -> None:
    server.add_workload("deployments", "workers", 2)
    service_account = ServiceAccount(account)
    http = HttpClient(f"https://127.0.0.1:{server.port}", timeout_s=120.0, tls=service_account.tls)
    workloads = {CHAT: ScaledWorkload(Kind.DEPLOYMENT, "workers")}
    own = KubernetesExecutor(KubernetesApi(http, service_account, "dynamo"), workloads, list, timeout_s=0.0)
    with pytest.raises(ExecutorFailed, match="did not respond within 0 s"):
        await own.carry_out(chat(4))
    with pytest.raises(ExecutorFailed, match="did not respond within 0 s"):
        await own.current([CHAT])
    await own.close()


async def test_what_the_role_does_not_permit_fails_and_the_other_pools_are_scaled(
    server: KubernetesApiServer, account: Path
) -> None:
    server.add_workload("deployments", "workers", 2)
    decoders = server.add_workload("statefulsets", "decoders", 1)
    del server.rules[0]
    own = executor(server, account)
    sentence = 'deployments.apps "workers" is forbidden: User "system:serviceaccount:dynamo:dynamo-planner" cannot get'
    with pytest.raises(ExecutorFailed, match=sentence):
        await own.carry_out([*chat(4), Decision(pool=DECODE, instances=3)])
    assert decoders.replicas == 3
    await own.close()


async def test_without_the_right_to_mark_pods_kubernetes_chooses(
    server: KubernetesApiServer, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workload = server.add_workload("deployments", "workers", 3)
    del server.rules[2]
    own = executor(server, account, registrations([pod.name for pod in server.pods_of(workload)]))
    await own.carry_out(chat(2, 0))
    await own.carry_out(chat(1, 0))
    assert workload.replicas == 1
    assert caplog.text.count("Kubernetes chooses which pods of deployments/workers end") == 1
    await own.close()


async def test_a_pod_that_ends_while_it_is_marked_is_no_failure(server: KubernetesApiServer, account: Path) -> None:
    workload = server.add_workload("deployments", "workers", 3)
    pods = [pod.name for pod in server.pods_of(workload)]

    def end(verb: str, path: str) -> None:
        if verb == "patch" and "/pods/" in path:
            server.pods.pop(pods[0], None)

    server.on_call = end
    own = executor(server, account, registrations(pods))
    await own.carry_out(chat(2, 0))
    assert workload.replicas == 2
    await own.close()


async def test_a_workload_that_is_missing_is_named(server: KubernetesApiServer, account: Path) -> None:
    own = executor(server, account)
    with pytest.raises(
        ExecutorFailed, match=r'^deployments/workers cannot be scaled: .* 404 deployments\.apps "workers" not found$'
    ):
        await own.carry_out(chat(1))
    with pytest.raises(ExecutorFailed, match="404"):
        await own.current([CHAT])
    await own.close()


async def test_a_pool_that_no_option_names_is_left_as_it_is(
    server: KubernetesApiServer, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = executor(server, account)
    for _ in range(2):
        await own.carry_out([Decision(pool=PREFILL, instances=3)])
    assert server.calls == [] and await own.current([PREFILL]) == {}
    assert caplog.text.count("'chat (prefill)' is not scaled") == 1
    await own.close()


async def test_another_authority_is_not_trusted(server: KubernetesApiServer, account: Path) -> None:
    write_ca(trustme.CA(), account / "ca.crt")
    server.add_workload("deployments", "workers", 2)
    own = executor(server, account)
    with pytest.raises(ExecutorFailed, match="certificate verify failed"):
        await own.carry_out(chat(4))
    assert server.calls == []
    await own.close()


def test_an_address_that_is_none_is_a_mistake_of_the_configuration(account: Path) -> None:
    kubernetes = KubernetesOptions(deployments=(ScaledObject(CHAT, "w"),), host="a b/c?d", service_account=account)
    with pytest.raises(ConfigError, match="--kubernetes-host 'a b/c\\?d' with --kubernetes-port 443 is no address"):
        open_kubernetes(ExecutorOptions(kind=ExecutorKind.KUBERNETES, kubernetes=kubernetes).kubernetes, list)


def test_an_address_of_version_6_is_one(account: Path) -> None:
    kubernetes = KubernetesOptions(deployments=(ScaledObject(CHAT, "w"),), host="fd00::1", service_account=account)
    assert isinstance(open_kubernetes(kubernetes, list), KubernetesExecutor)


def test_the_context_checks_names(account: Path) -> None:
    context = ServiceAccount(account).tls()
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
