"""Which engine a `--model` means, and that engine.

| `--model` | engine |
|---|---|
| `echo` | echo: input `INPUT0`, FP32 of any length |
| `echo:NAME=DATATYPE[dims],…` | echo with these inputs |
| `echo:file.yaml`, `echo:config.pbtxt` | echo with the inputs that the file declares |
| `echo:llm`, `echo:llm:tokenizer.json` | echo as a language model, of bytes or of that tokenizer's tokens: see `read_tokenizer` |
| `module:Class`, `path/to/file.py:Class` | python: of tensors, or with `generate` a language model that takes text |
| a `.gguf` file, `smollm2` | llama |
| a folder of folders with `config.pbtxt` | repository: see `dynamo.worker.repository` |
| a folder with a `config.json`, as Hugging Face has them | vllm; sglang with `--engine sglang` |
| none, with `--url http://…` | remote |
| `sim`, `sim:blocks=512,block_size=16,speedup=0,…` | sim: a simulated engine; see `sim_config` for what can be set |
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from tokenizers import Tokenizer

from dynamo.common.errors import InvalidRequest
from dynamo.common.http.client import HttpClient
from dynamo.common.model_card import Role
from dynamo.common.repository import ControlMode
from dynamo.worker.config import EngineKind, RepositoryOptions
from dynamo.worker.engine.base import Engine, TensorEngine
from dynamo.worker.engine.declaration import PBTXT_SUFFIX, YAML_SUFFIXES, Declaration, read_declaration
from dynamo.worker.engine.echo import CHAT_TEMPLATE, EchoTensors, EchoTokens, byte_tokenizer, echo_declaration, parse_tensors
from dynamo.worker.engine.python import PythonEngine
from dynamo.worker.engine.python_text import PythonTextEngine, generates_text
from dynamo.worker.engine.remote.dialect import RemoteKind
from dynamo.worker.engine.remote.engine import RemoteEngine
from dynamo.worker.engine.remote.gateway import GatewayAddress
from dynamo.worker.engine.remote.load import Rank
from dynamo.worker.engine.remote.options import RemoteOptions
from dynamo.worker.engine.remote.relay import RelayEngine
from dynamo.worker.engine.sim.engine import SimConfig, SimEngine
from dynamo.worker.engine.sim.scheduler import SchedulerConfig
from dynamo.worker.engine.sim.script import CALLS_TEMPLATE
from dynamo.worker.engine.sim.tiers import SharedStores, TierConfig
from dynamo.worker.engine.sim.timing import TimingModel
from dynamo.worker.engine.user_class import load_class
from dynamo.worker.kv.vllm_subscriber import KvSource
from dynamo.worker.repository.declared.layout import is_repository
from dynamo.worker.repository.engine import RepositoryEngine
from dynamo.worker.repository.models.settings import RepositorySettings
from dynamo.worker.repository.scheduling.rate_limiter import RateLimit, RateLimiter
from dynamo.worker.repository.stores.object_store import is_url
from dynamo.worker.tokenizers.folder import TextFiles, read_folder
from dynamo.worker.tokenizers.gguf import GgufModel
from dynamo.worker.tokenizers.sentencepiece import SentencePieceModel

log = logging.getLogger(__name__)

AnyEngine: TypeAlias = Engine | TensorEngine

SIM_SETTINGS = frozenset(
    {
        "adapters",
        "batched_tokens",
        "block_size",
        "blocks",
        "calls",
        "cpu_blocks",
        "cpu_fetch",
        "disk_blocks",
        "disk_fetch",
        "failing_reads",
        "ranks",
        "role",
        "seed",
        "shared_blocks",
        "shared_fetch",
        "speedup",
        "timing",
        "token_bytes",
        "tokenizer",
        "steps_per_turn",
        "transfer",
    }
)
BUILT_IN_MODELS = ("smollm2",)
"""Names of small models that come as Python packages."""


def choose_engine(model: str) -> EngineKind:
    """Return the engine that serves `model`. Raises InvalidRequest naming what is supported."""
    where, colon, name = model.rpartition(":")
    if model == "echo" or model.startswith("echo:"):
        return EngineKind.ECHO
    if model == "sim" or model.startswith("sim:"):
        return EngineKind.SIM
    if model.lower() in BUILT_IN_MODELS or model.endswith(".gguf"):
        return EngineKind.LLAMA
    if colon and where and name.isidentifier():
        return EngineKind.PYTHON
    if model and Path(model).is_dir():
        if is_repository(Path(model)):
            return EngineKind.REPOSITORY
        if (Path(model) / "config.json").is_file():
            return EngineKind.VLLM
        raise InvalidRequest(f"the folder {model} is neither a model, with a config.json, nor a model repository")
    raise InvalidRequest(
        f"model {model!r} cannot be served: give a .gguf file, {', '.join(BUILT_IN_MODELS)}, a model folder, "
        "module:Class, path/to/file.py:Class, echo or sim; with --engine vllm or sglang also a name on Hugging Face"
    )


def make_engine(
    model: str,
    kind: EngineKind | None = None,
    *,
    name: str = "",
    threads: int | None = None,
    max_num_seqs: int | None = None,
    context_length: int | None = None,
    role: Role | None = None,
    speedup_ratio: float | None = None,
    engine_args: str = "",
    stores: SharedStores | None = None,
) -> AnyEngine:
    """Return an engine for `model`, not started. `kind` overrides the choice, `name` the model's own name. Simulated engines
    share `stores`.

    Raises InvalidRequest if there is no such model, the engine's package is not installed, or a setting is not for this engine.
    """
    kind = kind or choose_engine(model)
    if role not in (None, Role.AGGREGATED) and kind not in (EngineKind.SIM, EngineKind.VLLM):
        raise InvalidRequest(f"the {kind} engine runs prefill and decode together: it takes no --role {role}")
    if engine_args and kind not in (EngineKind.VLLM, EngineKind.SGLANG):
        raise InvalidRequest(f"--engine-args are for vllm and sglang, not for the {kind} engine, which serves {model}")
    match kind:
        case EngineKind.ECHO:
            return _make_echo(model.removeprefix("echo").removeprefix(":"), name)
        case EngineKind.PYTHON:
            return _make_python(model, name, context_length)
        case EngineKind.LLAMA:
            return _make_llama(model, name, threads, max_num_seqs, context_length)
        case EngineKind.REPOSITORY:
            raise InvalidRequest(f"a model repository has names of its own: give {model} as --model-repository, without a name")
        case EngineKind.SIM:
            settings = model.removeprefix("sim").removeprefix(":")
            config = sim_config(settings, name, max_num_seqs, context_length, role, speedup_ratio)
            store = None if stores is None else stores.of(config.name, config.scheduler.tiers.shared_blocks)
            return SimEngine(config, store)
        case EngineKind.VLLM:
            return _make_vllm(model, name, engine_args, role or Role.AGGREGATED, max_num_seqs, context_length)
        case EngineKind.SGLANG:
            return _make_sglang(model, name, engine_args, max_num_seqs, context_length)
        case EngineKind.REMOTE:
            raise InvalidRequest(f"a remote engine is named by --url, not by --model {model}")


def make_remote(
    url: str,
    options: RemoteOptions,
    *,
    position: int = 0,
    name: str = "",
    context_length: int | None = None,
    max_num_seqs: int | None = None,
) -> RemoteEngine | RelayEngine:
    """Return an engine for the server at `url`, the one at `position` of `options`, not started.

    Each data-parallel rank of a server has a position of its own. Raises InvalidRequest for a URL or tokenizer that cannot be
    used.
    """
    events = None
    server, number = divmod(position, options.data_parallel_size)
    rank = Rank(number, options.data_parallel_size) if options.data_parallel_size > 1 else None
    if options.kv_events:
        replay = _address_of_rank(options.kv_replay[server], number) if options.kv_replay else None
        events = KvSource(0, _address_of_rank(options.kv_events[server], number), replay)
    client = HttpClient(url, key=options.api_key, timeout_s=options.timeout_s)
    if options.kind is RemoteKind.RELAY:
        return RelayEngine(client, name=name)
    return RemoteEngine(
        client,
        kind=options.kind,
        name=name,
        files=None if options.tokenizer is None else _read_text_files(options.tokenizer),
        context_length=context_length,
        max_num_seqs=max_num_seqs,
        events=events,
        rank=rank,
        gateway=GatewayAddress(url, options.endpoints[server] if options.endpoints else "", options.pod_ip),
    )


def _address_of_rank(address: str, rank: int) -> str:
    """Return where a rank publishes if the first one does so at `address`: vLLM counts up from the first port."""
    host, _, port = address.rpartition(":")
    return address if not rank else f"{host}:{int(port) + rank}"


def _read_text_files(path: Path) -> TextFiles:
    if path.is_dir():
        return read_folder(path)
    try:
        return TextFiles(read_tokenizer(path))
    except OSError as error:
        raise InvalidRequest(f"the tokenizer {path} cannot be read: {error}") from error


def split_repositories(
    models: Iterable[tuple[str, str]], kind: EngineKind | None
) -> tuple[list[tuple[str, str]], tuple[Path, ...]]:
    """Split `models`, pairs of model and name, into single models and the folders that are whole model repositories.

    Raises InvalidRequest for a model that is neither.
    """
    single: list[tuple[str, str]] = []
    folders: list[Path] = []
    for model, name in models:
        if name or (kind or choose_engine(model)) is not EngineKind.REPOSITORY:
            single.append((model, name))
        else:
            folders.append(Path(model))
    return single, tuple(folders)


def make_repository(options: RepositoryOptions, folders: tuple[Path, ...], drain_s: float) -> RepositoryEngine:
    """Return an engine for the model repositories of `options` and those in `folders`, not started.

    Raises InvalidRequest for a folder that does not exist.
    """
    plain = [text.removeprefix("file://") for text in options.repositories]
    folders = (*(Path(text) for text in plain if not is_url(text)), *folders)
    settings = RepositorySettings(
        folders=tuple(folder.expanduser().resolve() for folder in folders),
        stores=tuple(text for text in plain if is_url(text)),
        auto_complete=options.auto_complete,
        strict_outputs=options.strict_outputs,
        default_max_batch_size=options.default_max_batch_size,
        drain_s=drain_s,
        path_roots=options.path_roots,
        path_max_bytes=options.path_max_bytes,
        copies=options.copies.expanduser(),
        copies_bytes=options.copies_bytes,
        on_request=options.control_mode is ControlMode.EXPLICIT,
        cache_bytes=options.cache_bytes,
        calls_bytes=options.calls_bytes,
        rate_limiter=None if options.rate_limit is RateLimit.OFF else RateLimiter(options.provided_resources()),
    )
    return RepositoryEngine(settings, options.control_mode, options.load, exit_on_error=options.exit_on_error)


def sim_config(
    settings: str,
    name: str,
    max_num_seqs: int | None,
    context_length: int | None,
    role: Role | None = None,
    speedup_ratio: float | None = None,
) -> SimConfig:
    """From `key=value,…`, where `role` and `speedup_ratio` come first if they are given. Keys:

    | key | |
    |---|---|
    | `blocks`, `block_size` | KV blocks of one rank (16,384) and tokens in one (16) |
    | `adapters` | LoRA adapters that it holds at once, see `--allow-runtime-lora`; 0: it loads none |
    | `calls` | 1: calls tools, see `sim.script` |
    | `cpu_blocks` | blocks that a rank keeps in the host's memory (0) |
    | `cpu_fetch` | tokens whose KV is read from there in a second (200,000); 0: at once |
    | `disk_blocks`, `disk_fetch` | the same of a disk, which gets what the host's memory evicts (0; 30,000) |
    | `failing_reads` | the share of reads from all these that fail (0): the rest of the prompt is computed |
    | `shared_blocks`, `shared_fetch` | the same of a store that the model's engines in this process share (0; 20,000) |
    | `token_bytes` | KV of a token (131,072), for metrics of bytes |
    | `batched_tokens` | tokens computed in one step (8,192) |
    | `speedup` | divides the durations of the timing; 0: steps take no time |
    | `timing` | a CSV file of measured steps, see `sim.timing` |
    | `ranks` | data-parallel ranks, each with blocks of its own |
    | `role` | aggregated, prefill or decode |
    | `transfer` | tokens per second whose KV a decode instance fetches from a prefill one; 0: at once |
    | `seed` | instances of the same seed generate the same tokens |
    | `steps_per_turn` | at speed 0: steps made before streams are read |
    | `tokenizer` | a tokenizer, as `read_tokenizer` takes it; default: bytes |

    Raises InvalidRequest naming what is wrong.
    """
    values = dict(item.partition("=")[::2] for item in settings.split(",") if item)
    if unknown := sorted(values.keys() - SIM_SETTINGS):
        raise InvalidRequest(f"the simulated engine has no setting {unknown[0]!r}; it has {', '.join(sorted(SIM_SETTINGS))}")
    try:
        speedup = float(values.get("speedup", "1")) if speedup_ratio is None else speedup_ratio
        timing = TimingModel.load(Path(values["timing"]), speedup) if "timing" in values else TimingModel(speedup=speedup)
        tokenizer = read_tokenizer(Path(values["tokenizer"])) if "tokenizer" in values else byte_tokenizer()
        calls = bool(int(values.get("calls", "0")))
        scheduler = SchedulerConfig(
            block_size=int(values.get("block_size", "16")),
            total_blocks=int(values.get("blocks", "16384")),
            max_batched_tokens=int(values.get("batched_tokens", "8192")),
            max_num_seqs=max_num_seqs or 256,
            vocabulary=Tokenizer.from_str(tokenizer.decode()).get_vocab_size(),
            kv_transfer_tokens_per_s=float(values.get("transfer", "0")),
            timing=timing,
            tiers=TierConfig(
                cpu_blocks=int(values.get("cpu_blocks", "0")),
                cpu_tokens_per_s=float(values.get("cpu_fetch", "200000")),
                disk_blocks=int(values.get("disk_blocks", "0")),
                disk_tokens_per_s=float(values.get("disk_fetch", "30000")),
                failing_reads=float(values.get("failing_reads", "0")),
                shared_blocks=int(values.get("shared_blocks", "0")),
                shared_tokens_per_s=float(values.get("shared_fetch", "20000")),
                token_bytes=int(values.get("token_bytes", "131072")),
            ),
        )
        return SimConfig(
            name=name or "sim",
            scheduler=scheduler,
            context_length=context_length or 131_072,
            data_parallel_size=int(values.get("ranks", "1")),
            role=role or Role(values.get("role", "aggregated")),
            seed=int(values.get("seed", "0")),
            steps_per_turn=int(values.get("steps_per_turn", "1")),
            tokenizer=tokenizer,
            chat_template=(CALLS_TEMPLATE if calls else CHAT_TEMPLATE).encode(),
            max_adapters=int(values.get("adapters", "0")),
            calls=calls,
        )
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"the simulated engine cannot be set up by {settings!r}: {error}") from error


def read_tokenizer(path: Path) -> bytes:
    """Return a `tokenizer.json`: the file itself, or made from a SentencePiece model (`.model`) or a GGUF file.

    Raises OSError, and InvalidRequest or Unsupported for a file that cannot be read.
    """
    match path.suffix:
        case ".model":
            return SentencePieceModel.read(path.read_bytes()).tokenizer_json()
        case ".gguf":
            return GgufModel.read(path).tokenizer_json()
        case _:
            return path.read_bytes()


def _make_echo(what: str, name: str) -> AnyEngine:
    kind, _, tokenizer = what.partition(":")
    if kind == "llm":
        try:
            return EchoTokens(name or "echo-llm", tokenizer=read_tokenizer(Path(tokenizer)) if tokenizer else None)
        except OSError as error:
            raise InvalidRequest(f"the tokenizer {tokenizer} cannot be read: {error}") from error
    declaration: Declaration | None = None
    if Path(what).suffix in (*YAML_SUFFIXES, PBTXT_SUFFIX):
        declaration = read_declaration(Path(what))
    elif what:
        declaration = echo_declaration(parse_tensors(what))
    return EchoTensors(declaration, name=name)


def _make_python(target: str, name: str, context_length: int | None) -> AnyEngine:
    model_class, _ = load_class(target)
    if generates_text(model_class):
        return PythonTextEngine(model_class, name=name, context_length=context_length)
    return PythonEngine.load(target, name=name)


@contextmanager
def _imported(need: str, package: str) -> Iterator[None]:
    """Import an engine in the body. Raises InvalidRequest if a package is missing, with what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"{need}, but the package {error.name} is missing: install {package}") from error


