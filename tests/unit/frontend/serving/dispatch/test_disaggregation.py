from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError, InstanceGone, InvalidRequest, Overloaded, Unavailable
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Stop,
    Summary,
    delta_encoder,
    pack_tokens,
    request_decoder,
    summary_encoder,
)
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.frontend.config import DisaggregationOptions, KvRouterOptions, RetryOptions, ServingOptions, Thresholds
from dynamo.frontend.metrics import FrontendMetrics, RequestType
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.fetch import TierFetch
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.frontend.serving.dispatch.disaggregation import OFFER
from tests.support.fakes import (
    FakeClient,
    FakeDirectory,
    FakeLink,
    FakeStream,
    FakeText,
    FakeTexts,
    RecordingRouter,
    continuation,
    instance,
    llm_card,
)
from tests.support.plane import generate

PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE, BOTH = map(InstanceId, (1, 2, 11, 12, 21))
PROMPT = [3, 1, 4, 1, 5]
HANDED_OVER = {"do_remote_prefill": True, "remote_engine_id": "e1", "remote_block_ids": [7, 8]}
CALL = Call(account=ANONYMOUS, request_id="r", endpoint="completions", request_type=RequestType.STREAM)


class Engines:
    """What every instance of the fleet was sent, and what it responds."""

    def __init__(self) -> None:
        self.requests: list[tuple[InstanceId, GenerateRequest]] = []
        self.failures: dict[InstanceId, DynamoError] = {}
        """Before any response."""
        self.deaths: dict[InstanceId, DynamoError] = {}
        """After the first token."""
        self.hands_over = True

    def __call__(self, stream: FakeStream) -> None:
        request = request_decoder.decode(stream.body)
        self.requests.append((stream.instance, request))
        if failure := self.failures.get(stream.instance):
            return stream.fail(failure)
        limit = request.stop.max_tokens
        assert limit is not None
        tokens = continuation(request.tokens, limit)
        stream.data(delta_encoder.encode(Delta((tokens[0],), finish_reason=FinishReason.LENGTH if limit == 1 else None)))
        if death := self.deaths.pop(stream.instance, None):
            return stream.fail(death)
        if limit > 1:
            stream.data(delta_encoder.encode(Delta(tuple(tokens[1:]), finish_reason=FinishReason.LENGTH)))
        is_prefill = request.kv_transfer == OFFER
        transfer = HANDED_OVER if is_prefill and self.hands_over else None
        cached = 4 if is_prefill else request.prompt_tokens if request.kv_transfer else 0
        summary = Summary(prompt_tokens=5, output_tokens=limit, cached_tokens=cached, kv_transfer=transfer, prefill_ms=2.0)
        stream.end(summary_encoder.encode(summary))

    @property
    def sent_to(self) -> list[InstanceId]:
        return [instance for instance, _ in self.requests]


class Front:
    def __init__(self, plane: DataPlane, directory: FakeDirectory, engines: Engines, router: RecordingRouter) -> None:
        self.plane = plane
        self.directory = directory
        self.engines = engines
        self.router = router

    async def generate(self, max_tokens: int = 4, call: Call = CALL, **more: object) -> tuple[list[int], Summary]:
        settings: dict[str, Any] = {"model": "talker", "prompt": PROMPT, "stop": Stop(max_tokens=max_tokens), **more}
        tokens: list[int] = []
        async with generate(self.plane, TextRequest(**settings), call) as generation:
            while batch := await generation.read():
                tokens += [token for text in batch for token in text.tokens]
            return tokens, generation.summary


def _texts() -> FakeTexts:
    async def load(card: object) -> FakeText:
        return FakeText()

    return FakeTexts(load)  # type: ignore[arg-type]


@asynccontextmanager
async def front(
    *roles: tuple[InstanceId, Role], router: RecordingRouter | None = None, migration_limit: int = 3, **settings: Any
) -> AsyncIterator[Front]:
    directory = FakeDirectory(*(instance(int(id_), llm_card(role=role)) for id_, role in roles))
    engines, router = Engines(), router or RecordingRouter()

    chosen = ServingOptions(disaggregation=DisaggregationOptions(**settings), retry=RetryOptions(migration_limit=migration_limit))
    metrics = FrontendMetrics(CollectorRegistry())
    async with open_data_plane(directory, FakeClient(engines), FakeLink(), router, _texts(), metrics, chosen) as plane:  # type: ignore[arg-type]
        yield Front(plane, directory, engines, router)
    assert not router.open


