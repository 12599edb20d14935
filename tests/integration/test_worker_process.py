"""A worker as a process and as part of a program, with real etcd and a real nats-server."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Unavailable
from dynamo.common.etcd import connect_etcd
from dynamo.common.messaging.jetstream.store import FileStore
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.messaging.request_plane.client import RequestClient, open_client
from dynamo.common.options import EtcdOptions, NatsOptions
from dynamo.common.process.ports import free_ports
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.fleet.directory import Directory, open_directory
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from dynamo.worker.app import Worker, open_worker, serve_fleet, serve_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.base import Context, TensorResponse
from dynamo.worker.engine.echo import EchoTensors, EchoTokens
from dynamo.worker.engine.python import PythonEngine, Tensor
from tests.support.servers import EtcdServer, NatsServer, start_nats


class Caller:
    """What a frontend has: a view of the instances and a way to send requests to them."""

    def __init__(self, directory: Directory, nats: Connection, client: RequestClient) -> None:
        self.directory = directory
        self.nats = nats
        self.client = client
        self._changed = asyncio.Event()
        directory.on_change(self._changed.set)

    async def instances(self, model: str, count: int) -> Sequence[Instance]:
        async with asyncio.timeout(120):
            while len(instances := self.directory.instances(model)) != count:
                self._changed.clear()
                await self._changed.wait()
        return instances

    async def infer(self, instance: Instance, request: ModelInferRequest) -> ModelInferResponse:
        async with self.client.open(instance.id, instance.subject, "infer", request.SerializeToString()) as stream:
            return ModelInferResponse.FromString(bytes(await stream.result()))


@asynccontextmanager
async def calling(etcd: EtcdServer, nats: NatsServer, namespace: str) -> AsyncIterator[Caller]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect_etcd(EtcdOptions(endpoints=(etcd.endpoint,))))
        directory = await stack.enter_async_context(open_directory(client, namespace))
        connection = await stack.enter_async_context(connect_nats(NatsOptions(servers=(nats.url,)), "caller"))
        yield Caller(directory, connection, await stack.enter_async_context(open_client(connection, namespace)))


@asynccontextmanager
async def worker_process(
    etcd: EtcdServer, nats: NatsServer, namespace: str, *flags: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    command = ("-m", "dynamo.worker", "--namespace", namespace, "--etcd-endpoints", etcd.endpoint, "--nats-servers", nats.url)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *flags, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def logged(process: asyncio.subprocess.Process, text: str) -> None:
    """Return when the process has written `text` to its log."""
    assert process.stderr is not None
    async with asyncio.timeout(120):
        async for line in process.stderr:
            if text in line.decode():
                return
    raise AssertionError(f"the process ended without logging {text!r}")


def echo_request(delay_ms: int = 0) -> ModelInferRequest:
    request = ModelInferRequest(model_name="echo", raw_input_contents=[np.arange(4, dtype=np.float32).tobytes()])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[4])
    if delay_ms:
        request.parameters["delay_ms"].int64_param = delay_ms
    return request


def config(etcd: EtcdServer, nats: NatsServer, namespace: str) -> WorkerConfig:
    return WorkerConfig(
        namespace=namespace,
        etcd=EtcdOptions(endpoints=(etcd.endpoint,)),
        nats=NatsOptions(servers=(nats.url,)),
    )


async def test_one_process_serves_several_models_and_leaves_in_order(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    flags = ("--model", "echo", "--model", "examples/classifier.py:Classifier", "--model", "echo:llm", "--model-name=echo")
    flags += ("--model-name=digits", "--model-name=words")
    async with (
        calling(etcd_server, nats_server, namespace) as caller,
        worker_process(etcd_server, nats_server, namespace, *flags) as process,
    ):
        [echo] = await caller.instances("echo", 1)
        [digits] = await caller.instances("digits", 1)
        [words] = await caller.instances("words", 1)
        assert echo.id == digits.id == words.id
        assert words.card.llm is not None
        tokenizer = await FileStore(caller.nats, tmp_path).get(words.card.llm.tokenizer)
        assert sha256(tokenizer).hexdigest() == words.card.llm.tokenizer
        slow = asyncio.create_task(caller.infer(echo, echo_request(delay_ms=6000)))
        response = await caller.infer(echo, echo_request())
        process.send_signal(signal.SIGTERM)
        await caller.instances("echo", 0)
        assert not slow.done()
        assert (await slow).raw_output_contents == response.raw_output_contents
        async with asyncio.timeout(120):
            assert await process.wait() == 0


async def test_files_of_models_are_stored_again_in_a_nats_that_lost_them(
    etcd_server: EtcdServer, namespace: str, tmp_path: Path
) -> None:
    async with (
        start_nats(tmp_path / "nats") as nats,
        calling(etcd_server, nats, namespace) as caller,
        worker_process(etcd_server, nats, namespace, "--model", "echo:llm", "--model-name=words"),
    ):
        [words] = await caller.instances("words", 1)
        assert words.card.llm is not None
        key = words.card.llm.tokenizer
        await nats.stop()
        shutil.rmtree(tmp_path / "nats" / "jetstream")
        await nats.restart()
        async with asyncio.timeout(120):
            for attempt in itertools.count():  # another cache each time: only the store may have it
                try:
                    await FileStore(caller.nats, tmp_path / f"cache-{attempt}").get(key)
                    return
                except Unavailable:
                    await asyncio.sleep(0.1)


async def test_without_jetstream_a_model_without_files_is_served_and_the_others_follow(
    etcd_server: EtcdServer, namespace: str, tmp_path: Path
) -> None:
    async with (
        start_nats(tmp_path / "without", jetstream=False) as nats,
        calling(etcd_server, nats, namespace) as caller,
        worker_process(etcd_server, nats, namespace, "--model", "sim", "--model", "echo"),
    ):
        [echo] = await caller.instances("echo", 1)
        assert (await caller.infer(echo, echo_request())).raw_output_contents
        assert not list(caller.directory.instances("sim"))  # frontends could not read its tokenizer
        await nats.stop()
        async with start_nats(tmp_path / "with", port=nats.port):
            await caller.instances("sim", 1)


async def test_no_request_fails_when_a_worker_is_stopped_under_load(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        calling(etcd_server, nats_server, namespace) as caller,
        worker_process(etcd_server, nats_server, namespace, "--model", "echo") as leaving,
        worker_process(etcd_server, nats_server, namespace, "--model", "echo"),
    ):
        both = await caller.instances("echo", 2)
        over = asyncio.Event()
        completed = 0

        async def load(turn: int) -> None:
            nonlocal completed
            while not over.is_set():
                turn += 1
                candidates = list(caller.directory.instances("echo"))
                for attempt in range(len(candidates)):
                    try:
                        await caller.infer(candidates[(turn + attempt) % len(candidates)], echo_request(delay_ms=turn % 5))
                        completed += 1
                        break
                    except DynamoError as error:
                        assert error.retryable, error
                else:
                    raise AssertionError("no instance took the request")

        async with asyncio.TaskGroup() as tasks:
            for turn in range(8):
                tasks.create_task(load(turn))
            leaving.send_signal(signal.SIGTERM)
            async with asyncio.timeout(120):
                assert await leaving.wait() == 0
            await caller.instances("echo", 1)
            before = completed
            for _ in range(50):
                await caller.infer(caller.directory.instances("echo")[0], echo_request())
            over.set()
        assert len(both) == 2
        assert completed > before > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "--model is required"),
        (("--model", "no-such-thing"), "cannot be served"),
        (("--model", "no/file.py:Class"), "there is no file"),
        (("--model", "echo", "--model", "echo"), "two models of this worker are called 'echo'"),
    ],
)
async def test_a_worker_that_cannot_serve_says_why_in_one_line(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, flags: tuple[str, ...], words: str
) -> None:
    async with worker_process(etcd_server, nats_server, namespace, *flags, "--log-level=error") as process:
        _, printed = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 2
    assert words in printed.decode()
    assert "Traceback" not in printed.decode()


async def test_an_engine_is_served_from_a_program_of_ones_own(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with calling(etcd_server, nats_server, namespace) as caller:
        async with open_worker([EchoTensors(), EchoTokens()], config(etcd_server, nats_server, namespace)) as worker:
            [instance] = await caller.instances("echo", 1)
            assert instance.id == worker.instance
            assert [card.name for card in worker.cards] == ["echo", "echo-llm"]
            assert (await caller.infer(instance, echo_request())).model_name == "echo"
        await caller.instances("echo", 0)


STUCK = """
import sys, threading
from dynamo.worker.engine.python import Tensor

