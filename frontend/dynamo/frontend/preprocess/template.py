"""Render a conversation to one prompt with the model's own Jinja chat template.

A template comes with the model, so it is untrusted code: it runs in Jinja's immutable sandbox, and what it may build is bounded
(iterations of its loops, length of any text it builds, length of the prompt). It provides what templates written for the
Hugging Face libraries expect: `raise_exception`, `strftime_now`, `tojson`, `break`, `continue`, `{% generation %}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynamo.common.errors import EngineError, InvalidRequest

MAX_PROMPT_CHARS = 16 << 20
MAX_LOOP_TURNS = 1_000_000

_DIGITS: Final = re.compile("[0-9]{5,}")
_BUDGET: Final = "loop_budget__"
_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", _BUDGET})


class _BoundExceeded(Exception):
    """The template exceeded one of its bounds, which the message names."""


class _Budget:
    """Turns that all loops of one rendering may take together."""

    def __init__(self, turns: int) -> None:
        self._left = turns

    def count(self, items: Iterable[object]) -> Iterator[object]:
        for item in items:
            self._left -= 1
            if self._left < 0:
                raise _BoundExceeded("its loops do not come to an end")
            yield item


class _GenerationBlock(Extension):
    """`{% generation %}` marks text of the assistant for training. Here it renders its contents."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with loops that are counted and operators that cannot blow up."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self._max_chars = max_chars
        for name in ("format", "center", "indent"):
            self.filters[name] = self._bounded(self.filters[name])
        self.filters["tojson"] = _tojson
        self.filters[_BUDGET] = _counted
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _BUDGET, [], [], None, None, lineno=loop.lineno)
        return template.set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise _BoundExceeded("it computes a power of large numbers")
        if operator == "*" and _product_length(left, right) > self._max_chars:
            raise _BoundExceeded("it repeats a text too often")
        if operator == "%":
            self._check_sizes(left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str | list | tuple) and len(result) > self._max_chars:
            raise _BoundExceeded(f"it puts together more than {self._max_chars} characters")
        return result

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # jinja2 names them differently
        text = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(text, str):  # a method of a text, such as ljust
            self._check_sizes(text, *args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check_sizes(*args, *kwargs.values())
            return function(*args, **kwargs)

        return bounded

    def _check_sizes(self, *args: object) -> None:
        """Padding and formatting make long texts of short ones: no width in `args` may be large, nor any written in a format."""
        for arg in args:
            width = arg if isinstance(arg, int) else 0
            if isinstance(arg, str) and ("%" in arg or "{" in arg):
                width = max((int(digits[:18]) for digits in _DIGITS.findall(arg)), default=0)
            if width > self._max_chars:
                raise _BoundExceeded("it pads a text too far")


class ChatTemplate:
    """One model's template, compiled. Any number of requests may use it concurrently."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        max_chars: int = MAX_PROMPT_CHARS,
        max_loop_turns: int = MAX_LOOP_TURNS,
    ) -> None:
        """Raises EngineError if `source` is not a valid template."""
        try:
            self._template = _Environment(max_chars).from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise EngineError(f"the model's chat template cannot be read: {error}") from error
        # Jinja copies the globals for each rendering; from a dict that is ten times as fast as from its chain of mappings.
        self._template.globals = dict(self._template.globals)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._max_chars = max_chars
        self._max_loop_turns = max_loop_turns

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. `variables` are the template's own options, such as `enable_thinking`. Raises InvalidRequest."""
        if variables and (reserved := _RESERVED & variables.keys()):
            raise InvalidRequest(
                f"'chat_template_kwargs' must not set {', '.join(sorted(reserved))}", param="chat_template_kwargs"
            )
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                self._tokens,
                **(variables or {}),
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **{_BUDGET: _Budget(self._max_loop_turns)},
            ):
                length += len(piece)
                if length > self._max_chars:
                    raise _BoundExceeded(f"it makes a prompt of more than {self._max_chars} characters")
                pieces.append(piece)
        except InvalidRequest:
            raise
        except _BoundExceeded as error:
            raise InvalidRequest(f"the chat template was stopped: {error}", param="messages") from error
        except Exception as error:  # any error of the template's code, on messages of a shape it does not expect
            raise InvalidRequest(f"the chat template failed on these messages: {_describe(error)}", param="messages") from error
        return "".join(pieces)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[object]) -> Iterator[object]:
    budget = context[_BUDGET]
    assert isinstance(budget, _Budget)
    return budget.count(items)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of transformers: jinja2's own escapes for HTML and sorts keys, unlike what models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise InvalidRequest(f"the chat template rejected the conversation: {message}", param="messages")


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _is_small(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1024


def _product_length(left: object, right: object) -> int:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            return len(sequence) * times
    return 0


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
