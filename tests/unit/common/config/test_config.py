"""What a process reads from flags, environment and file, and what stops its start."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from dynamo.common.config import (
    ConfigError,
    FileSecret,
    group,
    load,
    markdown_table,
    option,
    parse_bytes,
    parse_port,
    project_version,
    replacements,
    variables,
)
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.common.process.interpreter import interpreter


class Mode(StrEnum):
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    body: int = option(1024, parse=parse_bytes, help="Largest body.")

    def __post_init__(self) -> None:
        if self.body == 13:
            raise ValueError("--limits-body may not be 13")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    blocks: int = option(64, help="Largest cache.")
    ttl_s: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    name: str = option("main", help="Name.")
    limits: CacheLimits = group("Cache", prefix="cache", default=CacheLimits)
    folder: str = option("/tmp", help="Folder.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caching:
    cache: CacheOptions = group("Cache", prefix="cache", default=CacheOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A server."""

    port: int = option(
        8001,
        flags=("--grpc-port",),
        hidden_flags=("--old-port",),
        env=("DYN_GRPC_PORT", "DYNAMO_GRPC_PORT"),
        file_key=("grpc_port", "grpc_service.port"),
        parse=parse_port,
        help="Port.",
    )
    grpc: bool = option(False, hidden_flags=("--kserve-mode",), help="Serve gRPC.")
    events: bool = option(True, help="Listen to events.")
    mode: Mode = option(Mode.RANDOM, help="How to choose.", parse=Mode)
    weight: float = option(1.0, minimum=0, maximum=10, help="Weight in %.")
    threads: int | None = option(None, minimum=1, help="Threads.")
    folder: Path | None = option(None, help="Folder.")
    models: tuple[str, ...] = option((), flags=("--model",), repeatable=True, separator="", help="Models.")
    declared: tuple[dict[str, object], ...] = option((), flags=(), env=(), from_file=lambda value: tuple(value), help="D")
    limits: Limits = group("Limits", prefix="limits")
    nats: NatsOptions = group("NATS", prefix="nats")
    etcd: EtcdOptions = group("etcd", prefix="etcd")
    log: LogOptions = group("Logging", prefix="log")


def read(*argv: str, file: str | None = None, folder: Path | None = None, **environ: str) -> Config:
    arguments: Sequence[str] = argv
    if file is not None:
        assert folder is not None
        (folder / "dynamo.yaml").write_text(file)
        arguments = ["--config", str(folder / "dynamo.yaml"), *argv]
    return load(Config, arguments, environ, program="server")


