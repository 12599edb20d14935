"""API keys: the file of their hashes, what each may do, and the program that makes them."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.config import ConfigError
from dynamo.common.errors import Forbidden, InvalidRequest, RateLimited, Unauthenticated
from dynamo.common.security.files import Watched
from dynamo.frontend.api import guard
from dynamo.frontend.security.accounts import ANONYMOUS, Account, KeyAccount, Ticket
from dynamo.frontend.security.keys import (
    MAX_FILE_BYTES,
    ApiKey,
    KeyRing,
    Limits,
    check_blank,
    entry_for,
    make_key,
    parse_expiry,
    parse_keys,
    read_keys,
)
from dynamo.frontend.security.surfaces import SCOPES, Scope, Surface, parse_restrictions
from tests.support.memory import kept_bytes, kept_objects


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def account(clock: Clock | None = None, *, models: tuple[str, ...] = ("*",), **limits: float) -> KeyAccount:
    key = ApiKey(name="team", salt=b"", digest=b"", models=models, limits=Limits(**limits))  # type: ignore[arg-type]
    return KeyAccount(key, clock or Clock())


# The file


def test_a_key_is_found_by_what_it_reads_and_by_nothing_else() -> None:
    ours, foreign = make_key(), "k" * 40
    ring = parse_keys(entry_for(ours, "ours") + entry_for(foreign, "foreign"))
    found = {shown: ring.find(shown) for shown in (ours, foreign)}
    assert {shown: key.name if key else None for shown, key in found.items()} == {ours: "ours", foreign: "foreign"}
    for shown in ("", ours[:-1], ours + "x", ours.upper(), "dyn-", "k" * 39, ours + "x" * 1000, "dyn-000000000000-" + "x" * 43):
        assert ring.find(shown) is None


def test_neither_the_file_nor_what_is_shown_of_a_key_holds_it() -> None:
    key = make_key()
    text = entry_for(key, "team")
    secret = key.split("-", 2)[2]  # it may have hyphens of its own
    ring = parse_keys(text)
    assert secret not in text
    assert key not in text
    digest = text.partition("sha256:")[2].split()[0]
    assert digest.partition(":")[2] not in repr(ring.keys)


def test_a_file_says_everything_about_a_key() -> None:
    text = entry_for(
        make_key(),
        "team-a",
        scopes=[Scope.INFER, Scope.METRICS],
        models=["llama-*", "adder"],
        limits=Limits(requests_per_s=0.5, concurrent_requests=2, tokens_per_minute=60),
        max_priority=-3,
        cache_group="teams",
        expires="2027-01-31",
    )
    [key] = parse_keys(text).keys
    assert key.scopes == {Scope.INFER, Scope.METRICS}
    assert key.models == ("llama-*", "adder")
    assert key.limits == Limits(requests_per_s=0.5, concurrent_requests=2, tokens_per_minute=60)
    assert (key.max_priority, key.cache_group) == (-3, "teams")
    assert key.expires_at == 1801353600


def entry(**changed: object) -> str:
    fields = {"name": "a", "hash": f"sha256:{'0' * 32}:{'a' * 64}"} | changed
    return "- {" + ", ".join(f"{name}: {value}" for name, value in fields.items() if value is not None) + "}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not YAML"),
        ("just words", "is not a list of keys"),
        ("- {name: a}", "missing required field `hash`"),
        (entry(name="two words"), "name"),
        (entry(scopes="[inferr]"), "inferr"),
        (entry(scope="[infer]"), "unknown field `scope`"),
        (entry(requests_per_s="0"), "requests_per_s"),
        (entry(requests_per_s=".nan"), "requests_per_s"),
        (entry(concurrent_requests="1.5"), "concurrent_requests"),
        (entry(tokens_per_minute="many"), "tokens_per_minute"),
        (entry(expires="tomorrow"), "neither a date nor"),
        (entry(hash="md5:aa"), "not of the form sha256"),
        (entry(hash=f"sha256:{'0' * 32}:{'z' * 64}"), "not of the form sha256"),
        ("- {name: a, name: b, hash: x}", "a field is given twice"),
        (entry() + entry(), "the name 'a' is given twice"),
        (entry(id="x") + entry(id="x", name="b"), "the id 'x' is given twice"),
        ("[" * 100_000, "line 1: there are lists in lists, more than 16 deep"),
        ("- " * 100_000, "line 1: there are lists in lists, more than 16 deep"),
        ("{? " * 100_000, "line 1: there are lists in lists, more than 16 deep"),
        ("- {[a]: b}", "line 1: a field's name is not text"),
        ("- *a", "line 1: there is no anchor 'a'"),
        ("[]\n---\n[]", "it is more than one document"),
        (" " * (MAX_FILE_BYTES + 1), "it has more than 8388608 bytes"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_place_and_without_a_hash(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_keys(file)
    sentence = str(error.value)
    assert words in sentence
    assert str(file) in sentence
    assert "a" * 64 not in sentence
    assert "\n" not in sentence


def test_what_libyaml_reads_is_read_without_it_as_well(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    one, other = entry_for("k" * 40, "one", expires="2030-01-31"), entry_for("l" * 40, "other")
    file.write_text(one.replace("[infer]", "&all [infer, admin]") + other.replace("[infer]", "*all") + "# the end\n")
    lines = (
        "import sys",
        "sys.modules['yaml._yaml'] = None",
        "from pathlib import Path",
        "from dynamo.frontend.security import keys",
        "assert keys.yaml.__with_libyaml__ is False",
        "print([(key.name, sorted(map(str, key.scopes)), key.expires_at) for key in keys.read_keys(Path(sys.argv[1])).keys])",
    )
    without = subprocess.run([sys.executable, "-c", "\n".join(lines), file], capture_output=True, text=True, check=True)
    keys = [(key.name, sorted(map(str, key.scopes)), key.expires_at) for key in read_keys(file).keys]
    assert keys == [("one", ["admin", "infer"], parse_expiry("2030-01-31")), ("other", ["admin", "infer"], None)]
    assert without.stdout.strip() == str(keys)


@given(st.text(max_size=200))
def test_any_text_is_a_list_of_keys_or_is_refused(text: str) -> None:
    try:
        parse_keys(text)
    except ValueError as error:
        assert str(error)


@given(st.text(max_size=600))
def test_anything_may_be_shown_as_a_key(text: str) -> None:
    ring = parse_keys(entry_for("k" * 40, "foreign"))
    assert ring.find(text) is None or text == "k" * 40


# Limits


def test_a_second_s_worth_of_requests_may_come_at_once_and_then_one_at_a_time() -> None:
    clock = Clock()
    team = account(clock, requests_per_s=4)
    for _ in range(4):
        team.admit("m", object()).close()
    with pytest.raises(RateLimited, match="4 requests per second") as error:
        team.admit("m", object())
    assert error.value.retry_after_s == pytest.approx(0.25)
    clock.now += 0.25
    team.admit("m", object()).close()
    with pytest.raises(RateLimited):
        team.admit("m", object())


def test_fewer_than_one_request_per_second_can_be_allowed() -> None:
    clock = Clock()
    team = account(clock, requests_per_s=0.1)
    team.admit("m", object()).close()
    with pytest.raises(RateLimited) as error:
        team.admit("m", object())
    assert error.value.retry_after_s == pytest.approx(10)
    clock.now += 10
    team.admit("m", object()).close()


def test_other_calls_have_the_rate_once_more_and_use_up_nothing_of_requests() -> None:
    clock = Clock()
    team = account(clock, requests_per_s=2)
    for _ in range(2):
        team.count()
    with pytest.raises(RateLimited, match="2 requests per second"):
        team.count()
    for _ in range(2):
        team.admit("m", object()).close()
    with pytest.raises(RateLimited, match="2 requests per second"):
        team.admit("m", object())
    clock.now += 0.5
    team.count()
    team.admit("m", object()).close()


def test_requests_at_once_are_counted_until_their_tickets_are_closed() -> None:
    team = account(concurrent_requests=2)
    first, second = team.admit("m", object()), team.admit("m", object())
    with pytest.raises(RateLimited, match="2 requests at once"):
        team.admit("m", object())
    first.close()
    first.close()
    assert team.sequences == 1
    third = team.admit("m", object())
    for ticket in (second, third):
        ticket.close()
    assert team.sequences == 0


def test_prompts_and_choices_count_as_requests_at_once() -> None:
    team, batch = account(concurrent_requests=5), object()
    parts = [team.admit("m", batch, 2) for _ in range(2)]
    assert team.sequences == 4
    with pytest.raises(RateLimited, match="may have 5 requests at once"):
        team.admit("m", object(), 2)
    with pytest.raises(InvalidRequest, match="more than 5 prompts and choices, and the API key 'team' may have 5"):
        team.admit("m", batch, 2)
    with pytest.raises(InvalidRequest):
        team.admit("m", object(), 6)
    for part in parts:
        part.close()
    assert team.sequences == 0


def test_the_prompts_of_a_request_have_their_places_from_when_the_first_is_admitted() -> None:
    team, batch = account(concurrent_requests=5), object()
    with team.admit("m", batch, 2, 4) as first:
        assert team.sequences == 4
        with pytest.raises(RateLimited):
            team.admit("m", object(), 2)
        with team.admit("m", batch, 2) as second:
            assert team.sequences == 4
            with pytest.raises(InvalidRequest):
                team.admit("m", batch, 2)
            first.close()
            second.close()
    assert team.sequences == 0
    team.admit("m", batch, 1, 5).close()
    assert team.sequences == 0, "the places of prompts that never began are free with the request"
    with pytest.raises(InvalidRequest):
        team.admit("m", batch, 1, 6)


def test_prompts_and_choices_count_for_the_rate_and_a_batch_is_admitted_as_a_whole() -> None:
    clock = Clock()
    team, batch = account(clock, requests_per_s=2), object()
    for _ in range(3):
        team.admit("m", batch, 2)
    with pytest.raises(RateLimited) as error:
        team.admit("m", object())
    assert error.value.retry_after_s == pytest.approx((6 - 2 + 1) / 2)


def test_work_that_is_no_request_counts_as_a_request_at_once_only() -> None:
    team = account(concurrent_requests=1, requests_per_s=1)
    with team.occupy():
        with pytest.raises(RateLimited, match="1 requests at once"):
            team.occupy()
        with pytest.raises(RateLimited, match="1 requests at once"):
            team.admit("m", object())
    team.admit("m", object()).close()


def test_a_key_has_as_many_streams_as_requests_at_once_and_they_count_apart() -> None:
    team = account(concurrent_requests=1)
    with team.open_stream():
        with pytest.raises(RateLimited, match="1 streams open"):
            team.open_stream()
        team.admit("m", object()).close()
    with team.open_stream(), account().open_stream(), account().open_stream():
        pass


def test_tokens_that_were_not_reserved_are_paid_afterwards_and_come_back_in_a_minute() -> None:
    clock = Clock()
    team = account(clock, tokens_per_minute=60)
    ticket = team.admit("m", object())
    ticket.charge(90)
    ticket.close()
    with pytest.raises(RateLimited, match="60 tokens per minute") as error:
        team.admit("m", object())
    assert error.value.retry_after_s == pytest.approx(31)
    clock.now += 31
    team.admit("m", object()).close()


def reserve_all(team: KeyAccount, prompt: int, output: int | None, count: int = 50) -> list[Ticket]:
    """Tickets of those of `count` requests that are admitted at once."""
    tickets = []
    for _ in range(count):
        with contextlib.suppress(RateLimited):
            ticket = team.admit("m", object())
            ticket.reserve(prompt, output)
            tickets.append(ticket)
    return tickets


def test_a_burst_of_requests_reserves_what_it_may_use_and_does_not_overdraw_the_budget() -> None:
    team = account(Clock(), tokens_per_minute=1000)
    assert len(reserve_all(team, 1, 200)) == 4


def test_tokens_that_were_reserved_and_not_used_are_given_back() -> None:
    team = account(Clock(), tokens_per_minute=1000)
    for ticket in reserve_all(team, 50, 200):
        ticket.charge(50)
        ticket.charge(10)
        ticket.close()
    assert len(reserve_all(team, 50, 200)) == 3  # 4 * 60 are used


def test_a_request_pays_for_what_it_uses_above_its_reservation() -> None:
    team = account(Clock(), tokens_per_minute=1000)
    (ticket,) = reserve_all(team, 100, 100, count=1)
    ticket.charge(950)
    ticket.close()
    assert reserve_all(team, 1, 50) == []
    assert len(reserve_all(team, 1, 49)) == 1


def test_a_request_that_may_use_more_than_the_budget_needs_all_of_it() -> None:
    clock = Clock()
    team = account(clock, tokens_per_minute=60)
    (ticket,) = reserve_all(team, 10, 4096)
    ticket.charge(11)
    ticket.close()
    assert reserve_all(team, 10, 4096) == []
    clock.now += 11
    assert len(reserve_all(team, 10, 4096)) == 1


def test_the_refusal_of_a_reservation_says_what_is_left() -> None:
    team = account(Clock(), tokens_per_minute=60)
    (ticket,) = reserve_all(team, 10, 20, count=1)
    with pytest.raises(RateLimited, match="'team' has 30 of its 60 tokens per minute left, and this request may use 50") as error:
        team.reserve(10, 40)
    assert error.value.retry_after_s == pytest.approx(20)
    ticket.close()


def test_requests_without_a_limit_reserve_a_share_of_the_budget() -> None:
    assert len(reserve_all(account(Clock(), tokens_per_minute=1000), 0, None)) == 10


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    team = account(clock, models=("llama-*",), requests_per_s=1)
    with pytest.raises(Forbidden, match="may not use model 'adder'"):
        team.admit("adder", object())
    team.admit("llama-1b", object()).close()
    assert team.sequences == 0


def test_models_are_matched_as_they_are_written() -> None:
    team = account(models=("llama-*", "org/tiny"))
    names = ["llama-1b", "llama-", "Llama-1b", "org/tiny", "tiny", "xllama-1b"]
    assert [team.permits(name) for name in names] == [True, True, False, True, False, False]


def test_names_that_callers_make_up_are_not_all_remembered() -> None:
    team = account(models=("llama-*",))
    before = kept_objects(team)
    for number in range(5000):
        assert not team.permits(f"made-up-{number}")
    assert kept_objects(team) - before <= 1024


def test_no_name_is_remembered_that_is_longer_than_names_of_models_are() -> None:
    team = account(models=("llama-*",))
    before = kept_bytes(team)
    for number in range(100):
        assert not team.permits(f"{number:08}" * 8192)
        assert team.permits("llama-" + f"{number:08}" * 8192)
    assert kept_bytes(team) - before < 65536


def test_an_account_that_was_withdrawn_or_has_expired_admits_nothing_more() -> None:
    team = account()
    team.withdrawn = True
    with pytest.raises(Unauthenticated, match="not valid any more"):
        team.admit("m", object())
    old = KeyAccount(ApiKey(name="old", salt=b"", digest=b"", expires_at=time.time() - 1))
    with pytest.raises(Unauthenticated, match="'old' has expired"):
        old.admit("m", object())


@pytest.mark.parametrize("ahead_s", [-60, 60])
def test_a_key_expires_by_the_clock_of_the_frontend_that_is_asked(ahead_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So by as much earlier or later as the clock is off, and no other clock matters."""
    now = time.time()
    team = KeyAccount(ApiKey(name="team", salt=b"", digest=b"", expires_at=now + 30))
    monkeypatch.setattr(time, "time", lambda: now + ahead_s)
    if ahead_s > 30:
        with pytest.raises(Unauthenticated, match="'team' has expired"):
            team.admit("m", object())
    else:
        team.admit("m", object())


