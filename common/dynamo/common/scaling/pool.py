"""The instances of one model in one role: what a planner scales."""

from __future__ import annotations

import msgspec

from dynamo.common.model_card import ModelCard, Role


class Pool(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Instances that can take one another's place."""

    model: str
    """The name in the card, no alias."""
    role: Role = Role.AGGREGATED

    @classmethod
    def of(cls, card: ModelCard) -> Pool:
        return cls(card.name, card.role)

    def __str__(self) -> str:
        return self.model if self.role is Role.AGGREGATED else f"{self.model} ({self.role})"
