"""Complete the cards that engines return with what the operator configured: aliases, chat template, parsers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.common.output_formats import AUTO
from dynamo.worker.config import TextOptions
from dynamo.worker.process.parsers import choose_parsers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedCard:
    """A card, and the contents of the files that it names by digest."""

    card: ModelCard
    files: Sequence[bytes]


class CardFinisher:
    """Completes the cards of a worker."""

    def __init__(self, options: TextOptions, aliases: Sequence[str] = ()) -> None:
        """`aliases` are further names of each model. Raises InvalidRequest if the chat template cannot be read."""
        self._options = options
        self._aliases = tuple(aliases)
        self._template: bytes | None = None
        if options.chat_template is not None:
            try:
                self._template = options.chat_template.read_bytes()
                self._template.decode()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidRequest(f"the chat template {options.chat_template} cannot be read: {error}") from error

    def finish(self, card: ModelCard, files: Sequence[bytes]) -> FinishedCard:
        """Return the card to register, with its files. `files` are those that the engine's card names."""
        if self._aliases:
            card = msgspec.structs.replace(card, aliases=(*card.aliases, *self._aliases))
        if card.llm is None:
            return FinishedCard(card, files)
        llm = card.llm
        if self._template is not None and llm.takes_text:
            raise InvalidRequest(f"model '{card.name}' takes text, which its own server renders: it takes no --chat-template")
        if self._template is not None:
            digest = sha256(self._template).hexdigest()
            files = [*(file for file in files if not _is_named(llm.chat_template, file)), self._template]
            llm = msgspec.structs.replace(llm, chat_template=digest)
        llm = self._with_parsers(card.name, llm, files)
        return FinishedCard(msgspec.structs.replace(card, llm=llm), files)

    def _with_parsers(self, name: str, llm: LlmInfo, files: Sequence[bytes]) -> LlmInfo:
        """Return `llm` with parsers, and log which: the operator's choice, else the engine's, else by the chat template."""
        if not llm.chat_template and not llm.takes_text:
            return llm
        template = next((file for file in files if _is_named(llm.chat_template, file)), b"").decode(errors="replace")
        tool_parser, reasoning_parser = self._options.tool_parser, self._options.reasoning_parser
        chosen = choose_parsers(
            template,
            (tool_parser == AUTO and llm.tool_parser) or tool_parser,
            (reasoning_parser == AUTO and llm.reasoning_parser) or reasoning_parser,
        )
        log.info(
            "model %s: tool parser %s, reasoning parser %s (%s)",
            name,
            chosen.tool_parser or "none",
            chosen.reasoning_parser or "none",
            chosen.reason,
        )
        return msgspec.structs.replace(llm, tool_parser=chosen.tool_parser, reasoning_parser=chosen.reasoning_parser)


def _is_named(digest: str, file: bytes) -> bool:
    return bool(digest) and sha256(file).hexdigest() == digest