@pytest.mark.parametrize("limits", [{"requests_per_s": 0.5}, {"tokens_per_minute": 60}, {"concurrent_requests": 1}])
def test_a_look_at_the_limits_refuses_as_they_do_and_takes_nothing(limits: dict[str, float]) -> None:
    clock = Clock()
    team = account(clock, **limits)
    for _ in range(3):
        team.check_limits()
    assert team.use().demand == 0
    ticket = team.admit("m", object())
    team.take_tokens(60)
    demand = team.use().demand
    with pytest.raises(RateLimited) as refused:
        team.check_limits()
    assert team.use().demand == demand + 1  # it counts for the share of this process, as any that is refused
    with pytest.raises(RateLimited) as not_admitted:
        team.admit("m", object())
    assert (str(refused.value), refused.value.retry_after_s) == (str(not_admitted.value), not_admitted.value.retry_after_s)
    ticket.close()
    clock.now += 2
    team.check_limits()


def test_new_limits_give_no_key_a_fresh_budget() -> None:
    clock = Clock()
    team = account(clock, tokens_per_minute=60)
    team.take_tokens(60)
    team.renew(ApiKey(name="team", salt=b"", digest=b"", limits=Limits(tokens_per_minute=120)))
    with pytest.raises(RateLimited):
        team.admit("m", object())
    clock.now += 1
    team.admit("m", object()).close()


