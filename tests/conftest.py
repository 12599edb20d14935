from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from dynamo.common.process.memory import give_back
from tests.gate.skips import skipped_tests
from tests.support.environments import files_of_other_environments
from tests.support.memory import peak_bytes, resident_bytes
from tests.support.servers import LASTING_ETCD_FLAGS, EtcdServer, NatsServer, Server, serving

_GARBAGE_BYTES = 64 * 2**20
_MOST_BYTES = 1800 * 2**20
"""What a test process may have at its peak: 580 MiB are modules and tests; a model or the largest requests come on top, such as
forms of 64 MiB."""
_PEAKS = pytest.StashKey[list[int]]()
"""The peak of each process that ran tests, in bytes."""
_RESIDENT = pytest.StashKey[int]()
"""Bytes that the process held after garbage was collected last."""

# No test asserts a time: a busy machine is no failure. Each run has the same examples; `--hypothesis-profile new` has others.
settings.register_profile("new", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dynamo", settings.get_profile("new"), derandomize=True)
settings.load_profile("dynamo")

# Threads for matrices wait for one another in loops: on a busy machine a small model's 20 ms of CPU become a second.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# No test trusts the system's authorities, which each client of httpx2 would read: 20 ms for each of some hundred clients.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent / "support")  # which holds no certificates

collect_ignore = files_of_other_environments()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Exempts what collection makes from garbage collection.

    It is half a million objects that stay until the end, and Python searches all objects only when a quarter more of them have
    appeared: garbage of tests would stay until then, and each search would take 0.3 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)  # as our processes do
        gc.enable()
        session.config.stash[_RESIDENT] = resident_bytes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Collects garbage where much memory waits for it: a frontend in the process leaves few objects in cycles, with 14 MB.

    What is left is exempt from then on: modules that tests import are a million objects, and each search would take 0.3 s. So it
    is after a test in which Python, or the test itself, searched all objects: the next search is of those that are new.

    What was freed is given back: threads of a thousand tests leave arenas with holes, 130 MB in one file of tests.
    """
    searches = _full_collections()
    result = yield
    if _full_collections() > searches or resident_bytes() > item.config.stash[_RESIDENT] + _GARBAGE_BYTES:
        gc.collect()
        gc.freeze()
        give_back()
        item.config.stash[_RESIDENT] = resident_bytes()
    return result


def _full_collections() -> int:
    collections: int = gc.get_stats()[2]["collections"]
    return collections


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Notes the memory of each process that ran tests, and fails a run in which one took too much."""
    peaks = session.config.stash.setdefault(_PEAKS, [])
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["peak_bytes"] = peak_bytes()
    elif not peaks:
        peaks.append(peak_bytes())
    if max(peaks, default=0) > _MOST_BYTES and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if peak := getattr(node, "workeroutput", {}).get("peak_bytes"):
        node.config.stash.setdefault(_PEAKS, []).append(peak)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    peak = max(config.stash.get(_PEAKS, []), default=0)
    most = f", more than the {_MOST_BYTES >> 20} MiB that are allowed" if peak > _MOST_BYTES else ""
    if skipped := skipped_tests(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("skipped tests")
    for line in skipped:
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"The largest test process had {peak >> 20} MiB{most}.", red=bool(most))


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests that leave it running. A test that stops it starts its own with `start_etcd`."""
    with serving(EtcdServer(tmp_path_factory.mktemp("etcd"), fsync=False, extra_flags=LASTING_ETCD_FLAGS)) as server:
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
