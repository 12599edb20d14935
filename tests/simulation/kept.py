"""Clients of what frontends keep, and what must be there in the end.

1. A file, batch or response that was acknowledged is there when all is quiet, as it was written.
2. An acknowledged batch is complete: each line is in its output or error file, once, and what is in the output is right.
3. A response in the background has ended: with what was requested, or as one that failed, where something was wrong.
4. The ledger has the tokens that were delivered, to the key that requested them; and the saved one has those of all frontends.
5. No key got more requests through than its rate allows, and one burst for each process that started and each trouble: what a
   process that is gone, or cut off, has used is not made up for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import msgspec

from dynamo.common.errors import DynamoError, NotFound
from dynamo.common.process.work import hold_nothing
from dynamo.frontend.api.openai.batches.batch import ENDED
from dynamo.frontend.api.openai.store.stored import RUNNING
from dynamo.frontend.security.ledger import Row
from tests.simulation.clients import Attempt, Outcome
from tests.simulation.process import LANGUAGE_MODELS
from tests.simulation.stores import LIMITED, LIMITS, OWNER, URL, BatchFile, Stores, drawn_batch, problem_of

if TYPE_CHECKING:
    from tests.simulation.history import History
    from tests.simulation.process import SimulatedFrontend

_WITHIN_S = 240.0
"""A batch has ended so long after all is quiet: its frontend's lease has ended, and lines that were refused are tried again."""
_LOOK_S = 5.0