# Files that change


def written_long_ago(file: Path) -> None:
    """Have a file read at the next look."""
    os.utime(file, (time.time() - 3600, time.time() - 3600))


class Versions:
    """A `read` that gives the file's text; "bad" cannot be used."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reads = 0

    def __call__(self) -> str:
        self.reads += 1
        text = self.file.read_text()
        if text == "bad":
            raise ConfigError("it is bad")
        return text


def test_a_file_is_read_anew_when_it_changes_and_not_else(tmp_path: Path) -> None:
    file, clock = tmp_path / "f", Clock()
    file.write_text("one")
    read = Versions(file)
    watched = Watched("the file", (file,), read, clock=clock)
    clock.now += 2
    assert watched.current() == "one"
    assert read.reads == 1
    file.write_text("two!")
    written_long_ago(file)
    assert watched.current() == "one", "it looks at most once a second"
    clock.now += 2
    assert watched.current() == "two!"


@pytest.mark.parametrize("begun", ["", "three and"])
def test_a_file_that_is_being_written_is_not_read_before_it_is_the_same_at_two_looks(tmp_path: Path, begun: str) -> None:
    file, clock = tmp_path / "f", Clock()
    file.write_text("one")
    watched = Watched("the file", (file,), Versions(file), clock=clock)

    def write(text: str) -> None:
        file.write_text(text)
        os.utime(file, (time.time() + 3600, time.time() + 3600))  # written a moment ago, however slow the test is

    write(begun)
    clock.now += 2
    assert watched.current() == "one"
    write("three and a half")
    clock.now += 2
    assert watched.current() == "one"
    clock.now += 2
    assert watched.current() == "three and a half"


def test_a_file_that_is_missing_for_a_moment_is_not_looked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "f", Clock()
    file.write_text("one")
    watched = Watched("the file", (file,), Versions(file), clock=clock)
    file.unlink()
    clock.now += 2
    assert watched.current() == "one"
    file.write_text("two!")
    written_long_ago(file)
    clock.now += 2
    assert watched.current() == "two!"
    assert "cannot be used" not in caplog.text


@pytest.mark.parametrize("fault", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_a_file_that_the_system_did_not_let_be_read_is_read_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: OSError | MemoryError
) -> None:
    """Without that, a key that is revoked at such a moment stays valid for ever."""
    file, clock = tmp_path / "f", Clock()
    file.write_text("one")
    is_refused = False

    def read() -> str:
        if not is_refused:
            return file.read_text()
        if isinstance(fault, OSError):
            raise ConfigError(f"it cannot be read: {fault.strerror}") from fault
        raise fault

    watched = Watched("the file", (file,), read, clock=clock)
    file.write_text("two!")
    written_long_ago(file)
    is_refused = True
    for _ in range(3):
        clock.now += 2
        assert watched.current() == "one"
    assert caplog.text.count("cannot be used") == 1
    is_refused = False
    clock.now += 2
    assert watched.current() == "two!"


def test_a_file_that_cannot_be_used_is_read_once(tmp_path: Path) -> None:
    file, clock = tmp_path / "f", Clock()
    file.write_text("one")
    read = Versions(file)
    watched = Watched("the file", (file,), read, clock=clock)
    file.write_text("bad")
    written_long_ago(file)
    for _ in range(3):
        clock.now += 2
        assert watched.current() == "one"
    assert read.reads == 2


def test_an_empty_key_file_does_not_take_the_place_of_one_with_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "keys.yaml", Clock()
    file.write_text("# none yet\n")
    watched = Watched("the keys", (file,), lambda: read_keys(file), check=check_blank, clock=clock)

    def names_after(text: str) -> list[str]:
        file.write_text(text)
        written_long_ago(file)
        clock.now += 2
        return [*watched.current().by_name]

    assert names_after("") == []
    assert names_after(entry_for("k" * 40, "a")) == ["a"]
    assert names_after("") == ["a"]
    assert names_after("# none\n") == ["a"]
    assert caplog.text.count("it is empty; a file without keys contains []") == 2
    assert names_after("[]\n") == []


def test_a_file_that_takes_long_is_read_beside_the_caller(tmp_path: Path) -> None:
    file, clock = tmp_path / "f", Clock()
    file.write_text("one")
    begun: list[Callable[[], None]] = []
    watched = Watched("the file", (file,), Versions(file), clock=clock, run=begun.append)

    def after(text: str) -> str:
        file.write_text(text)
        written_long_ago(file)
        clock.now += 2
        return watched.current()

    assert (after("two!"), after("three"), len(begun)) == ("one", "one", 1)
    begun.pop()()
    assert (watched.current(), len(begun)) == ("three", 1), "it changed again before that was read"
    begun.pop()()
    assert (after("bad"), len(begun)) == ("three", 1)
    begun.pop()()
    assert (after("four"), len(begun)) == ("three", 1)
    begun.pop()()
    assert (watched.current(), len(begun)) == ("four", 0)


def test_a_key_file_that_changes_is_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("[]")
    readers: list[str] = []

    def read(path: Path) -> KeyRing:
        readers.append(threading.current_thread().name)
        return read_keys(path)

    monkeypatch.setattr(guard, "read_keys", read)
    watched = guard.watch_keys(file)
    file.write_text(entry_for("k" * 40, "a"))
    written_long_ago(file)
    while len(readers) < 2:
        watched.current()
        time.sleep(0.01)
    assert readers[0] == threading.current_thread().name != readers[1]


def test_a_link_to_another_file_is_a_change(tmp_path: Path) -> None:
    clock = Clock()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
    data = tmp_path / "data"
    data.symlink_to("one")  # as Kubernetes mounts a secret
    watched = Watched("the file", (data / "f",), Versions(data / "f"), clock=clock)
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(data)
    written_long_ago(data / "f")
    clock.now += 2
    assert watched.current() == "two"


def test_what_cannot_be_used_changes_nothing_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "f", Clock()
    file.write_text("one")
    watched = Watched("the file", (file,), Versions(file), clock=clock)
    file.write_text("bad")
    written_long_ago(file)
    for _ in range(3):
        clock.now += 2
        assert watched.current() == "one"
    assert caplog.text.count("the old one stays: it is bad") == 1
    file.write_text("three")
    written_long_ago(file)
    clock.now += 2
    assert watched.current() == "three"


# Surfaces


def test_every_surface_but_health_needs_a_scope() -> None:
    assert set(Surface) - set(SCOPES) == {Surface.HEALTH}


def test_restrictions_are_read_as_triton_writes_them() -> None:
    first, second = parse_restrictions("model-repository,health:admin-key=se=cr:et\n\nlogging: Other = x \n", "p-")
    assert (first.surfaces, first.header, first.value) == (
        {Surface.MODEL_REPOSITORY, Surface.HEALTH},
        "p-admin-key",
        "se=cr:et",
    )
    assert (second.header, second.value) == ("p-other", " x")
    assert "se=cr" not in repr(first)


@pytest.mark.parametrize(
    "line", ["s3cret", "health:s3cret", "health=s3cret:x", "s3cret=a:b=c", "health:=s3cret", "health:a b=s3cret", "health:key="]
)
def test_a_restriction_that_cannot_be_read_is_not_quoted(line: str) -> None:
    with pytest.raises(ValueError, match="not of the form") as error:
        parse_restrictions(line)
    assert "s3cret" not in str(error.value)


def test_a_restriction_of_an_unknown_surface_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"names the surface 'infer'; there are health, .*inference"):
        parse_restrictions("infer:k=v")


# dynamo-keys


def keys(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = (sys.executable, "-m", "dynamo.frontend.security", *arguments)
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


def test_the_program_makes_keys_that_the_server_knows(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    made = keys("add", "team-a", "--file", str(file), "--model", "llama-*", "--tokens-per-minute", "1000")
    assert made.returncode == 0, made.stderr
    other = keys(
        "add",
        "team-b",
        "--file",
        str(file),
        "--stdin",
        "--scope",
        "admin",
        "--weight",
        "2.5",
        "--max-priority",
        "5",
        "--cache-group",
        "teams",
        "--stored-bytes",
        "2GiB",
        stdin="x" * 40 + "\n",
    )
    assert (other.returncode, other.stdout) == (0, ""), "a key that is known already is not printed"
    assert file.stat().st_mode & 0o777 == 0o600
    ring = read_keys(file)
    found = ring.find(made.stdout.strip())
    assert found is not None
    assert (found.name, found.models, found.limits.tokens_per_minute) == ("team-a", ("llama-*",), 1000)
    admin = ring.find("x" * 40) or found
    assert (admin.name, admin.weight, found.weight) == ("team-b", 2.5, 1.0)
    assert (admin.max_priority, found.max_priority) == (5, 0)
    listed = keys("list", "--api-keys-file", str(file))
    assert keys("list", str(file)).stdout == listed.stdout
    assert "needs the key file" in keys("list").stderr
    assert listed.stdout.splitlines() == [
        "team-a: scopes infer; models llama-*; 1000 tokens/min",
        "team-b: scopes admin; models *; 2147483648 bytes stored; weight 2.5; priority up to 5; cached prompts of group teams",
    ]


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (("add", "team a"), "", "name"),
        (("add", "old"), "", "with the new key: the name 'old' is given twice"),
        (("add", "short", "--stdin"), "hunter2\n", "needs 32 characters or more; this one has 7"),
        (("add", "late", "--expires", "soon"), "", "--expires must be a date or a date and time, got 'soon'"),
        (("add", "late", "--expires", "2020-01-31"), "", "--expires must be in the future, got 2020-01-31"),
        (("add", "none", "--tokens-per-minute", "0"), "", "--tokens-per-minute must be above 0"),
        (("add", "none", "--requests-per-s", "-1"), "", "--requests-per-s must be above 0 and at most 1000000000, got -1"),
        (("add", "none", "--requests-per-s", "nan"), "", "--requests-per-s must be above 0"),
        (("add", "none", "--concurrent-requests", "0"), "", "--concurrent-requests must be above 0"),
        (("add", "none", "--stored-bytes", "much"), "", "--stored-bytes is not a size such as 4194304 or 64MiB, got 'much'"),
        (("add", "none", "--stored-bytes", "0"), "", "--stored-bytes must be above 0, got 0"),
        (("add", "none", "--weight", "0"), "", "--weight must be at least 0.001 and at most 1000, got 0"),
        (("add", "none", "--max-priority", "2147483648"), "", "--max-priority must be from -2147483647 to 2147483647"),
        (("add", "none", "--cache-group", "a b"), "", "cache_group"),
        (("remove", "old"), "", "invalid choice"),
    ],
)
def test_the_program_refuses_in_one_sentence_and_leaves_the_file(
    tmp_path: Path, arguments: Sequence[str], stdin: str, words: str
) -> None:
    file = tmp_path / "keys.yaml"
    before = entry_for(make_key(), "old")
    file.write_text(before)
    refused = keys(*arguments, "--file", str(file), stdin=stdin)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("dynamo-keys: ")
    assert refused.stderr.count("\n") == 1
    assert words in refused.stderr
    assert "hunter2" not in refused.stderr
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


# Cached prompts


def holder(name: str, group: str = "", *, salts: bool = True) -> KeyAccount:
    return KeyAccount(ApiKey(name=name, salt=b"", digest=b"", cache_group=group), salts=salts)


def test_no_key_can_send_a_salt_with_which_it_gets_the_cached_prompts_of_another() -> None:
    callers: list[Account] = [holder("a"), holder("b"), holder("a", "b"), holder("c", "a"), ANONYMOUS, holder("d", salts=False)]
    sent = ["", "s", "t", "a", "key", "\n", "a\n", "\ns"]
    sent += [caller.isolate(salt) for caller in callers for salt in sent]
    seen: dict[str, tuple[int, str]] = {}
    for number, caller in enumerate(callers[:-1]):
        for salt in sent:
            assert seen.setdefault(caller.isolate(salt), (number, salt)) == (number, salt)


def test_keys_of_a_group_share_cached_prompts_and_a_salt_divides_them() -> None:
    one, two = holder("a", "teams"), holder("b", "teams")
    assert one.isolate("") == two.isolate("")
    assert one.isolate("s") == two.isolate("s") != one.isolate("t")
    before = one.isolate("")
    one.renew(ApiKey(name="a", salt=b"", digest=b"", cache_group="others"))
    assert one.isolate("") != before


def test_without_salts_for_each_key_clients_have_those_that_they_send() -> None:
    shared = holder("a", salts=False)
    assert (shared.isolate(""), shared.isolate("s")) == ("", "s")