PAIR = ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE))
RESPONSE = continuation(PROMPT, 4)


def gone(id_: InstanceId) -> InstanceGone:
    return InstanceGone(id_)


async def test_the_first_prefill_instance_that_joins_gets_the_next_prompt_and_none_once_it_left() -> None:
    async with front((DECODE, Role.DECODE)) as f:
        await f.generate()
        f.directory.add(instance(int(PREFILL), llm_card(role=Role.PREFILL)))
        await f.generate()
        f.directory.remove(int(PREFILL))
        await f.generate()
        assert f.engines.sent_to == [DECODE, PREFILL, DECODE, DECODE]


async def test_one_instance_computes_the_prompt_and_another_one_responds() -> None:
    async with front(*PAIR) as f:
        tokens, summary = await f.generate()
        assert tokens == RESPONSE
        (first, prefill), (second, decode) = f.engines.requests
        assert (first, second) == (PREFILL, DECODE)
        assert (prefill.stop.max_tokens, prefill.kv_transfer, prefill.prompt) == (1, OFFER, decode.prompt)
        assert (decode.stop.max_tokens, decode.kv_transfer) == (4, HANDED_OVER)
        chosen, booked = f.router.requests
        assert (chosen.is_prefilled, booked.is_prefilled) == (False, True)
        assert (summary.cached_tokens, summary.prefill_ms) == (4, 2.0)  # what the prefill instance cached and took


async def test_the_instance_that_computed_the_prompt_is_credited_with_what_it_had_cached() -> None:
    async with front(*PAIR) as f:
        await f.generate()
        assert (f.plane.reuse.hit_rate(PREFILL), f.plane.reuse.hit_rate(DECODE)) == (0.8, None)


async def test_what_the_prefill_instance_found_cached_is_compared_with_what_routing_counted_on() -> None:
    async with front(*PAIR) as f:
        f.router.fetch = TierFetch(((Tier.CPU, 1),), 1, 0.0, 0.0)
        await f.generate()
        assert f.router.found == [4], "to the decode instance, all of the prompt is cached"


async def test_a_prefill_instance_never_responds_to_callers() -> None:
    async with front((PREFILL, Role.PREFILL)) as f:
        with pytest.raises(Unavailable):
            await f.generate()
        assert f.engines.sent_to == []


@pytest.mark.parametrize("when", ["failures", "deaths"])
async def test_a_prompt_whose_prefill_instance_is_lost_is_computed_by_another_one(when: str) -> None:
    async with front((PREFILL, Role.PREFILL), (OTHER_PREFILL, Role.PREFILL), (DECODE, Role.DECODE)) as f:
        getattr(f.engines, when)[PREFILL] = gone(PREFILL)
        assert (await f.generate())[0] == RESPONSE
        assert f.engines.sent_to == [PREFILL, OTHER_PREFILL, DECODE]


@pytest.mark.parametrize("error", [gone(PREFILL), Overloaded("busy", retry_after_s=1)])
async def test_without_a_prefill_instance_that_can_one_instance_does_all(error: DynamoError) -> None:
    async with front(*PAIR) as f:
        f.engines.failures[PREFILL] = error
        assert (await f.generate())[0] == RESPONSE
        assert f.engines.sent_to == [PREFILL, DECODE]
        assert f.engines.requests[-1][1].kv_transfer is None


@pytest.mark.parametrize("roles", [((DECODE, Role.DECODE),), ((BOTH, Role.AGGREGATED),), ((BOTH, Role.AGGREGATED), PAIR[0])])
async def test_fleets_that_lack_a_role_serve_as_one_unless_they_may_not(roles: tuple[tuple[InstanceId, Role], ...]) -> None:
    async with front(*roles) as f:
        assert (await f.generate())[0] == RESPONSE
        assert f.engines.sent_to == [roles[0][0]]
    async with front(*roles, enforce=True) as f:
        with pytest.raises(Unavailable, match=r"no (prefill|decode) instance is serving model 'talker'"):
            await f.generate()
        assert f.engines.sent_to == []


async def test_where_it_is_enforced_a_failed_prefill_fails_the_request() -> None:
    async with front(*PAIR, enforce=True) as f:
        f.engines.failures[PREFILL] = gone(PREFILL)
        with pytest.raises(InstanceGone):
            await f.generate()
        assert f.engines.sent_to == [PREFILL]


