from __future__ import annotations

import pytest

from dynamo.common.process.fair_line import FairLine


def test_owners_have_turns_whatever_each_has_waiting() -> None:
    line = FairLine[int]()
    for owner, item in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)):
        line.append(owner, item)
    assert [line.take() for _ in range(6)] == [1, 4, 5, 2, 6, 3]
    assert not line


def test_the_last_item_of_the_owner_with_most_can_be_taken_back() -> None:
    line = FairLine[int]()
    with pytest.raises(ValueError, match="empty"):
        line.longest()
    for owner, item in (("a", 1), ("b", 2), ("b", 3)):
        line.append(owner, item)
    assert (line.longest(), line.count("b"), line.count("c"), line.last("b")) == ("b", 2, 0, 3)
    assert line.take_last("b") == 3
    assert [line.take(), line.take()] == [1, 2]
