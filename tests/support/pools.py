"""Registrations and load reports as a planner gets them."""

from __future__ import annotations

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import LoadMessage, LoadReport, StepTotals
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, Role
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.scaling.pool import Pool

CHAT = Pool("chat")
LLM = LlmInfo(context_length=4096, tokenizer="x", block_size=16, total_blocks=500, max_num_seqs=64, max_batched_tokens=2048)


def instance(number: int, model: str = "chat", role: Role = Role.AGGREGATED, kind: ModelKind = ModelKind.LLM) -> Instance:
    card = ModelCard(name=model, kind=kind, role=role, llm=LLM if kind is ModelKind.LLM else None)
    return Instance(id=InstanceId(number), endpoint=Endpoint(), subject="s", card=card, started_at=0.0)


def load(model: str = "chat", *, steps: int = 0, running: int = 0, waiting: int = 0, queued_tokens: int = 0) -> LoadMessage:
    """A report of an engine that has done so many steps of 20 ms."""
    totals = StepTotals(steps=steps, seconds=0.02 * steps, prefill_tokens=50 * steps, sequences=4 * steps)
    return LoadMessage(model, LoadReport(running=running, waiting=waiting, queued_prefill_tokens=queued_tokens, totals=totals))