def refusal(*argv: str, file: str | None = None, folder: Path | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv, file=file, folder=folder, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """Options that had other names and values in the version before."""

    mode: Mode = option(Mode.RANDOM, file_key="pick.mode", replaced={"any": "random", "turns": "round-robin"}, help="Mode.")
    port: int = option(1, parse=parse_port, formerly=("--old-port", "OLD_PORT", "old.port_number"), help="Port.")
    events: bool = option(True, formerly=("--listen",), help="Events.")
    password: str | None = option(None, secret=True, formerly=("--passwd", "DYN_PASSWD", "passwd"), help="Password.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    port: int = option(1, flags=("--port",), hidden_flags=("--hidden-port",), formerly=("--former-port",), help="Port.")
    metrics: bool = option(True, help="Metrics.")
    drain_s: float = option(1.0, help="Drain.")
    key: str | None = option(None, secret=True, help="Key.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    names: tuple[str, ...] = option((), repeatable=True, several=True, help="Names.")
    drain_s: float = option(1.0, help="Drain.")
    model: str = option("", help="Model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    model: str = option("", help="Model.")
    for_frontend: tuple[str, ...] = option((), flags=("--for-frontend",), repeatable=True, separator="", help="Flags.")
    for_worker: tuple[str, ...] = option((), flags=("--for-worker",), repeatable=True, separator="", help="Flags.")


def launch(*argv: str) -> Launcher:
    return load(Launcher, argv, {}, program="launcher", passes_on={"for_frontend": Frontend, "for_worker": Worker})


def test_without_anything_the_defaults_hold() -> None:
    config = read()
    assert (config.port, config.grpc, config.events, config.limits.body) == (8001, False, True, 1024)
    assert config.nats.servers == ("nats://127.0.0.1:4222",)


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = "weight: 1.5\nthreads: 3\nlimits: {body: 2KiB}\n"
    config = read("--limits-body", "2048", file=file, folder=tmp_path, DYN_WEIGHT="2.5", DYN_THREADS="7")
    assert (config.weight, config.threads, config.limits.body) == (2.5, 7, 2048)
    assert read("--weight=3", DYN_WEIGHT="2.5").weight == 3.0


def test_of_a_flag_that_is_given_twice_the_later_one_counts() -> None:
    assert read("--grpc-port", "1", "--grpc-port", "2").port == 2
    assert read("--events", "--no-events").events is False
    assert read("--no-events", "--events").events is True
    assert read("--model", "a", "--model", "b").models == ("a", "b"), "repeatable flags add up"


def test_the_first_variable_that_is_set_and_not_empty_counts() -> None:
    assert read(DYN_GRPC_PORT="1", DYNAMO_GRPC_PORT="2").port == 1
    assert read(DYN_GRPC_PORT="", DYNAMO_GRPC_PORT="2").port == 2


def test_every_name_of_an_option_works(tmp_path: Path) -> None:
    assert read("--old-port", "5").port == 5
    assert read("--kserve-mode").grpc is True
    assert read(file="grpc_service:\n  port: 8787\n", folder=tmp_path).port == 8787
    assert read(file="grpc-service:\n  port: 8787\n", folder=tmp_path).port == 8787


def test_booleans_have_a_negative_form_and_read_common_words() -> None:
    assert read("--no-events").events is False
    assert read(DYN_EVENTS="off").events is False
    assert read(DYN_GRPC="1").grpc is True


def test_lists_are_repeated_flags_or_separated_text(tmp_path: Path) -> None:
    assert read("--model", "a,b", "--model", "c").models == ("a,b", "c")
    assert read(DYN_NATS_SERVERS="nats://a:1, nats://b:2").nats.servers == ("nats://a:1", "nats://b:2")
    assert read(NATS_URL="nats://a:1").nats.servers == ("nats://a:1",)
    assert read(file="etcd: {endpoints: [x:1, y:2]}", folder=tmp_path).etcd.endpoints == ("x:1", "y:2")


def test_structured_values_come_from_the_file(tmp_path: Path) -> None:
    config = read(file="declared:\n- name: m\n  shape: [1, 2]\n", folder=tmp_path)
    assert config.declared == ({"name": "m", "shape": [1, 2]},)


def test_enumerations_list_their_choices() -> None:
    assert read("--mode", "round-robin").mode is Mode.ROUND_ROBIN
    assert refusal("--mode", "fast") == "--mode: 'fast' is not one of random, round-robin"


def test_a_secret_comes_from_a_variable_or_a_file_but_never_from_a_flag(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    assert read(DYN_NATS_TOKEN="s3cret").nats.token == "s3cret"
    assert read(DYN_NATS_TOKEN_FILE=str(secret)).nats.token == "s3cret"
    assert read("--nats-token-file", str(secret)).nats.token == "s3cret"
    assert read(file=f"nats: {{token_file: {secret}}}", folder=tmp_path).nats.token == "s3cret"
    assert refusal("--nats-token", "x") == (
        "--nats-token would be readable in the process list; use --nats-token-file or DYN_NATS_TOKEN"
    )
    assert "s3cret" not in repr(read(DYN_NATS_TOKEN="s3cret"))


@pytest.mark.parametrize(
    ("argv", "environ", "sentence"),
    [
        (["--grpc-prot", "1"], {}, "unknown flag --grpc-prot; did you mean --grpc-port?"),
        (["--grpc-port", "http"], {}, "--grpc-port: 'http' is not a port (0 to 65535)"),
        (["--grpc-port", "65536"], {}, "--grpc-port: '65536' is not a port (0 to 65535)"),
        (["--grpc-port"], {}, "--grpc-port: expected one argument"),
        (["--weight", "11"], {}, "--weight: 11 is above 10"),
        (["--weight", "nan"], {}, "--weight: 'nan' is not a finite number"),
        (["--threads", "0"], {}, "--threads: 0 is below 1"),
        (["--threads", "2.5"], {}, "--threads: '2.5' is not an integer"),
        (["--limits-body", "12 XB"], {}, "--limits-body: '12 XB' is not a size such as 4194304 or 64MiB"),
        (["--limits-body", "13"], {}, "--limits-body may not be 13"),
        (["model.gguf"], {}, "unexpected argument 'model.gguf'"),
        (["--nats-tls-cert-file", "c.pem"], {}, "--nats-tls-cert-file needs --nats-tls-key-file as well"),
        (
            ["--nats-password-file", "/none"],
            {},
            "--nats-password-file: the file /none cannot be read: No such file or directory",
        ),
        ([], {"DYN_GRPC_PROT": "1"}, "unknown variable DYN_GRPC_PROT; did you mean DYN_GRPC_PORT?"),
        ([], {"DYN_GRPC": "maybe"}, "variable DYN_GRPC: 'maybe' is neither true nor false"),
        (["--config", "/none.yaml"], {}, "the configuration file /none.yaml cannot be read: No such file or directory"),
    ],
)
def test_what_does_not_fit_is_one_clear_sentence(argv: list[str], environ: dict[str, str], sentence: str) -> None:
    assert refusal(*argv, **environ) == sentence


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("wieght: 1", "{path}: unknown key 'wieght'; did you mean weight?"),
        ("limits: {bodi: 1}", "{path}: unknown key 'limits.bodi'; did you mean limits.body?"),
        ("limits: {body: [1]}", "{path}: 'limits.body' must be one plain value, not a list"),
        ("grpc: perhaps", "{path}: 'grpc': 'perhaps' is neither true nor false"),
        ("weight: 1\nweight: 2", "{path}: 'weight' is given twice"),
        ("- a", "the configuration file {path} does not hold a mapping"),
    ],
)
def test_a_bad_file_is_named_with_its_key(file: str, sentence: str, tmp_path: Path) -> None:
    assert refusal(file=file, folder=tmp_path) == sentence.format(path=tmp_path / "dynamo.yaml")


def test_text_that_is_not_yaml_is_one_sentence(tmp_path: Path) -> None:
    assert "is not YAML" in refusal(file="a: [", folder=tmp_path)


def test_an_option_in_file_and_on_the_command_line_must_agree(tmp_path: Path) -> None:
    assert read("--weight", "2", file="weight: 2", folder=tmp_path).weight == 2.0
    sentence = refusal("--weight", "2", file="weight: 3", folder=tmp_path)
    assert sentence == f"--weight and 'weight' in {tmp_path / 'dynamo.yaml'} are both given and differ; keep one of them"


def test_a_required_option_is_requested() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Needy:
        name: str = option(help="Name.", flags=("--name",), env=("DYN_NAME",))

    with pytest.raises(ConfigError, match=r"^--name is required: give --name or set DYN_NAME$"):
        load(Needy, [], {}, program="needy")


def test_help_shows_groups_defaults_and_variables_but_no_hidden_flags() -> None:
    shown = io.StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = shown.getvalue()
    assert "--grpc-port PORT" in text and "default 8001" in text and "DYN_GRPC_PORT" in text
    assert "NATS:" in text and "--nats-password-file FILE" in text
    assert "--old-port" not in text and "--nats-password " not in text


def test_version_is_printed() -> None:
    shown = io.StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit):
        read("--version")
    assert shown.getvalue() == f"server {project_version()}, {interpreter()}\n"


def test_the_table_for_the_docs_has_every_option() -> None:
    table = markdown_table(Config)
    assert "### NATS" in table
    assert "| `--events`, `--no-events` | `DYN_EVENTS` | `events` | `on` | Listen to events. |" in table
    assert "`--nats-password-file`" in table and "`--nats-password`" not in table
    assert "DYNAMO_GRPC_PORT" in variables(Config) and "DYN_NATS_PASSWORD_FILE" in variables(Config)


def test_a_group_within_a_group_of_the_same_title_continues_it() -> None:
    config = load(Caching, ["--cache-blocks", "8"], {"DYN_CACHE_FOLDER": "/var"}, program="server")
    assert config == Caching(cache=CacheOptions(limits=CacheLimits(blocks=8), folder="/var"))
    assert config.cache.limits.ttl_s == 1.5, "a field without option keeps its default"
    table = markdown_table(Caching)
    flags = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert table.count("### Cache") == 1 and flags == ["--cache-name", "--cache-blocks", "--cache-folder"]


def test_a_secret_from_a_file_reaches_another_process_with_its_path(tmp_path: Path) -> None:
    """`--processes` hands the configuration to each process that it starts."""
    file = tmp_path / "password"
    file.write_text("old")
    copy = pickle.loads(pickle.dumps(FileSecret("old", str(file))))
    file.write_text("new")
    assert (copy, copy.current()) == ("old", "new")


@pytest.mark.parametrize(
    ("argv", "environ", "file", "expected", "warning"),
    [
        (["--mode", "turns"], {}, "", Renamed(mode=Mode.ROUND_ROBIN), "--mode turns is deprecated: use round-robin"),
        ([], {"DYN_MODE": "any"}, "", Renamed(), "variable DYN_MODE any is deprecated: use random"),
        (
            [],
            {},
            "pick: {mode: turns}",
            Renamed(mode=Mode.ROUND_ROBIN),
            "{path}: 'pick.mode' turns is deprecated: use round-robin",
        ),
        (["--old-port=7"], {}, "", Renamed(port=7), "--old-port is deprecated: use --port"),
        (["--old-port", "7"], {}, "", Renamed(port=7), "--old-port is deprecated: use --port"),
        (["--no-listen"], {}, "", Renamed(events=False), "--no-listen is deprecated: use --no-events"),
        ([], {"OLD_PORT": "7"}, "", Renamed(port=7), "variable OLD_PORT is deprecated: use DYN_PORT"),
        ([], {"OLD_PORT": "7", "DYN_PORT": "8"}, "", Renamed(port=8), "variable OLD_PORT is deprecated: use DYN_PORT"),
        ([], {"OLD_PORT": "7", "DYN_PORT": ""}, "", Renamed(port=7), "variable OLD_PORT is deprecated: use DYN_PORT"),
        ([], {}, "old: {port-number: 7}", Renamed(port=7), "{path}: 'old.port_number' is deprecated: use 'port'"),
        ([], {}, "{port: 8, old: {port_number: 7}}", Renamed(port=8), "{path}: 'old.port_number' is deprecated: use 'port'"),
        (["--passwd-file", "{path}"], {}, "{}", Renamed(password="{}"), "--passwd-file is deprecated: use --password-file"),
        ([], {"DYN_PASSWD": "x"}, "", Renamed(password="x"), "variable DYN_PASSWD is deprecated: use DYN_PASSWORD"),
        ([], {}, "passwd: x", Renamed(password="x"), "{path}: 'passwd' is deprecated: use 'password'"),
    ],
)
def test_names_and_values_of_the_version_before_work_with_a_warning(
    argv: list[str],
    environ: dict[str, str],
    file: str,
    expected: Renamed,
    warning: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(file)
    argv = [word.replace("{path}", str(path)) for word in argv]
    assert load(Renamed, ["--config", str(path), *argv], environ, program="server") == expected
    assert caplog.messages == [f"{warning.replace('{path}', str(path))}, since the next version refuses it"]


def test_former_names_are_listed_beside_their_successors_and_nowhere_else() -> None:
    assert replacements(Renamed) == {
        "--old-port": "--port",
        "OLD_PORT": "DYN_PORT",
        "old.port_number": "port",
        "--listen": "--events",
        "--no-listen": "--no-events",
        "--passwd-file": "--password-file",
        "DYN_PASSWD": "DYN_PASSWORD",
        "DYN_PASSWD_FILE": "DYN_PASSWORD_FILE",
        "passwd": "password",
        "passwd_file": "password_file",
        "--mode any": "--mode random",
        "--mode turns": "--mode round-robin",
    }
    assert "old" not in markdown_table(Renamed) and "passwd" not in markdown_table(Renamed)


def test_without_former_names_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    load(Renamed, ["--port", "7", "--mode", "random"], {"DYN_EVENTS": "1"}, program="server")
    assert caplog.messages == []


def test_a_key_of_the_file_may_be_a_path(tmp_path: Path) -> None:
    assert read(file="limits.body: 2KiB", folder=tmp_path).limits.body == 2048


def test_flags_of_one_other_program_are_passed_on_to_it() -> None:
    config = launch("--port", "7", "--no-metrics", "--names", "a", "b", "--model", "m", "--key-file=/k", "--names=c")
    assert config.for_frontend == ("--port=7", "--no-metrics", "--key-file=/k")
    assert config.for_worker == ("--names=a", "--names=b", "--names=c")
    assert config.model == "m", "our own flag is not passed on"
    assert launch("--hidden-port=8", "--for-frontend=--port=9").for_frontend == ("--hidden-port=8", "--port=9"), "in their order"


def test_a_former_flag_of_another_program_is_passed_on_by_its_new_name(caplog: pytest.LogCaptureFixture) -> None:
    assert launch("--former-port", "7").for_frontend == ("--port=7",)
    assert caplog.messages == ["--former-port is deprecated: use --port, since the next version refuses it"]


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--drain-s=1", "--drain-s is a flag of several programs; use --for-frontend=--drain-s=… or --for-worker=--drain-s=…"),
        ("--prot=1", "unknown flag --prot; did you mean --port?"),
        ("--port", "--port: expected one argument"),
        ("--key=x", "--key would be readable in the process list; use --key-file or DYN_KEY"),
    ],
)
def test_a_flag_that_cannot_be_passed_on_is_one_sentence(flag: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(flag)
    assert str(caught.value) == sentence
