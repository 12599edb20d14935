"""What frontends keep in JetStream: files, batches, responses in the background, and the usage of keys, with the keys' limits.

The real parts, below their HTTP operations. Batches are carried out through the operation of `/v1/completions`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from dynamo.common.etcd import Etcd
from dynamo.common.etcd.leases import open_leases
from dynamo.common.generation import Sampling, Stop
from dynamo.common.messaging.jetstream.records import open_records
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.names import leases_prefix
from dynamo.common.process.background import running
from dynamo.common.security.files import Watched
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.guard import Accounts
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.openai.batches.batch import Batch, Batches
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.batches.runner import BatchRunner
from dynamo.frontend.api.openai.store.background import BackgroundResponses, Stages
from dynamo.frontend.api.openai.store.events import ResponseObject
from dynamo.frontend.api.openai.store.owned import Storage
from dynamo.frontend.api.openai.store.stored import StoredResponses, new_response_id
from dynamo.frontend.api.operations import protocol_operations
from dynamo.frontend.config import TextOptions
from dynamo.frontend.fleet.peers.limits import shared_limits
from dynamo.frontend.fleet.peers.response_changes import ResponseChanges
from dynamo.frontend.fleet.peers.usage import UsageStore, open_usage
from dynamo.frontend.metrics import FrontendMetrics, RequestType
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.keys import ApiKey, KeyRing, Limits
from dynamo.frontend.security.ledger import Ledger
from dynamo.frontend.security.surfaces import Surface
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane
from tests.simulation.tokens import VOCABULARY, expected_tokens
from tests.support.fakes import FakeVocabulary
from tests.support.plane import generate

URL = "/v1/completions"
OWNER = "carol"
"""The key of files, batches and responses."""
LIMITED = "bob"
LIMITS: Mapping[str, Limits] = {
    "alice": Limits(),
    LIMITED: Limits(requests_per_s=2.0, concurrent_requests=3),
    OWNER: Limits(),
}
"""Limits of each key."""
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Stores:
    """What one frontend stores."""

    accounts: Accounts
    files: Files
    batches: Batches
    runner: BatchRunner
    background: BackgroundResponses
    usage: UsageStore
    plane: DataPlane

    async def cancel_batch(self, id: str) -> Batch:
        """As the operation of the API does."""

        def cancelled(batch: Batch) -> Batch:
            return batch if batch.status == "cancelling" else replace(batch, status="cancelling")

        return await self.batches.change(OWNER, id, cancelled)

    def account(self, name: str) -> Account:
        return self.accounts.named(name)

    async def respond_in_background(self, rng: Random, model: str, size: int) -> ResponseObject:
        """Start a response of so many tokens, and return it as it is stored at first."""
        prompt, seed = drawn_prompt(rng)
        id = new_response_id()
        queued = ResponseObject(id=id, created_at=0, model=model, reasoning={}, text={}, status="queued", background=True)
        call = Call(account=self.account(OWNER), request_id=id, endpoint="responses", request_type=RequestType.STREAM)

        async def respond(stages: Stages) -> ResponseObject:
            request = TextRequest(
                model=model, prompt=prompt, stop=Stop(max_tokens=size, ignore_eos=True), sampling=Sampling(seed=seed)
            )
            tokens: list[int] = []
            call.progress.on_sent = stages.sent
            async with generate(self.plane, request, call) as generation:
                generation.check_line()
                await stages.admitted()
                while batch := await generation.read():
                    for delta in batch:
                        tokens += delta.tokens
            is_right = tokens == expected_tokens(prompt, seed, size)
            output = ({"type": "message", "is_right": is_right},)
            return ResponseObject(
                id=id, created_at=0, model=model, reasoning={}, text={}, status="completed", background=True, output=output
            )

        return await self.background.start(OWNER, queued, [], respond, Capacity().enter())


def drawn_prompt(rng: Random) -> tuple[list[int], int]:
    """Return a prompt and the seed of its response."""
    return [rng.randrange(VOCABULARY) for _ in range(8)], rng.randrange(1 << 20)


@dataclass(frozen=True, slots=True)
class BatchFile:
    """The lines of a batch, and what each responds."""

    content: bytes
    texts: Mapping[str, str | None]
    """By `custom_id`; None: the line is for a model that does not exist."""


def drawn_batch(rng: Random, lines: int) -> BatchFile:
    texts: dict[str, str | None] = {}
    content = []
    for number in range(lines):
        prompt, seed = drawn_prompt(rng)
        size = rng.choice([1, 20, 60])
        body = {"model": rng.choice(["sim", "small"]), "prompt": prompt, "seed": seed, "max_tokens": size}
        if rng.random() < 0.05:
            body["model"], text = "absent", None
        else:
            text = FakeVocabulary().decode(expected_tokens(prompt, seed, size), skip_special_tokens=True)
        content.append(json.dumps({"custom_id": f"c{number}", "method": "POST", "url": URL, "body": body}))
        texts[f"c{number}"] = text
    return BatchFile("\n".join(content).encode(), texts)


def problem_of(batch: Batch, file: BatchFile, output: bytes, errors: bytes, *, may_be_cancelled: bool, is_well: bool) -> str:
    """Return what is wrong with a batch that has ended; empty if nothing is. `is_well`: no line had a reason to fail."""
    codes = {problem.code for problem in batch.errors.data} if batch.errors is not None else set()
    has_ended_frontends = codes == {"frontends_ended"} and not is_well  # which three did that were killed with it
    if batch.status != "completed" and not (may_be_cancelled and batch.status == "cancelled") and not has_ended_frontends:
        return f"it is {batch.status}: {batch.errors}"
    results = [json.loads(line) for line in (*output.splitlines(), *errors.splitlines())]
    ids = [result["custom_id"] for result in results]
    if sorted(ids) != sorted(file.texts):
        return f"its results are of the lines {sorted(ids)}, not of {sorted(file.texts)}"
    failed = {json.loads(line)["custom_id"] for line in errors.splitlines()}
    unforeseen = sorted(id for id in failed if file.texts[id] is not None)
    if unforeseen and is_well and batch.status == "completed":
        return f"its lines {unforeseen} failed though all was well"
    for line in output.splitlines():
        result = json.loads(line)
        text = result["response"]["body"]["choices"][0]["text"]
        if text != file.texts[result["custom_id"]]:
            return f"line {result['custom_id']} has {text!r} instead of {file.texts[result['custom_id']]!r}"
    return ""


def _now() -> float:
    return time.time()  # looked up at each call: the simulation replaces it


@asynccontextmanager
async def open_stores(
    nats: Connection, etcd: Etcd, namespace: str, plane: DataPlane, metrics: FrontendMetrics
) -> AsyncIterator[Stores]:
    """Open what `wiring.plane` and `wiring.http` open for a frontend with keys."""
    keys = KeyRing([ApiKey(name=name, salt=b"", digest=b"", limits=limits) for name, limits in LIMITS.items()])
    accounts = Accounts(Watched("keys", (), lambda: keys), asyncio.get_running_loop().time, Ledger(_now))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(shared_limits(nats, namespace, accounts.fleet, accounts))
        used = await stack.enter_async_context(open_records(nats, "dynamo-usage", ttl_s=86_400.0, max_bytes=_MAX_BYTES))
        usage = await stack.enter_async_context(open_usage(used, accounts.ledger, namespace, accounts.fleet.origin))
        responses = await stack.enter_async_context(open_records(nats, "dynamo-responses", ttl_s=86_400.0, max_bytes=_MAX_BYTES))
        records = await stack.enter_async_context(open_records(nats, "dynamo-batches", ttl_s=86_400.0, max_bytes=_MAX_BYTES))
        leases = await stack.enter_async_context(open_leases(etcd, leases_prefix(namespace, "batches")))
        changes = ResponseChanges(nats, namespace)
        background = BackgroundResponses(StoredResponses(Storage(responses, namespace, _now), changes, metrics))
        readiness = Readiness()
        readiness.attach(plane)
        operations = protocol_operations(plane, readiness, TextOptions(), background=background)
        by_path = {operation.path: operation for operation in operations if operation.method == "POST"}
        kept = Storage(records, namespace, _now)
        files, batches = Files(kept), Batches(kept)

        def account(name: str, surface: Surface) -> Account:
            return accounts.named(name)

        runner = BatchRunner(files, batches, leases, by_path, HttpSettings(), account, metrics)
        async with running(runner.run(), "batches"):
            yield Stores(accounts, files, batches, runner, background, usage, plane)
        await background.drain(5.0)
