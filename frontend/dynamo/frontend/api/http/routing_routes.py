"""How requests are routed: busy thresholds, to be read and changed, and the last decisions.

    GET  /busy_threshold          the thresholds of every model
    POST /busy_threshold          {"model": …} reads those of one model; with thresholds in it, sets these; null: never busy
    GET  /v1/routing/decisions    the last explained decisions of this process, newest first; `?limit=`, `?model=`

Thresholds hold for all frontends of the namespace, in all their processes, until all of them have ended. Reading the decisions
makes this process explain those of the next 15 seconds, up to a hundred per second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import Endpoint, ErrorForm, Exchange, HttpSettings, account_of
from dynamo.frontend.api.http.json_body import decode
from dynamo.frontend.api.http.openapi import Operation
from dynamo.frontend.api.statuses import public_message
from dynamo.frontend.router.explain import DecisionLog
from dynamo.frontend.router.explanation import DecisionRecord
from dynamo.frontend.router.thresholds import Thresholds, ThresholdTable
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane

_MAX_TOKENS = 2**53
_MAX_DECISIONS = 256


@dataclass(frozen=True, slots=True)
class RoutingControl:
    """What these paths work on."""

    thresholds: ThresholdTable
    decisions: DecisionLog
    follows_loads: bool
    """False: the router mode does not know who is busy."""
    set_thresholds: Callable[[str, Thresholds], None]
    """For this process and all others. Raises Unavailable before there is a connection to them."""


class ModelThresholds(Struct, kw_only=True, frozen=True):
    """From which load on an instance of the model gets no more requests; null: never."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None


class AllThresholds(Struct, frozen=True):
    thresholds: list[ModelThresholds]


class ThresholdsRequest(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    active_decode_blocks_threshold: (
        Annotated[float, Meta(ge=0, le=1, description="Share of the KV blocks in use.")] | UnsetType | None
    ) = UNSET
    active_prefill_tokens_threshold: (
        Annotated[int, Meta(ge=0, le=_MAX_TOKENS, description="Prompt tokens still to be computed.")] | UnsetType | None
    ) = UNSET


class Decisions(Struct, frozen=True):
    decisions: list[DecisionRecord]


class ErrorResponse(Struct, frozen=True):
    error: str


OPERATIONS = (
    Operation(
        method="get", path="/busy_threshold", summary="When instances count as busy", group="Routing", answer=AllThresholds
    ),
    Operation(
        path="/busy_threshold",
        summary="Read or change when instances of a model count as busy",
        group="Routing",
        request=ThresholdsRequest,
        answer=ModelThresholds,
        error=ErrorResponse,
    ),
    Operation(
        method="get", path="/v1/routing/decisions", summary="Why requests went where they went", group="Routing", answer=Decisions
    ),
)


def routing_routes(readiness: Readiness, control: RoutingControl, settings: HttpSettings) -> list[BaseRoute]:
    decoder = msgspec.json.Decoder(ThresholdsRequest)

    async def listed(request: Request) -> Response:
        models = {card.name for card in readiness.plane.cards(account_of(request.scope)) if card.llm is not None} | set(
            control.thresholds.changes()
        )
        return _json(AllThresholds([_shown(model, control.thresholds.of(model)) for model in sorted(models)]))

    async def changed(exchange: Exchange) -> None:
        exchange.caller()
        request = decode(decoder, await exchange.body(), exchange.settings.max_json_depth)
        thresholds = _change(readiness.plane, exchange.account, control, request)
        await exchange.answer(msgspec.json.encode(thresholds))

    async def decisions(request: Request) -> Response:
        limit, model = _limit(request.query_params.get("limit", "100")), request.query_params.get("model")
        found = control.decisions.read(_MAX_DECISIONS)
        return _json(Decisions([decision for decision in found if model is None or decision.model == model][:limit]))

    return [
        Route("/busy_threshold", listed),
        Route("/busy_threshold", Endpoint(changed, _ERRORS, settings), methods=["POST"]),
        Route("/v1/routing/decisions", decisions),
    ]


def _change(plane: DataPlane, account: Account, control: RoutingControl, request: ThresholdsRequest) -> ModelThresholds:
    """Raises ModelNotFound; InvalidRequest if nobody would heed the thresholds."""
    model = plane.card(account, request.model).name
    known = control.thresholds.of(model)
    decode_blocks, prefill_tokens = request.active_decode_blocks_threshold, request.active_prefill_tokens_threshold
    if decode_blocks is UNSET and prefill_tokens is UNSET:
        return _shown(model, known)
    if not control.follows_loads:
        raise InvalidRequest(
            "this frontend does not follow the loads of instances: start it with --load-aware, with a --router-mode "
            "that looks at loads, or with a threshold"
        )
    wanted = Thresholds(
        active_decode_blocks=known.active_decode_blocks if decode_blocks is UNSET else decode_blocks,
        active_prefill_tokens=known.active_prefill_tokens if prefill_tokens is UNSET else prefill_tokens,
    )
    control.set_thresholds(model, wanted)
    return _shown(model, wanted)


def _shown(model: str, thresholds: Thresholds) -> ModelThresholds:
    return ModelThresholds(
        model=model,
        active_decode_blocks_threshold=thresholds.active_decode_blocks,
        active_prefill_tokens_threshold=thresholds.active_prefill_tokens,
    )


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= _MAX_DECISIONS:
        raise InvalidRequest(f"'limit' must be a whole number from 1 to {_MAX_DECISIONS}", param="limit")
    return int(text)


def _json(body: Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _body(error: BaseException, status: int) -> bytes:
    return orjson.dumps({"error": public_message(error)})


_ERRORS = ErrorForm(body=_body, event=_body)
