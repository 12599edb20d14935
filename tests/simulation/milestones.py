"""What histories must come to, sometimes: states, faults in a phase, and races that each were meant to be reached.

An invariant that holds in a thousand histories says nothing about a situation that none of them had. So each situation has a name
here, histories count how often they get there (`observers`), and `python -m tests.simulation` prints where none of them was. What
was not reached within its `within` histories fails the run: then the generator of histories does not do what it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Milestone:
    """A situation."""

    name: str
    meaning: str
    within: int | None = None
    """Histories that reach it for all but certain; None: it is too rare to be expected.

    What a share p of histories comes to is missed by N of them with probability (1 - p)^N. With N = 12 / p that is 1 in 160,000,
    so a hundred such situations fail less than one run in a thousand by chance.
    """


SURFACES: Mapping[str, tuple[Milestone, ...]] = {
    "requests": (
        Milestone("killed-upload", "a worker was killed while it had a part of a request's body", within=320),
        Milestone(
            "killed-before-first",
            "a worker was killed between the whole of a request and the first frame of its response",
            within=140,
        ),
        Milestone("killed-after-first", "a worker was killed between the first and the last frame of a response", within=50),
        Milestone("killed-credit", "a worker was killed while a response waited for credit", within=80),
        Milestone("killed-in-drain", "a worker was killed while another one drained", within=180),
        Milestone("frontend-killed-open", "a frontend was killed with requests open", within=150),
        Milestone("terminated-open", "a worker got SIGTERM with requests open", within=70),
        Milestone("drain-refused", "a worker that drained refused a request"),
        Milestone("drain-timed-out", "a worker ended with requests open, since draining took too long", within=120),
        Milestone("asleep-open", "a worker went to sleep with requests open", within=180),
        Milestone("paused-open", "a worker was stopped with requests open", within=190),
        Milestone("nats-down-in-credit", "NATS was stopped while a response waited for credit", within=220),
        Milestone("nats-down-in-upload", "NATS was stopped while an upload waited for credit"),
        Milestone("credit-queued", "a stream waited for credit that others had borrowed", within=20),
        Milestone("response-lost", "a part of a response was lost", within=100),
        Milestone("request-lost", "a part of a request was lost", within=200),
        Milestone("request-forgotten", "an instance did not know a request any more", within=70),
        Milestone("response-after-deadline", "a part of a response came after the deadline of its request", within=70),
        Milestone("response-after-cancel", "a part of a response came after its request was cancelled", within=20),
        Milestone("deadline-at-worker", "a deadline passed at the worker first", within=80),
        Milestone("deadline-before-first", "a request's deadline passed before any response", within=30),
        Milestone("deadline-after-first", "a request's deadline passed in the middle of its response"),
        Milestone("left-before-first", "a client left before the first response", within=20),
        Milestone("left-after-first", "a client left in the middle of a response", within=20),
        Milestone("instance-silent", "an instance with open streams was given up, since it did not respond", within=150),
        Milestone("instance-absent", "an instance with open streams was given up, since it had no subscription", within=30),
        Milestone("instance-unreached", "a request met an instance that had no subscription", within=30),
        Milestone("instance-returned", "an instance that was taken for gone sent something after all", within=120),
        Milestone("caller-absent", "a worker cancelled requests of a caller without subscription", within=150),
        Milestone("caller-silent", "a worker cancelled requests of a caller that was silent"),
        Milestone("link-silent", "a connection to NATS was given up, since nats-server was silent", within=100),
        Milestone("slow-reader-cut", "nats-server cut a connection that read too slowly"),
    ),
    "dispatch": (
        Milestone("retried-after-death", "a request was sent again after its instance died", within=50),
        Milestone("retried-after-loss", "a request was sent again after a part of it, or of its response, was lost", within=30),
        Milestone("retried-after-refusal", "a request was sent again after its instance refused it"),
        Milestone("retried-after-link", "a request was sent again after the frontend's own connection was away", within=50),
        Milestone("retried-to-success", "a request that another instance had failed got its response", within=20),
        Milestone("retried-twice", "a request was sent to a third instance", within=70),
        Milestone("moved", "a stream went on at another instance", within=70),
        Milestone("moved-twice", "a stream went on at a third instance", within=310),
        Milestone("moved-to-success", "a stream that went on at another instance was right to its end", within=70),
        Milestone("blamed", "a request was blamed for the death of two instances"),
        Milestone("marked-down", "an instance was marked down", within=30),
        Milestone("no-instance", "a request failed for want of an instance", within=310),
        Milestone("queue-waited", "a request waited in the queue and was served", within=60),
        Milestone("queue-full", "a full queue refused a request", within=220),
        Milestone("queue-late", "a request was refused, since its turn would have come after its deadline"),
        Milestone("queue-expired", "a request's deadline passed in the queue"),
        Milestone("queue-left", "a request was cancelled while it waited in the queue", within=210),
        Milestone("queue-killed", "a frontend was killed while requests waited in its queue"),
        Milestone("queue-held-back", "a frontend left room to a request that waited at another one", within=270),
    ),
    "discovery": (
        Milestone("lease-expired-alive", "a lease expired although its owner lived", within=70),
        Milestone("lease-expired-dead", "the lease of a dead process expired", within=30),
        Milestone("lease-expired-unwatched", "a lease expired while a frontend had no watch", within=90),
        Milestone("lease-in-doubt", "a lease was not renewed in its time", within=50),
        Milestone("lease-lost", "a process learned that its lease was gone", within=60),
        Milestone("watch-compacted", "a watch asked for a revision that was compacted", within=180),
        Milestone("history-lost", "a frontend learned that etcd lost its data", within=240),
        Milestone("registration-awaited", "a registration went away without a word, and was kept for a while", within=40),
        Milestone("registration-returned", "a registration that was kept for a while came back", within=150),
        Milestone("registration-dropped", "a registration that was kept for a while did not come back", within=50),
        Milestone("started-without-etcd", "a process started while etcd was away", within=140),
        Milestone("started-without-nats", "a process started while NATS was away", within=260),
        Milestone("killed-without-etcd", "a worker was killed while etcd was away", within=320),
        Milestone("registered-late", "a worker that stood ready was registered after etcd came back", within=130),
    ),
    "routing": (
        Milestone("gap-repaired", "a gap in KV events was repaired by the missing updates", within=150),
        Milestone("gap-snapshot", "a gap in KV events was repaired by a snapshot"),
        Milestone("snapshot-stale", "a snapshot was older than what was known"),
        Milestone("events-dropped", "a frontend stopped following events, since they came too fast", within=340),
        Milestone("events-resumed", "a frontend followed events again", within=340),
        Milestone("events-dropped-in-resync", "a frontend stopped following events while it repaired a gap"),
        Milestone("peer-forgotten", "bookings of a silent frontend were dropped", within=120),
        Milestone("killed-with-bookings", "a frontend was killed while others had bookings of it", within=210),
        Milestone("removed-with-bookings", "an instance went away while a frontend had bookings on it", within=60),
        Milestone("resync-unanswered", "a repair of a gap failed, and was tried again", within=190),
    ),
    "stores": (
        Milestone("file-kept", "a file was stored, and acknowledged", within=40),
        Milestone("batch-complete", "a batch was complete, with each line once in its files", within=40),
        Milestone("batch-line-failed", "a line of a batch failed", within=50),
        Milestone("batch-taken-over", "a batch went on at another frontend", within=370),
        Milestone("batch-contested", "two frontends wanted the lease of a batch", within=90),
        Milestone("segment-contested", "two frontends carried out the same lines of a batch"),
        Milestone("batch-stopped", "a batch stopped for a while, since a store was away"),
        Milestone("batch-cancelled", "a batch was cancelled", within=120),
        Milestone("response-cancelled", "a response in the background was cancelled", within=390),
        Milestone("response-complete", "a response in the background was complete", within=40),
        Milestone("response-failed", "a response in the background failed"),
        Milestone("response-orphaned", "the frontend of a response in the background died"),
        Milestone("response-delayed", "a response in the background could not be stored at once", within=110),
        Milestone("store-refused", "an operation on records failed, since JetStream was away", within=80),
        Milestone("record-contested", "a record was changed since it was read", within=250),
        Milestone("record-large", "a record lay in the object store", within=40),
        Milestone("ledger-delayed", "usage could not be saved at once", within=90),
        Milestone("ledger-exact", "a frontend's ledger had exactly the tokens delivered", within=50),
        Milestone(
            "ledger-bounded", "a frontend's ledger had requests of which only the least and most tokens are known", within=40
        ),
        Milestone("ledger-inherited", "the saved ledger had what a frontend had saved that is gone"),
        Milestone("limit-refused", "a key's limits refused a request", within=40),
        Milestone("limit-isolated", "a frontend that reached no other one applied limits", within=220),
        Milestone("killed-with-batch", "a frontend was killed while it carried out a batch"),
        Milestone("killed-with-response", "a frontend was killed while it generated a response in the background"),
    ),
    "shared memory": (
        Milestone("lent-by-frontend", "a frontend lent a body", within=30),
        Milestone("lent-by-worker", "a worker lent a body", within=30),
        Milestone("arena-full", "an arena had no room for a body, which went as messages", within=40),
        Milestone("arena-unreachable", "an arena could not be opened", within=20),
        Milestone("region-refused", "a reference could not be read", within=70),
        Milestone("region-revoked", "a region that its reader had not taken was revoked", within=50),
        Milestone("body-sent-again", "a body that its reader could not open went again, as messages"),
        Milestone("owner-killed", "a process was killed while regions of it were lent", within=190),
        Milestone("reader-killed", "a process was killed while it read a region"),
        Milestone("reader-paused", "a process was stopped while regions were lent to it or by it"),
    ),
}
"""By what they are about."""

MILESTONES: Mapping[str, Milestone] = {each.name: each for some in SURFACES.values() for each in some}


class Reached:
    """How often one history came to each milestone."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, name: str, times: int = 1) -> None:
        """Note that the history is there. Raises KeyError for a name that is not declared."""
        if times:
            self.counts[MILESTONES[name].name] += times


