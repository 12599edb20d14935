"""The executor that the options name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme

from dynamo.common.config import ConfigError
from dynamo.common.scaling.pool import Pool
from dynamo.planner.executors.choice import open_executor
from dynamo.planner.executors.kubernetes.executor import KubernetesExecutor
from dynamo.planner.executors.options import ExecutorKind, ExecutorOptions, KubernetesOptions, ScaledObject
from tests.support.certificates import write_ca
from tests.support.fake_etcd import FakeEtcd

CHAT = Pool("chat")


@pytest.mark.parametrize("kind", [ExecutorKind.TARGETS, ExecutorKind.NONE])
async def test_programs_that_follow_the_key_or_the_metric_are_told_nothing_else(kind: ExecutorKind) -> None:
    etcd: Any = FakeEtcd()
    async with open_executor(ExecutorOptions(kind=kind), "ns", etcd, list) as executor:
        assert executor is None


async def test_the_virtual_connector_is_chosen_by_its_name() -> None:
    etcd: Any = FakeEtcd()
    await etcd.put("v1/ns/planner/num_decode_workers", b"4")
    async with open_executor(ExecutorOptions(kind=ExecutorKind.VIRTUAL), "ns", etcd, list) as executor:
        assert executor is not None and await executor.current([CHAT]) == {CHAT: 4}


async def test_kubernetes_is_chosen_where_there_is_a_service_account(tmp_path: Path) -> None:
    kubernetes = KubernetesOptions(deployments=(ScaledObject(CHAT, "w"),), host="127.0.0.1", service_account=tmp_path)
    options = ExecutorOptions(kind=ExecutorKind.KUBERNETES, kubernetes=kubernetes)
    etcd: Any = FakeEtcd()
    with pytest.raises(ConfigError, match=f"the service account's file {tmp_path}/token cannot be read"):
        async with open_executor(options, "ns", etcd, list):
            pass
    write_ca(trustme.CA(), tmp_path / "ca.crt")
    (tmp_path / "token").write_text("token")
    (tmp_path / "namespace").write_text("dynamo")
    async with open_executor(options, "ns", etcd, list) as executor:
        assert isinstance(executor, KubernetesExecutor)