async def test_a_prefill_instance_that_hands_nothing_over_is_made_up_for(caplog: pytest.LogCaptureFixture) -> None:
    async with front(*PAIR) as f:
        f.engines.hands_over = False
        assert (await f.generate())[0] == RESPONSE
        assert f.engines.requests[-1][1].kv_transfer is None
        assert "provides no KV transfer" in caplog.text


async def test_after_a_decode_instance_failed_the_next_one_computes_the_prompt_itself() -> None:
    """What was handed over may have been fetched already."""
    async with front(*PAIR, (OTHER_DECODE, Role.DECODE)) as f:
        f.engines.failures[DECODE] = gone(DECODE)
        assert (await f.generate())[0] == RESPONSE
        assert f.engines.sent_to == [PREFILL, DECODE, OTHER_DECODE]
        assert [request.kv_transfer for _, request in f.engines.requests] == [OFFER, HANDED_OVER, None]


async def test_a_stream_whose_decode_instance_dies_goes_on_with_its_prompt_computed_anew() -> None:
    async with front(*PAIR, (OTHER_DECODE, Role.DECODE)) as f:
        f.engines.deaths[DECODE] = gone(DECODE)
        assert (await f.generate())[0] == RESPONSE
        assert f.engines.sent_to == [PREFILL, DECODE, PREFILL, OTHER_DECODE]
        assert list(f.engines.requests[-1][1].tokens) == [*PROMPT, RESPONSE[0]]


async def test_a_short_prompt_is_computed_by_the_decode_instance() -> None:
    async with front(*PAIR, min_prompt_tokens=6) as f:
        await f.generate()
        assert f.engines.sent_to == [DECODE]
    async with front(*PAIR, min_prompt_tokens=5) as f:
        await f.generate()
        assert f.engines.sent_to == [PREFILL, DECODE]


async def test_a_pin_names_the_decode_instance() -> None:
    async with front(*PAIR, (OTHER_DECODE, Role.DECODE), (BOTH, Role.AGGREGATED)) as f:
        await f.generate(call=Call(account=ANONYMOUS, request_id="r", instance=OTHER_DECODE))
        await f.generate(call=Call(account=ANONYMOUS, request_id="r", instance=BOTH))
        assert f.engines.sent_to == [PREFILL, OTHER_DECODE, BOTH]


async def test_a_request_may_name_the_instance_that_computes_its_prompt() -> None:
    async with front(*PAIR, (OTHER_PREFILL, Role.PREFILL), min_prompt_tokens=1000) as f:
        for named in (OTHER_PREFILL, PREFILL):
            await f.generate(call=Call(account=ANONYMOUS, request_id="r", prefill_instance=named))
        assert f.engines.sent_to == [OTHER_PREFILL, DECODE, PREFILL, DECODE], "however short the prompt is"


async def test_a_prefill_instance_that_is_named_is_not_made_up_for() -> None:
    async with front(*PAIR) as f:
        with pytest.raises(Unavailable, match="instance b does not serve model 'talker' now"):
            await f.generate(call=Call(account=ANONYMOUS, request_id="r", prefill_instance=DECODE))
        f.engines.failures[PREFILL] = gone(PREFILL)
        with pytest.raises(InstanceGone):
            await f.generate(call=Call(account=ANONYMOUS, request_id="r", prefill_instance=PREFILL))
    async with front((BOTH, Role.AGGREGATED)) as f:
        with pytest.raises(Unavailable, match="instance 15 computes no prompts of model 'talker' for other instances now"):
            await f.generate(call=Call(account=ANONYMOUS, request_id="r", prefill_instance=BOTH))


async def test_a_generation_tells_which_instance_computed_its_prompt() -> None:
    async with (
        front(*PAIR) as f,
        generate(f.plane, TextRequest(model="talker", prompt=PROMPT, stop=Stop(max_tokens=2)), CALL) as g,
    ):
        assert g.prefill_instance is None
        while await g.read():
            pass
        assert g.decision is not None
        assert (g.prefill_instance, g.decision.instance.id) == (PREFILL, DECODE)