class Stuck:
    inputs = {"INPUT0": Tensor("FP32", [-1])}
    outputs = {"OUTPUT0": Tensor("FP32", [-1])}
    name = "echo"

    def infer(self, INPUT0):
        print("stuck in infer", file=sys.stderr, flush=True)
        threading.Event().wait()

    def close(self):
        threading.Event().wait()
"""


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_worker_whose_model_is_stuck_ends_within_its_timeouts_or_at_the_second_signal(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path, signals: int
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    timeout_s = "0.2" if signals == 1 else "600"
    flags = ("--model", f"{tmp_path}/stuck.py:Stuck", "--drain-timeout", timeout_s, "--close-timeout", timeout_s)
    async with (
        calling(etcd_server, nats_server, namespace) as caller,
        worker_process(etcd_server, nats_server, namespace, *flags) as process,
    ):
        [instance] = await caller.instances("echo", 1)
        request = asyncio.create_task(caller.infer(instance, echo_request()))
        await logged(process, "stuck in infer")
        process.send_signal(signal.SIGTERM)
        await logged(process, "draining 1 open requests")
        for _ in range(signals - 1):
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            assert await process.wait() == (0 if signals == 1 else 128 + signal.SIGTERM)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def test_serving_ends_when_stop_is_set(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    stop = asyncio.Event()
    seen: list[Worker] = []

    def started(worker: Worker) -> None:
        seen.append(worker)
        stop.set()

    settings = config(etcd_server, nats_server, namespace)
    await asyncio.wait_for(serve_worker(EchoTensors(), settings, stop=stop, on_started=started), 120)
    assert len(seen) == 1


class Loading:
    """A model that loads forever."""

    inputs = outputs = {"x": Tensor("FP32", [1])}  # noqa: RUF012

    def __init__(self, loading: asyncio.Event) -> None:
        self.loading = loading

    async def load(self) -> None:
        self.loading.set()
        await asyncio.Event().wait()

    def infer(self, x: object) -> object:
        return x


async def test_a_stop_while_models_load_abandons_the_start(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    stop, loading = asyncio.Event(), asyncio.Event()
    engine = PythonEngine(lambda: Loading(loading))
    serving = asyncio.create_task(serve_worker(engine, config(etcd_server, nats_server, namespace), stop=stop))
    await loading.wait()
    stop.set()
    await asyncio.wait_for(serving, 120)


class Broken(EchoTensors):
    async def start(self) -> Sequence[object]:  # type: ignore[override]
        raise InvalidRequest("the model file is broken")

    async def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        raise AssertionError
        yield


async def test_an_engine_that_does_not_start_ends_the_serving_and_closes_those_before(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    closed = asyncio.Event()

    class First(EchoTensors):
        async def close(self) -> None:
            closed.set()

    with pytest.raises(InvalidRequest, match="broken"):
        await serve_worker([First(), Broken()], config(etcd_server, nats_server, namespace), stop=asyncio.Event())
    assert closed.is_set()


class Mortal(EchoTensors):
    """Serves until the test makes it fail."""

    def __init__(self) -> None:
        super().__init__()
        self.dying = asyncio.Event()
        self.is_closed = False

    async def failure(self) -> EngineError:
        await self.dying.wait()
        return EngineError("the engine's process has died")

    async def close(self) -> None:
        self.is_closed = True


async def test_an_engine_that_dies_ends_its_worker_in_order_and_says_why(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    engine = Mortal()

    def started(worker: Worker) -> None:
        engine.dying.set()

    with pytest.raises(EngineError, match="process has died"):
        await serve_worker(engine, config(etcd_server, nats_server, namespace), stop=asyncio.Event(), on_started=started)
    assert engine.is_closed


async def test_a_worker_that_fails_ends_the_others_of_its_process(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    engines, workers, arenas = [Mortal() for _ in range(3)], set(), set()

    def started(worker: Worker) -> None:
        workers.add(worker.instance)
        arenas.add(worker.requests.memory and worker.requests.memory.token)
        if len(workers) == 3:
            engines[1].dying.set()

    with pytest.raises(EngineError, match="process has died"):
        await serve_fleet(engines, config(etcd_server, nats_server, namespace), stop=asyncio.Event(), on_started=started)
    assert len(workers) == 3
    assert len(arenas) == 1, "of their process"
    assert all(engine.is_closed for engine in engines)


async def test_a_worker_started_without_etcd_serves_and_joins_when_it_comes(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    late = EtcdServer(tmp_path, port=free_ports(1)[0], fsync=False)
    try:
        async with open_worker(EchoTensors(), config(late, nats_server, namespace)) as worker:
            assert not worker.registration.registered.is_set()
            await late.start()
            async with asyncio.timeout(120):
                await worker.registration.registered.wait()
    finally:
        await late.stop()
