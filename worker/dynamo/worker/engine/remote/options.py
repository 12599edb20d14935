"""The options of the remote engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dynamo.common.config import option
from dynamo.worker.engine.remote.dialect import RemoteKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Engine servers that run elsewhere, for the remote engine."""

    urls: tuple[str, ...] = option(
        (),
        flags=("--url",),
        env=("DYN_REMOTE_URL",),
        repeatable=True,
        metavar="URL",
        help="An engine server such as `vllm serve`, instead of --model; given several times, each gets an instance of its own.",
    )
    url_file: Path | None = option(
        None,
        flags=("--url-file",),
        env=("DYN_REMOTE_URL_FILE",),
        metavar="PATH",
        help="A file that lists engine servers, as llm-d's `file-discovery` has it, instead of --url. It is followed: servers "
        "that are added get instances, and those of servers that are removed drain.",
    )
    kind: RemoteKind | None = option(
        None,
        parse=RemoteKind,
        help="What the servers speak; default: as they say. `text`: OpenAI's chat and text completions, of any server. `relay`: "
        "audio and images, which pass through, as do chats with such a model.",
    )
    tokenizer: Path | None = option(
        None,
        flags=("--tokenizer",),
        metavar="PATH",
        help="The model's folder, or its tokenizer.json, .model or .gguf file; default: the folder that the server names.",
    )
    kv_events: tuple[str, ...] = option(
        (),
        repeatable=True,
        metavar="ADDRESS",
        help="Where a server publishes KV events, such as tcp://gpu-7:5557, for routing by cache; one for each --url.",
    )
    kv_replay: tuple[str, ...] = option(
        (),
        repeatable=True,
        metavar="ADDRESS",
        help="Where it repeats lost KV events; one for each --url.",
    )
    endpoints: tuple[str, ...] = option(
        (),
        flags=("--remote-endpoint",),
        repeatable=True,
        metavar="IP:PORT",
        help="Where gateways reach a server, as an endpoint picker tells them; one for each --url. Default: where this worker "
        "does or, in a pod beside the server, the pod's own address (POD_IP).",
    )
    pod_ip: str = option(
        "", flags=("--pod-ip",), env=("POD_IP",), help="Address of the pod that this process is in, beside the servers."
    )
    data_parallel_size: int = option(
        1,
        minimum=1,
        maximum=1024,
        help="Data-parallel ranks of each server, which is one of vLLM: each rank gets an instance of its own, with its load and "
        "its KV events, which are published from the given port upwards.",
    )
    api_key: str | None = option(None, secret=True, help="Key that the servers demand.")
    timeout_s: float = option(
        120.0,
        minimum=1,
        maximum=86_400,
        help="Longest silence of a server during a response; after it the request continues elsewhere.",
    )

    def __post_init__(self) -> None:
        if self.kind is RemoteKind.RELAY and (self.kv_events or self.tokenizer or self.data_parallel_size > 1):
            raise ValueError("--remote-kind relay takes no tokenizer, KV events or data-parallel ranks")
        if self.url_file is not None and (self.urls or self.kv_events or self.kv_replay or self.endpoints):
            raise ValueError("--url-file takes the place of --url, and of what is given once for each of them")
        if self.data_parallel_size > 1:
            for address in (*self.kv_events, *self.kv_replay):
                host, _, port = address.rpartition(":")
                if not host.startswith("tcp://") or not port.isdecimal():
                    raise ValueError(f"--remote-data-parallel-size needs KV events at tcp://HOST:PORT, got {address}")

    @property
    def is_used(self) -> bool:
        return bool(self.urls) or self.url_file is not None

    @property
    def instances(self) -> int:
        """One for each rank of each server."""
        return len(self.urls) * self.data_parallel_size
