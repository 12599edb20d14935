"""The API key of a batch, which a key file that is being replaced may lack for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynamo.common.errors import Forbidden, Unauthenticated
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.surfaces import Surface

WAIT_S = 60.0
"""How long a batch waits whose key is refused, before that is the result of its lines."""
POLL_S = 1.0
_REFUSED = frozenset({401, 403})

FindAccount = Callable[[str, Surface], Account]
"""Returns the account of a key by its name. Raises Unauthenticated if there is no such key, Forbidden if it lacks the scope."""


class BatchKey:
    """The key of one batch, for as long as that is carried out."""

    def __init__(self, find: FindAccount, owner: str, surface: Surface, wait_s: float = WAIT_S) -> None:
        self._find = find
        self._wait_s = wait_s
        self._owner = owner
        self._surface = surface
        self._refused_since: float | None = None
        """On the loop's clock; None: the key was accepted when it was looked for last."""

    async def account(self) -> Account:
        """Return the account of the key once it is accepted. Raises Unauthenticated, Forbidden."""
        while True:
            account, wait_s = self.find()
            if not wait_s:
                return account or self._find(self._owner, self._surface)
            await asyncio.sleep(wait_s)

    def find(self) -> tuple[Account | None, float]:
        """Return the account of the key now, None if it is refused, and for how long to wait for it then.

        It is another account than before if the key file lacked the key meanwhile.
        """
        now = asyncio.get_running_loop().time()
        try:
            account = self._find(self._owner, self._surface)
        except (Unauthenticated, Forbidden):
            if self._refused_since is None:
                self._refused_since = now
            return None, max(0.0, min(POLL_S, self._refused_since + self._wait_s - now))
        self._refused_since = None
        return account, 0.0

    def wait_after(self, status: int | None) -> float:
        """Return for how long to wait for the key after a request ended with `status`; 0: that has another reason."""
        return self.find()[1] if status in _REFUSED else 0.0
