"""The names of fields in errors, where a request is served in terms of another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dynamo.common.errors import InvalidRequest


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Have an InvalidRequest of the body name the fields as the client did: `names` has its names by ours."""
    try:
        yield
    except InvalidRequest as error:
        message = str(error)
        for ours, sent in names.items():
            message = message.replace(f"'{ours}'", f"'{sent}'")
        error.args = (message,)
        if error.param is not None:
            error.param = names.get(error.param.partition("[")[0], error.param)
        raise
