"""The executor that the options name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from dynamo.common.discovery import Instance
from dynamo.common.etcd import Etcd
from dynamo.planner.executors.base import Executor
from dynamo.planner.executors.kubernetes.executor import open_kubernetes
from dynamo.planner.executors.options import ExecutorKind, ExecutorOptions
from dynamo.planner.executors.virtual import VirtualExecutor


@asynccontextmanager
async def open_executor(
    options: ExecutorOptions, namespace: str, etcd: Etcd, registrations: Callable[[], Iterable[Instance]]
) -> AsyncIterator[Executor | None]:
    """Open what decisions are given to in addition to the key with the targets; None: a program follows this, or a metric.

    `namespace` is that of the project, `registrations` returns all instances as they are now. Waits for nothing. Raises
    ConfigError.
    """
    executor: Executor | None = None
    match options.kind:
        case ExecutorKind.KUBERNETES:
            executor = open_kubernetes(options.kubernetes, registrations)
        case ExecutorKind.VIRTUAL:
            executor = VirtualExecutor(etcd, namespace, model=options.virtual_model, wait_s=options.virtual_wait_s)
    try:
        yield executor
    finally:
        if executor is not None:
            await executor.close()
