"""Whether an engine still makes progress: seen from its responses or, if there are none, by having it generate one token.

A process can live, take requests and send heartbeats while its engine hangs, so frontends probe it. However many they are, an
engine that makes progress is not disturbed, and an idle one generates one token for all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Overloaded
from dynamo.common.generation import Delta, GenerateRequest, Sampling, Stop, Summary, TextPrompt, pack_text, pack_tokens
from dynamo.common.process.background import awaited
from dynamo.worker.engine.base import Context, Engine

log = logging.getLogger(__name__)

_TOKEN = 1
"""Part of every vocabulary. A prompt this short leaves no full block in a prefix cache."""
_TEXT = TextPrompt(messages=[{"role": "user", "content": "Hi"}])
_GIVEN_UP_S = 30.0
"""After this time the probe is given up and the engine aborts it."""
_LOOK_S = 0.1
_CLOSE_S = 2.0


class Canary:
    """Probes one language model."""

    def __init__(self, model: str, engine: Engine, *, takes_text: bool = False) -> None:
        self.progress = 0
        """To be incremented with each delta of the engine."""
        self._request = GenerateRequest(
            model=model,
            prompt=pack_text(_TEXT) if takes_text else pack_tokens((_TOKEN,)),
            sampling=Sampling(temperature=0.0),
            stop=Stop(max_tokens=1, ignore_eos=not takes_text),
        )
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._seen = 0
        self._alive_at = self._loop.time()
        self._probe: asyncio.Task[DynamoError | None] | None = None

    def __repr__(self) -> str:
        probing = self._probe is not None and not self._probe.done()
        return f"<Canary of {self._request.model}, progress={self.progress}, probing={probing}>"

    async def probe(self, idle_s: float) -> None:
        """Return once the engine is known to work: it made progress in the last `idle_s` seconds, or generates a token now.

        Raises the error of the engine. Does not return while the engine hangs.
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
        """Have the engine generate one token. Return its error, or None."""
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
            await asyncio.wait({self._probe}, timeout=_CLOSE_S)  # a hung engine may not end its iterator


class CanaryRequest(msgspec.Struct, frozen=True):
    """Body of a `canary` request. The response is empty and is sent once the engine is known to work."""

    model: str
    idle_s: float
