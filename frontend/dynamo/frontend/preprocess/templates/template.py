"""Render a conversation to one prompt with the model's own Jinja chat template.

A template comes with the model, so it is untrusted code: it runs in Jinja's immutable sandbox, and every operation of it is
charged to a `Budget` (steps, bytes read and made, length of each value and of the prompt). It provides what templates written for
the Hugging Face libraries expect: `raise_exception`, `strftime_now`, `tojson`, `break`, `continue`, `{% generation %}`.

How operations come to be charged:

1. Filters, tests and methods are wrapped: what could make much of little is estimated first, the result is counted afterwards.
2. `+`, `-`, `*`, `%` and `**` pass through the sandbox's `call_binop`.
3. Syntax that Jinja compiles to plain Python (`~`, comparisons, literals of containers, slices, loops) is rewritten when the
   template is parsed, so that its operands pass through a filter that counts them.
4. Whatever puts values of a template into a dict or a set has its keys checked before (`Budget.check_keys`), or is refused.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence
from datetime import datetime
from functools import cached_property, wraps
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.frontend.preprocess.templates.budget import NODE_BYTES, BoundExceeded, Budget, OutOfTime
from dynamo.frontend.preprocess.templates.syntax import BODY, CONCAT, COUNTED, MADE, READ, SEARCHED, SLICED, rewrite

MAX_PROMPT_CHARS = 16 << 20
MAX_STEPS = 2_000_000
"""Iterations, calls and operations of one rendering; a step takes about a microsecond."""
MAX_SOURCE_CHARS = 128 << 10
"""The interpreter's lock is held while a template is compiled, for 0.1 s and more for this one. Real ones have up to 30,000."""

