from __future__ import annotations

import io

import pytest
from rich.console import Console

from dynamo.local.top import Counters, Frontend, watch

BEFORE = """
# TYPE dynamo_frontend_requests counter
dynamo_frontend_requests_total{model="a",status="success"} 10
dynamo_frontend_requests_total{model="b",status="success"} 1
dynamo_frontend_requests_total{model="a",status="error"} 5
# TYPE dynamo_frontend_time_to_first_token_seconds histogram
dynamo_frontend_time_to_first_token_seconds_bucket{model="a",le="0.1"} 4
dynamo_frontend_time_to_first_token_seconds_bucket{model="a",le="1.0"} 4
dynamo_frontend_time_to_first_token_seconds_bucket{model="a",le="+Inf"} 4
dynamo_frontend_time_to_first_token_seconds_count{model="a"} 4
dynamo_frontend_time_to_first_token_seconds_sum{model="a"} 0.2
"""
AFTER = (
    BEFORE.replace('"a",status="success"} 10', '"a",status="success"} 30')
    .replace('"b",status="success"} 1', '"b",status="success"} 3')
    .replace('le="0.1"} 4', 'le="0.1"} 8')
    .replace('le="1.0"} 4', 'le="1.0"} 12')
    .replace('le="+Inf"} 4', 'le="+Inf"} 14')
)
FIRST_TOKEN = "time_to_first_token_seconds"


def test_rates_and_quantiles_are_of_the_time_between_two_scrapes() -> None:
    before, after = Counters(BEFORE, scraped_at=10.0), Counters(AFTER, scraped_at=12.0)
    assert after.rate("requests_total|success", before) == 11  # both models' together
    assert after.rate("requests_total|error", before) == 0
    assert after.quantile(FIRST_TOKEN, 0.2, before) == pytest.approx(0.05)  # the second of four in a bucket up to 0.1
    assert after.quantile(FIRST_TOKEN, 0.6, before) == pytest.approx(0.1 + 0.9 / 2)
    assert after.quantile(FIRST_TOKEN, 0.99, before) == 1.0  # beyond the last bound, which is all that is known
    assert after.quantile(FIRST_TOKEN, 0.5, after) is None
    assert after.quantile("nothing", 0.5, before) is None


class Ending(Frontend):
    """A frontend that leaves after two screens."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:0", "")
        self._left = 7

    def read(self, path: str) -> bytes:
        self._left -= 1
        if not self._left:
            raise OSError("left")
        fleet = b'{"namespace": "n", "router_mode": "kv", "state": "ready", "explains": false, "models": []}'
        return AFTER.encode() if path == "/metrics" else fleet


def test_into_a_pipe_one_screen_follows_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.local.top.PERIOD_S", 0)
    printed = io.StringIO()
    with pytest.raises(OSError, match="left"):
        watch(Ending(), once=False, console=Console(file=printed, width=160))
    assert printed.getvalue().count("kv routing") == 2
