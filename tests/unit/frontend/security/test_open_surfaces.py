"""Callers without a key where others have keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.common.errors import Unauthenticated
from dynamo.frontend.api.declaration import TEXT
from dynamo.frontend.api.guard import Accounts, Guard, watch_keys
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.keys import MAX_PRIORITY, entry_for, make_key
from dynamo.frontend.security.surfaces import Scope, Surface


def test_who_needs_no_key_goes_before_no_key(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(entry_for(make_key(), "team", scopes=[Scope.INFER]))
    accounts = Accounts(watch_keys(tmp_path / "keys.yaml"))
    guard = Guard(accounts, open_surfaces={Surface.INFERENCE})
    opened: list[Account] = [guard.enter(TEXT, {}), guard.account_named("", Surface.INFERENCE)]
    assert [account.max_priority for account in opened] == [0, 0] == [accounts.named("team").max_priority] * 2
    assert Guard(None).enter(TEXT, {}).max_priority == MAX_PRIORITY
    with pytest.raises(Unauthenticated):
        Guard(accounts).enter(TEXT, {})
