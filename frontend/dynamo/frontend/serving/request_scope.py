"""One request, from its admission to its outcome: admitted, timed, traced and counted in one place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from dynamo.common.errors import Cancelled, RateLimited
from dynamo.common.observability.tracing import Tracing
from dynamo.frontend.metrics import RequestTimer
from dynamo.frontend.security.accounts import Ticket
from dynamo.frontend.security.ledger import UsageCounts
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.output_lengths import OutputLengths
from dynamo.frontend.serving.prompt_tokens import BYTES_PER_TOKEN

log = logging.getLogger(__name__)

_MOST_FOR_EACH_EXPECTED = BYTES_PER_TOKEN + 128
"""Tokens for each that was expected: one for each byte of a text, and what a model puts around texts, of which each has one."""
_ADDED_TOKENS = 4096


class RequestScope:
    """Entered once per request by the data plane, whichever API the request came by; a request ends exactly once.

        with RequestScope(model, call, tracing) as scope:
            response = await dispatcher.stream(work, scope.call).result()
            scope.succeed()

    Entering it counts the request, begins its trace and admits it to the caller's account, or raises why it is not admitted.
    Leaving it before `succeed` or `fail` is a failure too: by the exception that left it, or by its caller's cancelling.
    """

    __slots__ = (
        "_is_logged",
        "_model",
        "_of_request",
        "_on_admitted",
        "_sent_before",
        "_sequences",
        "_ticket",
        "_timer",
        "_tracing",
        "call",
        "input_tokens",
        "is_over",
        "lengths",
        "media",
    )

    _timer: RequestTimer
    _is_logged: bool

    def __init__(
        self,
        model: NamedModel,
        call: Call,
        tracing: Tracing | None,
        sequences: int = 1,
        on_admitted: Callable[[], None] | None = None,
        lengths: OutputLengths | None = None,
    ) -> None:
        """`sequences` is how many responses are generated side by side.

        `on_admitted` is called if the caller's account admits the request; `lengths` learns how long the responses are.
        """
        most = call.account.max_priority
        self.call = call if call.priority <= most else msgspec.structs.replace(call, priority=most)
        """The caller's, with a priority that its account may use, and a trace context of its own once the scope is entered."""
        if call.prompts > 1:  # another prompt that was sent has not cost this one anything
            self.call = msgspec.structs.replace(self.call, progress=call.progress.of_part())
        self._of_request = call
        """The same one for all prompts of a request, by which they are admitted together."""
        self.is_over = False
        self.input_tokens = 0
        """Tokens of the prompt; see `prompt`."""
        self.media = 0
        """Images and the like in the prompt."""
        self._model = model
        self._tracing = tracing
        self._sequences = sequences
        self._on_admitted = on_admitted
        self.lengths = lengths
        self._ticket: Ticket | None = None
        """None also for a caller of whom nothing is counted."""
        self._sent_before = self.call.progress.sent
        """How often the call was sent for earlier scopes: to models that a rule tried before."""

    def __repr__(self) -> str:
        state = "over" if self.is_over else "running"
        return f"<RequestScope {self.call.request_id} of model {self._model.name!r}, {state}, {self.input_tokens} input tokens>"

    def __enter__(self) -> Self:
        """Raises Unauthenticated, Forbidden, RateLimited, and InvalidRequest for more sequences than the caller may have."""
        call, span = self.call, None
        self._of_request.progress.started = True
        self._is_logged = log.isEnabledFor(logging.DEBUG)
        if self._is_logged:
            log.debug("request begins: %s of model '%s'", call.endpoint, self._model.name)
        if self._tracing is not None:
            about = {
                "dynamo.model": self._model.card.name,
                "dynamo.request_id": call.request_id,
                "dynamo.request_type": call.request_type.value,
            }
            span = self._tracing.begin(call.endpoint, call.headers, about)
            if span is not None:
                self.call = msgspec.structs.replace(call, span=span, headers=span.headers(call.headers))
        self._timer = RequestTimer(self._model.metrics, call.endpoint, call.request_type, span)
        try:
            ticket = call.account.admit(self._model.name, self._of_request, self._sequences, self._sequences * call.prompts)
            if ticket.is_counted:
                self._ticket = ticket
            if call.expected_tokens:
                self._reserve(ticket, call.expected_tokens, 0)
            if self._on_admitted is not None:
                self._on_admitted()
        except BaseException as error:
            self.fail(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if not self.is_over:
            self.fail(error or Cancelled())

    @property
    def output_tokens(self) -> int:
        return self._timer.output_tokens

    def prompt(self, tokens: int, output_tokens: int | None) -> None:
        """The prompt has so many tokens, and all sequences of the response together at most `output_tokens`; None: no limit.

        Both are reserved in the account, and what is not used is given back at the end. Raises RateLimited.
        """
        if self._ticket is None:
            self.input_tokens = tokens
            return
        self._reserve(self._ticket, tokens, output_tokens)
        self._take_prompt(tokens)

    def _reserve(self, ticket: Ticket, tokens: int, output_tokens: int | None) -> None:
        try:
            ticket.reserve(tokens, output_tokens)
        except RateLimited:  # not admitted after all: the ledger has no request that limits refused
            self._ticket = None
            ticket.close()
            raise

    def counted(self, tokens: int) -> None:
        """The model has counted the tokens of a prompt that was estimated; 0: it does not say, and the estimate is charged.

        No more than texts can have, with what is put around them: a wrong number must not take a key's limit for years.
        """
        expected = self.call.expected_tokens
        most = _MOST_FOR_EACH_EXPECTED * expected + _ADDED_TOKENS
        self._take_prompt(min(tokens, most) if tokens else expected)

    def _take_prompt(self, tokens: int) -> None:
        if self._ticket is not None:
            self._ticket.charge(tokens)
        self.input_tokens = tokens

    def _give_prompt_back(self) -> None:
        if self._ticket is not None:
            self._ticket.charge(-self.input_tokens)
        self.input_tokens = 0

    def responded(self) -> None:
        """The first part of the response has arrived; `tokens` implies it."""
        self._of_request.progress.responded = True
        self._timer.responded()

    def tokens(self, count: int) -> None:
        """`count` tokens (at least 1) of the response have arrived together."""
        self._of_request.progress.responded = True
        self._timer.tokens(count)
        if self._ticket is not None:
            self._ticket.charge(count)

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """Correct what was counted so far to what the engine reports: in the account, its ledger and the metrics.

        An engine that takes text has its prompt estimated, and any number of tokens in each piece of its response.
        """
        if self._ticket is not None:
            self._ticket.charge(prompt_tokens - self.input_tokens + output_tokens - self.output_tokens)
        self.input_tokens = prompt_tokens
        self._timer.output_tokens = output_tokens

    def succeed(self, *, cached_tokens: int = 0) -> None:
        """End the request with success, unless it has ended."""
        self._end(None, cached_tokens)

    def fail(self, error: BaseException) -> None:
        """End the request with `error`, unless it has ended."""
        self._end(error, 0)

    def _end(self, error: BaseException | None, cached_tokens: int) -> None:
        if self.is_over:
            return
        self.is_over = True
        expected, was_sent = self.call.expected_tokens, self.call.progress.sent > self._sent_before
        if expected and not self.input_tokens and was_sent:
            self._take_prompt(expected)  # an instance has had the work, although no response says of how many tokens
        elif error is not None and self.input_tokens and not was_sent:
            self._give_prompt_back()  # no instance has had it
        if self._is_logged:
            log.debug("request ends: %s", "success" if error is None else repr(error))
        if error is None and self.lengths is not None:
            each = self._timer.output_tokens / self._sequences
            self.lengths.learn(self._model.card.name, self.call.account.name, self.call.session, each)
        self._timer.finish(error, input_tokens=self.input_tokens, cached_tokens=cached_tokens)
        if self._ticket is None:
            return
        self._ticket.close()
        usage = UsageCounts(
            requests=self._sequences,
            errors=0 if error is None else self._sequences,
            prompt_tokens=self.input_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=self.output_tokens,
            media=self.media,
        )
        self.call.account.record(self._model.name, usage)
