"""The names of a namespace in etcd: one document, which every frontend follows and any of them may change."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from dynamo.common.etcd import Etcd
from dynamo.common.etcd.document import DocumentType, EtcdDocument
from dynamo.common.names import model_names_key
from dynamo.common.process.background import running
from dynamo.frontend.names.rules import Rule, Rules, check_rules

log = logging.getLogger(__name__)

Change = Callable[[dict[str, Rule]], None]
"""Changes a copy of the table in place. May raise DynamoError."""


class NameTable:
    """The rules by name. Lookups are served from memory."""

    def __init__(self, etcd: Etcd, namespace: str) -> None:
        self._document: EtcdDocument[Mapping[str, Rule]] = EtcdDocument(
            etcd, model_names_key(namespace), DocumentType("names of models", {}, _encode, _decode), _log_change
        )
        self.ready = self._document.ready
        """Set once the table has been read, or etcd refused to show it."""

    def __repr__(self) -> str:
        return f"<NameTable with {len(self.rules)} names in {self._document}>"

    @property
    def rules(self) -> Mapping[str, Rule]:
        return self._document.value

    async def follow(self) -> None:
        """Apply changes in etcd until cancelled."""
        await self._document.follow()

    async def change(self, change: Change) -> None:
        """Change the table for all frontends. Raises InvalidRequest for a table that is not valid, Unavailable without etcd."""

        def changed(current: Mapping[str, Rule]) -> dict[str, Rule]:
            rules = dict(current)
            change(rules)
            return rules

        await self._document.change(changed)


def _encode(rules: Mapping[str, Rule]) -> bytes:
    check_rules(rules)
    return msgspec.json.encode(Rules(dict(rules)))


def _decode(data: bytes) -> Mapping[str, Rule]:
    rules = msgspec.json.decode(data, type=Rules).rules
    check_rules(rules)
    return rules


def _log_change(rules: Mapping[str, Rule]) -> None:
    log.info("%d names of models are in use", len(rules))


@asynccontextmanager
async def open_names(etcd: Etcd, namespace: str) -> AsyncIterator[NameTable]:
    """Follow the names of a namespace while the body runs. Does not wait for etcd: see `ready`."""
    table = NameTable(etcd, namespace)
    async with running(table.follow(), "names of models"):
        yield table
