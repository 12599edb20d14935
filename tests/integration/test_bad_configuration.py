"""What is wrong with a configuration ends the start of either program with one sentence and exit status 2."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import trustme

from dynamo.common.process.ports import free_ports
from dynamo.frontend.__main__ import main as frontend_main
from dynamo.worker.__main__ import main as worker_main
from tests.support.certificates import Pair, issue, write_ca

PROGRAMS = pytest.mark.parametrize("program", ["frontend", "worker"])
# No server listens there: a configuration must be refused before anything is waited for.
NOWHERE = ("--etcd-endpoints", "http://127.0.0.1:9", "--nats-servers", "nats://127.0.0.1:9")


MAINS = {"frontend": frontend_main, "worker": worker_main}


@dataclass
class Attempt:
    """One start of a program."""

    program: str
    folder: Path
    flags: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    def refusal(self) -> str:
        """The one sentence it ends with. Runs inside this process, which starting one for each would take a minute."""
        errors, output = io.StringIO(), io.StringIO()
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        on_signal = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "DYNAMO_"))}
        try:
            with (
                mock.patch.object(sys, "argv", self.command()),
                mock.patch.dict(os.environ, {**environ, **self.environ}, clear=True),
                contextlib.chdir(self.folder),
                contextlib.redirect_stderr(errors),
                contextlib.redirect_stdout(output),
                pytest.raises(SystemExit) as ended,
            ):
                MAINS[self.program]()
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
            for number, handler in on_signal.items():
                signal.signal(number, handler)
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer):
                    thread.cancel()  # it would end this process some seconds after the program
        return self.sentence(ended.value.code, output.getvalue(), errors.getvalue())

    def command(self) -> list[str]:
        own = {"frontend": ("--http-port", "--grpc-port"), "worker": ("--model",)}[self.program]
        values = ("echo",) if self.program == "worker" else tuple(map(str, free_ports(2)))
        flags = [word for flag, value in zip(own, values, strict=True) if flag not in self.flags for word in (flag, value)]
        where = () if any(flag in NOWHERE for flag in self.flags) else NOWHERE
        return [f"dynamo-{self.program}", *where, *flags, *self.flags]

    def sentence(self, status: object, output: str, errors: str) -> str:
        assert status == 2, errors
        assert output == ""
        *before, last = errors.splitlines()
        # Before it nothing but the log of a start that had begun.
        assert all(line[2:3] == ":" and " INFO " in line for line in before), errors
        assert last.startswith(f"dynamo-{self.program}: ")
        return last.removeprefix(f"dynamo-{self.program}: ")


@PROGRAMS
def test_the_exit_status_of_the_process_is_2(tmp_path: Path, program: str) -> None:
    attempt = Attempt(program, tmp_path, ["--nats-tls-ca-file", "none.pem"])
    command = [sys.executable, "-m", f"dynamo.{program}", *attempt.command()[1:]]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    )
    sentence = attempt.sentence(ended.returncode, ended.stdout, ended.stderr)
    assert sentence == "NATS: the CA file none.pem cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model-repository", "nowhere"], "nowhere cannot be read"),
        (["--model-repository", ".", "--response-cache-byte-size", "-1"], "response-cache-byte-size"),
        (["--model-repository", ".", "--load-model", "x"], "--load-model needs --model-control-mode explicit"),
    ],
)
def test_a_repository_that_cannot_be_served_as_it_is_named_ends_the_start(tmp_path: Path, flags: list[str], words: str) -> None:
    assert words in Attempt("worker", tmp_path, flags).refusal()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return issue(trustme.CA(), tmp_path, "server")


@PROGRAMS
@pytest.mark.parametrize(
    ("flags", "environ", "sentence"),
    [
        (["--nats-serves", "x"], {}, "unknown flag --nats-serves; did you mean --nats-servers?"),
        (["--drain-timeout", "-1"], {}, "--drain-timeout: -1 is below 0"),
        (["--drain-timeout", "soon"], {}, "--drain-timeout: 'soon' is not a number"),
        ([], {"DYN_DRAIN_TIMEOUT": "1"}, "unknown variable DYN_DRAIN_TIMEOUT; did you mean DYN_DRAIN_TIMEOUT_S?"),
        ([], {"DYN_DRAIN_TIMEOUT_S": "x"}, "variable DYN_DRAIN_TIMEOUT_S: 'x' is not a number"),
        ([], {"DYN_NATS_PASSWORD": "s3cret"}, "--nats-password-file needs --nats-user as well"),
        (
            ["--nats-password", "s3cret"],
            {},
            "--nats-password would be readable in the process list; use --nats-password-file or DYN_NATS_PASSWORD",
        ),
        (
            ["--nats-servers", "nats://me:s3cret@127.0.0.1:9"],
            {},
            "--nats-servers holds a login, which logs and the process list would show; "
            "use --nats-user with --nats-password-file, or --nats-token-file",
        ),
        (
            ["--etcd-endpoints", "http://me:s3cret@127.0.0.1:9"],
            {},
            "--etcd-endpoints holds a login, which logs and the process list would show; "
            "use --etcd-user with --etcd-password-file",
        ),
        (
            ["--nats-servers", "http://127.0.0.1:9"],
            {},
            "NATS: 'http://127.0.0.1:9' is not an address of the form nats://host:port",
        ),
        (["--etcd-endpoints", "ftp://x"], {}, "'ftp://x' is not an etcd endpoint of the form http://host:port"),
        (
            ["--nats-tls-ca-file", "none.pem"],
            {},
            "NATS: the CA file none.pem cannot be read: No such file or directory",
        ),
        (
            ["--etcd-endpoints", "https://127.0.0.1:9", "--etcd-tls-ca-file", "none.pem"],
            {},
            "etcd: the CA file none.pem cannot be read: No such file or directory",
        ),
        (
            ["--nats-nkey-seed-file", "none.nk"],
            {},
            "NATS: the nkey seed file none.nk cannot be read: No such file or directory",
        ),
        (
            ["--nats-token-file", "none"],
            {},
            "--nats-token-file: the file none cannot be read: No such file or directory",
        ),
        (
            ["--nats-nkey-seed-file", "a", "--nats-credentials-file", "b"],
            {},
            "--nats-nkey-seed-file and --nats-credentials-file are different ways to log in to NATS; keep one of them",
        ),
        (
            ["--nats-inbox-prefix", "_INBOX.*"],
            {},
            "--nats-inbox-prefix must be letters, digits, '_' and '-' in at most 8 parts of 64, "
            "separated by dots, got '_INBOX.*'",
        ),
        (
            ["--namespace", "a b"],
            {},
            "--namespace: 'a b' is not usable: the name has the character ' '; allowed are letters, digits and . _ / -",
        ),
        (
            [],
            {"DYN_NAMESPACE": "prod>"},
            "variable DYN_NAMESPACE: 'prod>' is not usable: the name has the character '>'; "
            "allowed are letters, digits and . _ / -",
        ),
        (
            ["--nats-servers", "no address"],
            {},
            "--nats-servers: 'no address' is not the address of a server: a URL, or host:port",
        ),
        (["--etcd-endpoints", "etcd:x"], {}, "--etcd-endpoints: 'etcd:x' is not the address of a server: a URL, or host:port"),
        (["--log-level", "loud"], {}, "--log-level: 'loud' names the level 'loud'; there are debug, info, warning and error"),
        (["--config", "none.yaml"], {}, "the configuration file none.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_flag_or_variable_ends_the_start(
    tmp_path: Path, program: str, flags: list[str], environ: Mapping[str, str], sentence: str
) -> None:
    assert Attempt(program, tmp_path, flags, environ).refusal() == sentence


@PROGRAMS
@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    [
        ("drain_timout_s: 3", [], "f.yaml: unknown key 'drain_timout_s'; did you mean drain_timeout_s?"),
        ("drain_timeout_s: [3]", [], "f.yaml: 'drain_timeout_s' must be one plain value, not a list"),
        ("drain_timeout_s: -3", [], "f.yaml: 'drain_timeout_s': -3 is below 0"),
        ("nats: {servers: {a: b}}", [], "f.yaml: 'nats.servers' must be one plain value, not a mapping"),
        ("nats: 3", [], "f.yaml: unknown key 'nats'"),
        ("drain_timeout_s: 3\ndrain_timeout_s: 4", [], "f.yaml: 'drain_timeout_s' is given twice"),
        (
            "drain_timeout_s: 3",
            ["--drain-timeout", "4"],
            "--drain-timeout and 'drain_timeout_s' in f.yaml are both given and differ; keep one of them",
        ),
        ("[1, 2]", [], "the configuration file f.yaml does not hold a mapping"),
        ("a: [", [], "the configuration file f.yaml is not YAML: "),
        ("nats: {password: s3cret}", [], "--nats-password-file needs --nats-user as well"),
    ],
)
def test_a_wrong_file_ends_the_start(tmp_path: Path, program: str, text: str, flags: list[str], sentence: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    refusal = Attempt(program, tmp_path, ["--config", "f.yaml", *flags]).refusal()
    assert refusal == sentence or (sentence.endswith(": ") and refusal.startswith(sentence))


@PROGRAMS
def test_a_key_of_another_certificate_ends_the_start(tmp_path: Path, program: str, pair: Pair) -> None:
    other = issue(trustme.CA(), tmp_path, "other")
    for system, flags in (("NATS", []), ("etcd", ["--etcd-endpoints", "https://127.0.0.1:9"])):
        prefix = f"--{system.lower()}-tls"
        flags += [f"{prefix}-cert-file", str(pair.cert), f"{prefix}-key-file", str(other.key)]
        sentence = f"{system}: the key in {other.key} does not belong to the certificate in {pair.cert}"
        assert Attempt(program, tmp_path, flags).refusal() == sentence


@PROGRAMS
def test_credentials_that_are_none_end_the_start_without_being_shown(tmp_path: Path, program: str) -> None:
    (tmp_path / "user.creds").write_text("SUAs3cret")
    (tmp_path / "seed.nk").write_text("SUAs3cret")
    refusals = [
        Attempt(program, tmp_path, ["--nats-credentials-file", "user.creds"]).refusal(),
        Attempt(program, tmp_path, ["--nats-nkey-seed-file", "seed.nk"]).refusal(),
    ]
    assert refusals == [
        "NATS: the credentials file user.creds does not hold a user's JWT and seed",
        "NATS: the file seed.nk holds no seed of an nkey",
    ]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("processes", [(), ("--processes", "2")])
def test_a_port_that_is_taken_ends_the_start(tmp_path: Path, taken_port: int, processes: tuple[str, ...]) -> None:
    http, grpc = free_ports(2)
    for flag, other in (("--http-port", ("--grpc-port", str(grpc))), ("--grpc-port", ("--http-port", str(http)))):
        flags = [flag, str(taken_port), *other, *processes]
        refusal = Attempt("frontend", tmp_path, flags).refusal()
        assert refusal == f"{flag}: cannot listen on 127.0.0.1:{taken_port}: Address already in use"


def test_a_status_port_that_is_taken_ends_the_start_of_a_worker(tmp_path: Path, taken_port: int) -> None:
    refusal = Attempt("worker", tmp_path, ["--status-port", str(taken_port)]).refusal()
    assert refusal == f"--status-port: cannot listen on 127.0.0.1:{taken_port}: Address already in use"


@pytest.mark.parametrize("processes", [(), ("--processes", "2")])
def test_files_of_the_frontend_that_cannot_be_used_end_its_start(tmp_path: Path, pair: Pair, processes: tuple[str, ...]) -> None:
    other = issue(trustme.CA(), tmp_path, "other")
    ca = write_ca(trustme.CA(), tmp_path / "ca.pem")
    (tmp_path / "keys.yaml").write_text("- {name: a}")
    own = ["--cert-file", str(pair.cert), "--key-file", str(pair.key)]
    attempts = {
        ("--cert-file", "none.pem", "--key-file", str(pair.key)): "the certificate file none.pem cannot be read: No such file or "
        "directory",
        (
            "--cert-file",
            str(pair.cert),
            "--key-file",
            str(other.key),
        ): f"the key in {other.key} does not belong to the certificate in {pair.cert}",
        ("--client-ca-file", str(ca)): "--client-ca-file needs --cert-file and --key-file",
        (*own, "--client-ca-file", str(pair.key)): f"the client CA file {pair.key} holds no certificate in PEM form",
        ("--grpc-server", "quic"): "--grpc-server: 'quic' is not one of auto, http2, grpcio",
        ("--use-tls",): "--use-tls needs --cert-file and --key-file",
        ("--api-keys-file", "none.yaml"): "the key file none.yaml cannot be read: No such file or directory",
        (
            "--api-keys-file",
            "keys.yaml",
        ): "the key file keys.yaml cannot be used: it is not a list of keys: Object missing required field `hash` - at `$[0]`",
        ("--api-open", "everything"): "--api-open: 'everything' is not one of ",
        ("--http-restricted-api-file", "keys.yaml"): "--http-restricted-api: a line is not of the form surface,…:header=value",
    }
    for flags, sentence in attempts.items():
        refusal = Attempt("frontend", tmp_path, [*flags, *processes]).refusal()
        assert refusal == sentence or (sentence.endswith(" ") and refusal.startswith(sentence))


def test_a_model_that_is_not_there_ends_the_start_of_a_worker(tmp_path: Path) -> None:
    assert "none.gguf" in Attempt("worker", tmp_path, ["--model", "none.gguf"]).refusal()
