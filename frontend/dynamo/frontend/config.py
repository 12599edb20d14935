"""The configuration of a frontend process: one frozen object, built before the process starts."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec

from dynamo.common.config import group, option, parse_bytes, parse_port
from dynamo.common.errors import InvalidRequest
from dynamo.common.generation_rules import MAX_CHOICES, MAX_LOGPROBS
from dynamo.common.http.web_pages import parse_allowed_host
from dynamo.common.kv.tiers import Tier, parse_tier_price
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.names import parse_name
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions, SharedMemoryOptions, TraceOptions
from dynamo.common.security.tls import TlsFiles
from dynamo.common.tensors.message_limits import MessageLimits
from dynamo.frontend.security.keys import MAX_PRIORITY
from dynamo.frontend.security.surfaces import Restriction, Surface, parse_restrictions

MIB = 2**20
GRPC_HEADER_PREFIX = "triton-grpc-protocol-"
"""Before the names of headers that restrict gRPC calls, as Triton has it."""
DEFAULT_WINDOW_BYTES = 2**16 - 1
"""What HTTP/2 defines; smaller ones save nothing."""
MAX_WINDOW_BYTES = 2**31 - 1
DEFAULT_GRPC_PORT = 8001


class GrpcServerChoice(StrEnum):
    AUTO = "auto"
    HTTP2 = "http2"
    GRPCIO = "grpcio"


class GrpcCompression(StrEnum):
    NONE = "none"
    GZIP = "gzip"
    DEFLATE = "deflate"


class RouterMode(StrEnum):
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    DIRECT = "direct"
    """Only requests that name their instance are served."""
    KV = "kv"
    """By what instances have cached and how busy they are."""
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"
    """The less loaded of two drawn at random."""


class KvCost(StrEnum):
    """What `--router-mode kv` minimises."""

    LATENCY = "latency"
    """Seconds that a placement adds to the latencies of all requests, as predicted."""
    WEIGHTS = "weights"
    """Blocks, weighed by `--overlap-score-weight` and `--router-prefill-load-scale`."""


class AffinityMode(StrEnum):
    """What a session does when its instance is busy."""

    HARD = "hard"
    """Its requests go there nevertheless."""
    SOFT = "soft"
    """It moves."""


class QueuePolicy(StrEnum):
    """Which waiting request is next; see `admission`."""

    FCFS = "fcfs"
    PREFIX = "prefix"
    WSPT = "wspt"


class OverloadStatus(StrEnum):
    """What overload looks like to callers. Peers differ, and gateways in front expect one or the other."""

    UNAVAILABLE = "503"
    """HTTP 503, gRPC UNAVAILABLE."""
    TOO_MANY_REQUESTS = "429"
    """HTTP 429, gRPC RESOURCE_EXHAUSTED."""
    OVERLOADED = "529"
    """HTTP 529, gRPC UNAVAILABLE."""


class _DeclaredTensor(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()


class _DeclaredModel(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `models` in the configuration file."""

    name: str
    type: str = "TensorBased"
    inputs: tuple[_DeclaredTensor, ...] = ()
    outputs: tuple[_DeclaredTensor, ...] = ()
    versions: tuple[str, ...] = ("1",)
    platform: str = "dynamo"
    max_batch_size: int = 0
    decoupled: bool = False
    labels: dict[str, str] = {}


class _GrpcService(msgspec.Struct, forbid_unknown_fields=True):
    """The section `grpc_service`, whose keys are read by the options that name them."""

    host: str | None = None
    port: int | None = None
    http_metrics_host: str | None = None
    http_metrics_port: int | None = None


def parse_declared_models(value: object) -> tuple[ModelCard, ...]:
    """The `models` section of a configuration file as cards; Raises ValueError with the end of a sentence."""
    try:
        declared = msgspec.convert(value, tuple[_DeclaredModel, ...])
        cards = tuple(_to_card(model) for model in declared)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ValueError(f"is not a list of models: {error}") from error
    names = [card.name for card in cards]
    if len(set(names)) != len(names):
        raise ValueError("declares a model twice")
    return cards


def _to_card(model: _DeclaredModel) -> ModelCard:
    if model.type.lower() not in ("tensorbased", "tensor"):
        raise InvalidRequest(
            f"model '{model.name}' has type '{model.type}'; only TensorBased models can be declared in a file, "
            "language models describe themselves when their worker starts"
        )
    return ModelCard(
        name=model.name,
        kind=ModelKind.TENSOR,
        versions=model.versions,
        platform=model.platform,
        inputs=tuple(_to_spec(tensor) for tensor in model.inputs),
        outputs=tuple(_to_spec(tensor) for tensor in model.outputs),
        max_batch_size=model.max_batch_size,
        decoupled=model.decoupled,
        labels=model.labels,
    ).check()


def _to_spec(tensor: _DeclaredTensor) -> TensorSpec:
    return TensorSpec(
        name=tensor.name,
        datatype=tensor.datatype.removeprefix("TYPE_"),
        shape=tensor.shape,
        optional=tensor.optional,
        labels=tensor.labels,
    )


def _grpc_section(value: object) -> bool:
    try:
        msgspec.convert(value, _GrpcService)
    except msgspec.ValidationError as error:
        raise ValueError(f"is not a gRPC service section: {error}") from error
    return True


def _parse_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("is not a URL that begins with http:// or https://")
    return text


def _parse_interval(text: str) -> str:
    """An interval in Prometheus' notation."""
    if not re.fullmatch(r"([0-9]+(ms|[smhdwy]))+", text):
        raise ValueError("is not an interval such as 15s or 1m30s")
    return text


def _parse_datasource(text: str) -> str:
    if not re.fullmatch(r"[\w. -]{1,40}", text):
        raise ValueError("is not a name of up to 40 letters, digits, dots, spaces, - and _")
    return text


