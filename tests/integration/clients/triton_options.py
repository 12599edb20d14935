"""Triton's clients with what their options offer: TLS, plugins that authenticate, compression, timeouts.

    python -m tests.integration.clients.triton_options GRPC_PORT HTTP_PORT CA_FILE KEY

Prints one JSON line per check. A program of its own: tritonclient's messages and ours cannot be loaded into one process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import gevent.ssl
import numpy as np
import tritonclient.grpc as by_grpc
import tritonclient.grpc.auth
import tritonclient.http as by_http
import tritonclient.http.auth
from tritonclient.utils import InferenceServerException

from tests.support.waiting import WAIT_S, expiring

GRPC_PORT, HTTP_PORT, CA_FILE, KEY = sys.argv[1:]
HALF_A_MINUTE = {"delay_ms": 30_000}


class BearerGrpc(by_grpc.InferenceServerClientPlugin):  # type: ignore[misc]
    def __call__(self, request: Any) -> None:
        request.headers["authorization"] = f"Bearer {KEY}"


class BearerHttp(by_http.InferenceServerClientPlugin):  # type: ignore[misc]
    def __call__(self, request: Any) -> None:
        request.headers["authorization"] = f"Bearer {KEY}"


def grpc_client(plugin: Any = None) -> by_grpc.InferenceServerClient:
    client = by_grpc.InferenceServerClient(f"localhost:{GRPC_PORT}", ssl=True, root_certificates=CA_FILE)
    if plugin is not None:
        client.register_plugin(plugin)
    return client


def http_client(plugin: Any = None, **options: Any) -> by_http.InferenceServerClient:
    def context() -> Any:
        return gevent.ssl.create_default_context(cafile=CA_FILE)

    client = by_http.InferenceServerClient(f"localhost:{HTTP_PORT}", ssl=True, ssl_context_factory=context, **options)
    if plugin is not None:
        client.register_plugin(plugin)
    return client


def infer(api: Any, client: Any, **options: Any) -> None:
    """Have `types` give a tensor back. Raises InferenceServerException."""
    value = np.arange(1000, dtype=np.float32)
    tensor = api.InferInput("FP32", value.shape, "FP32")
    tensor.set_data_from_numpy(value)
    assert (client.infer("types", [tensor], **options).as_numpy("FP32") == value).all()


def refused(call: Callable[[], None], words: str) -> None:
    try:
        call()
    except (InferenceServerException, TimeoutError) as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError("it was served")


def unknown_authority() -> None:
    client = by_grpc.InferenceServerClient(f"localhost:{GRPC_PORT}", ssl=True)
    refused(lambda: infer(by_grpc, client, client_timeout=WAIT_S), "")


def plain_text() -> None:
    client = by_grpc.InferenceServerClient(f"localhost:{GRPC_PORT}")
    refused(lambda: infer(by_grpc, client, client_timeout=WAIT_S), "")


GRPC_LOGIN, HTTP_LOGIN = tritonclient.grpc.auth.BasicAuth("any", KEY), tritonclient.http.auth.BasicAuth("any", KEY)
CHECKS: dict[str, Callable[[], None]] = {
    "gRPC: BasicAuth": lambda: infer(by_grpc, grpc_client(GRPC_LOGIN)),
    "gRPC: a plugin that sends a bearer token": lambda: infer(by_grpc, grpc_client(BearerGrpc())),
    "gRPC: no plugin": lambda: refused(lambda: infer(by_grpc, grpc_client()), "an API key is required"),
    "gRPC: gzip": lambda: infer(by_grpc, grpc_client(GRPC_LOGIN), compression_algorithm="gzip"),
    "gRPC: deflate": lambda: infer(by_grpc, grpc_client(GRPC_LOGIN), compression_algorithm="deflate"),
    "gRPC: client_timeout": lambda: refused(
        lambda: infer(by_grpc, grpc_client(GRPC_LOGIN), client_timeout=expiring(0.3), parameters=HALF_A_MINUTE),
        "DEADLINE_EXCEEDED",
    ),
    "gRPC: an unknown authority": unknown_authority,
    "gRPC: without TLS": plain_text,
    "HTTP: BasicAuth": lambda: infer(by_http, http_client(HTTP_LOGIN)),
    "HTTP: a plugin that sends a bearer token": lambda: infer(by_http, http_client(BearerHttp())),
    "HTTP: no plugin": lambda: refused(lambda: infer(by_http, http_client()), "an API key is required"),
    "HTTP: gzip": lambda: infer(
        by_http, http_client(HTTP_LOGIN), request_compression_algorithm="gzip", response_compression_algorithm="gzip"
    ),
    "HTTP: deflate": lambda: infer(
        by_http, http_client(HTTP_LOGIN), request_compression_algorithm="deflate", response_compression_algorithm="deflate"
    ),
    "HTTP: network_timeout": lambda: refused(
        lambda: infer(by_http, http_client(HTTP_LOGIN, network_timeout=expiring(0.3)), parameters=HALF_A_MINUTE), ""
    ),
}


def await_model() -> None:
    """Return when the frontend serves the model."""
    client, until = grpc_client(GRPC_LOGIN), time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            if client.is_model_ready("types", client_timeout=WAIT_S):
                return
        except InferenceServerException:
            pass
        time.sleep(0.1)
    raise TimeoutError("the model is not served")


def main() -> None:
    await_model()
    for name, check in CHECKS.items():
        problem = ""
        try:
            check()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps({"case": name, "problem": problem}), flush=True)


if __name__ == "__main__":
    main()
