"""Bytes of a request that arrive; what protocols do with a capacity lies with their tests."""

from __future__ import annotations

import pytest

from dynamo.common.errors import InvalidRequest, RateLimited
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.config import CapacityOptions

QUARTER = 2**18


@pytest.mark.parametrize("stays_held", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_bytes_have_arrived_when_the_body_ends_and_stay_held_or_do_not(*, stays_held: bool, fails: bool) -> None:
    capacity = Capacity(CapacityOptions(max_buffered_bytes=4 * QUARTER))
    with capacity.holding() as occupied:
        try:
            with occupied.arriving("team", stays_held=stays_held) as arrive:
                arrive(QUARTER)
                arrive(QUARTER)
                with pytest.raises(RateLimited):  # one message of the key waits, with as much as others have left
                    capacity.hold_waiting("team", QUARTER, 0)
                if fails:
                    raise InvalidRequest("the body is wrong")
        except InvalidRequest:
            assert fails
        assert capacity.buffered_bytes == (2 * QUARTER if stays_held else 0)
        capacity.hold_waiting("team", QUARTER, 0)
    assert capacity.buffered_bytes == QUARTER
