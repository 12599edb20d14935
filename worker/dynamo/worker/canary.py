"""Whether an engine still makes progress: seen from what it answers or, when it answers nothing, by one token asked of it.

A process can live, take requests and send its beats while its engine hangs. Frontends ask. However many they are, an engine that
works is not disturbed, however full it is, and an idle one generates one token for all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec

from dynamo.common.background import awaited
from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Overloaded
from dynamo.common.generation import Delta, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.worker.engine.base import Context, Engine

log = logging.getLogger(__name__)

_TOKEN = 1
"""In every vocabulary; and so short a prompt leaves nothing in a prefix cache."""
_GIVEN_UP_S = 30.0
"""After so long an engine is told to forget the token."""
_LOOK_S = 0.1


class Canary:
    """Of one language model."""

    def __init__(self, model: str, engine: Engine) -> None:
        self.progress = 0
        """To be counted up with each answer of the engine."""
        self._request = GenerateRequest(
            model=model,
            prompt=pack_tokens((_TOKEN,)),
            sampling=Sampling(temperature=0.0),
            stop=Stop(max_tokens=1, ignore_eos=True),
        )
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._seen = 0
        self._alive_at = self._loop.time()
        self._probe: asyncio.Task[DynamoError | None] | None = None

    async def probe(self, idle_s: float) -> None:
        """Returns when the engine works: when it has answered anything in the last `idle_s` seconds, or does so now.

        Raises what it fails with. While it hangs this does not return.
        """
        while not self._is_alive(idle_s):
            if self._probe is None or self._probe.done():
                self._probe = awaited(self._generate_token(), "canary")
            probe = self._probe
            done, _ = await asyncio.wait({probe}, timeout=_LOOK_S)
            if done:
                if (error := probe.result()) is not None:
                    raise error
                self._alive_at = self._loop.time()
                return

    def _is_alive(self, idle_s: float) -> bool:
        now = self._loop.time()
        if self.progress != self._seen:
            self._seen = self.progress
            self._alive_at = now
        return now - self._alive_at < idle_s

    async def _generate_token(self) -> DynamoError | None:
        """One token, or why there is none."""
        steps = cast(AsyncGenerator[Delta | Summary, None], self._engine.generate(self._request, Context("canary")))
        try:
            async with asyncio.timeout(_GIVEN_UP_S), aclosing(steps):
                async for step in steps:
                    if isinstance(step, Summary):
                        return None
        except (InvalidRequest, Overloaded):
            return None  # it refuses, so it lives
        except TimeoutError:
            return EngineError(f"the engine made no token within {_GIVEN_UP_S:g} s")
        except DynamoError as error:
            return error
        except Exception:
            log.exception("a canary of model %s failed", self._request.model)
            return EngineError("the engine failed")
        return EngineError("the engine ended without a summary")

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)


class CanaryRequest(msgspec.Struct, frozen=True):
    """Body of a `canary` request, answered with nothing if the engine works."""

    model: str
    idle_s: float
