from __future__ import annotations

import gc
import secrets
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.servers import ETCD_FLAGS, EtcdServer, NatsServer, Server, serving

settings.register_profile("dynamo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dynamo")  # no test asserts a time, and a busy machine is not a failure


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests that leave it running. A test that stops it starts its own with `start_etcd`."""
    with serving(EtcdServer(tmp_path_factory.mktemp("etcd"), fsync=False, extra_flags=ETCD_FLAGS)) as server:
        yield server


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One nats-server for all tests that leave it running. A test that stops it starts its own with `start_nats`."""
    with serving(NatsServer(tmp_path_factory.mktemp("nats"))) as server:
        yield server


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses, so that tests can share the servers."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts alone free what the test drops."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the logs of the shared servers that a failed test used."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for name, value in item.funcargs.items():
            if isinstance(value, Server):
                report.sections.append((f"end of {name}'s log", value.log()))
    return report
