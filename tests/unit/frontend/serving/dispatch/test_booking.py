from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.errors import Cancelled, InvalidRequest, Overloaded
from dynamo.common.names import InstanceId
from dynamo.frontend.config import CircuitOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.dispatch.booking import Booker, Booking
from dynamo.frontend.serving.dispatch.circuits import Circuits
from tests.support.fakes import FakeClient, FakeStream, RecordingRouter, instance


class Bench:
    def __init__(self) -> None:
        self.router, self.client = RecordingRouter(), FakeClient()
        self.released = 0
        circuits = Circuits(CircuitOptions(), lambda model: (), lambda: 0.0, lambda model, count, opened: None)
        self.booker = Booker(self.router, self.client, circuits, self.on_released)

    def on_released(self, instance: InstanceId) -> None:
        self.released += 1

    def book(self) -> Booking:
        metrics = FrontendMetrics(CollectorRegistry()).for_model("adder")
        work = Work(model="adder", verb="infer", body=b"", metrics=metrics)
        call = Call(request_id="r", account=ANONYMOUS)
        return self.booker.book(work, call, [instance(1)], deadline=None, failed_attempts=0)


async def test_a_booking_is_on_the_router_s_books_until_it_is_released() -> None:
    b = Bench()
    booking = b.book()
    assert len(b.router.open) == 1
    booking.release(None)
    assert (b.router.outcomes, b.released) == ([None], 1)


async def test_a_booking_that_is_cancelled_cancels_its_request() -> None:
    b = Bench()
    error = Overloaded("full")
    b.book().cancel(error)
    assert b.client.streams[0].cancelled
    assert (b.router.outcomes, b.released) == ([error], 1)


async def test_a_booking_is_released_once() -> None:
    b = Bench()
    booking = b.book()
    booking.release(None)
    booking.cancel(Cancelled())
    assert (b.router.outcomes, b.released) == ([None], 1)


async def test_a_request_that_cannot_be_opened_is_not_booked() -> None:
    def refuse(stream: FakeStream) -> None:
        raise InvalidRequest("too large")

    b = Bench()
    b.client.respond = refuse
    with pytest.raises(InvalidRequest):
        b.book()
    assert not b.router.open
    assert b.released == 1


async def test_a_booking_shows_where_it_is() -> None:
    b = Bench()
    booking = b.book()
    assert repr(booking) == f"<Booking {booking.id} at instance 1, sent>"
    booking.release(None)
    assert repr(booking) == f"<Booking {booking.id} at instance 1, released>"
