"""What the operations of KServe v2 declare, over gRPC and HTTP alike."""

from __future__ import annotations

from dataclasses import replace

from dynamo.frontend.api.declaration import TEXT, Reads, changed, shown
from dynamo.frontend.security.surfaces import Surface

INFER = replace(TEXT, reads=Reads.TENSORS, copies=1)
REST_INFER = replace(INFER, copies=2)
"""Over HTTP the message for workers is made beside the body."""
GENERATE = TEXT
METADATA = shown(Surface.METADATA)
CONFIG = shown(Surface.MODEL_CONFIG)
STATISTICS = shown(Surface.STATISTICS)
INDEX = shown(Surface.MODEL_REPOSITORY)
LOAD = changed(Surface.MODEL_REPOSITORY, reads=Reads.TENSORS, copies=3, deadline_s=None)  # that of --repository-timeout
UNLOAD = replace(LOAD, reads=Reads.LITTLE)
TRACE = shown(Surface.TRACE)
SET_TRACE = changed(Surface.TRACE, reads=Reads.LITTLE, copies=1, deadline_s=60.0)
LOG = shown(Surface.LOGGING)
SET_LOG = replace(SET_TRACE, surface=Surface.LOGGING)
REGIONS = shown(Surface.SHARED_MEMORY)
SET_REGION = replace(SET_TRACE, surface=Surface.SHARED_MEMORY)
