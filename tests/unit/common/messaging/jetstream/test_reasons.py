"""What operators read of JetStream's errors."""

from __future__ import annotations

import pytest
from nats.js.errors import APIError, ServiceUnavailableError

from dynamo.common.messaging.jetstream.reasons import reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ServiceUnavailableError(), "runs without JetStream"),
        (ServiceUnavailableError(code=503, description="system is busy", err_code=10008), "system is busy"),
        (APIError(code=400, description="no", err_code=1), "no"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_says_what_is_wrong(error: Exception, reason: str) -> None:
    assert reason in reason_of(error)