async def test_log_probabilities_of_the_prompt_need_one_instance_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    to_generate: Callable[..., Any] = FakeText.to_generate

    async def with_logprobs(self: FakeText, request: TextRequest, key: str = "") -> GenerateRequest:
        made: GenerateRequest = await to_generate(self, request)
        return GenerateRequest(model=made.model, prompt=made.prompt, stop=made.stop, prompt_logprobs=1)

    monkeypatch.setattr(FakeText, "to_generate", with_logprobs)
    async with front(*PAIR) as f:
        await f.generate()
        assert f.engines.sent_to == [DECODE]
    async with front(*PAIR, enforce=True) as f:
        with pytest.raises(InvalidRequest, match="log probabilities of the prompt"):
            await f.generate()


async def test_leaving_while_the_prompt_is_computed_ends_the_prefill() -> None:
    client = FakeClient(lambda stream: None)
    directory = FakeDirectory(*(instance(int(id_), llm_card(role=role)) for id_, role in PAIR))

    metrics, router = FrontendMetrics(CollectorRegistry()), RecordingRouter()
    async with open_data_plane(directory, client, FakeLink(), router, _texts(), metrics) as plane:  # type: ignore[arg-type]
        async with generate(plane, TextRequest(model="talker", prompt=PROMPT), CALL) as generation:
            reading = asyncio.create_task(generation.read())
            while not client.streams:
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        assert [stream.cancelled for stream in client.streams] == [True]
        assert not router.open


class Remembering(RecordingRouter):
    """A router for which instances miss so many tokens of any prompt."""

    def __init__(self, missing: int) -> None:
        super().__init__()
        self.missing = missing
        self.looked_at: list[InstanceId] = []

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance], *, with_room: bool = False) -> int:
        self.looked_at = [candidate.id for candidate in candidates]
        return self.missing


async def test_a_prompt_that_a_decode_instance_has_cached_is_not_computed_elsewhere() -> None:
    router = Remembering(missing=0)
    async with front(*PAIR, (BOTH, Role.AGGREGATED), router=router) as f:
        assert (await f.generate())[0] == RESPONSE
        assert f.engines.sent_to == router.looked_at == [DECODE]
        assert f.engines.requests[0][1].kv_transfer is None
        assert not router.requests[0].is_prefilled  # what is cached decides where it goes
        router.missing = 1
        await f.generate()
        assert f.engines.sent_to == [DECODE, PREFILL, DECODE]


async def test_few_missing_tokens_are_computed_by_the_decode_instance() -> None:
    router = Remembering(missing=3)
    async with front(*PAIR, router=router, min_prompt_tokens=4) as f:
        await f.generate()
        assert f.engines.sent_to == [DECODE]
        router.missing = 4
        await f.generate()
        assert f.engines.sent_to == [DECODE, PREFILL, DECODE]


def test_the_router_knows_how_much_of_a_prompt_the_best_candidate_lacks() -> None:
    fleet = [instance(id_, llm_card(role=Role.DECODE)) for id_ in (1, 2)]
    kv = KvRouter(KvRouterOptions(block_size=4))
    prompt = pack_tokens(range(10))
    request = RouteRequest(model="talker", prompt=prompt)
    assert kv.missing_tokens(request, fleet) == 10
    hashes = sequence_hashes(prompt, 4)
    kv.index("talker").store(InstanceId(2), hashes[:1])
    assert kv.missing_tokens(request, fleet) == 6
    assert kv.missing_tokens(request, fleet[:1]) == 10
    kv.index("talker").store(InstanceId(2), hashes)
    assert kv.missing_tokens(request, fleet) == 0
    assert kv.missing_tokens(RouteRequest(model="talker", prompt=pack_tokens(range(3))), fleet) == 3
    assert kv.missing_tokens(request, fleet, with_room=True) is None, "no threshold says which ones have room"
    kv.thresholds.set("talker", Thresholds(active_prefill_tokens=100), changed_at_ms=1)
    kv.loads.book("long", InstanceId(2), 0.0, prefill_tokens=101)
    assert kv.missing_tokens(request, fleet, with_room=True) == 10, "the one that has it cached is busy"
    kv.loads.book("long, too", InstanceId(1), 0.0, prefill_tokens=101)
    assert kv.missing_tokens(request, fleet, with_room=True) is None


async def test_a_prefill_costs_no_retry_when_the_request_may_not_move() -> None:
    async with front(*PAIR, (OTHER_DECODE, Role.DECODE), migration_limit=0) as f:
        f.engines.deaths[DECODE] = gone(DECODE)
        with pytest.raises(InstanceGone):
            await f.generate()
        assert f.engines.sent_to == [PREFILL, DECODE]
