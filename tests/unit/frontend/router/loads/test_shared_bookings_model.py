"""Bookings against a model: two frontends that share theirs over a bus that loses messages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.common.discovery import Instance
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.router.loads.shared_bookings import SharedBookings
from dynamo.frontend.router.loads.table import LoadTable

CARD = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=4096, tokenizer="", total_blocks=100))
FLEET = [Instance(id=InstanceId(id_), endpoint=Endpoint(), subject="", card=CARD, started_at=0.0) for id_ in (1, 2)]
# Sequence hashes are chained: a block stands for its whole prefix, so prompts are paths from the root of one tree.
PROMPTS: list[list[int]] = [[], [1], [1, 2], [1, 2, 3], [1, 4], [5, 6]]

sides = st.sampled_from([0, 1])


@dataclass
class Booked:
    """What a booking counts."""

    instance: int
    tokens: int
    blocks: list[int]
    extra: int
    prefilling: bool = True


@dataclass
class Frontend:
    table: LoadTable
    sent: deque[SharedBookings] = field(default_factory=deque)
    """Messages on their way to the other one."""
    own: dict[str, Booked] = field(default_factory=dict)
    others: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """The other one's sums by instance, as of the last message about it that has arrived."""

    def sums(self, instance: int) -> tuple[int, int, int]:
        booked = [each for each in self.own.values() if each.instance == instance]
        blocks = len({block for each in booked for block in each.blocks}) + sum(each.extra for each in booked)
        return len(booked), sum(each.tokens for each in booked if each.prefilling), blocks

    def expected(self, instance: int) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.sums(instance), self.others.get(instance, (0, 0, 0)), strict=True)))

    def actual(self) -> list[tuple[float, ...]]:
        loads = self.table.read(self.table.rows(FLEET), 0.0)
        return [(load.requests, load.prefill_tokens, load.decode_blocks) for load in loads]

    def receive(self, message: SharedBookings) -> None:
        self.table.apply(message, 0.0, lambda instance: True)
        for instance in list(self.others):
            if message.first <= instance <= message.last:
                del self.others[instance]
        for each in message.instances:
            self.others[each.instance] = (each.requests, each.prefill_tokens, each.blocks)


class BookingsOfTwo(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.frontends: list[Frontend] = []
        for name in ("a", "b"):
            frontend = Frontend(LoadTable(name))
            frontend.table.on_unshared(lambda: None)
            self.frontends.append(frontend)

    @rule(
        side=sides,
        instance=st.sampled_from(FLEET),
        tokens=st.integers(0, 50),
        blocks=st.sampled_from(PROMPTS),
        extra=st.integers(0, 3),
    )
    def book(self, side: int, instance: Instance, tokens: int, blocks: list[int], extra: int) -> None:
        self.count += 1
        frontend, name = self.frontends[side], f"booking {self.count}"
        frontend.table.book(name, instance.id, 0.0, prefill_tokens=tokens, blocks=blocks, extra_blocks=extra)
        frontend.own[name] = Booked(instance.id, tokens, blocks, extra)

    @rule(side=sides, data=st.data())
    def first_token(self, side: int, data: st.DataObject) -> None:
        frontend = self.frontends[side]
        if frontend.own:
            name = data.draw(st.sampled_from(sorted(frontend.own)))
            frontend.table.first_token(name, 0.0)
            frontend.own[name].prefilling = False

    @rule(side=sides, data=st.data())
    def finish(self, side: int, data: st.DataObject) -> None:
        frontend = self.frontends[side]
        if frontend.own:
            name = data.draw(st.sampled_from(sorted(frontend.own)))
            frontend.table.finished(name)
            del frontend.own[name]

    @rule(side=sides, most=st.integers(1, 3))
    def publish_changes(self, side: int, most: int) -> None:
        frontend = self.frontends[side]
        frontend.sent.extend(frontend.table.take_unshared(most))

    @rule(side=sides, most=st.integers(1, 3))
    def publish_everything(self, side: int, most: int) -> None:
        frontend = self.frontends[side]
        frontend.sent.extend(frontend.table.all_own_bookings(most))

    @precondition(lambda self: any(frontend.sent for frontend in self.frontends))
    @rule(side=sides, is_lost=st.booleans())
    def deliver(self, side: int, is_lost: bool) -> None:
        sender, receiver = self.frontends[side], self.frontends[1 - side]
        if sender.sent:
            message = sender.sent.popleft()
            if not is_lost:
                receiver.receive(message)

    @invariant()
    def loads_are_those_of_the_bookings_that_arrived(self) -> None:
        for frontend in self.frontends:
            assert frontend.actual() == [frontend.expected(instance.id) for instance in FLEET]

    def teardown(self) -> None:
        """Once all is finished and said, nothing is left, whatever was lost."""
        for frontend in self.frontends:
            for name in list(frontend.own):
                frontend.table.finished(name)
        for side, frontend in enumerate(self.frontends):
            for message in frontend.table.all_own_bookings(1):
                self.frontends[1 - side].receive(message)
        for frontend in self.frontends:
            assert len(frontend.table) == 0
            assert frontend.actual() == [(0, 0, 0), (0, 0, 0)]


TestBookingsOfTwo = BookingsOfTwo.TestCase
TestBookingsOfTwo.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