def is_local(host: str) -> bool:
    """Whether only this machine can connect to what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortTlsOptions:
    """TLS of one port."""

    tls_cert_file: str | None = option(None, metavar="FILE", help="Certificate of the server (PEM); makes this port speak TLS.")
    tls_key_file: str | None = option(None, metavar="FILE", help="Key of the certificate (PEM).")
    tls_client_ca_file: str | None = option(
        None, metavar="FILE", help="Clients must show a certificate signed by one of these (PEM)."
    )
    tls_ciphers: str | None = option(None, metavar="LIST", help="Cipher suites of this port, as for `--tls-ciphers`.")

    def check(self, prefix: str) -> None:
        """Raise ValueError if they do not fit together. `prefix`: of the flags."""
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError(f"--{prefix}-tls-cert-file and --{prefix}-tls-key-file are only useful together")
        for option_name, value in (("client-ca-file", self.tls_client_ca_file), ("ciphers", self.tls_ciphers)):
            if value is not None and self.tls_cert_file is None:
                raise ValueError(f"--{prefix}-tls-{option_name} needs --{prefix}-tls-cert-file")

    @property
    def files(self) -> TlsFiles | None:
        """None: the port does not speak TLS."""
        cert, key = self.tls_cert_file, self.tls_key_file
        if cert is None or key is None:
            return None
        return TlsFiles(cert=cert, key=key, client_ca=self.tls_client_ca_file, ciphers=self.tls_ciphers)

    def completed(self, common: TlsOptions) -> PortTlsOptions:
        """Return these options with what they lack of the common ones; without a certificate the others are of no use."""
        own = self
        if own.tls_cert_file is None:
            own = replace(own, tls_cert_file=common.cert_file, tls_key_file=common.key_file)
        if own.files is None:
            return own
        client_ca, ciphers = own.tls_client_ca_file or common.client_ca_file, own.tls_ciphers or common.ciphers
        return replace(own, tls_client_ca_file=client_ca, tls_ciphers=ciphers)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The HTTP side, which is always up."""

    host: str = option("127.0.0.1", file_key=("http.host", "grpc_service.http_metrics_host"), help="Address to listen on.")
    port: int = option(
        8000,
        parse=parse_port,
        file_key=("http.port", "grpc_service.http_metrics_port"),
        help="Port; 0 lets the system choose.",
    )
    max_body_bytes: int = option(
        64 * MIB,
        flags=("--http-max-body-size",),
        parse=parse_bytes,
        minimum=1024,
        maximum=2**31 - 1,
        metavar="SIZE",
        help="Largest body of a request.",
    )
    max_json_bytes: int = option(
        4 * MIB,
        flags=("--http-max-json-size",),
        parse=parse_bytes,
        minimum=1024,
        maximum=2**31 - 1,
        metavar="SIZE",
        help="Largest body without tensors: conversations and prompts, with the images in them.",
    )
    max_tensor_json_bytes: int = option(
        32 * MIB,
        flags=("--http-max-tensor-json-size",),
        parse=parse_bytes,
        minimum=1024,
        maximum=2**31 - 1,
        metavar="SIZE",
        help="Most JSON in a request of KServe's infer. Tensors in binary follow it and have only the bound of the body.",
    )
    max_connections: int = option(
        32_768, minimum=1, maximum=1_000_000, help="Connections of a process; the system's limit of open files may permit fewer."
    )
    max_head_bytes: int = option(
        64 * 1024,
        flags=("--http-max-head-size",),
        parse=parse_bytes,
        minimum=1024,
        maximum=16 * MIB,
        metavar="SIZE",
        help="Largest request line with its headers.",
    )
    head_timeout_s: float = option(
        10.0, minimum=0.1, help="A request line and its headers must arrive within this many seconds of their first byte."
    )
    idle_timeout_s: float = option(75.0, minimum=0.1, help="A connection without a request for so many seconds is closed.")
    min_body_bytes_per_s: int = option(
        1024,
        flags=("--http-min-body-rate",),
        parse=parse_bytes,
        minimum=0,
        maximum=2**31 - 1,
        metavar="SIZE",
        help="A body that arrives with fewer bytes per second, averaged over 10 s, is refused. 0: no limit.",
    )
    unread_timeout_s: float = option(
        300.0, minimum=0.1, help="A client that reads nothing of a response for so many seconds is disconnected."
    )
    max_json_depth: int = option(100, minimum=4, maximum=500, help="How deep arrays and objects of a request may nest.")
    max_json_values: int = option(
        750_000,
        minimum=1000,
        maximum=2**31 - 1,
        help="Values in a JSON body without tensors, counted before anything is decoded. Each object, array and key counts as 8,"
        " a string as 6, a number with a fraction as 2.",
    )
    strict_fields: bool = option(
        False, help="Refuse requests of OpenAI's and Anthropic's APIs with fields that this server does not have."
    )
    keepalive_s: float = option(
        15.0, minimum=0.1, help="A comment is sent on a stream that is silent for so long, so that proxies do not cut it."
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        flags=("--allowed-origins",),
        repeatable=True,
        metavar="ORIGIN",
        help="Origins whose pages may use this server from a browser (CORS): `https://example.org`, or `*`, which without API "
        "keys does not include what administrators do, such as loading models. Default: none.",
    )
    allowed_methods: tuple[str, ...] = option(
        ("*",), flags=("--allowed-methods",), repeatable=True, metavar="METHOD", help="Methods that these pages may use."
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",), flags=("--allowed-headers",), repeatable=True, metavar="HEADER", help="Headers that these pages may send."
    )
    allow_credentials: bool = option(
        False, flags=("--allow-credentials",), help="Whether these pages may send cookies and client certificates."
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        flags=("--allowed-host",),
        repeatable=True,
        parse=parse_allowed_host,
        metavar="HOST",
        help="Without API keys: further names by which this server may be addressed (the header `Host`), besides addresses, "
        "`localhost` and the name of the machine. A domain such as `*.example.com` or `.svc` includes all names in it; `*`: any. "
        "May be given several times.",
    )
    console: bool = option(True, help="Serve `/console`, a page about the fleet.")
    admin_api: bool = option(
        True,
        help="Serve `/busy_threshold`, `/v1/routing/decisions` and `/v1/names`, which change and show where requests go.",
    )
    port_tls: PortTlsOptions = group("HTTP", prefix="http", default=PortTlsOptions)

    def __post_init__(self) -> None:
        self.port_tls.check("http")

    @property
    def tls(self) -> TlsFiles | None:
        """None: the port does not speak TLS."""
        return self.port_tls.files

    @property
    def is_local(self) -> bool:
        return is_local(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """What the requests of a process together may occupy; past it they are refused, with a hint when to retry."""

    max_concurrent_requests: int = option(
        32_768,
        minimum=1,
        maximum=10_000_000,
        help="Requests and gRPC calls in progress, streams and the requests in them included, health excepted.",
    )
    max_buffered_bytes: int = option(
        1024 * MIB,
        flags=("--max-buffered-size",),
        parse=parse_bytes,
        minimum=MIB,
        maximum=2**40,
        metavar="SIZE",
        help="Bytes of the bodies and messages of all requests in progress, and of what is read for them from stores and from "
        "memory of clients.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """Bounds on what one text request may demand, checked before time is spent on it."""

    max_prompt_chars: int = option(16 * MIB, minimum=1, maximum=2**31 - 1, help="Longest prompt, before it is tokenized.")
    max_messages: int = option(16_384, minimum=1, maximum=1_000_000, help="Messages of a conversation.")
    max_stop_strings: int = option(32, minimum=1, maximum=1024, help="Stop strings of a request.")
    max_choices: int = option(MAX_CHOICES, minimum=1, maximum=MAX_CHOICES, help="Choices of a request: `n` times its prompts.")
    max_best_of: int = option(20, minimum=1, maximum=MAX_CHOICES, help="Largest `best_of`.")
    max_logprobs: int = option(
        MAX_LOGPROBS, minimum=0, maximum=MAX_LOGPROBS, help="Most alternatives that log probabilities are shown of."
    )
    max_image_pixels: int = option(
        128 * 1024**2, minimum=1, maximum=2**40, help="Pixels of the images of a request together, as their headers say."
    )
    max_embedding_inputs: int = option(2048, minimum=1, maximum=1_000_000, help="Texts in a request for embeddings.")


def _parse_host(text: str) -> str:
    """Return a host, or a domain with a leading dot. Raises ValueError with the end of a sentence."""
    host = text.strip().lower()
    if not re.fullmatch(r"\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*", host):
        raise ValueError("is not a host such as images.example.com, or a domain such as .example.com")
    return host


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions:
    """Images and other media that requests name by URL."""

    hosts: tuple[str, ...] = option(
        (),
        flags=("--media-url-host",),
        env=("DYN_MEDIA_URL_HOST",),
        repeatable=True,
        parse=_parse_host,
        metavar="HOST",
        help="A host, or with a leading dot a domain and its hosts, whose http and https URLs are fetched; may be given several "
        "times. None: media must be data URLs.",
    )
    max_bytes: int = option(
        16 * MIB,
        flags=("--media-max-bytes",),
        env=("DYN_MEDIA_MAX_BYTES",),
        parse=parse_bytes,
        minimum=1,
        maximum=256 * MIB,
        help="Longest media by URL, of one request together.",
    )
    timeout_s: float = option(
        10.0,
        flags=("--media-timeout",),
        minimum=0.1,
        maximum=600,
        help="All media of a request must have arrived within this many seconds.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How text requests are completed, bounded and tokenized."""

    limits: TextLimits = group("Text", prefix="text", default=TextLimits)
    media: MediaOptions = group("Media", prefix="media", default=MediaOptions)
    fast_tokenizer: bool = option(
        True,
        flags=("--fast-tokenizer",),
        env=("DYN_FAST_TOKENIZER",),
        help="Tokenize with fastokens (extra `fast`) where it gives the same ids as tokenizers, which is checked for each model.",
    )
    tokenizer_cache_bytes: int = option(
        512 * MIB,
        flags=("--tokenizer-cache-size",),
        env=("DYN_TOKENIZER_CACHE_SIZE",),
        parse=parse_bytes,
        minimum=0,
        maximum=2**40,
        metavar="SIZE",
        help="Memory for tokenizers, shared by models and loaded when a model appears. Beyond it, they are loaded at first use, "
        "and those that are not in use are evicted.",
    )
    request_template: Path | None = option(
        None,
        flags=("--request-template",),
        env=("DYN_REQUEST_TEMPLATE",),
        file_key="request_template",
        metavar="FILE",
        help="JSON with `model`, `temperature` and `max_completion_tokens` for requests that do not set them.",
    )
    trust_request_chat_template: bool = option(
        False,
        flags=("--trust-request-chat-template",),
        env=("DYN_TRUST_REQUEST_CHAT_TEMPLATE",),
        help="Take the chat templates that requests bring. They run in a sandbox with a bounded number of steps.",
    )
    trust_kv_transfer_params: bool = option(
        False,
        flags=("--trust-kv-transfer-params",),
        env=("DYN_TRUST_KV_TRANSFER_PARAMS",),
        help="Pass `kv_transfer_params` of `/inference/v1/generate` to engines, which fetch KV caches from where these say.",
    )
    return_tokens_as_token_ids: bool = option(
        False,
        flags=("--return-tokens-as-token-ids",),
        env=("DYN_RETURN_TOKENS_AS_TOKEN_IDS",),
        help="Show tokens as `token_id:17` in log probabilities, unless a request says otherwise.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesOptions:
    """What is stored of the Responses API, in JetStream."""

    store: bool = option(True, help="Store responses of requests that do not say `store`, as OpenAI does.")
    ttl_s: float = option(
        30 * 86_400.0,
        flags=("--responses-ttl",),
        minimum=60,
        maximum=3.2e7,
        help="Stored responses are kept for this many seconds.",
    )
    max_bytes: int = option(
        1024 * MIB,
        flags=("--responses-max-size",),
        parse=parse_bytes,
        minimum=MIB,
        maximum=2**50,
        metavar="SIZE",
        help="What stored responses take up at most; those that are large, as much again. The first frontend sets it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOptions:
    """The ledger of what API keys have used, in JetStream."""

    ledger: bool = option(True, help="Keep what each API key has used of each model, by day.")
    retention_days: int = option(90, minimum=1, maximum=366, help="A day is kept for so long. The first frontend sets it.")
    max_bytes: int = option(
        64 * MIB,
        flags=("--usage-max-size",),
        parse=parse_bytes,
        minimum=MIB,
        maximum=2**50,
        metavar="SIZE",
        help="What the ledger takes up at most; days with many keys and models, as much again. The first frontend sets it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KserveOptions:
    """KServe v2, over gRPC and over REST."""

    server_name: str = option("dynamo", help="Name of the server in its metadata; some clients of Triton expect `triton`.")
    strict_readiness: bool = option(
        True, help="The server is ready if all models are that should be; off, if any model is. `/health` is always the latter."
    )
    client_shared_memory: bool = option(
        True, help="Let clients on this host register system shared memory, for inputs and outputs."
    )
    client_shared_memory_keys: tuple[str, ...] = option(
        ("*",),
        repeatable=True,
        metavar="PATTERN",
        help="Keys that clients may register, such as `clients-*`; all but those of this project's own memory by default.",
    )
    client_shared_memory_remote: bool = option(
        False,
        help="Let clients that come by another than the loopback address register memory, too.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """The KServe v2 gRPC side."""

    enabled: bool | None = option(
        None,
        flags=("--grpc", "--kserve-grpc-server", "--kserve-mode"),
        env=("DYN_GRPC", "DYN_KSERVE_GRPC_SERVER"),
        help="Serve KServe v2 over gRPC, or do not. Unset: if a gRPC port or a section grpc_service in the file demands it.",
    )
    section: bool = option(
        False, flags=(), env=(), file_key="grpc_service", from_file=_grpc_section, help="Host and ports of this side."
    )
    host: str = option("127.0.0.1", file_key=("grpc.host", "grpc_service.host"), help="Address to listen on.")
    port: int | None = option(
        None,
        parse=parse_port,
        env=("DYN_GRPC_PORT", "DYNAMO_GRPC_PORT"),
        file_key=("grpc.port", "grpc_service.port"),
        help=f"Port, {DEFAULT_GRPC_PORT} if this is not given; 0 lets the system choose. Giving it turns this side on.",
    )
    server: GrpcServerChoice = option(
        GrpcServerChoice.AUTO,
        replaced={"native": "http2"},
        help="Which server runs: http2 is this project's, on the event loop, and auto takes it. grpcio is gRPC's own as it ships,"
        " a reference that is not for untrusted clients: it accepts one call per turn of the event loop; a call whose path"
        " is not UTF-8 ends it (seen with 1.85.1); it takes messages before bounds of the process count them, lets clients be as"
        " slow as they like, and has neither --grpc-max-connections nor metrics of connections.",
    )
    workers: int = option(
        1,
        env=("DYN_GRPC_WORKERS", "DYNAMO_GRPC_WORKERS"),
        minimum=1,
        maximum=256,
        help="Accepted for the command lines of Dynamo, without effect: more processor cores are used by --processes.",
    )
    max_message_bytes: int = option(
        64 * MIB,
        flags=("--max-message-size",),
        env=("DYN_MAX_MESSAGE_SIZE", "DYNAMO_MAX_MESSAGE_SIZE"),
        file_key=("grpc.max_message_size", "max_message_size"),
        parse=parse_bytes,
        minimum=1024,
        maximum=2**31 - 1,
        metavar="SIZE",
        help="Largest message in either direction.",
    )
    limits: MessageLimits = group("KServe gRPC", prefix="grpc", default=MessageLimits)
    max_metadata_bytes: int = option(
        64 * 1024, parse=parse_bytes, minimum=8192, maximum=16 * MIB, help="Largest metadata of a call."
    )
    max_concurrent_streams: int = option(1024, minimum=1, maximum=2**31 - 1, help="Calls open at once on one connection.")
    max_stream_requests: int = option(
        256, minimum=1, maximum=65536, help="Requests worked on at once within one ModelStreamInfer call."
    )
    stream_idle_timeout_s: float = option(
        600.0,
        minimum=1,
        help="A ModelStreamInfer call that has had no request in progress for this long, or up to a quarter longer, is ended.",
    )
    max_connections: int = option(
        8192, minimum=1, help="Connections at once; further ones are closed. The system's limit of open files counts as well."
    )
    initial_connection_window_size: int | None = option(
        None,
        parse=parse_bytes,
        minimum=DEFAULT_WINDOW_BYTES,
        maximum=MAX_WINDOW_BYTES,
        help="HTTP/2 window of a connection, in bytes, 16 MiB if this is not given. grpcio has one setting for this and that of a"
        " call: the larger of the two counts.",
    )
    initial_stream_window_size: int | None = option(
        None,
        parse=parse_bytes,
        minimum=DEFAULT_WINDOW_BYTES,
        maximum=MAX_WINDOW_BYTES,
        help="HTTP/2 window of a call, in bytes, 4 MiB if this is not given, and 64 KiB at most before a caller has shown its"
        " credentials, where they are required. It grows for a larger message.",
    )
    keepalive_s: float = option(60.0, minimum=1, help="A silent connection is pinged after this many seconds.")
    keepalive_timeout_s: float = option(20.0, minimum=1, help="An unanswered ping closes the connection.")
    keepalive_permit_without_calls: bool = option(
        True,
        help="Ping connections without calls, too, and let clients do so; off, such clients may ping once in two hours.",
    )
    max_pings_without_data: int = option(
        0, minimum=0, help="Pings that the server sends one after the other while it sends no response; 0 for no limit."
    )
    client_ping_interval_s: float = option(
        5.0, minimum=0, help="Clients that ping more often than this while no response is sent are disconnected."
    )
    compression: GrpcCompression = option(
        GrpcCompression.NONE,
        help="Compression of responses to clients that accept it; compressed requests are always accepted.",
    )
    max_connection_age_s: float | None = option(
        None, minimum=1, help="Connections older than this are closed gracefully, so that load can be spread again."
    )
    port_tls: PortTlsOptions = group("KServe gRPC", prefix="grpc", default=PortTlsOptions)

    def __post_init__(self) -> None:
        self.port_tls.check("grpc")
        if self.port_tls.tls_ciphers is not None and self.server is GrpcServerChoice.GRPCIO:
            raise ValueError("--grpc-server grpcio takes cipher suites from GRPC_SSL_CIPHER_SUITES, not from --tls-ciphers")

    @property
    def tls(self) -> TlsFiles | None:
        """None: the port does not speak TLS."""
        return self.port_tls.files

    @property
    def is_local(self) -> bool:
        return is_local(self.host)

    @property
    def listen_port(self) -> int:
        return DEFAULT_GRPC_PORT if self.port is None else self.port

    @property
    def wanted(self) -> bool:
        """Who names a port wants it to be open; a plain yes or no goes before that."""
        if self.enabled is not None:
            return self.enabled
        return self.section or self.port is not None


def _parse_objective(text: str) -> tuple[str, int]:
    name, separator, number = text.rpartition("=")
    try:
        priority = int(number)
    except ValueError:
        priority = MAX_PRIORITY + 1
    if not name or not separator or abs(priority) > MAX_PRIORITY:
        raise ValueError(f"must be NAME=PRIORITY, with a priority from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {text!r}")
    return name, priority


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerOptions:
    """The endpoint picker, which tells gateways where to send their requests."""

    enabled: bool = option(
        False,
        flags=("--endpoint-picker",),
        env=("DYN_ENDPOINT_PICKER",),
        help="Choose endpoints for gateways that ask by Envoy's external processing, as those of the Gateway API do.",
    )
    host: str = option("127.0.0.1", help="Address that it listens on.")
    port: int = option(9002, parse=parse_port, help="Port that it listens on; 0 lets the system choose.")
    endpoints: int = option(
        1,
        minimum=1,
        maximum=8,
        help="How many endpoints a gateway is given, the best first, so that it can retry at the next: more than one is for "
        "gateways that read a list.",
    )
    objectives: tuple[tuple[str, int], ...] = option(
        (),
        parse=_parse_objective,
        flags=("--endpoint-picker-objective",),
        repeatable=True,
        metavar="NAME=PRIORITY",
        help="Priority of requests whose header x-gateway-inference-objective is NAME; below 0 they are shed rather than queued.",
    )
    port_tls: PortTlsOptions = group("Endpoint picker", prefix="endpoint_picker", default=PortTlsOptions)

    def __post_init__(self) -> None:
        self.port_tls.check("endpoint-picker")

    @property
    def is_local(self) -> bool:
        return is_local(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusOptions:
    """Who reads the metrics, and where."""

    enabled: bool = option(True, flags=("--prometheus",), env=("DYN_PROMETHEUS",), help="Serve `/metrics`.")
    host: str = option("127.0.0.1", help="Address that `--prometheus-port` is opened on.")
    port: int | None = option(
        None,
        parse=parse_port,
        help="A port for `/metrics`, `/health` and `/live` alone, with the keys and the TLS of the HTTP port, which has them,"
        " too. 0 lets the system choose. Default: none.",
    )
    endpoint: str | None = option(
        None, parse=_parse_url, metavar="URL", help="Where the Prometheus server is, for the data source that Grafana gets."
    )
    scrape_interval: str = option("15s", parse=_parse_interval, help="How often it scrapes, for the same.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrafanaOptions:
    """Dashboards for Grafana."""

    folder: Path | None = option(
        None,
        help="Write the dashboards and what Grafana needs to find them here when the process starts. Default: nowhere, or, if one"
        " of the other two is given, the folder `grafana` of `--cache-dir`.",
    )
    dashboard_name: str | None = option(
        None, flags=("--grafana-dashboard-name",), file_key="grafana.dashboard.name", help="Grafana's folder for them: dynamo."
    )
    datasources: tuple[str, ...] = option(
        (),
        repeatable=True,
        parse=_parse_datasource,
        file_key="grafana.dashboard.datasources",
        help="Names of the data sources that the dashboards offer: prometheus. The first is the one at `--prometheus-endpoint`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """TLS on all ports of the frontend. Options of one port, such as `--grpc-tls-cert-file`, go before these."""

    required: bool = option(
        False,
        flags=("--use-tls",),
        env=("DYN_USE_TLS",),
        file_key=("tls.required", "use_tls"),
        help="Refuse to start unless every port speaks TLS. A certificate alone turns TLS on, too.",
    )
    cert_file: str | None = option(
        None,
        flags=("--cert-file", "--tls-cert-file", "--tls-cert-path"),
        env=("DYN_TLS_CERT_FILE", "DYNAMO_TLS_CERT"),
        file_key=("tls.cert_file", "cert_file"),
        metavar="FILE",
        help="Certificate of the server (PEM); makes gRPC and HTTP speak TLS. Read again when it changes.",
    )
    key_file: str | None = option(
        None,
        flags=("--key-file", "--tls-key-file", "--tls-key-path"),
        env=("DYN_TLS_KEY_FILE", "DYNAMO_TLS_KEY"),
        file_key=("tls.key_file", "key_file"),
        metavar="FILE",
        help="Key of the certificate (PEM), without a passphrase.",
    )
    client_ca_file: str | None = option(
        None,
        flags=("--client-ca-file", "--tls-client-ca-file", "--tls-client-ca-cert-path"),
        env=("DYN_TLS_CLIENT_CA_FILE", "DYNAMO_TLS_CLIENT_CA"),
        file_key=("tls.client_ca_file", "client_ca_file"),
        metavar="FILE",
        help="Clients must show a certificate signed by one of these (PEM), on gRPC and HTTP.",
    )
    ciphers: str | None = option(
        None,
        flags=("--tls-ciphers",),
        env=("DYN_TLS_CIPHERS",),
        file_key="tls.ciphers",
        metavar="LIST",
        help="Cipher suites for TLS 1.2 in OpenSSL's notation, such as ECDHE+AESGCM:ECDHE+CHACHA20; those of TLS 1.3 are always"
        " allowed. grpcio takes its own from GRPC_SSL_CIPHER_SUITES in the environment.",
    )

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("--cert-file and --key-file are only useful together")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """Who may use what."""

    keys_file: Path | None = option(
        None,
        flags=("--api-keys-file",),
        env=("DYN_API_KEYS_FILE",),
        file_key="api_keys_file",
        metavar="FILE",
        help="API keys, hashed, made by dynamo-keys. With it every call but health needs a key. Read again when it changes.",
    )
    open_surfaces: tuple[Surface, ...] = option(
        (),
        flags=("--api-open",),
        env=("DYN_API_OPEN",),
        file_key="api_open",
        repeatable=True,
        choices=tuple(surface.value for surface in Surface),
        metavar="SURFACE",
        help=f"With API keys: what is open without one. Of {', '.join(Surface)}.",
    )
    cache_salt_per_key: bool = option(
        True,
        flags=("--cache-salt-per-key",),
        env=("DYN_CACHE_SALT_PER_KEY",),
        file_key="cache_salt_per_key",
        help="With API keys: prompts that are cached for one key, or a group of keys, are not used for others, who would notice.",
    )
    grpc_restricted: str | None = option(
        None,
        flags=("--grpc-restricted-protocol",),
        env=("DYN_GRPC_RESTRICTED_PROTOCOL",),
        file_key="grpc_restricted_protocol",
        secret=True,
        help="Lines SURFACE,…:KEY=VALUE: these gRPC calls need the metadata triton-grpc-protocol-KEY with this value.",
    )
    http_restricted: str | None = option(
        None,
        flags=("--http-restricted-api",),
        env=("DYN_HTTP_RESTRICTED_API",),
        file_key="http_restricted_api",
        secret=True,
        help="Lines SURFACE,…:HEADER=VALUE: these HTTP calls need this header.",
    )

    def __post_init__(self) -> None:
        for flag, parse in (
            ("--grpc-restricted-protocol", self.grpc_restrictions),
            ("--http-restricted-api", self.http_restrictions),
        ):
            try:
                parse()
            except ValueError as error:
                raise ValueError(f"{flag}: a line {error}") from None

    def grpc_restrictions(self) -> tuple[Restriction, ...]:
        return parse_restrictions(self.grpc_restricted or "", GRPC_HEADER_PREFIX)

    def http_restrictions(self) -> tuple[Restriction, ...]:
        return parse_restrictions(self.http_restricted or "")


DEFAULT_OVERLAP_WEIGHT = 4.0
DEFAULT_PREFILL_SCALE = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRouterOptions:
    """What the KV router minimises, and what it counts as cached."""

    cost: KvCost | None = option(
        None,
        help="What an instance costs: seconds that a request adds to the latencies of all there, or weighted blocks. "
        "Default: latency, unless one of the next two options is set.",
    )
    overlap_score_weight: float = option(
        DEFAULT_OVERLAP_WEIGHT,
        flags=("--overlap-score-weight", "--overlap-score-credit", "--kv-overlap-score-weight"),
        env=("DYN_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_CREDIT"),
        file_key="overlap_score_weight",
        minimum=0,
        help="With weights: blocks of prefill that one cached block saves; 0 looks at load only.",
    )
    prefill_load_scale: float = option(
        DEFAULT_PREFILL_SCALE,
        minimum=0,
        help="With weights: cost of a block to prefill against a block held by a running request.",
    )
    temperature: float = option(0.0, minimum=0, help="Above 0 the instance is drawn from a softmax over normalised costs.")
    ttft_goal_s: float | None = option(
        None,
        flags=("--ttft-goal",),
        env=("DYN_TTFT_GOAL",),
        minimum=0,
        metavar="SECONDS",
        help="With latency: a request that is predicted to get its first token later on every instance is refused as overload; "
        "one that would on idle ones, too, only for what waits before it.",
    )
    itl_goal_s: float | None = option(
        None,
        flags=("--itl-goal",),
        env=("DYN_ITL_GOAL",),
        minimum=0,
        metavar="SECONDS",
        help="With latency: requests stay away from instances where tokens would take longer.",
    )
    kv_full_penalty: float = 1.0
    """Weight of the term that keeps prompts away from instances whose KV blocks are more than half in use."""
    use_kv_events: bool = option(
        True,
        flags=("--router-kv-events", "--use-kv-events"),
        env=("DYN_ROUTER_KV_EVENTS", "DYN_USE_KV_EVENTS"),
        file_key="use_kv_events",
        help="Follow what instances publish about their caches; without, caches are guessed from the router's own decisions.",
    )
    ttl_s: float = option(
        120.0,
        flags=("--router-ttl", "--router-ttl-secs"),
        env=("DYN_ROUTER_TTL", "DYN_ROUTER_TTL_SECS"),
        minimum=0.001,
        help="Without KV events: seconds for which a guess lasts, after its prompt should have been computed.",
    )
    max_tree_size: int = option(1 << 20, minimum=1, help="Without KV events: (block, instance) pairs guessed at most.")
    prune_target_ratio: float = option(
        0.8, minimum=0.01, maximum=1, help="Without KV events: share of guesses that pruning leaves."
    )
    speculative_ttl_s: float = option(
        2.0,
        minimum=0,
        help="With KV events: how many seconds a prompt counts as cached without them, after it should have been computed.",
    )
    tier_price: tuple[tuple[Tier, float], ...] = option(
        (),
        repeatable=True,
        parse=parse_tier_price,
        metavar="TIER=SECONDS",
        help="With latency: seconds to fetch a KV block from a tier (cpu, disk, shared), such as cpu=0.0002,disk=0.001, in place "
        "of what is learned.",
    )
    track_active_blocks: bool = option(
        True, help="Count blocks held by running requests into the cost; off: prefill alone counts."
    )
    track_output_blocks: bool = option(False, help="Book the blocks that a request's max_tokens would fill, too.")
    assume_kv_reuse: bool = option(
        True, help="Bookings on one instance count shared prefixes once; off: each counts all its blocks."
    )
    block_size: int = 0
    """Tokens of a KV block; 0: the block size of the instances' cards."""

    @property
    def tier_prices(self) -> dict[Tier, float]:
        """Seconds per block of the tiers whose prices are set."""
        return dict(self.tier_price)

    @property
    def has_goals(self) -> bool:
        return self.ttft_goal_s is not None or self.itl_goal_s is not None

    @property
    def effective_cost(self) -> KvCost:
        """What is minimised: who sets a weight wants weights."""
        if self.cost is not None:
            return self.cost
        is_weighed = (self.overlap_score_weight, self.prefill_load_scale) != (DEFAULT_OVERLAP_WEIGHT, DEFAULT_PREFILL_SCALE)
        return KvCost.WEIGHTS if is_weighed else KvCost.LATENCY

    def __post_init__(self) -> None:
        for name in ("overlap_score_weight", "prefill_load_scale", "temperature", "kv_full_penalty"):
            check_weight(name, getattr(self, name))
        if not 0.0 < self.prune_target_ratio <= 1.0:
            raise InvalidRequest("router_prune_target_ratio must be above 0 and at most 1")


def check_weight(name: str, value: float) -> float:
    """Return `value`. Raises InvalidRequest unless it can weigh a term of the KV router's cost."""
    if not math.isfinite(value) or value < 0.0:
        raise InvalidRequest(f"{name} must be a number from 0 on, not {value}", param=name)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The loads from which on an instance is busy and gets no more requests. None: never."""

    active_decode_blocks: float | None = option(
        None,
        flags=("--active-decode-blocks-threshold",),
        env=("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",),
        file_key="active_decode_blocks_threshold",
        minimum=0,
        maximum=1,
        help="Share of its KV blocks in use above which an instance is busy; all busy: requests are refused as overload.",
    )
    active_prefill_tokens: int | None = option(
        None,
        flags=("--active-prefill-tokens-threshold",),
        env=("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",),
        file_key="active_prefill_tokens_threshold",
        minimum=0,
        help="Prompt tokens waiting to be computed above which an instance is busy; all busy: requests are refused as overload.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How instances are chosen. Options about KV caches apply to `--router-mode kv` only, thresholds to all modes."""

    mode: RouterMode = option(RouterMode.ROUND_ROBIN, help="How an instance is chosen.")
    load_aware: bool = option(
        False,
        flags=("--load-aware",),
        env=("DYN_LOAD_AWARE", "DYN_ROUTER_LOAD_AWARE"),
        help="least-loaded instead of round-robin, power-of-two instead of random.",
    )
    kv: KvRouterOptions = group("Routing", prefix="router", default=KvRouterOptions)
    durable_kv_events: bool = option(
        False,
        flags=("--durable-kv-events", "--router-durable-kv-events"),
        env=("DYN_DURABLE_KV_EVENTS", "DYN_ROUTER_DURABLE_KV_EVENTS"),
        file_key="durable_kv_events",
        help="Begin with the KV events that workers with the same option have recorded in JetStream, and query only the "
        "instances for which the record is incomplete.",
    )
    snapshot_threshold: int = option(
        10_000,
        minimum=1,
        help="With durable KV events: events on record after which a snapshot takes their place, in the NATS object store.",
    )
    reset_states: bool = option(
        False, help="With durable KV events: forget, at the start, what is on record, snapshots included."
    )
    replica_sync: bool = option(
        False, help="Share bookings and sessions with the other frontends of the namespace, so that they decide like one."
    )
    thresholds: Thresholds = group("Routing", prefix="router", default=Thresholds)
    session_affinity_ttl_s: float | None = option(
        None,
        flags=("--router-session-affinity-ttl-secs", "--session-affinity-ttl"),
        env=("DYN_ROUTER_SESSION_AFFINITY_TTL_SECS", "DYN_SESSION_AFFINITY_TTL"),
        minimum=0.001,
        help="Requests of one session go to one instance until none came for so many seconds; unset: sessions mean nothing.",
    )
    session_affinity_mode: AffinityMode = option(
        AffinityMode.HARD, help="A session whose instance is busy: hard keeps it there, soft moves it."
    )
    session_affinity_max: int = option(
        65_536,
        minimum=1,
        help="Sessions remembered at most. Those of a key with more than its share are forgotten first, the least used first.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """Whether idle instances are probed."""

    wait_s: float | None = option(
        None,
        flags=("--canary-wait",),
        env=("DYN_CANARY_WAIT",),
        minimum=0.1,
        maximum=86_400,
        metavar="SECONDS",
        help="An idle instance of a language model makes one token this often, or is left out until it can. Default: never.",
    )
    timeout_s: float = option(
        3.0, flags=("--canary-timeout",), env=("DYN_CANARY_TIMEOUT",), minimum=0.1, help="How long it may take for that token."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """What happens to a request whose instance fails: it is retried before its first response, and migrated after it."""

    migration_limit: int = option(
        3,
        flags=("--migration-limit",),
        env=("DYN_MIGRATION_LIMIT",),
        file_key="migration_limit",
        minimum=0,
        maximum=100,
        help="How often one text stream may go on at another instance when its own dies; 0: it fails.",
    )
    max_attempts: int = option(
        5,
        flags=("--max-attempts",),
        minimum=1,
        maximum=100,
        help="Instances tried for one request; a migration starts a new count.",
    )
    ratio: float = option(
        0.2,
        minimum=0,
        maximum=1,
        help="Retries and migrations allowed per request, for each API key and model: a dying fleet gets few requests twice.",
    )
    floor_per_s: float = option(
        10.0, minimum=0, help="Retries and migrations of an API key at a model allowed per second however few requests it sends."
    )
    burst: int = 1000
    """Retries saved up at most. An instance's death costs one for each request it held."""
    reconnect_grace_s: float = 5.0
    """After our NATS connection came back: how long instances that seem gone are waited for."""
    disconnected_wait_s: float = 30.0
    """How long a request without a deadline waits for a NATS connection that is away; others wait until their deadlines."""
    refusal_pause_s: float = 1.0
    """An instance that refused as unavailable, e.g. because it drains, is left out for so long if there are others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitOptions:
    """Which instances get no requests because their engines fail too many."""

    enabled: bool = option(
        True,
        flags=("--circuit-breaker",),
        env=("DYN_CIRCUIT_BREAKER",),
        help="Send no requests to an instance whose engine fails too many of them.",
    )
    failure_share: float = option(
        0.2, minimum=0.01, maximum=1, help="Share of its requests that must fail; others must do better."
    )
    min_failures: int = option(5, minimum=1, maximum=1_000_000, help="So many of them, at least.")
    open_s: float = option(
        10.0,
        flags=("--circuit-open-time",),
        minimum=0.1,
        maximum=86_400,
        help="Seconds until one is tried again; twice as many each time that it fails again, up to 300.",
    )
    max_open_share: float = option(
        0.5, minimum=0, maximum=1, help="Largest share of the instances of a model, in one role, that get none at once."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Whether requests wait while all instances are busy, which thresholds decide."""

    size: int = option(
        0,
        flags=("--router-queue-size",),
        env=("DYN_ROUTER_QUEUE_SIZE",),
        minimum=0,
        maximum=1_000_000,
        help="Requests of a model that may wait while all its instances are busy; 0: they are refused as overload at once.",
    )
    policy: QueuePolicy = option(
        QueuePolicy.FCFS,
        flags=("--router-queue-policy",),
        env=("DYN_ROUTER_QUEUE_POLICY",),
        help="Who is next: fcfs by priority, then arrival; prefix nearly so, but one whose prompt is cached where there is room; "
        "wspt by priority per token, so that short ones wait least.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Requests for models that a planner starts when there are requests."""

    timeout_s: float = option(
        120.0,
        flags=("--start-timeout",),
        env=("DYN_START_TIMEOUT",),
        minimum=0.1,
        maximum=86_400,
        metavar="SECONDS",
        help="How long a request waits for the first instance of its model, if a planner starts one.",
    )
    queue_size: int = option(
        1000,
        flags=("--start-queue-size",),
        env=("DYN_START_QUEUE_SIZE",),
        minimum=0,
        maximum=1_000_000,
        help="Requests of a model that may wait while its first instance starts; 0: they are refused at once.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationOptions:
    """For models that have instances of the roles prefill and decode."""

    enforce: bool = option(
        False,
        flags=("--enforce-disagg",),
        env=("DYN_ENFORCE_DISAGG",),
        file_key="enforce_disagg",
        help="Refuse requests that no prefill and decode instances can serve together, rather than have one instance do all.",
    )
    min_prompt_tokens: int = option(
        0,
        flags=("--disagg-min-prompt-tokens",),
        env=("DYN_DISAGG_MIN_PROMPT_TOKENS",),
        minimum=0,
        help="Prompts of which a decode instance lacks fewer tokens are computed there: moving KV blocks would take longer.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """What the data plane knows and does for every protocol."""

    request_timeout_s: float | None = option(
        None, minimum=0.001, help="Longest life of a request whose caller gave no deadline; unset: none."
    )
    repository_timeout_s: float = option(
        600.0, flags=("--repository-timeout",), minimum=1, help="Seconds within which workers must load or unload a model."
    )
    models: tuple[ModelCard, ...] = option(
        (),
        flags=(),
        env=(),
        file_key="models",
        from_file=parse_declared_models,
        help="Tensor models declared before a worker serves them: their metadata is served, inference is UNAVAILABLE until then.",
    )
    remember_s: float = 600.0
    """A model that lost its last instance is known for so long: requests for it are unavailable, not unknown."""
    statistics_timeout_s: float = 5.0
    """How long to wait for the statistics of instances."""
    queue: QueueOptions = group("Queue", prefix="queue", default=QueueOptions)
    start: StartOptions = group("Models that start from zero", prefix="start", default=StartOptions)
    disaggregation: DisaggregationOptions = group("Disaggregated serving", prefix="disaggregation", default=DisaggregationOptions)
    retry: RetryOptions = group("Retries and migration", prefix="retry", default=RetryOptions)
    canary: CanaryOptions = group("Canaries", prefix="canary", default=CanaryOptions)
    circuit: CircuitOptions = group("Circuit breaking", prefix="circuit", default=CircuitOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Configuration of a frontend, which serves KServe v2 and HTTP and reaches workers over etcd and NATS."""

    namespace: str = option("dynamo", parse=parse_name, help="Namespace whose workers are served.")
    processes: int = option(1, minimum=1, maximum=256, help="Processes that share the same ports.")
    drain_timeout_s: float = option(
        30.0, flags=("--drain-timeout",), minimum=0, help="After SIGTERM, requests may finish for this many seconds."
    )
    settle_s: float = option(
        0.5, minimum=0, help="After SIGTERM, new requests are still taken for so long: readiness has to get around first."
    )
    overload_status: OverloadStatus = option(
        OverloadStatus.UNAVAILABLE,
        help="HTTP status of refused overload; gRPC gives RESOURCE_EXHAUSTED for 429 and UNAVAILABLE otherwise.",
    )
    cache_dir: Path = option(
        Path("~/.cache/dynamo"), help="Where tokenizers and templates are kept that were fetched from the object store."
    )
    batches_max_bytes: int = option(
        1024 * MIB,
        flags=("--batches-max-size",),
        parse=parse_bytes,
        minimum=MIB,
        maximum=2**50,
        metavar="SIZE",
        help="What files and batches take up at most; those that are large, as much again. The first frontend sets it.",
    )
    http: HttpOptions = group("HTTP", prefix="http", default=HttpOptions)
    capacity: CapacityOptions = group("Capacity", default=CapacityOptions)
    kserve: KserveOptions = group("KServe", default=KserveOptions)
    grpc: GrpcOptions = group("KServe gRPC", prefix="grpc", default=GrpcOptions)
    endpoint_picker: PickerOptions = group("Endpoint picker", prefix="endpoint_picker", default=PickerOptions)
    prometheus: PrometheusOptions = group("Prometheus", prefix="prometheus", default=PrometheusOptions)
    grafana: GrafanaOptions = group("Grafana", prefix="grafana", default=GrafanaOptions)
    tls: TlsOptions = group("TLS", prefix="tls", default=TlsOptions)
    access: AccessOptions = group("Access", prefix="access", default=AccessOptions)
    text: TextOptions = group("Text", prefix="text", default=TextOptions)
    responses: ResponsesOptions = group("Responses", prefix="responses", default=ResponsesOptions)
    usage: UsageOptions = group("Usage", prefix="usage", default=UsageOptions)
    router: RouterOptions = group("Routing", prefix="router", default=RouterOptions)
    serving: ServingOptions = group("General", default=ServingOptions)
    nats: NatsOptions = group("NATS", prefix="nats", default=NatsOptions)
    etcd: EtcdOptions = group("etcd", prefix="etcd", default=EtcdOptions)
    shared_memory: SharedMemoryOptions = group("Shared memory", prefix="shared_memory", default=SharedMemoryOptions)
    log: LogOptions = group("Logging", prefix="log", default=LogOptions)
    trace: TraceOptions = group("Tracing", prefix="trace", default=TraceOptions)

    def __post_init__(self) -> None:
        object.__setattr__(self, "http", replace(self.http, port_tls=self.http.port_tls.completed(self.tls)))
        object.__setattr__(self, "grpc", replace(self.grpc, port_tls=self.grpc.port_tls.completed(self.tls)))
        picker = replace(self.endpoint_picker, port_tls=self.endpoint_picker.port_tls.completed(self.tls))
        object.__setattr__(self, "endpoint_picker", picker)
        if self.tls.required and (self.http.tls is None or (self.grpc.wanted and self.grpc.tls is None)):
            raise ValueError("--use-tls needs --cert-file and --key-file")
        if self.tls.required and picker.enabled and picker.port_tls.files is None:
            raise ValueError("--use-tls needs --cert-file and --key-file, or those of the endpoint picker")
        if self.processes > 1 and picker.enabled and picker.port == 0:
            raise ValueError("--processes shares ports between processes, so they need a fixed --endpoint-picker-port")
        if self.tls.client_ca_file is not None and self.http.tls is None and self.grpc.tls is None:
            raise ValueError("--client-ca-file needs --cert-file and --key-file")
        if self.tls.ciphers is not None and self.http.tls is None and self.grpc.tls is None:
            raise ValueError("--tls-ciphers needs --cert-file and --key-file")
        if self.processes > 1 and (self.http.port == 0 or (self.grpc.wanted and self.grpc.listen_port == 0)):
            raise ValueError("--processes shares ports between processes, so they need fixed --http-port and --grpc-port")
        if self.processes > 1 and self.prometheus.port == 0:
            raise ValueError("--processes shares ports between processes, so they need a fixed --prometheus-port")
        if self.prometheus.port is not None and not self.prometheus.enabled:
            raise ValueError("--prometheus-port and --no-prometheus exclude each other")
        same = self.grpc.wanted and self.http.port == self.grpc.listen_port != 0
        if same and self.http.host == self.grpc.host:
            raise ValueError(f"--http-port and --grpc-port are both {self.http.port}")

    @property
    def picker_grpc(self) -> GrpcOptions:
        """The options of the endpoint picker's server: those of gRPC, at its own address."""
        picker = self.endpoint_picker
        return replace(self.grpc, server=GrpcServerChoice.HTTP2, host=picker.host, port=picker.port, port_tls=picker.port_tls)

    @property
    def grafana_folder(self) -> Path | None:
        """Where dashboards are written; None for nowhere."""
        if self.grafana.folder is None and (self.grafana.dashboard_name is not None or self.grafana.datasources):
            return self.cache_dir.expanduser() / "grafana"
        return self.grafana.folder
