"""The data plane and what it stands on: etcd, NATS, the directory, the router."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dynamo.common.etcd import connect_etcd
from dynamo.common.messaging.client import open_client
from dynamo.common.messaging.connection import connect_nats
from dynamo.common.messaging.store import FileStore
from dynamo.common.model_card import ModelCard
from dynamo.common.tracing import open_tracing
from dynamo.frontend.api.console.fleet import LoadWatch
from dynamo.frontend.api.http.routing_operations import RoutingControl
from dynamo.frontend.config import FrontendConfig, TextOptions
from dynamo.frontend.fleet.directory import open_directory
from dynamo.frontend.fleet.repository import open_repositories
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.frontend.serving.text_models import LoadText, TextModel
from dynamo.frontend.wiring.links import Links
from dynamo.frontend.wiring.metrics import Metrics
from dynamo.frontend.wiring.routing import open_router

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_plane(
    config: FrontendConfig, links: Links, loads: LoadWatch, control: RoutingControl, metrics: Metrics
) -> AsyncIterator[DataPlane]:
    """Open a data plane that has read the directory once. Waits for NATS and etcd, however long that takes.

    Fills `links`, and closes `loads` before the connection that it reads. Raises Unavailable or InvalidRequest if NATS or etcd
    refuse us.
    """
    async with AsyncExitStack() as stack:
        tracing = await stack.enter_async_context(open_tracing(config.trace, "dynamo-frontend"))
        etcd = await stack.enter_async_context(connect_etcd(config.etcd))
        directory = links.directory = await stack.enter_async_context(open_directory(etcd, config.namespace))
        nats = await stack.enter_async_context(connect_nats(config.nats, f"dynamo-frontend {os.getpid()}"))
        links.connection = nats
        metrics.link.follow_reconnects(nats)
        stack.push_async_callback(loads.close)
        client = links.client = await stack.enter_async_context(open_client(nats, config.namespace))
        router = await stack.enter_async_context(open_router(config, control, links, directory, nats, client, metrics.router))
        repositories = await stack.enter_async_context(open_repositories(etcd, config.namespace))
        load_text = _text_loader(FileStore(nats, config.cache_dir.expanduser()), config.text)
        plane = await stack.enter_async_context(
            open_data_plane(directory, client, nats, router, load_text, metrics.frontend, config.serving, tracing, repositories)
        )
        if not directory.ready.is_set():
            log.info("waiting for etcd")
        await directory.ready.wait()  # before, every model would be unknown
        yield plane


def _text_loader(store: FileStore, options: TextOptions) -> LoadText:
    offload = Offload()

    async def load(card: ModelCard) -> TextModel:
        from dynamo.frontend.preprocess import pipeline  # heavy; a fleet of tensor models does without

        return await pipeline.load_text_model(card, store, options.limits, fast_tokenizer=options.fast_tokenizer, offload=offload)

    return load
