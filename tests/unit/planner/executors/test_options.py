"""The options of executors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dynamo.common.config import ConfigError, group, load
from dynamo.common.model_card import Role
from dynamo.common.scaling.pool import Pool
from dynamo.planner.executors.options import ExecutorKind, ExecutorOptions, ScaledObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A planner's."""

    executor: ExecutorOptions = group("Executor", default=ExecutorOptions)


def read(*argv: str, **environ: str) -> ExecutorOptions:
    return load(Config, argv, environ, program="dynamo-planner").executor


def test_workloads_are_named_by_model_and_role() -> None:
    options = read(
        "--executor=kubernetes",
        "--kubernetes-deployment=org/chat.v1:prefill=dynamo-worker-prefill",
        "--kubernetes-deployment=chat=dynamo-worker",
        "--kubernetes-statefulset=chat:decode=workers.a",
        KUBERNETES_SERVICE_HOST="10.0.0.1",
        KUBERNETES_SERVICE_PORT="6443",
        POD_NAMESPACE="serving",
    )
    assert options.kind is ExecutorKind.KUBERNETES
    assert options.kubernetes.deployments == (
        ScaledObject(Pool("org/chat.v1", Role.PREFILL), "dynamo-worker-prefill"),
        ScaledObject(Pool("chat"), "dynamo-worker"),
    )
    assert options.kubernetes.statefulsets == (ScaledObject(Pool("chat", Role.DECODE), "workers.a"),)
    assert (options.kubernetes.host, options.kubernetes.port, options.kubernetes.namespace) == ("10.0.0.1", 6443, "serving")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--executor=docker"], "--executor: 'docker' is not one of"),
        (["--executor=kubernetes", "--kubernetes-host=h"], "--executor kubernetes needs a --kubernetes-deployment or"),
        (["--executor=kubernetes", "--kubernetes-deployment=m=w"], "--executor kubernetes runs in a pod, or needs"),
        (["--kubernetes-deployment=m"], "--kubernetes-deployment: 'm' is not of the form MODEL=NAME or MODEL:ROLE=NAME"),
        (["--kubernetes-deployment=m=Worker_1"], "--kubernetes-deployment: 'm=Worker_1' is not of the form"),
        (["--kubernetes-deployment=m=w/scale"], "--kubernetes-deployment: 'm=w/scale' is not of the form"),
        (["--kubernetes-deployment=m:both=w"], "--kubernetes-deployment: 'm:both=w' names the role 'both'; there are aggre"),
        (["--kubernetes-deployment==w"], "--kubernetes-deployment: '=w' is not usable: the name is empty"),
        (["--kubernetes-deployment=m=a", "--kubernetes-statefulset=m=b"], "--kubernetes-deployment and --kubernetes-stat"),
        (["--kubernetes-deployment=m=a,n=a"], "--kubernetes-deployment and --kubernetes-statefulset name 'a' twice"),
        (["--kubernetes-namespace=../x"], "--kubernetes-namespace: '../x' is not the name of an object"),
        (["--virtual-wait-s=-1"], "--virtual-wait-s: -1 is below 0"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*flags)
    assert str(caught.value).startswith(sentence)


def test_the_waiting_time_has_the_variable_of_the_virtual_connector_too() -> None:
    assert read().virtual_wait_s == 1800.0
    assert read(SCALING_MAX_WAIT_TIME="60").virtual_wait_s == 60.0
