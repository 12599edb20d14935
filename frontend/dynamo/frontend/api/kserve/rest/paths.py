"""Which resource a path below /v2 names.

A model's name may hold `/`, as it is or as `%2F`: everything up to `/versions/…` or the last word belongs to it. Only a name that
ends like one of these paths has to be encoded. Versions are words, not numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote


class Resource(StrEnum):
    SERVER = "server"
    LIVE = "live"
    READY = "ready"
    INDEX = "index"
    LOAD = "load"
    UNLOAD = "unload"
    ALL_STATISTICS = "all statistics"
    MODEL = "model"
    MODEL_READY = "model ready"
    CONFIG = "config"
    STATISTICS = "statistics"
    INFER = "infer"
    GENERATE = "generate"
    GENERATE_STREAM = "generate stream"
    REFUSED = "refused"
    """A call of Triton's that this server does not do; `Target.model` is its name in `kserve_messages.REFUSED`."""


@dataclass(frozen=True, slots=True)
class Target:
    resource: Resource
    model: str = ""
    version: str = ""
    repository: str = ""


_LAST_WORDS = {
    "ready": Resource.MODEL_READY,
    "config": Resource.CONFIG,
    "stats": Resource.STATISTICS,
    "infer": Resource.INFER,
    "generate": Resource.GENERATE,
    "generate_stream": Resource.GENERATE_STREAM,
}
_MEMORIES = {"systemsharedmemory": "SystemSharedMemory", "cudasharedmemory": "CudaSharedMemory"}


def find(raw_path: bytes) -> Target | None:
    """What `raw_path`, which is still percent-encoded, names; None if nothing. It begins with /v2."""
    words = [unquote(word) for word in raw_path.decode("latin-1").split("/")[2:]]
    if "" in words:
        return None
    match words:
        case []:
            return Target(Resource.SERVER)
        case ["health", "live"]:
            return Target(Resource.LIVE)
        case ["health", "ready"]:
            return Target(Resource.READY)
        case ["models", "stats"]:
            return Target(Resource.ALL_STATISTICS)
        case ["repository", "index"]:
            return Target(Resource.INDEX)
        case ["repository", repository, "index"]:
            return Target(Resource.INDEX, repository=repository)
        case ["trace", "setting"] | ["models", _, *_, "trace", "setting"]:
            return Target(Resource.REFUSED, "TraceSetting")
        case ["logging"]:
            return Target(Resource.REFUSED, "LogSettings")
        case ["repository", "models", _, *_, "load" | "unload" as word]:
            return Target(Resource(word), "/".join(words[2:-1]))
        case ["repository", repository, "models", _, *_, "load" | "unload" as word]:
            return Target(Resource(word), "/".join(words[3:-1]), repository=repository)
        case ["systemsharedmemory" | "cudasharedmemory" as memory, *_, "status" | "register" | "unregister" as word]:
            return Target(Resource.REFUSED, f"{_MEMORIES[memory]}{word.capitalize()}")
        case ["models", _, *_]:
            return _model(words[1:])
        case _:
            return None


def _model(words: Sequence[str]) -> Target:
    resource, version = Resource.MODEL, ""
    if len(words) > 1 and words[-1] in _LAST_WORDS:
        resource, words = _LAST_WORDS[words[-1]], words[:-1]
    if len(words) > 2 and words[-2] == "versions":
        version, words = words[-1], words[:-2]
    return Target(resource, "/".join(words), version)
