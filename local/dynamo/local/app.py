"""`dynamo-local`: starts a deployment, shows what it serves and where, sends each model one request, and waits for the end."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from dynamo.common.errors import DynamoError
from dynamo.common.etcd import connect_etcd
from dynamo.common.lifecycle import EXIT_FAILURE, EXIT_OK, end_at_once, stop_on_signal
from dynamo.common.model_card import ModelKind
from dynamo.common.process.background import awaited
from dynamo.local.config import EXIT_UNAUTHENTICATED, LocalConfig
from dynamo.local.deployment import Deployment, claimed, start_deployment
from dynamo.local.scaling import TargetFollower
from dynamo.local.supervisor import Supervisor, open_supervisor
from dynamo.local.view import ServedModel, served_models

PROMPT = "Write one sentence about the sea."


class FirstRequestFailed(DynamoError):
    """The first request to a model failed; its error is on the screen."""


async def serve(config: LocalConfig) -> int:
    """Run until a signal, a process that keeps ending or, with `once`, the last response; return the exit status.

    Raises ConfigError for a configuration that cannot be used.
    """
    with claimed(config.folder.resolve()):
        async with open_supervisor(report, config.stop_timeout_s) as supervisor:

            def kill_and_end(number: int) -> None:
                supervisor.kill()
                end_at_once(number)

            stop = stop_on_signal(at_once=kill_and_end)
            try:
                await _unless_stopped(_run(config, supervisor), stop)
            except DynamoError as error:
                print(f"\ndynamo-local: {error}\n", file=sys.stderr, flush=True)
                return EXIT_FAILURE
    return EXIT_OK


def report(line: str) -> None:
    print(f"  {line}", flush=True)


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Run `work` and cancel it when `stop` is set."""
    task, stopping = awaited(work), awaited(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for pending in (task, stopping):
            pending.cancel()
        await asyncio.wait({task, stopping})


async def _run(config: LocalConfig, supervisor: Supervisor) -> None:
    print(f"dynamo-local: {config.workers} worker(s); data and logs in {config.folder}", flush=True)
    deployment = await start_deployment(config, supervisor, report)
    models = served_models(deployment.instances)
    _show(deployment, models)
    supervisor.keep_running()
    if config.ask:
        await supervisor.unless_died(_send_first_requests([first_request_command(deployment, model, config) for model in models]))
    if not config.once:
        print("Ctrl-C stops everything.", flush=True)
        await supervisor.unless_died(_serve_on(config, deployment))


async def _serve_on(config: LocalConfig, deployment: Deployment) -> None:
    """Wait for ever; meanwhile there are as many workers as a planner wants, if there is one."""
    if not config.is_scaled:
        await asyncio.Event().wait()
    async with connect_etcd(deployment.etcd) as etcd:
        await TargetFollower(etcd, config.namespace, deployment.workers, report).run()


def first_request_command(deployment: Deployment, model: ServedModel, config: LocalConfig) -> list[str]:
    """Return a command that sends one request to a model, to be run or to be copied."""
    text = next((first.text for first in config.first_requests if first.model == model.card.name), "")
    if not text and model.card.kind is ModelKind.LLM:
        text = PROMPT
    return [sys.executable, "-m", "dynamo.local.ask", deployment.grpc, model.card.name, *([text] if text else [])]


def _show(deployment: Deployment, models: Sequence[ServedModel]) -> None:
    print("\nServing")
    for model in models:
        kind = "language model" if model.card.kind is ModelKind.LLM else f"{model.card.kind} model"
        print(f"  {model.card.name}: {kind}, {len(model.instances)} instance(s)")
    print(f"  KServe v2 gRPC  {deployment.grpc}")
    print(f"  HTTP            {deployment.http}/health  /metrics  /v1/models\n", flush=True)


async def _send_first_requests(commands: Sequence[Sequence[str]]) -> None:
    """Send one request after the other, and none if the frontend requires an API key. Raises FirstRequestFailed."""
    for command in commands:
        status = await _send_first(command)
        if status == EXIT_UNAUTHENTICATED:
            print("No first requests are sent: the frontend requires an API key, of which it keeps only the hash.\n", flush=True)
            return
        if status != EXIT_OK:
            raise FirstRequestFailed(f"the request above failed with status {status}")
        print(flush=True)


async def _send_first(command: Sequence[str]) -> int:
    """Return the exit status of the command."""
    print(f"$ {shlex.join([_from_here(Path(command[0])), *command[1:]])}", flush=True)
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)
    try:
        return await process.wait()
    except BaseException:
        process.kill()
        await process.wait()
        raise


def _from_here(python: Path) -> str:
    """Return the path of the interpreter, relative to the working directory if it is inside."""
    return str(python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python)
