"""What `dynamo-local` accepts, and which commands it makes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.common.config import ConfigError, load
from dynamo.common.discovery import Instance
from dynamo.common.lifecycle import open_listener
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.options import EtcdOptions
from dynamo.frontend.config import RouterMode
from dynamo.local.app import PROMPT, first_request_command
from dynamo.local.config import PASSES_ON, FirstRequest, LocalConfig
from dynamo.local.deployment import (
    Backend,
    Deployment,
    check_flags,
    child_environment,
    choose_port,
    claimed,
    frontend_command,
    planner_command,
    worker_command,
)
from dynamo.local.logins import make_login
from dynamo.local.view import ServedModel, ready_workers, served_models
from dynamo.planner.config import PlannerConfig
from dynamo.worker.config import TextOptions, WorkerConfig

ETCD, NATS = Backend(("http://127.0.0.1:1",)), Backend(("nats://127.0.0.1:2",))


def read(*argv: str) -> LocalConfig:
    return load(LocalConfig, argv, {}, program="dynamo-local", passes_on=PASSES_ON)


def instance(number: int, model: str) -> Instance:
    card = ModelCard(name=model, kind=ModelKind.TENSOR)
    return Instance(id=InstanceId(number), endpoint=Endpoint(), subject="s", card=card, started_at=0.0)


def test_several_models_and_workers_can_be_requested() -> None:
    config = read("--model", "smollm2", "--model", "m.py:M", "--workers", "2", "--worker-flag=--drain-timeout=5")
    command = worker_command(config, ETCD, NATS)
    assert command[:3] == [sys.executable, "-m", "dynamo.worker"]
    assert command.count("--model") == 2 and command[-1] == "--drain-timeout=5"
    assert command[command.index("--etcd-endpoints") + 1] == ETCD.urls[0]


def test_names_parsers_and_template_are_passed_on_to_workers() -> None:
    flags = (
        "--served-model-name",
        "a",
        "b",
        "--tool-call-parser=harmony",
        "--reasoning-parser=none",
        "--chat-template=chat.jinja",
    )
    command = worker_command(read(*flags), ETCD, NATS)
    worker = load(WorkerConfig, command[3:], {}, program="dynamo-worker")
    assert (worker.names, worker.aliases) == (("a",), ("b",))
    assert worker.text == TextOptions(tool_parser="openai", reasoning_parser="none", chat_template=Path("chat.jinja"))
    assert load(WorkerConfig, worker_command(read(), ETCD, NATS)[3:], {}, program="dynamo-worker").text == TextOptions()


def test_workers_share_the_processors_unless_told_otherwise() -> None:
    assert "--threads" in worker_command(read(), ETCD, NATS)
    for given in (["--worker-flag=--threads=3"], ["--threads", "3"]):
        assert worker_command(read(*given), ETCD, NATS).count("--threads") == 0


def test_the_frontend_serves_grpc_on_the_chosen_ports() -> None:
    command = frontend_command(read("--frontend-flag=--router-mode=random"), ETCD, NATS, 1, 2)
    assert "--grpc" in command and command[command.index("--grpc-port") + 1] == "2"
    assert command[-1] == "--router-mode=random"


def test_each_program_gets_the_flags_that_only_it_has() -> None:
    config = read(
        "--router-mode", "kv", "--http-host=0.0.0.0", "--threads", "3", "--worker-flag=--drain-timeout=5", "--no-prometheus"
    )
    assert frontend_command(config, ETCD, NATS, 1, 2)[-3:] == ["--router-mode=kv", "--http-host=0.0.0.0", "--no-prometheus"]
    assert worker_command(config, ETCD, NATS)[-2:] == ["--threads=3", "--drain-timeout=5"]
    check_flags(config, {})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--router-mode", "best"], "--router-mode: 'best' is not one of"),
        (["--frontend-flag=--router-mode=best"], "--router-mode: 'best' is not one of"),
        (["--threads", "0"], "--threads: 0 is below 1"),
        (["--worker-flag=--thread=1"], "unknown flag --thread; did you mean --threads?"),
        (["--prometheus-port", "1", "--no-prometheus"], "--prometheus-port and --no-prometheus exclude each other"),
        (
            ["--drain-timeout", "5"],
            "--drain-timeout is a flag of several programs; use --frontend-flag=--drain-timeout=… or --worker-flag=--",
        ),
        (["--etcd-password-file", "f"], "--etcd-password-file is a flag of several programs"),
        (["--frontend-flag=--etcd-user=u"], "--etcd-user needs --etcd-password-file as well"),
    ],
)
def test_wrong_flags_of_the_programs_are_refused_before_they_start(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_flags(read(*flags), {})
    assert str(caught.value).startswith(sentence)


def test_a_planner_gets_the_servers_and_its_flags() -> None:
    config = read("--planner", "--planner-flag=--namespace=other")
    command = planner_command(config, ETCD, NATS)
    assert command[:3] == [sys.executable, "-m", "dynamo.planner"]
    assert command[command.index("--nats-servers") + 1] == NATS.urls[0] and command[-1] == "--namespace=other"
    assert config.is_scaled and read("--follow-targets").is_scaled and not read().is_scaled
    with pytest.raises(ConfigError, match="--dry-run is for a planner, which --planner starts"):
        read("--planner-flag=--dry-run=1")


def test_a_planner_replays_with_the_mode_of_the_frontend_unless_it_is_given_another() -> None:
    for flags, mode in (
        ([], RouterMode.ROUND_ROBIN),
        (["--router-mode", "kv"], RouterMode.KV),
        (["--router-mode", "kv", "--whatif-router-mode=direct"], RouterMode.DIRECT),
    ):
        command = planner_command(read("--planner", *flags), ETCD, NATS)
        assert load(PlannerConfig, command[3:], {}, program="dynamo-planner").whatif_router_mode is mode


def test_a_worker_registers_under_the_name_that_it_is_given() -> None:
    command = worker_command(read(), ETCD, NATS, "abcd.worker-1")
    assert load(WorkerConfig, command[3:], {}, program="dynamo-worker").process_name == "abcd.worker-1"
    in_pod = load(WorkerConfig, worker_command(read(), ETCD, NATS)[3:], {"POD_NAME": "pod-1"}, program="dynamo-worker")
    assert in_pod.process_name == "pod-1"


def test_logins_in_the_environment_concern_only_servers_that_run_already() -> None:
    environ = {"DYN_ETCD_PASSWORD": "p"}
    check_flags(read(), environ)
    with pytest.raises(ConfigError, match="--etcd-password-file needs --etcd-user as well"):
        check_flags(read(f"--etcd-endpoints={ETCD.urls[0]}"), environ)


def test_passwords_are_in_files_and_never_in_arguments(tmp_path: Path) -> None:
    etcd = Backend(ETCD.urls, make_login("root", tmp_path / "logins" / "etcd"))
    nats = Backend(NATS.urls, make_login("dynamo", tmp_path / "logins" / "nats"))
    assert etcd.login is not None and nats.login is not None
    command = worker_command(read(), etcd, nats)
    assert command[command.index("--etcd-user") + 1] == "root"
    assert command[command.index("--nats-password-file") + 1] == str(tmp_path / "logins" / "nats")
    for login in (etcd.login, nats.login):
        assert login.file.read_text() == login.password and len(login.password) >= 32
        assert login.file.stat().st_mode & 0o777 == 0o600 and login.file.parent.stat().st_mode & 0o777 == 0o700
        assert login.password not in " ".join(command) and login.password not in repr(etcd) + repr(nats)
    assert make_login("root", etcd.login.file).password != etcd.login.password, "each start has its own"


def test_children_inherit_logins_of_other_programs_servers_only() -> None:
    environ = {
        "DYN_NATS_TOKEN": "t",
        "NATS_AUTH_USERNAME": "u",
        "DYN_ETCD_TLS_CA_FILE": "ca",
        "ETCD_AUTH_USERNAME": "u",
        "HOME": "/",
    }
    etcd, nats = f"--etcd-endpoints={ETCD.urls[0]}", f"--nats-servers={NATS.urls[0]}"
    assert child_environment(environ, read(etcd, nats)) == environ
    assert child_environment(environ, read(etcd)).keys() == {"DYN_ETCD_TLS_CA_FILE", "ETCD_AUTH_USERNAME", "HOME"}


def test_a_question_names_its_model(tmp_path: Path) -> None:
    file = tmp_path / "image.json"
    file.write_text("{}")
    config = read("--question", "a=why = because?", "--question", f"b=@{file}")
    assert config.first_requests == (FirstRequest("a", "why = because?"), FirstRequest("b", f"@{file}"))
    with pytest.raises(ConfigError, match="--question: 'why' is not of the form"):
        read("--question", "why")
    with pytest.raises(ConfigError, match="names the file /none, which does not exist"):
        read("--question", "b=@/none")


def test_language_models_get_a_prompt_and_others_what_the_user_gave(tmp_path: Path) -> None:
    workers: Any = None  # which no command names
    deployment = Deployment("http://127.0.0.1:1", "127.0.0.1:2", tmp_path, (), EtcdOptions(), workers)
    language = ServedModel(ModelCard(name="a", kind=ModelKind.LLM), frozenset())
    tensor = ServedModel(ModelCard(name="b", kind=ModelKind.TENSOR), frozenset())
    assert first_request_command(deployment, language, read())[-3:] == ["127.0.0.1:2", "a", PROMPT]
    assert first_request_command(deployment, language, read("--question", "a=hi"))[-1] == "hi"
    assert first_request_command(deployment, tensor, read())[-1] == "b"


def test_the_usual_port_gives_way_when_it_is_taken_but_a_wanted_one_does_not() -> None:
    with open_listener("127.0.0.1", 0, flag="--http-port") as taken:
        port = taken.getsockname()[1]
        assert choose_port("--http-port", None, port) not in (0, port)
        with pytest.raises(ConfigError, match=f"--http-port: cannot listen on 127.0.0.1:{port}: Address already in use"):
            choose_port("--http-port", port, 8000)
    assert choose_port("--http-port", port, 8000) == port
    assert choose_port("--http-port", 0, 8000) > 0


def test_a_folder_serves_one_deployment_at_a_time(tmp_path: Path) -> None:
    with claimed(tmp_path / "a"), pytest.raises(ConfigError, match="is in use by another dynamo-local"), claimed(tmp_path / "a"):
        pass
    with claimed(tmp_path / "a"):
        pass


def test_a_worker_with_several_instances_counts_when_all_of_them_have_registered() -> None:
    seen = [replace(instance(number, "a"), process_instances=3) for number in (1, 2, 3)]
    assert ready_workers({"worker 1": seen[:2]}, 1) == 0
    assert ready_workers({"worker 1": seen}, 1) == 1


def test_a_worker_counts_when_it_has_registered_all_its_models() -> None:
    seen = [instance(1, "a"), instance(1, "b"), instance(2, "a"), instance(3, "a"), instance(3, "b")]
    assert ready_workers({"worker 1": seen[:2], "worker 2": seen[2:3], "worker 3": seen[3:]}, 2) == 2
    assert ready_workers({}, 2) == 0
    assert [(model.card.name, len(model.instances)) for model in served_models(seen)] == [("a", 3), ("b", 2)]


def test_workers_that_watch_servers_have_no_models_of_their_own() -> None:
    flags = ("--url", "http://127.0.0.1:9101", "--url=http://127.0.0.1:9102", "--model-name", "far")
    config = load(WorkerConfig, worker_command(read(*flags), ETCD, NATS)[3:], {}, program="dynamo-worker")
    assert config.models == () and config.model_names == ("far",)
    assert config.remote.urls == ("http://127.0.0.1:9101", "http://127.0.0.1:9102")
