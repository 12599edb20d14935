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
from msgspec import UNSET, Meta, Struct, UnsetType

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.calls import read_limit
from dynamo.frontend.api.declaration import Reads, changed, shown
from dynamo.frontend.api.http.errors import OPENAI_ERRORS, PLAIN_ERRORS
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import read_json
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.router.explain import DecisionLog
from dynamo.frontend.router.explanation import DecisionRecord
from dynamo.frontend.router.loads.thresholds import Thresholds, ThresholdTable
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.surfaces import Surface
from dynamo.frontend.serving.data_plane import DataPlane

_MAX_TOKENS = 2**53
_MAX_DECISIONS = 256


@dataclass(frozen=True, slots=True)
class RoutingControl:
    """The state that these operations read and change."""

    thresholds: ThresholdTable
    decisions: DecisionLog
    follows_loads: bool
    """False: the router mode does not know which instances are busy."""
    set_thresholds: Callable[[str, Thresholds], None]
    """Sets them for this process and all others."""


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


class RoutingErrorResponse(Struct, frozen=True):
    error: str


def routing_operations(plane: DataPlane, control: RoutingControl) -> list[Operation]:
    decoder = msgspec.json.Decoder(ThresholdsRequest)

    async def list_thresholds(exchange: Exchange) -> None:
        account = exchange.account
        models = {card.name for card in plane.cards(account) if card.llm is not None} | set(control.thresholds.changes())
        thresholds = [_shown(model, control.thresholds.of(model)) for model in sorted(filter(account.permits, models))]
        await exchange.respond(msgspec.json.encode(AllThresholds(thresholds)))

    async def change_thresholds(exchange: Exchange) -> None:
        exchange.call()
        request = await read_json(exchange, decoder)
        await exchange.respond(msgspec.json.encode(_change(plane, exchange.account, control, request)))

    async def list_decisions(exchange: Exchange) -> None:
        query = exchange.query
        limit, model = read_limit(query.get("limit", "100"), _MAX_DECISIONS), query.get("model")
        decisions = [
            decision
            for decision in control.decisions.read(_MAX_DECISIONS)
            if (model is None or decision.model == model) and exchange.account.permits(decision.model)
        ]
        await exchange.respond(msgspec.json.encode(Decisions(decisions[:limit])))

    return [
        Operation(
            method="GET",
            path="/busy_threshold",
            declared=shown(Surface.THRESHOLDS),
            errors=PLAIN_ERRORS,
            handle=list_thresholds,
            summary="When instances count as busy",
            group="Routing",
            response=AllThresholds,
            error=RoutingErrorResponse,
        ),
        Operation(
            path="/busy_threshold",
            declared=changed(Surface.THRESHOLDS, reads=Reads.LITTLE, copies=3, deadline_s=60.0),
            errors=PLAIN_ERRORS,
            handle=change_thresholds,
            summary="Read or change when instances of a model count as busy",
            group="Routing",
            request=ThresholdsRequest,
            response=ModelThresholds,
            error=RoutingErrorResponse,
        ),
        Operation(
            method="GET",
            path="/v1/routing/decisions",
            declared=shown(Surface.CONSOLE),
            errors=OPENAI_ERRORS,
            handle=list_decisions,
            summary="Why requests went where they went",
            group="Routing",
            response=Decisions,
        ),
    ]


def _change(plane: DataPlane, account: Account, control: RoutingControl, request: ThresholdsRequest) -> ModelThresholds:
    """Raises ModelNotFound; InvalidRequest if thresholds have no effect here."""
    model = plane.card(account, request.model).name
    account.permit(model)  # the request may have named it by an alias
    current = control.thresholds.of(model)
    decode_blocks, prefill_tokens = request.active_decode_blocks_threshold, request.active_prefill_tokens_threshold
    if decode_blocks is UNSET and prefill_tokens is UNSET:
        return _shown(model, current)
    if not control.follows_loads:
        raise InvalidRequest(
            "this frontend does not follow the loads of instances: start it with --load-aware, with a --router-mode "
            "that looks at loads, or with a threshold"
        )
    wanted = Thresholds(
        active_decode_blocks=current.active_decode_blocks if decode_blocks is UNSET else decode_blocks,
        active_prefill_tokens=current.active_prefill_tokens if prefill_tokens is UNSET else prefill_tokens,
    )
    control.set_thresholds(model, wanted)
    return _shown(model, wanted)


def _shown(model: str, thresholds: Thresholds) -> ModelThresholds:
    return ModelThresholds(
        model=model,
        active_decode_blocks_threshold=thresholds.active_decode_blocks,
        active_prefill_tokens_threshold=thresholds.active_prefill_tokens,
    )
