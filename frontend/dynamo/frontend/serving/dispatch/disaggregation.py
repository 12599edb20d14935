"""Disaggregated serving: one instance computes the prompt, another one generates the response.

Where a model has instances of role `prefill` and of role `decode`, a prompt goes to one of the former first: the router chooses
by what they have cached. Its response carries what the engines' connector needs to fetch the KV blocks (`kv_transfer`), and with
that the request goes to a decode instance, chosen by load alone. A prompt goes to a decode instance at once if

1. one of them has all whole blocks of it cached, or
2. fewer than `min_prompt_tokens` of its tokens are missing there: moving the blocks would take longer than computing them.

Where that cannot work, no request fails: without a prefill instance that can take it, or after a decode instance failed, one
instance does both. `enforce` forbids that: then requests wait for instances of either role that are to start. A request that
names its prefill instance has it computed there, or fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import EngineError, InvalidRequest, Overloaded, Unavailable
from dynamo.common.generation import GenerateRequest, Stop, Summary, read_summary, request_encoder
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.frontend.config import DisaggregationOptions
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher

log = logging.getLogger(__name__)

OFFER: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Tells an instance to keep the KV blocks of a prompt for another one; the format of vLLM's connectors."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that has been computed."""

    instance: InstanceId
    summary: Summary
    """Its `kv_transfer` is what the decode instance needs."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The work of the instance that generates the response."""

    work: Work
    prefill: Prefill | None = None
    """None: that instance computes the prompt itself."""


class Disaggregation:
    """Whether and how a prompt is computed apart. One per process."""

    def __init__(self, dispatcher: Dispatcher, settings: DisaggregationOptions) -> None:
        self._dispatcher = dispatcher
        self._settings = settings

    def is_complete(self, name: str, tokenizer: str) -> bool:
        """Return whether a model that has instances may be served: with `enforce`, both roles must be there."""
        able = self._dispatcher.candidates.able_to_serve
        return not self._settings.enforce or all(able(name, "", tokenizer, role) for role in (Role.PREFILL, Role.DECODE))

    async def place(self, work: Work, prompt: GenerateRequest, call: Call) -> Placed:
        """Have `prompt` computed by a prefill instance, if it should be. `work` is to let one instance do both.

        Raises DynamoError: why the prefill instance rejected the request, and Unavailable, Overloaded or InvalidRequest if one
        instance would have to do both and may not.
        """
        named = call.prefill_instance
        try:
            decode = self._decode_instances(work, prompt)
        except Unavailable:
            await self._start(work, call)
            decode = self._decode_instances(work, prompt)
        if not decode:
            self._dispatcher.stream(msgspec.structs.replace(work, role=Role.PREFILL), call).count_missing()
            if named is not None:
                raise Unavailable(f"instance {named:x} computes no prompts of model '{work.model}' for other instances now")
            return Placed(work)
        enforce = self._settings.enforce
        decoding = msgspec.structs.replace(work, role=Role.DECODE, otherwise=None if enforce else work)
        if named is None and not await self._is_worth_moving(work, prompt, decode):
            decoding.hashes = work.hashes
            return Placed(decoding)
        try:
            prefill = await self._prefill(work, prompt, call)
        except (Unavailable, Overloaded) as error:
            if enforce or named is not None:
                raise
            log.info("no prefill instance of model '%s' takes a prompt, one instance does both: %s", work.model, error)
            return Placed(work)
        if prefill is None:
            return Placed(work)
        decoding.body = request_encoder.encode(msgspec.structs.replace(prompt, kv_transfer=prefill.summary.kv_transfer))
        decoding.hashes = work.hashes
        decoding.is_prefilled = True
        return Placed(decoding, prefill)

    async def _start(self, work: Work, call: Call) -> None:
        """Wait for instances of both roles, as far as they are to start. Raises ModelStarting, DeadlineExceeded."""
        stream = self._dispatcher.stream(msgspec.structs.replace(work, role=Role.PREFILL), call)
        await stream.instance_started()
        stream.redirect(msgspec.structs.replace(work, role=Role.DECODE))
        await stream.instance_started()

    def _decode_instances(self, work: Work, prompt: GenerateRequest) -> Sequence[Instance]:
        """Return the instances that may go on with a computed prompt; none: one does both. Raises Unavailable, InvalidRequest."""
        name = work.name or work.model
        prefill = self._dispatcher.candidates.able_to_serve(name, work.version, work.tokenizer, Role.PREFILL)
        enforce = self._settings.enforce
        if not prefill and not enforce:
            return ()
        decode: Sequence[Instance] = self._dispatcher.candidates.able_to_serve(name, work.version, work.tokenizer, Role.DECODE)
        if work.pinned is not None:
            decode = [instance for instance in decode if instance.id == work.pinned]
        if not prefill or not decode:
            if enforce:
                missing = "decode" if prefill else "prefill"
                raise Unavailable(f"no {missing} instance is serving model '{work.model}', and one instance may not do both")
            return ()
        if prompt.prompt_logprobs is not None:  # the decode instance, which responds, would not know them
            if enforce:
                raise InvalidRequest(
                    "log probabilities of the prompt are not known where prompts are computed apart", param="prompt_logprobs"
                )
            return ()
        return decode

    async def _is_worth_moving(self, work: Work, prompt: GenerateRequest, decode: Sequence[Instance]) -> bool:
        if prompt.prompt_tokens < self._settings.min_prompt_tokens:
            return False
        missing = await self._dispatcher.missing_tokens(work, decode)
        return missing is None or missing >= max(1, self._settings.min_prompt_tokens)

    async def _prefill(self, work: Work, prompt: GenerateRequest, call: Call) -> Prefill | None:
        """Return None if the instance's engine provides no KV transfer. Raises DynamoError."""
        request = msgspec.structs.replace(
            prompt, n=1, logprobs=None, stop=Stop(max_tokens=1, ignore_eos=True), data_parallel_rank=None, kv_transfer=OFFER
        )
        body = request_encoder.encode(request)
        named = call.prefill_instance  # `call.instance` is to respond
        first = msgspec.structs.replace(
            work,
            body=body,
            role=Role.PREFILL,
            expected_output_tokens=1,
            sequences=1,
            learned_output=0.0,
            pinned=named,
            needs_room=named is not None,
            session="",
        )
        async with self._dispatcher.stream(first, call) as stream:
            while True:
                try:
                    while await stream.read():
                        pass  # the one token is made again by the decode instance
                    break
                except Unavailable as error:
                    if not stream.started:
                        raise
                    await stream.move(error, first)  # nothing of it was used: another instance may do all of it again
            assert stream.decision is not None
            instance = stream.decision.instance.id
            try:
                summary = read_summary(stream.trailer)
            except ValueError:
                raise EngineError("the summary of the prefill engine cannot be read") from None
            stream.found_cached(summary.cached_tokens)
            if summary.kv_transfer is None:
                log.warning("instance %x of model '%s' has the role prefill and provides no KV transfer", instance, work.model)
                if self._settings.enforce:
                    raise EngineError(f"the prefill instance {instance:x} provides no KV transfer")
                return None
            return Prefill(instance, summary)