def _make_llama(model: str, name: str, threads: int | None, max_num_seqs: int | None, context_length: int | None) -> AnyEngine:
    with _imported(f"{model} needs the llama engine", "dynamo-serving[llama]"):
        from dynamo.worker.engine.llama.engine import LlamaEngine
    return LlamaEngine(model, name=name, threads=threads, slots=max_num_seqs, context_length=context_length)


def _make_vllm(
    model: str, name: str, engine_args: str, role: Role, max_num_seqs: int | None, context_length: int | None
) -> AnyEngine:
    with _imported(f"{model} needs the vllm engine", "vllm into the same environment"):
        from dynamo.worker.engine.vllm.engine import SharedVllm, VllmEngine
        from dynamo.worker.engine.vllm.speech import VllmSpeech
    vllm = SharedVllm(
        model, name=name, engine_args=engine_args, role=role, max_num_seqs=max_num_seqs, context_length=context_length
    )
    if not vllm.only_transcribes():
        return VllmEngine(vllm)
    if role is not Role.AGGREGATED:
        raise InvalidRequest(f"{model} is a speech model: it takes no --role {role}")
    return VllmSpeech(vllm)


def _make_sglang(model: str, name: str, engine_args: str, max_num_seqs: int | None, context_length: int | None) -> AnyEngine:
    with _imported(f"{model} needs the sglang engine", "sglang into the same environment"):
        from dynamo.worker.engine.sglang import SglangEngine
    log.warning("model %s: the sglang engine is experimental, never run on a GPU; SGLang's own server with --url is proven", name)
    return SglangEngine(model, name=name, engine_args=engine_args, max_num_seqs=max_num_seqs, context_length=context_length)
