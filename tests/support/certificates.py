"""Certificates made on the spot, as files that a test may replace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM."""

    cert: Path
    key: Path

    def write(self, issued: trustme.LeafCert) -> None:
        """Each file is replaced at once, the certificate last."""
        _replace(self.key, issued.private_key_pem.bytes())
        _replace(self.cert, b"".join(pem.bytes() for pem in issued.cert_chain_pems))


def issue(ca: trustme.CA, folder: Path, name: str, *identities: str, expired: bool = False) -> Pair:
    """Return a pair signed by `ca`, by default for 127.0.0.1 and localhost, valid now or until yesterday."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    now = datetime.now(UTC)
    begin, end = (now - timedelta(days=2), now - timedelta(days=1)) if expired else (None, None)
    pair.write(ca.issue_cert(*(identities or ("127.0.0.1", "localhost")), not_before=begin, not_after=end))
    return pair


def write_ca(ca: trustme.CA, path: Path) -> Path:
    _replace(path, ca.cert_pem.bytes())
    return path


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(content)
    os.replace(draft, path)
