from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.errors import Cancelled, Code, DynamoError, InvalidRequest, NoInstances, Overloaded, RateLimited
from dynamo.common.tensors.check import RequestChecker
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.security.accounts import ANONYMOUS, Account, KeyAccount
from dynamo.frontend.security.keys import ApiKey, Limits
from dynamo.frontend.security.ledger import Ledger
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.request_scope import RequestScope
from tests.support.fakes import tensor_card


@dataclass
class FakeSpan:
    ended: list[Code | None] = field(default_factory=list)

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        return {**headers, "traceparent": "ours"}

    def set(self, attributes: object) -> None:
        pass

    def event(self, name: str) -> None:
        pass

    def end(self, error: Code | None = None) -> None:
        self.ended.append(error)


@dataclass
class FakeTracing:
    spans: list[FakeSpan] = field(default_factory=list)

    def begin(self, name: str, headers: object, about: object) -> FakeSpan:
        self.spans.append(FakeSpan())
        return self.spans[-1]


class Requests:
    """Scopes of model `m`, and what was counted of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = FrontendMetrics(self.registry)
        self.tracing = FakeTracing()

    def scope(self, call: Call) -> RequestScope:
        card = tensor_card("m")
        model = NamedModel("m", "", card, self.metrics.for_model("m"), RequestChecker(card), is_served=True)
        return RequestScope(model, call, self.tracing)  # type: ignore[arg-type]

    def outcomes(self) -> dict[str, float]:
        """How many requests ended with each type of error; "" is success."""
        samples = [sample for family in self.registry.collect() for sample in family.samples]
        ended = [sample for sample in samples if sample.name == "dynamo_frontend_requests_total"]
        return {sample.labels["error_type"]: sample.value for sample in ended}

    def running(self) -> float | None:
        return self.registry.get_sample_value("dynamo_frontend_inflight_requests", {"model": "m"})


def call(account: Account = ANONYMOUS) -> Call:
    return Call(request_id="r", account=account)


def limited(ledger: Ledger | None = None, **limits: float) -> KeyAccount:
    key = ApiKey(name="team", salt=b"", digest=b"", limits=Limits(**limits))  # type: ignore[arg-type]
    return KeyAccount(key, ledger=ledger)


@pytest.mark.parametrize(
    ("failure", "counted"),
    [(None, ""), (InvalidRequest("no"), "validation"), (Cancelled(), "cancelled"), (RuntimeError("bug"), "internal")],
)
def test_a_request_ends_exactly_once_however_often_that_is_said(failure: Exception | None, counted: str) -> None:
    requests = Requests()
    with requests.scope(call()) as scope:
        assert requests.running() == 1
        for _ in range(2):
            scope.succeed() if failure is None else scope.fail(failure)
        scope.fail(InvalidRequest("too late"))
    assert requests.outcomes() == {counted: 1}
    assert requests.running() == 0
    assert len(requests.tracing.spans[0].ended) == 1


def test_an_exception_that_leaves_the_scope_is_the_outcome() -> None:
    requests = Requests()
    with pytest.raises(InvalidRequest), requests.scope(call()):
        raise InvalidRequest("no")
    assert requests.outcomes() == {"validation": 1}
    assert requests.tracing.spans[0].ended == [Code.INVALID_REQUEST]


def test_leaving_the_scope_before_the_end_counts_as_cancelled() -> None:
    requests = Requests()
    with requests.scope(call()):
        pass
    assert requests.outcomes() == {"cancelled": 1}


def test_a_request_that_is_not_admitted_counts_as_refused_and_is_over() -> None:
    requests, account = Requests(), limited(concurrent_requests=1)
    with requests.scope(call(account)) as first:
        with pytest.raises(RateLimited), requests.scope(call(account)):
            raise AssertionError("it was admitted")
        first.succeed()
    assert requests.outcomes() == {"": 1, "rate_limit": 1}
    assert (requests.running(), account.sequences) == (0, 0)


@pytest.mark.parametrize("expected_tokens", [0, 200])
def test_the_ledger_has_no_request_that_the_token_budget_refused(expected_tokens: int) -> None:
    ledger = Ledger()
    requests, account = Requests(), limited(ledger, tokens_per_minute=100)
    account.take_tokens(50)
    refused = msgspec.structs.replace(call(account), expected_tokens=expected_tokens)
    with pytest.raises(RateLimited), requests.scope(refused) as scope:
        scope.prompt(40, 60)
    assert requests.outcomes() == {"rate_limit": 1}
    assert (account.sequences, ledger.row_count) == (0, 0)


@pytest.mark.parametrize("failure", [None, InvalidRequest("no")])
def test_the_account_has_the_request_until_its_end(failure: DynamoError | None) -> None:
    requests, account = Requests(), limited(concurrent_requests=1)
    with requests.scope(call(account)) as scope:
        assert account.sequences == 1
        scope.succeed() if failure is None else scope.fail(failure)
        assert account.sequences == 0


def test_the_prompts_of_a_traced_batch_are_admitted_as_one_request() -> None:
    requests, account = Requests(), limited(requests_per_s=1)
    batch = call(account)
    with requests.scope(batch) as first, requests.scope(batch) as second:
        assert first.call.headers == second.call.headers == {"traceparent": "ours"}
        with pytest.raises(RateLimited), requests.scope(call(account)):
            pass


def test_the_prompts_of_a_batch_above_its_priority_are_admitted_as_one_request() -> None:
    requests, account = Requests(), limited(requests_per_s=1)
    batch = msgspec.structs.replace(call(account), priority=5)
    with requests.scope(batch), requests.scope(batch), pytest.raises(RateLimited), requests.scope(call(account)):
        pass


def test_the_prompts_of_a_request_have_their_places_together() -> None:
    requests, account = Requests(), limited(concurrent_requests=4)
    with requests.scope(msgspec.structs.replace(call(account), prompts=3)):
        assert account.sequences == 3
    assert account.sequences == 0


def test_an_edge_can_tell_whether_a_request_was_begun() -> None:
    requests, made = Requests(), call()
    assert not made.progress.started
    with requests.scope(made):
        assert made.progress.started


def test_tokens_are_counted_for_the_metrics_and_for_the_account() -> None:
    requests, account = Requests(), limited(tokens_per_minute=100)
    with requests.scope(call(account)) as scope:
        scope.prompt(60, 40)
        scope.tokens(40)
        scope.succeed(cached_tokens=16)
        assert scope.output_tokens == 40
    with pytest.raises(RateLimited), requests.scope(call(account)):
        pass
    for name, value in (("input_sequence_tokens_sum", 60), ("output_tokens_total", 40), ("cached_tokens_sum", 16)):
        assert requests.registry.get_sample_value(f"dynamo_frontend_{name}", {"model": "m"}) == value


def test_an_estimate_of_tokens_is_reserved_until_the_request_ends() -> None:
    requests, account = Requests(), limited(tokens_per_minute=100)
    estimated = Call(request_id="r", account=account, expected_tokens=60)
    with requests.scope(estimated) as scope:
        with pytest.raises(RateLimited), requests.scope(Call(request_id="s", account=account, expected_tokens=60)):
            pass
        scope.succeed()
    with requests.scope(Call(request_id="t", account=account, expected_tokens=100)):
        pass


@pytest.mark.parametrize(
    ("sent", "counted", "charged"),
    [(0, None, 0), (1, None, 60), (2, None, 60), (1, 40, 40), (1, 90, 90), (1, 0, 60)],
    ids=["never sent", "left early", "moved", "fewer", "more", "not counted"],
)
def test_an_estimate_is_charged_once_sent_unless_the_model_counts(sent: int, counted: int | None, charged: int) -> None:
    ledger = Ledger()
    requests, account = Requests(), limited(ledger, tokens_per_minute=100)
    estimated = Call(request_id="r", account=account, expected_tokens=60)
    estimated.progress.sent = 5  # to a model that a rule tried before
    with requests.scope(estimated) as scope:
        scope.call.progress.sent += sent
        if counted is not None:
            scope.counted(counted)
            scope.succeed()
    [limit] = account.rate_limits()
    assert limit.remaining == 100 - charged
    assert [row.prompt_tokens for row in ledger.rows(ledger.today())] == [charged]
    metric = requests.registry.get_sample_value("dynamo_frontend_input_sequence_tokens_sum", {"model": "m"})
    assert (metric or 0) == charged


def test_a_model_that_counts_wrongly_takes_no_more_of_a_key_than_texts_can_have() -> None:
    ledger = Ledger()
    account = limited(ledger, tokens_per_minute=100)
    with Requests().scope(Call(request_id="r", account=account, expected_tokens=60)) as scope:
        scope.call.progress.sent += 1
        scope.counted(2**62)
        scope.succeed()
    assert [row.prompt_tokens for row in ledger.rows(ledger.today())] == [60 * (4 + 128) + 4096]


@pytest.mark.parametrize("sent", [0, 1])
def test_a_prompt_that_no_instance_was_sent_is_not_charged(sent: int) -> None:
    ledger = Ledger()
    requests, account = Requests(), limited(ledger, tokens_per_minute=100)
    made = call(account)
    made.progress.sent = 5  # to a model that a rule tried before
    with requests.scope(made) as scope:
        scope.prompt(60, 40)
        assert account.rate_limits()[0].remaining == 0
        scope.call.progress.sent += sent
        scope.fail(NoInstances("m"))
    assert account.rate_limits()[0].remaining == 100 - 60 * sent
    [row] = ledger.rows(ledger.today())
    assert (row.requests, row.errors, row.prompt_tokens) == (1, 1, 60 * sent)


def test_of_several_prompts_only_those_are_charged_that_an_instance_was_sent() -> None:
    ledger, told = Ledger(), []
    requests, account = Requests(), limited(ledger, tokens_per_minute=1000)
    made = msgspec.structs.replace(call(account), prompts=2)
    made.progress.on_sent = lambda: told.append("sent")
    with requests.scope(made) as first, requests.scope(made) as second:
        first.prompt(60, 40)
        second.prompt(70, 40)
        first.call.progress.was_sent()
        first.responded()
        second.fail(Overloaded("busy"))
        first.fail(Overloaded("busy"))
    assert account.rate_limits()[0].remaining == 1000 - 60
    assert [row.prompt_tokens for row in ledger.rows(ledger.today())] == [60]
    assert (made.progress.sent, made.progress.started, made.progress.responded, told) == (1, True, True, ["sent"])


def test_a_request_that_may_use_more_tokens_than_are_left_is_refused() -> None:
    requests, account = Requests(), limited(tokens_per_minute=100)
    with requests.scope(call(account)) as first:
        first.prompt(10, 40)
        with pytest.raises(RateLimited), requests.scope(call(account)) as second:
            second.prompt(10, 80)
        first.tokens(1)
        first.succeed()
    with requests.scope(call(account)) as third:
        third.prompt(10, 79)


@pytest.mark.parametrize(
    ("account", "requested", "granted"),
    [
        (limited(), 5, 0),
        (limited(), -5, -5),
        (KeyAccount(ApiKey(name="team", salt=b"", digest=b"", max_priority=3)), 5, 3),
        (KeyAccount(ApiKey(name="team", salt=b"", digest=b"", max_priority=-3)), 0, -3),
        (ANONYMOUS, 5, 5),
    ],
)
def test_a_request_has_at_most_the_priority_that_its_key_may_use(account: Account, requested: int, granted: int) -> None:
    with Requests().scope(msgspec.structs.replace(call(account), priority=requested)) as scope:
        assert scope.call.priority == granted
        scope.succeed()
