"""A worker's registration against a simulated etcd: whatever happens to lease and keys, etcd ends up as the worker wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from dynamo.common.discovery import Instance, encode_registration
from dynamo.common.etcd import client as etcd_client
from dynamo.common.etcd import connect_etcd
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.options import EtcdOptions
from dynamo.protos import etcd_pb2 as pb
from dynamo.worker.process.registration import CHECK_S, LEASE_TTL_S, Registration, registered
from tests.simulation.clock import Process, SimulatedLoop
from tests.simulation.etcd_server import SimulatedEtcd, SimulatedTransport
from tests.support.waiting import expiring

OFFERS = st.sets(st.sampled_from(["a", "b", "c"]))
AWAY_S = st.sampled_from([0.1, 4.0, 11.0, 25.0])
CALM_S = LEASE_TTL_S + 10.0
"""Within it a lease runs out, is granted again, and all keys are put under it."""


def instance(model: str) -> Instance:
    card = ModelCard(name=model, kind=ModelKind.TENSOR)
    return Instance(id=InstanceId(1), endpoint=Endpoint(), subject="s", card=card, started_at=0.0)


class Registrations(RuleBasedStateMachine):
    registration: Registration
    is_tampered = False
    """Keys were changed from outside, which the worker sees when it reads them the next time."""

    @initialize(models=OFFERS)
    def start(self, models: set[str]) -> None:
        self.loop = SimulatedLoop()
        self.etcd = SimulatedEtcd(self.loop, Random(0))
        self.process = Process("worker")
        self.models = models
        self.stack = ExitStack()
        self.stack.enter_context(
            mock.patch.object(etcd_client, "Transport", lambda options: SimulatedTransport(options, self.etcd))
        )
        self.main = self.run(self._begin())
        self.pass_time(1.0)

    async def _begin(self) -> asyncio.Task[None]:
        self.leaving = asyncio.Event()
        return self.process.start(self._serve())

    async def _serve(self) -> None:
        async with (
            connect_etcd(EtcdOptions(endpoints=("http://127.0.0.1:2379",))) as etcd,
            registered(etcd, [instance(model) for model in sorted(self.models)]) as self.registration,
        ):
            await self.leaving.wait()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @rule(seconds=st.sampled_from([0.001, 0.5, 4.0, 12.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(away_s=AWAY_S, lose_data=st.booleans())
    def etcd_restarts(self, away_s: float, lose_data: bool) -> None:
        self.etcd.stop()
        self.pass_time(away_s)
        self.etcd.start(lose_data=lose_data)

    @rule(away_s=AWAY_S)
    def the_worker_is_cut_off(self, away_s: float) -> None:
        self.etcd.cut_off(self.process)
        self.pass_time(away_s)
        self.etcd.let_in(self.process)

    @rule(away_s=AWAY_S)
    def the_worker_hangs(self, away_s: float) -> None:
        self.process.pause()
        self.pass_time(away_s)
        self.run(self._resumed())

    async def _resumed(self) -> None:
        self.process.resume()

    @rule()
    def the_leases_are_revoked(self) -> None:
        for lease in list(self.etcd.leases):
            self.etcd.respond(pb.LeaseRevokeRequest(ID=lease))

    @rule()
    def the_keys_are_deleted(self) -> None:
        self.is_tampered = True
        for key in list(self.etcd.keys):
            self.etcd.respond(pb.DeleteRangeRequest(key=key))

    @rule()
    def the_keys_are_overwritten(self) -> None:
        self.is_tampered = True
        for key in list(self.etcd.keys):
            self.etcd.respond(pb.PutRequest(key=key, value=b"foreign"))

    @rule(models=OFFERS)
    def the_offer_changes(self, models: set[str]) -> None:
        self.models = models
        self.run(self._update(models))

    async def _update(self, models: set[str]) -> None:
        update = self.registration.update([instance(model) for model in sorted(models)], timeout_s=expiring(2.0))
        await self.process.context.copy().run(asyncio.get_running_loop().create_task, update)

    @rule()
    def all_is_calm(self) -> None:
        """The keys are those of the offer, under the one lease of the worker."""
        self.pass_time(CALM_S + (CHECK_S if self.is_tampered else 0.0))
        self.is_tampered = False
        offers = [instance(model) for model in self.models]
        assert {kv.key.decode(): kv.value for kv in self.etcd.keys.values()} == {
            offer.key: encode_registration(offer) for offer in offers
        }
        assert {kv.lease for kv in self.etcd.keys.values()} <= self.etcd.leases.keys()
        assert len(self.etcd.leases) == 1
        assert self.registration.registered.is_set()

    def teardown(self) -> None:
        """Nothing stays when the worker leaves."""
        if not hasattr(self, "main"):
            return
        self.all_is_calm()
        self.leaving.set()
        self.run(asyncio.wait_for(self.main, 120))
        assert not self.etcd.keys
        assert not self.etcd.leases
        self.stack.close()
        self.loop.close()


TestRegistrations = Registrations.TestCase
TestRegistrations.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