@dataclass
class Kept:
    """What was acknowledged in a history."""

    history: History
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, BatchFile] = field(default_factory=dict)
    responses: dict[str, float] = field(default_factory=dict)
    """With when each was requested."""
    begun_s: dict[str, float] = field(default_factory=dict)
    """When each batch was made."""
    cancelling: set[str] = field(default_factory=set)
    """Batches and responses that a client has tried to cancel."""
    cancelled: set[str] = field(default_factory=set)
    """Responses of which that was acknowledged."""

    async def client(self, rng: Random, end: float) -> None:
        """Use what is kept, at any frontend, until `end`."""
        h = self.history
        while h.loop.time() < end:
            await asyncio.sleep(rng.expovariate(1 / 2.0))
            await self.use(rng.choice(["file", "batch", "batch", "response", "response"]), rng)

    async def use(self, kind: str, rng: Random) -> None:
        """Make a file, batch or response at some frontend."""
        frontend = self.history.pick_frontend()
        if frontend is not None and frontend.stores is not None:
            with contextlib.suppress(DynamoError):  # then nothing was acknowledged
                await self._make(kind, frontend, frontend.stores, rng)

    async def _make(self, kind: str, frontend: SimulatedFrontend, stores: Stores, rng: Random) -> None:
        h = self.history
        match kind:
            case "file":
                content = rng.randbytes(rng.choice([10, 3_000, 40_000]))
                made = await h.within(frontend, stores.files.create(OWNER, "a", "user_data", content))
                if made is not None:
                    self.files[made.id] = content
                    h.reached("file-kept")
            case "batch":
                drawn = drawn_batch(rng, rng.choice([1, 6, 20]))
                file = await h.within(frontend, stores.files.create(OWNER, "b", "batch", drawn.content))
                if file is None:
                    return
                self.files[file.id] = drawn.content
                batch = await h.within(frontend, stores.batches.create(OWNER, URL, file.id, None))
                if batch is not None:
                    self.batches[batch.id] = drawn
                    self.begun_s[batch.id] = h.loop.time()
                    stores.runner.poke()
                    await self._perhaps_cancel(batch.id, rng)
            case _:
                begun_s = h.loop.time()
                model, size = rng.choice(list(LANGUAGE_MODELS)), rng.choice([1, 20, 100, 100])
                response = await h.within(frontend, stores.respond_in_background(rng, model, size))
                if response is not None:
                    self.responses[response.id] = begun_s
                    await self._perhaps_cancel(response.id, rng)

    async def _perhaps_cancel(self, id: str, rng: Random) -> None:
        """Try to cancel a batch or response, at any frontend."""
        h = self.history
        if rng.random() > 0.4:
            return
        await asyncio.sleep(rng.choice([0.0, 0.05, 0.3, 1.0]))
        frontend = h.pick_frontend()
        if frontend is None or (stores := frontend.stores) is None:
            return
        self.cancelling.add(id)
        if id in self.batches:
            await h.within(frontend, stores.cancel_batch(id))
        else:
            response = await h.within(frontend, stores.background.stored.cancel(OWNER, id))
            if response is not None and response["status"] == "cancelled":
                self.cancelled.add(id)

    # When all is quiet

    async def check(self) -> None:
        """Look for everything at some frontend."""
        h = self.history
        frontend = next((each for each in h.frontends if each.stores is not None), None)
        if frontend is None or frontend.stores is None:
            return
        stores = frontend.stores
        try:
            await h.within(frontend, self._check_files(stores))
            await h.within(frontend, self._check_batches(stores))
            await h.within(frontend, self._check_responses(stores))
            await h.within(frontend, self._check_saved(stores))
        except DynamoError as error:
            h.violations.append(f"the stores fail when all is quiet: {error!r}")
        for each in h.frontends:
            if each.stores is not None:
                self._check_ledger(each, each.stores)
        self._check_limits()

    async def _check_files(self, stores: Stores) -> None:
        for id, content in self.files.items():
            try:
                if await stores.files.content(OWNER, id, hold_nothing) != content:
                    self.history.violations.append(f"file {id} is not as it was written")
            except NotFound:
                self.history.violations.append(f"file {id} was acknowledged, and is gone")

    async def _check_batches(self, stores: Stores) -> None:
        h = self.history
        until = h.loop.time() + _WITHIN_S
        for id, file in self.batches.items():
            try:
                while (batch := await stores.batches.read(OWNER, id)).status not in ENDED and h.loop.time() < until:
                    await asyncio.sleep(_LOOK_S)
            except NotFound:
                h.violations.append(f"batch {id} was acknowledged, and is gone")
                continue
            parts = [
                b"" if part is None else await stores.files.content(OWNER, part, hold_nothing)
                for part in (batch.output_file_id, batch.error_file_id)
            ]
            problem = problem_of(
                batch, file, *parts, may_be_cancelled=id in self.cancelling, is_well=h.was_well_since(self.begun_s[id])
            )
            if problem:
                h.violations.append(f"batch {id}: {problem}")
            elif batch.status == "cancelled":
                h.reached("batch-cancelled")
            else:
                h.reached("batch-complete")
                h.reached("batch-line-failed", batch.request_counts.failed)

    async def _check_responses(self, stores: Stores) -> None:
        h = self.history
        for id, begun_s in self.responses.items():
            try:
                response = await stores.background.stored.read(OWNER, id)
            except NotFound:
                h.violations.append(f"response {id} was acknowledged, and is gone")
                continue
            if id in self.cancelled:
                h.reached("response-cancelled")
                if response["status"] != "cancelled":
                    h.violations.append(f"response {id} was cancelled, and is {response['status']}")
            elif response["status"] == "cancelled":
                if id not in self.cancelling:
                    h.violations.append(f"response {id} is cancelled, and no client did it")
            elif response["status"] in RUNNING:
                h.violations.append(f"response {id} is {response['status']} when all is quiet")
            elif response["status"] == "completed":
                h.reached("response-complete")
                if not msgspec.json.decode(response["output"])[0]["is_right"]:
                    h.violations.append(f"response {id} is wrong")
            elif h.was_well_since(begun_s):
                h.violations.append(f"response {id} failed though all was well: {response['error']}")
            else:
                h.reached("response-orphaned" if "has ended" in response["error"]["message"] else "response-failed")

    async def _check_saved(self, stores: Stores) -> None:
        """What all frontends have saved is what those that live have counted, and no more than all requests could use."""
        h, day = self.history, stores.accounts.ledger.today()
        saved = await stores.usage.read(day, day)
        for key in ("alice", LIMITED):
            written = sum(row.completion_tokens for row in saved if row.key == key)
            ledgers = [each.stores.accounts.ledger for each in h.frontends if each.stores is not None]
            least = sum(row.completion_tokens for ledger in ledgers for row in ledger.rows(day) if row.key == key)
            most = _most_tokens(each for each in h.attempts if each.account == key and each.kind == "generate")
            if not least <= written <= most:
                h.violations.append(f"the saved ledger of {key} has {written} tokens; {least} to {most} were delivered")
            elif written > least:
                h.reached("ledger-inherited")

    def _check_ledger(self, frontend: SimulatedFrontend, stores: Stores) -> None:
        """What a frontend has written down is what its requests were delivered."""
        ledger = stores.accounts.ledger
        rows = ledger.rows(ledger.today())
        for key in ("alice", LIMITED):
            own = [row for row in rows if row.key == key]
            attempts = [
                each
                for each in self.history.attempts
                if each.frontend is frontend and each.account == key and each.kind == "generate"
            ]
            self._check_rows(f"{frontend.process.name} of {key}", own, attempts)

    def _check_rows(self, what: str, rows: list[Row], attempts: list[Attempt]) -> None:
        written = sum(row.completion_tokens for row in rows)
        least = sum(each.received_tokens for each in attempts)
        most = _most_tokens(attempts)
        if not least <= written <= most:
            self.history.violations.append(f"the ledger of {what} has {written} tokens; {least} to {most} were delivered")
        elif written:
            self.history.reached("ledger-exact" if least == most else "ledger-bounded")

    def _check_limits(self) -> None:
        """No key ever got more through than its rate and a burst, and one more for each process and each trouble."""
        h, rate = self.history, LIMITS[LIMITED].requests_per_s
        assert rate is not None
        h.reached("limit-refused", sum(each.error.startswith("RateLimited") for each in h.attempts))
        served = [each.begun_s for each in h.attempts if each.account == LIMITED and each.outcome is Outcome.RIGHT]
        spare = max(1.0, rate) * (1 + h.frontends_started + len(h.troubles))
        for first, begin in enumerate(served):
            for last in range(first, len(served)):
                seconds, count = served[last] - begin, last - first + 1
                if count > rate * seconds + spare:
                    h.violations.append(f"{count} requests of {LIMITED} were served in {seconds:.1f} s")
                    return


def _most_tokens(attempts: Iterable[Attempt]) -> int:
    """Return how many tokens requests can have been delivered: those that failed may have got some that no client read."""
    return sum(each.received_tokens if each.outcome is Outcome.RIGHT else each.size for each in attempts)
