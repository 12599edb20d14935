from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.tensors.check import RequestChecker
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.api.kserve.infer import call_for
from dynamo.frontend.metrics import FrontendMetrics, RequestType
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.protos.inference_pb2 import ModelInferRequest
from tests.support.fakes import tensor_card


def made(id: str = "", priority: int = 0, **headers: object) -> Call:
    """The call of a request with this id and priority, of a caller with these headers."""
    card = tensor_card("m")
    metrics = FrontendMetrics(CollectorRegistry()).for_model("m")
    model = NamedModel("m", "", card, metrics, RequestChecker(card), is_served=True)
    head = ModelInferRequest(model_name="m", id=id)
    if priority:
        head.parameters["priority"].uint64_param = priority
    return call_for(TensorRequest.build(head), model, Call(account=ANONYMOUS, **headers), RequestType.UNARY)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["x" * 129, "line\nbreak", "größe", ""])
def test_an_id_that_would_spoil_logs_is_replaced(bad: str) -> None:
    first, second = made(bad), made(bad)
    assert first.request_id.isalnum()
    assert first.request_id != second.request_id


def test_the_requests_own_id_is_used_without_a_header() -> None:
    assert made("mine").request_id == "mine"
    assert made("mine", request_id="header's").request_id == "header's"


def test_tritons_priority_one_is_the_most_urgent_and_zero_the_default() -> None:
    urgent, less, default, most = (made(priority=level).priority for level in (1, 2, 0, 2**40))
    assert urgent > less > default == 0
    assert most > default
