"""How many items a page of a list has."""

from __future__ import annotations

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.openai.store.pages import limit_of


@pytest.mark.parametrize("text", ["", "0", "101", "-1", "1.0", "x", "000000001999999", "9" * 5000])
def test_a_limit_that_is_no_number_within_the_bounds_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="'limit' must be an integer from 1 to 100"):
        limit_of({"limit": text})


def test_a_limit_has_a_default() -> None:
    assert (limit_of({}), limit_of({"limit": "100"}), limit_of({"limit": "007"})) == (20, 100, 7)