class Census:
    """The milestones of many histories."""

    def __init__(self) -> None:
        self.histories = 0
        self._times: Counter[str] = Counter()
        self._in: Counter[str] = Counter()
        """How many histories came to each."""

    def add(self, counts: Mapping[str, int]) -> None:
        """Add one history. Names of other versions are ignored."""
        self.histories += 1
        for name, count in counts.items():
            if name in MILESTONES:
                self._times[name] += count
                self._in[name] += 1

    def overdue(self) -> list[Milestone]:
        """Return those that so many histories would have reached."""
        return [
            each
            for each in MILESTONES.values()
            if each.within is not None and each.within <= self.histories and not self._in[each.name]
        ]

    def table(self) -> list[str]:
        """Return all milestones with how often, and in how many histories, they were reached; at its end those that were not."""
        lines = [f"{'times':>9} {'histories':>9}  milestone"]
        for surface, milestones in SURFACES.items():
            lines.append(f"{'':19}  {surface}:")
            lines += [
                f"{self._times[each.name]:9} {self._in[each.name]:9}  {each.name:26} {each.meaning}"
                for each in milestones
                if self._in[each.name]
            ]
        return [*lines, *_named("never reached:", (each for each in MILESTONES.values() if not self._in[each.name]))]


def _named(title: str, milestones: Iterable[Milestone]) -> list[str]:
    lines = [f"    {each.name:26} {each.meaning}" for each in milestones]
    return [title, *lines] if lines else []
