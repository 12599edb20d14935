"""Trace and log settings, and the names of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from dynamo.protos import inference_pb2 as pb
from tests.differential.cases import Case
from tests.differential.server_client import Response, ServerClient

_TRACE: tuple[dict[str, Any], ...] = (
    {"trace_level": ["TIMESTAMPS"]},
    {"trace_level": ["TIMESTAMPS", "TENSORS"]},
    {"trace_level": "OFF"},
    {"trace_level": ["NONSENSE"]},
    {"trace_level": ["OFF", "TENSORS"]},
    {"trace_level": ["TENSORS", "NONSENSE"]},
    {"trace_level": ["TENSORS", "TIMESTAMPS"], "trace_rate": "9", "trace_count": "-2"},
    {"trace_level": []},
    {"trace_rate": "5"},
    {"trace_rate": 7},
    {"trace_rate": "x"},
    {"trace_rate": "-1"},
    {"trace_rate": ["1", "2"]},
    {"trace_count": "3"},
    {"trace_count": "-1"},
    {"trace_count": "-2"},
    {"trace_count": "x"},
    {"log_frequency": "2"},
    {"log_frequency": "x"},
    {"trace_file": "/tmp/other"},
    {"trace_mode": "opentelemetry"},
    {"unknown": "1"},
    {"trace_rate": None},
    {"trace_level": None},
    {"trace_count": None},
    {"log_frequency": None},
    {"trace_level": ["OFF"]},
    {},
)
_LOG: tuple[dict[str, Any], ...] = (
    {"log_info": False},
    {"log_info": True},
    {"log_warning": False},
    {"log_warning": True},
    {"log_error": True},
    {"log_info": "x"},
    {"log_info": 1},
    {"log_verbose_level": 1},
    {"log_verbose_level": 0},
    {"log_verbose_level": -1},
    {"log_verbose_level": True},
    {"log_verbose_level": "x"},
    {"log_format": "ISO8601"},
    {"log_format": "default"},
    {"log_format": "nonsense"},
    {"log_format": 1},
    {"log_file": "/tmp/other.log"},
    {"log_file": 1},
    {"unknown": 1},
    {},
)


def cases() -> Iterator[Case]:
    for path in ("/v2/trace/setting", "/v2/models/echo_fp32/trace/setting", "/v2/models/unknown/trace/setting"):
        yield Case("trace settings", f"GET {path}", partial(_rest, "GET", path, b""))
        for body in (*_TRACE, [], 1, "x"):
            yield Case("trace settings", f"POST {path} {body!r}", partial(_rest, "POST", path, body))
        yield Case("trace settings", f"POST {path} no JSON", partial(_rest, "POST", path, b"{"))
        yield Case("trace settings", f"GET {path} at last", partial(_rest, "GET", path, b""))
    for model, body in product(("", "echo_fp32", "unknown"), _TRACE):
        yield Case("trace settings", f"gRPC of {model!r} {body!r}", partial(_trace, model, body))
    yield Case("log settings", "GET", partial(_rest, "GET", "/v2/logging", b""))
    for log in (*_LOG, [], 1):
        yield Case("log settings", f"POST {log!r}", partial(_rest, "POST", "/v2/logging", log))
    yield Case("log settings", "POST no JSON", partial(_rest, "POST", "/v2/logging", b"{"))
    for settings in _LOG:
        yield Case("log settings", f"gRPC {settings!r}", partial(_log, settings))
    yield Case("metrics", "names and labels of inference", _metric_names)


def _rest(method: str, path: str, body: object, client: ServerClient) -> Response:
    return client.rest(method, path, body)


def _trace(model: str, settings: dict[str, Any], client: ServerClient) -> Response:
    message = pb.TraceSettingRequest(model_name=model)
    for key, value in settings.items():
        values = [] if value is None else value if isinstance(value, list) else [str(value)]
        message.settings[key].value.extend(values)
    return client.call("TraceSetting", message)


def _log(settings: dict[str, Any], client: ServerClient) -> Response:
    message = pb.LogSettingsRequest()
    for key, value in settings.items():
        match value:
            case bool():
                message.settings[key].bool_param = value
            case int():
                message.settings[key].uint32_param = value % 2**32
            case str():
                message.settings[key].string_param = value
    return client.call("LogSettings", message)


def _metric_names(client: ServerClient) -> Response:
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(nv_\w+)\{([^}]*)\}", client.metrics(), re.MULTILINE):
        if name.startswith("nv_inference") and 'model="echo_fp32"' in labels:
            found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    return Response("OK", body={name: sorted(found[name]) for name in sorted(found)})
