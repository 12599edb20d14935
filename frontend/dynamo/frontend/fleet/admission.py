"""Responds to instances that ask whether this process has admitted them: `dynamo.common.admission` says what that means.

An instance asks until it is ready, so a fleet at rest exchanges nothing, and a frontend remembers nothing of it. What it says is
computed when it is asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from dynamo.common.admission import AdmissionQuery, AdmissionReport
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.model_card import ModelCard
from dynamo.common.names import InstanceId, admissions_subject, admitted_reply, instance_of
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.fleet.peers.exchange import PeerBus


class Admissions:
    """Which instances this process has admitted."""

    def __init__(
        self, directory: Directory, has_text: Callable[[ModelCard], bool], is_in_step: Callable[[InstanceId, str], bool]
    ) -> None:
        """`has_text` says whether tokenizer and template of a card are at hand, `is_in_step` whether a cache is known."""
        self._directory = directory
        self._has_text = has_text
        self._is_in_step = is_in_step

    def has_admitted(self, instance: InstanceId, models: Sequence[str]) -> bool:
        """Return whether requests for each of `models` may be sent to `instance` now."""
        cards = {registered.card.name: registered.card for registered in self._directory.registrations_of(instance)}
        return all(
            (card := cards.get(model)) is not None and self._has_text(card) and self._is_in_step(instance, model)
            for model in models
        )


@asynccontextmanager
async def reported_admissions(bus: PeerBus, namespace: str, origin: str, admissions: Admissions) -> AsyncIterator[None]:
    """Respond to the instances of a namespace while the body runs. `origin` names this process."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(AdmissionQuery)
    unreadable = Unreadable("a query about an admission")

    def asked(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        query = unreadable.read(decoder, subject, payload)
        if query is None:
            return
        try:
            instance = instance_of(subject)
        except ValueError as error:
            return unreadable.drop(subject, error)
        report = AdmissionReport(origin, query.number, admissions.has_admitted(instance, query.models))
        bus.publish_nowait(admitted_reply(subject), encoder.encode(report))

    subscription = await bus.subscribe(admissions_subject(namespace), asked)
    try:
        yield
    finally:
        await subscription.close()