_DIGITS: Final = re.compile("[0-9]+")
_MAX_INT_BITS: Final = 16_384
_MAX_DIGITS_TO_ROUND: Final = 400
_FEW_FIELDS: Final = 8
_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
_WITHOUT_USE: Final = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters for web pages whose cost has no simple bound."""
_ONE_BY_ONE: Final = frozenset({"groupby", "max", "min", "sort", "sum", "unique"})
"""Filters that compare or add up all items of a container, each of which takes about a step."""
_GROUP_BYTES: Final = 256
"""What a group of one item takes: a tuple, a list and their places."""
_MAX_DATE_CHARS: Final = 64
"""In the format of a date, each character of which may become some dozens."""
_CONSTANT_TIME: Final = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length"})
"""Filters and methods that do not look at the whole of a container."""
_SHALLOW: Final = frozenset({"batch", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"})
_CHEAP_METHODS: Final = frozenset({"get", "items", "keys", "values", "cycle", "changed"})
_UNSAFE_METHODS: Final = frozenset({"translate", "maketrans", "striptags", "fromkeys", "isdisjoint", "to_bytes"})


class _GenerationBlock(Extension):
    """`{% generation %}` marks text of the assistant for training. Here it renders its contents."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _QuietNamespace(Namespace):
    """A namespace whose text does not contain its attributes, which may contain the namespace."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every operation charged to the budget of the rendering that runs in this thread."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self._local = threading.local()
        for name in _WITHOUT_USE:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: self._charged_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: self._charged_test(function) for name, function in self.tests.items()}
        self.filters |= {
            COUNTED: lambda items: self.budget.each(items),
            READ: self._read,
            SEARCHED: self._searched,
            MADE: self._made,
            SLICED: self._sliced,
            CONCAT: self._join_texts,
            BODY: lambda steps: self.budget.step(steps),
        }
        self.finalize = self._finalize
        self.concat = self._concat  # type: ignore[method-assign]
        del self.globals["lipsum"]
        self.globals.update(
            dict=self._dict,
            namespace=lambda *args, **fields: _QuietNamespace(self._dict(*args, **fields)),
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
        )

    @property
    def budget(self) -> Budget:
        """The budget of the current rendering. Raises AttributeError when a template is compiled: nothing is evaluated then."""
        budget: Budget = self._local.budget
        return budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._local.budget = budget

    @budget.deleter
    def budget(self) -> None:
        del self._local.budget

    # Syntax

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        rewrite(template)
        return template.set_environment(self)  # type: ignore[return-value]

    def _read(self, value: object) -> object:
        """An operand of a comparison."""
        budget = self.budget
        budget.step()
        budget.read(value)
        return value

    def _searched(self, value: object) -> object:
        """The container in `item in container`."""
        self.budget.step()
        if not isinstance(value, Mapping):
            self.budget.read(value)
        return value

    def _made(self, value: object) -> object:
        """A literal of a container."""
        self.budget.step()
        self.budget.made(value)
        if isinstance(value, dict):
            self.budget.check_keys(value)
        return value

    def _sliced(self, value: Any) -> Any:
        self.budget.step()
        self.budget.charge(_shallow_bytes(value))
        return value

    def _join_texts(self, values: list[object]) -> str:
        """The operator `~`."""
        budget = self.budget
        budget.step()
        budget.check(sum(map(budget.read, values)))
        return "".join(map(str, values))

    def _concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a macro or of a block that is assigned to a variable."""
        pieces = list(pieces)
        budget = self.budget
        length = sum(map(len, pieces))
        budget.check(length)
        budget.charge(length)
        return "".join(pieces)

    def _finalize(self, value: object) -> object:
        """A value that is written to the prompt."""
        budget = self.budget
        budget.step()
        budget.check(budget.read(value) - NODE_BYTES)
        return value

    # Operators and calls

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.step()
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise BoundExceeded("it computes a power of large numbers")
        if operator == "*":
            self._check_product(left, right)
        if operator == "-" and (isinstance(left, KeysView | ItemsView) or isinstance(right, KeysView | ItemsView)):
            raise BoundExceeded("it subtracts keys or items of a dict")
        if operator == "%" and isinstance(left, str | bytes):
            self._check_format(left, right if isinstance(right, tuple) else (right,))
        result = super().call_binop(context, operator, left, right)
        budget.made(result)
        return result

    def _check_product(self, left: object, right: object) -> None:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise BoundExceeded("it multiplies large numbers")
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
                size = len(sequence) if isinstance(sequence, str | bytes) else self.budget.bytes_of(sequence)
                self.budget.check(size * times)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # jinja2 names them differently
        budget = self.budget
        budget.step()
        if isinstance(obj, LoopContext):  # a recursive loop
            args = tuple(budget.each(arg) for arg in args)
        # The sandbox wraps str.format.
        owner, name = getattr(getattr(obj, "__wrapped__", obj), "__self__", None), getattr(obj, "__name__", "")
        if owner is not None and name in _UNSAFE_METHODS:
            raise BoundExceeded(f"it calls '{name}'")
        if isinstance(owner, str | bytes):
            args = self._check_method(owner, name, args, kwargs)
        elif isinstance(owner, range):
            budget.step(len(owner))
        elif isinstance(owner, list | tuple | dict):
            if name in _CHEAP_METHODS:
                for arg in args:
                    if isinstance(arg, tuple):  # the hash of which takes as long as it is large
                        budget.read(arg)
                return super().call(context, obj, *args, **kwargs)
            budget.read(owner)
        result = super().call(context, obj, *args, **kwargs)
        budget.made(result)
        return result

    def _check_method(self, text: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Check what a method of `text` may make; return its arguments, with iterators made into lists."""
        budget = self.budget
        length = budget.read(text)
        for arg in (*args, *kwargs.values()):
            budget.read(arg)
            if isinstance(arg, int):  # a width
                budget.check(abs(arg) * (text.count("\t") if name == "expandtabs" and isinstance(text, str) else 1))
        if name == "join" and args:
            return (self._bounded_list(args[0], length), *args[1:])
        if name == "replace" and len(args) > 1:
            self._check_replace(text, args[0], args[1])
        elif name in ("format", "format_map"):
            self._check_format(text, (*args, *kwargs.values()))
        elif name in ("split", "rsplit", "splitlines"):
            separators = text.count(args[0]) if args and args[0] else length
            budget.charge(NODE_BYTES * separators // 2)
        return args

    def _dict(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        """The functions `dict` and, with an object around it, `namespace`."""
        if len(args) == 1 and not isinstance(args[0], Mapping):
            each: Any = self.budget.each
            pairs: Any = [tuple(each(pair)) for pair in each(args[0])]
            self.budget.check_keys(pair[0] for pair in pairs if pair)
            return dict(pairs, **fields)
        return dict(*args, **fields)

    # Filters and tests

    def _charged_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps jinja2's mark for functions that take the context
        def charged(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            budget.step()
            offset = 1 if hasattr(function, "jinja_pass_arg") else 0
            values = args[offset:]
            if name not in _CONSTANT_TIME:
                for value in (*values, *kwargs.values()):
                    if name in _SHALLOW:
                        budget.charge(_shallow_bytes(value))
                    else:
                        budget.read(value)
            values = self._check_filter(name, values, kwargs)
            result = function(*args[:offset], *values, **kwargs)
            if name in ("batch", "slice"):
                result = list(budget.each(result))
            if name not in _CONSTANT_TIME:
                budget.made(result)
            return result

        return charged

    def _charged_test(self, function: Any) -> Callable[..., Any]:
        @wraps(function)
        def charged(*args: Any) -> Any:
            budget = self.budget
            budget.step()
            if len(args) > 1:  # a comparison; the others look at the type
                for value in args:
                    budget.read(value)
            return function(*args)

        return charged

    def _check_filter(self, name: str, values: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Check what a filter may make of `values`; return them, with iterators made into lists where that takes a look."""
        budget = self.budget
        text = values[0] if values else None

        def argument(index: int, keyword: str, default: Any = None) -> Any:
            return values[index] if len(values) > index else kwargs.get(keyword, default)

        match name:
            case "title" | "wordcount":  # which make a list of the words
                budget.made_of(NODE_BYTES * len(str(text)))
            case "dictsort":
                budget.step(len(values[0]))
            case "replace":
                self._check_replace(str(text), str(argument(1, "old", "")), str(argument(2, "new", "")))
            case "join":
                return (self._bounded_list(text, len(str(argument(1, "d", "")))), *values[1:])
            case "format":
                self._check_format(str(text), (*values[1:], *kwargs.values()))
            case "indent":
                width = argument(1, "width", 4)
                each = len(width) if isinstance(width, str) else width
                budget.check(budget.bytes_of(text) + each * (1 + str(text).count("\n")))
            case "center" | "truncate":
                for value in (*values[1:], *kwargs.values()):
                    budget.check(value if isinstance(value, int) else 0)
            case "batch" | "slice":
                budget.check(NODE_BYTES * abs(int(argument(1, "linecount" if name == "batch" else "slices", 0))))
            case "round":
                if abs(int(argument(1, "precision", 0))) > _MAX_DIGITS_TO_ROUND:
                    raise BoundExceeded("it rounds to too many digits")
            case "sum":
                if not isinstance(argument(2, "start", 0), int | float):
                    raise BoundExceeded("it sums up what are not numbers")
            case "tojson":
                self._check_json(text, argument(2, "indent"), argument(3, "separators"))
            case "string" | "trim" | "upper" | "lower" | "capitalize" | "escape" | "e" | "forceescape":
                budget.check(budget.bytes_of(text))
        if name in _ONE_BY_ONE:
            items = list(budget.each(values[0]))
            if name == "groupby":
                budget.made_of(_GROUP_BYTES * len(items))
            if name == "unique":
                attribute = argument(2, "attribute")
                budget.check_keys(items if attribute is None else map(make_attrgetter(self, attribute), items))
            return (items, *values[1:])
        return values

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        count = text.count(old) if old else len(text) + 1
        self.budget.check(len(text) + count * max(0, len(new) - len(old)))

    def _check_format(self, form: Any, values: Sequence[Any]) -> None:
        """Check the length of a formatted text: a field may repeat any value, and name any width."""
        form = form.decode("latin-1") if isinstance(form, bytes) else str(form)
        fields = form.count("%") + form.count("{")
        sizes = [self.budget.bytes_of(value) for value in values]
        widths = sum(int(digits[:18]) for digits in _DIGITS.findall(form))
        widths += (
            fields * max((abs(value) for value in values if isinstance(value, int)), default=0)
            if "*" in form or "{" in form
            else 0
        )
        total = sum(sizes) if fields <= min(_FEW_FIELDS, len(sizes)) else fields * max(sizes, default=0)
        self.budget.check(len(form) + total + widths)

    def _check_json(self, value: object, indent: Any, separators: Any) -> None:
        size = self.budget.size_of(value)
        width = len(indent) if isinstance(indent, str) else indent if isinstance(indent, int) else 0
        around = sum(map(len, separators)) if isinstance(separators, list | tuple) else 0
        self.budget.check(size.bytes + size.nodes * (max(0, width) * size.depth + around))

    def _bounded_list(self, items: Any, separator: int) -> Any:
        """Return `items` as a list that can be joined within the bound."""
        if isinstance(items, str):
            self.budget.check(len(items) * (1 + separator))
            return items
        result = []
        total = 0
        for item in self.budget.each(items):
            total += self.budget.bytes_of(item) + separator
            self.budget.check(total)
            result.append(item)
        return result


def _shallow_bytes(value: object) -> int:
    return NODE_BYTES * len(value) if isinstance(value, str | bytes | list | tuple | dict | range) else 0


class ChatTemplate:
    """One model's template, compiled. Any number of requests may use it concurrently."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        max_chars: int = MAX_PROMPT_CHARS,
        max_steps: int = MAX_STEPS,
    ) -> None:
        """Raises EngineError if `source` is not a valid template."""
        if len(source) > MAX_SOURCE_CHARS:
            raise EngineError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed")
        self.source = source
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:  # the last one from Python: too many nested blocks
            raise EngineError(f"the chat template cannot be read: {error}") from error
        # Jinja copies the globals for each rendering; from a dict that is ten times as fast as from its chain of mappings.
        self._template.globals = dict(self._template.globals)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._max_chars = max_chars
        self._max_steps = max_steps

    @cached_property
    def takes_parts_only(self) -> bool:
        """Whether content must be a list of parts, as for the templates of some vision models: of a string they write nothing."""
        return not self._writes("probe") and self._writes([{"type": "text", "text": "probe"}])

    def _writes(self, content: object) -> bool:
        """Return whether the text of a user's message is in the prompt."""
        try:
            return "probe" in self.render([{"role": "user", "content": content}])
        except InvalidRequest:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
    ) -> str:
        """Return the prompt. `variables` are the template's own options, such as `enable_thinking`.

        Raises InvalidRequest, or OutOfTime if `max_steps` is given and does not suffice.
        """
        if variables and (reserved := _RESERVED & variables.keys()):
            raise InvalidRequest(
                f"'chat_template_kwargs' must not set {', '.join(sorted(reserved))}", param="chat_template_kwargs"
            )
        pieces: list[str] = []
        length = 0
        steps = self._max_steps if max_steps is None else min(max_steps, self._max_steps)
        budget = Budget(steps=steps, max_bytes=self._max_chars)
        self._environment.budget = budget
        try:
            for piece in self._template.generate(
                self._tokens,
                **(variables or {}),
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
            ):
                length += len(piece)
                budget.step()
                budget.check(length)
                pieces.append(piece)
        except InvalidRequest:
            raise
        except OutOfTime as error:
            if steps < self._max_steps:
                raise
            raise InvalidRequest(f"the chat template was stopped: {error}", param="messages") from error
        except BoundExceeded as error:
            raise InvalidRequest(f"the chat template was stopped: {error}", param="messages") from error
        except Exception as error:  # any error of the template's code, on messages of a shape it does not expect
            raise InvalidRequest(f"the chat template failed on these messages: {_describe(error)}", param="messages") from error
        return "".join(pieces)


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
    if len(form) > _MAX_DATE_CHARS:
        raise BoundExceeded(f"it formats a date by more than {_MAX_DATE_CHARS} characters")
    return datetime.now().astimezone().strftime(form)


def _is_small(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1024


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
