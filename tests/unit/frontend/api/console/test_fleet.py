from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from dynamo.common.errors import Unavailable
from dynamo.common.kv.events import LoadMessage, LoadReport, message_encoder
from dynamo.common.messaging.nats.connection import OnMessage
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.api.console import fleet as console_fleet
from dynamo.frontend.api.console.fleet import LoadWatch
from dynamo.frontend.serving.dispatch.prefix_reuse import HALF_LIFE_S, PrefixReuse

ONE, OTHER = InstanceId(0x1A), InstanceId(0x2B)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_hit_rate_is_the_cached_share_of_recent_prompts() -> None:
    clock = Clock()
    reuse = PrefixReuse(clock)
    assert reuse.hit_rate(ONE) is None
    reuse.add(ONE, 100, 0)
    reuse.add(OTHER, 100, 100)
    clock.now += HALF_LIFE_S
    reuse.add(ONE, 50, 50)
    assert reuse.hit_rate(ONE) == 0.5  # the 100 tokens of a minute ago count as 50
    assert reuse.hit_rate(OTHER) == 1.0
    reuse.forget(ONE)
    assert reuse.hit_rate(ONE) is None


def test_a_prompt_of_no_tokens_is_no_division_by_zero() -> None:
    reuse = PrefixReuse(Clock())
    reuse.add(ONE, 0, 0)
    assert reuse.hit_rate(ONE) is None


@dataclass
class FakeBus:
    """A bus with one subscription at most."""

    refusals: int = 0
    subject: str = ""
    on_message: OnMessage | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def subscribe(self, subject: str, on_message: OnMessage) -> FakeBus:
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("no connection")
        self.subject, self.on_message = subject, on_message
        self.changed.set()
        return self

    async def close(self) -> None:
        self.on_message = None
        self.changed.set()

    async def turned(self) -> None:
        async with asyncio.timeout(120):
            await self.changed.wait()
        self.changed.clear()

    def report(self, instance: InstanceId, payload: bytes) -> None:
        assert self.on_message is not None
        self.on_message(Endpoint(namespace="ns").load_subject(instance), "", memoryview(payload), False)


async def test_loads_are_followed_while_a_console_looks_and_not_longer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(console_fleet, "WATCHED_S", 0.2)
    bus = FakeBus()
    watch = LoadWatch(bus, "ns", asyncio.get_running_loop().time)
    assert not watch.read()
    await bus.turned()
    assert bus.subject == "dynamo.ns.*.load.*"
    bus.report(ONE, message_encoder.encode(LoadMessage("m", LoadReport(running=3))))
    bus.report(OTHER, b"no report")
    assert "a load report on dynamo.ns.backend.load.2b was dropped" in caplog.text
    assert {key: report.running for key, report in watch.read().items()} == {(ONE, "m"): 3}
    await bus.turned()
    assert bus.on_message is None
    await watch.close()


async def test_reports_of_invented_models_are_kept_up_to_a_bound() -> None:
    bus = FakeBus()
    watch = LoadWatch(bus, "ns", asyncio.get_running_loop().time)
    watch.read()
    await bus.turned()
    for number in range(25_000):
        bus.report(ONE, message_encoder.encode(LoadMessage(f"m{number}", LoadReport(running=1))))
    bus.report(ONE, message_encoder.encode(LoadMessage("m0", LoadReport(running=2))))
    reports = watch.read()
    assert len(reports) == 20_000
    assert reports[ONE, "m0"].running == 2
    await watch.close()


async def test_a_look_after_the_end_or_a_refusal_follows_anew() -> None:
    bus = FakeBus(refusals=1)
    watch = LoadWatch(bus, "ns", asyncio.get_running_loop().time)
    watch.read()
    async with asyncio.timeout(120):
        while bus.refusals:
            await asyncio.sleep(0)
    while bus.on_message is None:
        watch.read()
        await asyncio.sleep(0)
    await watch.close()
