"""The arguments of SGLang's server that tests give; as in SGLang, argparse refuses others."""

from __future__ import annotations

import argparse
from typing import Any


class ServerArgs(argparse.Namespace):
    model_path: str
    kv_events_config: str
    context_length: int | None
    max_running_requests: int | None
    page_size: int
    dp_size: int
    incremental_streaming_output: bool
    disable_radix_cache: bool
    lora_paths: list[Any] | None

    def resolved_dict(self) -> dict[str, Any]:
        return vars(self)


def prepare_server_args(argv: list[str]) -> ServerArgs:
    parser = argparse.ArgumentParser(prog="sglang serve")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--kv-events-config")
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dp-size", "--data-parallel-size", type=int, default=1)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--disable-radix-cache", action="store_true")
    parser.set_defaults(lora_paths=None)
    return parser.parse_args(argv, namespace=ServerArgs())
