"""Fields of requests that this server does not have: ignored and counted, or refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from dynamo.common.errors import InvalidRequest

MAX_NAMES = 100
OTHER_FIELD = "other"
"""Counts the names past that number, and those that are no identifiers: clients choose them."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_log = logging.getLogger(__name__)


def _uncounted(endpoint: str, field: str) -> None:
    pass


class UnknownFields:
    """Decides what happens to fields that this server does not have."""

    def __init__(self, *, refuse: bool = False, count: Callable[[str, str], None] = _uncounted) -> None:
        """`count` is called with the endpoint and the name of each field that is ignored; there are at most `MAX_NAMES` names."""
        self._refuse = refuse
        self._count = count
        self._names: set[str] = set()

    def ignore(self, endpoint: str, field: str) -> None:
        """Count a field. Raises InvalidRequest if unknown fields are refused."""
        if self._refuse:
            shown = field if len(field) <= 200 else field[:199] + "…"
            raise InvalidRequest(f"unknown field '{shown}'", param=shown)
        if field not in self._names:
            if len(self._names) == MAX_NAMES or not _NAME.fullmatch(field):
                return self._count(endpoint, OTHER_FIELD)
            self._names.add(field)
            _log.warning("a request to %s has the field '%s', which this server does not have: it is ignored", endpoint, field)
        self._count(endpoint, field)
