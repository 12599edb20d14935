"""Searches in a thread of their own."""

from __future__ import annotations

import logging
import threading

import pytest

from dynamo.planner.whatif.background import search_thread
from tests.support.waiting import WAIT_S


def test_searches_run_in_another_thread_one_after_the_other() -> None:
    ran: list[tuple[str, int]] = []
    with search_thread() as thread:
        done = threading.Event()
        thread.start(lambda: ran.append(("first", threading.get_ident())))
        thread.start(lambda: ran.append(("second", threading.get_ident())))
        thread.start(done.set)
        assert done.wait(WAIT_S)
    assert [name for name, _ in ran] == ["first", "second"]
    assert threading.get_ident() not in {thread_id for _, thread_id in ran}


def test_a_search_that_fails_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    done = threading.Event()
    with caplog.at_level(logging.ERROR), search_thread() as thread:
        thread.start(fail)
        thread.start(done.set)
        assert done.wait(WAIT_S)
    assert "a what-if failed" in caplog.text
