"""How the lines of a batch are requests, and use the account of their key: in turn, and in its ledger once results are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dynamo.common.http.served import ClientWatch, Header
from dynamo.common.messaging.buffers import Buffer
from dynamo.frontend.security.accounts import Account, Ticket
from dynamo.frontend.security.derived_accounts import SameAccount
from dynamo.frontend.security.ledger import UsageCounts
from dynamo.frontend.serving.queue.fair_slots import FairSlots

SLOW_S = 30.0
"""How long a line, or a batch of which no line ends, keeps others waiting: its model may hang until the batch expires."""


class LineAccount(SameAccount):
    """The account of a key, for one request of a batch. The limits of the key apply at once; `settle` writes into its ledger.

    What a line uses is not billed unless its result is kept: the line is carried out again then.
    """

    def __init__(self, account: Account, admitted: Callable[[], None]) -> None:
        """`admitted` is called whenever the key's limits have admitted a part of the request."""
        super().__init__(account)
        self._admitted = admitted
        self._used: list[tuple[str, UsageCounts]] = []

    def admit(self, model: str, request: object, sequences: int = 1, of: int = 0) -> Ticket:
        ticket = super().admit(model, request, sequences, of)
        self._admitted()
        return ticket

    def record(self, model: str, usage: UsageCounts) -> None:
        self._used.append((model, usage))

    def settle(self) -> None:
        """Write what the request used into the ledger of the key."""
        for model, usage in self._used:
            self._account.record(model, usage)


class LineRequest:
    """A line as a request that no client sent, for the handlers that serve requests."""

    method = "POST"
    scheme = "http"
    query = b""
    client = "unknown"

    def __init__(self, path: str, headers: Sequence[Header], body: bytes) -> None:
        self.path = path
        self.raw_path = path.encode()
        self.headers = headers
        self.watch = ClientWatch()
        self.more_body = True
        self.on_half_close: Callable[[], None] | None = None
        self.response: list[bytes] = []
        """The parts of the response's body."""
        self._body = body

    async def read(self) -> bytes:
        if not self.more_body:
            await asyncio.Event().wait()  # for the client, which never leaves
        self.more_body = False
        return self._body

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        """The exchange knows the status, and no header is kept."""

    async def write(self, body: Buffer, *, is_last: bool = False) -> None:
        self.response.append(bytes(body))


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """What became of a line."""

    text: bytes
    """Its line in the output or error file."""
    is_good: bool
    account: LineAccount | None = None
    """To be settled when the result is kept; None: the line was not carried out."""
    is_abandoned: bool = False
    """Whether it was not carried out since the batch was cancelled, or has no room for its result."""


class LineSlots:
    """Places for the lines of all batches, of which keys have their turns. A line that takes long gives its place to others."""

    def __init__(self, slots: int, slow_s: float = SLOW_S) -> None:
        self._slots = FairSlots(slots)
        self._slow_s = slow_s
        self._loop = asyncio.get_running_loop()
        self._ended_at: dict[str, float] = {}
        """When a line of each batch that is carried out ended last, or the batch was begun."""

    def begin(self, batch: str) -> None:
        self._ended_at[batch] = self._loop.time()

    def end(self, batch: str) -> None:
        del self._ended_at[batch]

    def is_slow(self, batch: str) -> bool:
        """Return whether no line of a batch has ended for long."""
        return self._loop.time() - self._ended_at[batch] >= self._slow_s

    @asynccontextmanager
    async def slot(self, account: Account, batch: str) -> AsyncIterator[None]:
        """Hold a place while the body runs, but not for long."""
        release = await self._slots.take(account)
        timer = self._loop.call_later(self._slow_s, release)
        try:
            yield
        finally:
            timer.cancel()
            release()
            if batch in self._ended_at:
                self.begin(batch)


class AdmissionTurns:
    """Lines of a batch are admitted one after another, and when the limits of their key refuse one, the next ones wait as well.

    Otherwise all of them would try again at the same time, and all but one be refused again.
    """

    def __init__(self, is_wanted: Callable[[], Awaitable[bool]], look_s: float) -> None:
        """`is_wanted` says whether the batch is still to be carried out, and is called every `look_s` while its lines wait."""
        self.is_wanted = True
        """Once it is not, no line waits for the limits any more."""
        self._look = is_wanted
        self._look_s = look_s
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._room_at = 0.0
        """When the limits have room again, on the loop's clock, as they said when they refused a line last."""
        self._has_room = asyncio.Event()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[], None]]:
        """Let the body make a request when its turn has come and the limits may have room, or when the batch `is_wanted` no more.

        The next one has its turn when the function that this yields is called, at the latest when the body ends.
        """
        await self._lock.acquire()
        has_turn = True

        def end_turn() -> None:
            nonlocal has_turn
            if has_turn:
                has_turn = False
                self._lock.release()

        try:
            await self._room()
            yield end_turn
        finally:
            end_turn()

    async def _room(self) -> None:
        while self.is_wanted and (left_s := self._room_at - self._loop.time()) > 0:
            self._has_room.clear()
            try:
                async with asyncio.timeout(min(left_s, self._look_s)):
                    await self._has_room.wait()
            except TimeoutError:
                self.is_wanted = await self._look()

    def refused(self, wait_s: float) -> None:
        """The limits refused a request, and have room for it in so many seconds."""
        self._room_at = self._loop.time() + wait_s

    def ended(self) -> None:
        """A request has ended, and given back what it held of the limits."""
        self._room_at = 0.0
        self._has_room.set()
