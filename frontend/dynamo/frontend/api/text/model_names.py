"""Requests that do not name their model."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.common.discovery import other_names
from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane


def generates_text(card: ModelCard) -> bool:
    return card.llm is not None


def name_or_only_model(
    plane: DataPlane, account: Account, name: str | None, suits: Callable[[ModelCard], bool] = generates_text
) -> str:
    """Return `name` or, without one, the only model that suits and that the caller may use. Raises InvalidRequest."""
    if name:
        return name
    models = [card for card in plane.cards(account) if suits(card)]
    if len(models) != 1:
        raise InvalidRequest(
            f"the field 'model' is missing; it can be left out if exactly one model suits the request, but {len(models)} do",
            param="model",
        )
    return next(filter(account.permits, (models[0].name, *other_names(models[0]))))


def described_model(plane: DataPlane, account: Account, name: str | None) -> str:
    """Return the model that stands for `name` or, without one, the only language model. Raises InvalidRequest, Forbidden."""
    return plane.names.representative(account, name_or_only_model(plane, account, name))
