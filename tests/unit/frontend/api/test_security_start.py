"""What a frontend logs at its start about access, and how it keeps to the file of keys from then on."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo.common.config import load
from dynamo.common.errors import Unauthenticated
from dynamo.common.process.background import running
from dynamo.frontend.api.guard import Guard, make_guards
from dynamo.frontend.api.rpc.guard import guarded
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.security.keys import entry_for, make_key
from dynamo.frontend.security.surfaces import Surface
from tests.support.grpc_operations import ECHO
from tests.support.waiting import until


def logged(caplog: pytest.LogCaptureFixture, *argv: str) -> list[tuple[str, str]]:
    """Return the levels and messages that are logged."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    make_guards(load(FrontendConfig, argv, {}, program="dynamo-frontend"))
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys.yaml").write_text(entry_for(make_key(), "a") + entry_for(make_key(), "b"))
    return str(tmp_path / "keys.yaml")


def test_by_default_only_this_machine_can_connect_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = load(FrontendConfig, [], {}, program="dynamo-frontend")
    assert config.http.is_local
    assert config.grpc.is_local
    assert logged(caplog, "--grpc") == [
        ("INFO", "HTTP listens on 127.0.0.1 without API keys: only this machine can connect"),
        ("INFO", "gRPC listens on 127.0.0.1 without API keys: only this machine can connect"),
    ]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", ""])
def test_a_wider_address_without_keys_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture, host: str) -> None:
    [(level, words)] = logged(caplog, "--http-host", host)
    assert level == "WARNING"
    assert words == f"HTTP listens on {host} without API keys: every client that can connect may use everything"


def test_keys_without_tls_are_logged_as_a_warning_where_others_can_listen(caplog: pytest.LogCaptureFixture, keys: str) -> None:
    required = ("INFO", "API keys are required; the file contains 2")
    assert logged(caplog, "--api-keys-file", keys) == [required]
    first, (level, words) = logged(caplog, "--api-keys-file", keys, "--http-host", "0.0.0.0")
    assert (first, level) == (required, "WARNING")
    assert "API keys can be read on the network" in words
    tls = ("--cert-file", "c", "--key-file", "k")
    assert logged(caplog, "--api-keys-file", keys, "--http-host", "0.0.0.0", *tls) == [required]


def test_without_keys_and_restrictions_no_handler_is_wrapped() -> None:
    config = load(FrontendConfig, ["--grpc"], {}, program="dynamo-frontend")
    http, grpc = make_guards(config)
    assert not http.is_on
    unguarded = guarded(ECHO, grpc)
    assert all(operation is given for operation, given in zip(unguarded, ECHO, strict=True))


def test_a_restriction_guards_its_surfaces_only() -> None:
    access = load(FrontendConfig, [], {"DYN_HTTP_RESTRICTED_API": "metrics:k=v"}, program="dynamo-frontend").access
    guard = Guard(None, restrictions=access.http_restrictions())
    assert [surface for surface in Surface if guard.guards(surface)] == [Surface.METRICS]
    assert replace(access, http_restricted=None).http_restrictions() == ()


async def test_a_key_that_is_withdrawn_during_a_pause_is_not_valid_for_the_first_request_after_it(tmp_path: Path) -> None:
    file, kept, gone = tmp_path / "keys.yaml", make_key(), make_key()
    file.write_text(entry_for(kept, "kept") + entry_for(gone, "gone"))
    accounts = make_guards(load(FrontendConfig, ["--api-keys-file", str(file)], {}, program="dynamo-frontend"))[0].accounts
    assert accounts is not None and accounts.of(gone).name == "gone"
    account = accounts.of(gone)
    async with running(accounts.follow(), "keys"):
        file.write_text(entry_for(kept, "kept"))
        await until(lambda: account.withdrawn)
    with pytest.raises(Unauthenticated):
        accounts.of(gone)
    assert accounts.of(kept).name == "kept"
