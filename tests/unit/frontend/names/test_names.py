"""The names of operators: which tables are valid, what a request by a name does, and the table in etcd."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NoReturn

import msgspec
import pytest

from dynamo.common.errors import InvalidRequest, Overloaded, RateLimited, Unavailable
from dynamo.common.etcd import Deleted, Events, KeyValue, Listing, Put, Reset, follow
from dynamo.common.names import InstanceId
from dynamo.frontend.names.__main__ import main
from dynamo.frontend.names.plan import Identity, make_plan, pick, representative
from dynamo.frontend.names.rules import (
    MAX_DEPTH,
    MAX_RULES,
    Condition,
    Fallback,
    Rule,
    Rules,
    Shadow,
    Sticky,
    Target,
    check_rules,
)
from dynamo.frontend.names.table import NameTable
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving import shadows as shadows_module
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.shadows import MAX_COPIES
from tests.support.fakes import FakeStream
from tests.support.http_edge import Speaker, chat_card, open_http_edge, send_delta
from tests.support.waiting import until

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
WITHOUT_KEY = Identity()


def everything(model: str) -> bool:
    return True


def rule(*targets: str, **fields: Any) -> Rule:
    """`model` or `model=weight` each."""
    pairs = [target.partition("=") for target in targets]
    return Rule(targets=tuple(Target(model=model, weight=float(weight or 1)) for model, _, weight in pairs), **fields)


def models(rules: dict[str, Rule], name: str, draw: float = 0.0, identity: Identity = WITHOUT_KEY) -> list[str]:
    return [candidate.model for candidate in make_plan(rules, name, identity, everything, lambda: draw).candidates]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"a": rule("b"), "b": rule("a")}, "loop: a → b → a"),
        ({"a": rule("b", fallbacks=(Fallback(model="c"),)), "c": rule("a")}, "loop: a → c → a"),
        ({"a": rule("a", fallbacks=(Fallback(model="a"),))}, "itself as a fallback"),
        ({"a": rule("a", shadows=(Shadow(model="a"),))}, "itself as a fallback or shadow"),
        ({str(n): rule(str(n + 1)) for n in range(MAX_DEPTH + 1)}, f"chain of more than {MAX_DEPTH}"),
        ({str(n): rule(str(n - 1)) for n in range(MAX_DEPTH + 1, 0, -1)}, f"chain of more than {MAX_DEPTH}"),
        ({f"n{n}": rule("m") for n in range(MAX_RULES + 1)}, f"at most {MAX_RULES}"),
        ({"a": rule("b", "b")}, "same target twice"),
        ({"a": rule("b=0", "c=0")}, "no weight above 0"),
        ({"a b": rule("c")}, "the character ' '"),
        ({"a": rule("b*")}, "the character '*'"),
        ({f"n{n}": rule(*(f"{n}-{k}-{'m' * 240}" for k in range(16))) for n in range(200)}, "bytes"),
    ],
)
def test_a_table_that_could_not_be_followed_is_refused(rules: dict[str, Rule], words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_rules(rules)
    assert words in str(refused.value)


def test_a_name_may_be_that_of_a_model_and_chains_may_be_four_long() -> None:
    rules = {"llama": rule("llama=9", "new"), **{str(n): rule(str(n + 1)) for n in range(MAX_DEPTH)}}
    check_rules(rules)
    assert models(rules, "llama") == ["llama"]
    assert models(rules, "llama", draw=0.95) == ["new"]
    assert models(rules, "0") == [str(MAX_DEPTH)]


def test_requests_are_split_by_weight() -> None:
    draws = itertools.count()
    targets = rule("a=6", "b=3", "c=1").targets
    counts = Counter(pick(targets, "n", "", lambda: next(draws) % 100 / 100).model for _ in range(100))
    assert counts == {"a": 60, "b": 30, "c": 10}


def test_a_session_stays_and_a_new_weight_moves_only_those_that_have_to() -> None:
    def places(weight: float) -> dict[int, str]:
        targets = rule("a=90", f"b={weight}").targets
        return {key: pick(targets, "n", f"s{key}", lambda: 0.0).model for key in range(4000)}

    few, many = places(10), places(30)
    assert few == places(10)
    assert 300 < Counter(few.values())["b"] < 500
    assert 900 < Counter(many.values())["b"] < 1100
    assert all(many[key] == "b" for key, model in few.items() if model == "b")


def test_only_what_the_rule_names_makes_requests_stick() -> None:
    rules = {"n": rule("a", "b", sticky=Sticky.USER)}
    by_user = {models(rules, "n", draw, Identity(user="u", session=str(draw)))[0] for draw in (0.1, 0.9)}
    by_session = {models(rules, "n", draw, Identity(session="s"))[0] for draw in (0.1, 0.9)}
    by_sequence = {models(rules, "n", draw, Identity(sequence="7"))[0] for draw in (0.1, 0.9)}
    assert (len(by_user), len(by_session), len(by_sequence)) == (1, 2, 1)


def test_a_sequence_has_no_fallbacks() -> None:
    rules = {"n": rule("a", fallbacks=(Fallback(model="b"),))}
    assert models(rules, "n") == ["a", "b"]
    assert models(rules, "n", identity=Identity(sequence="7")) == ["a"]


def test_models_that_the_caller_may_not_use_are_passed_over() -> None:
    rules = {"n": rule("secret=99", "open=1", fallbacks=(Fallback(model="secret"), Fallback(model="spare")))}

    def permits(model: str) -> bool:
        return model != "secret"

    plan = make_plan(rules, "n", WITHOUT_KEY, permits, lambda: 0.0)
    assert [candidate.model for candidate in plan.candidates] == ["open", "spare"]
    assert make_plan(rules, "n", WITHOUT_KEY, lambda model: False, lambda: 0.0).candidates == ()


def test_a_fallback_of_a_fallback_is_tried_after_it_under_its_own_conditions() -> None:
    spare = rule("small", fallbacks=(Fallback(model="tiny", on=(Condition.OVERLOADED,)),))
    rules = {"n": rule("big", fallbacks=(Fallback(model="spare", on=(Condition.NO_INSTANCES,)),)), "spare": spare}
    plan = make_plan(rules, "n", WITHOUT_KEY, everything, lambda: 0.0)
    assert [(candidate.model, set(candidate.on)) for candidate in plan.candidates] == [
        ("big", set()),
        ("small", {Condition.NO_INSTANCES}),
        ("tiny", {Condition.OVERLOADED}),
    ]


def test_describing_a_name_looks_at_each_name_below_it_once() -> None:
    rules = {f"{level}-{n}": rule(*(f"{level + 1}-{m}" for m in range(16))) for level in range(4) for n in range(16)}
    check_rules(rules)
    calls: list[str] = []

    def permits(model: str) -> bool:
        calls.append(model)
        return True

    assert representative(rules, "0-0", permits, lambda model: model == "4-15") == "4-15"
    assert len(calls) < 1000


def test_shadows_get_their_share_and_only_of_what_is_sent_first() -> None:
    spare = rule("small", shadows=(Shadow(model="never"),))
    rules = {"n": rule("big", shadows=(Shadow(model="next", share=0.25),), fallbacks=(Fallback(model="spare"),)), "spare": spare}
    assert make_plan(rules, "n", WITHOUT_KEY, everything, lambda: 0.2).shadows == ("next",)
    assert make_plan(rules, "n", WITHOUT_KEY, everything, lambda: 0.25).shadows == ()


def test_a_name_is_described_by_the_first_model_that_is_ready() -> None:
    rules = {"n": rule("rare=1", "common=9", "off=0", fallbacks=(Fallback(model="spare"),))}
    assert representative(rules, "n", everything, lambda model: True) == "common"
    assert representative(rules, "n", everything, {"rare", "off"}.__contains__) == "rare"
    assert representative(rules, "n", everything, {"spare"}.__contains__) == "spare"
    assert representative(rules, "n", everything, lambda model: False) == "common"
    assert representative(rules, "m", everything, lambda model: False) == "m"


# Requests


def by_model(stream: FakeStream, speakers: dict[int, Callable[[FakeStream], None]]) -> None:
    speakers[int(stream.instance)](stream)


def overloaded(stream: FakeStream) -> None:
    stream.fail(Overloaded("the engine has enough to do"))


async def test_every_text_api_serves_a_name_and_says_which_model_responded() -> None:
    rules = {"chat": rule("small")}
    async with open_http_edge(chat_card("small"), respond=Speaker(), rules=rules) as edge:
        for path, body in {
            "/v1/chat/completions": HELLO,
            "/v1/completions": {"prompt": "Hi"},
            "/v1/responses": {"input": "Hi"},
            "/v1/messages": HELLO | {"max_tokens": 5},
        }.items():
            response = await edge.post(path, {"model": "chat", **body})
            assert (response.status_code, response.json().get("model")) == (200, "small"), response.text
        counted = await edge.post("/v1/messages/count_tokens", {"model": "chat", **HELLO})
        tokens = await edge.post("/tokenize", {"model": "chat", "prompt": "Hi"})
        text = {"text_input": "Hi"}
        generated = await edge.post("/v2/models/chat/generate", text)
        events = await edge.post("/v2/models/chat/generate_stream", text)
        ready = await edge.http.get("/v2/models/chat/ready")
        metadata = await edge.http.get("/v2/models/chat")
    assert counted.json()["input_tokens"] > 0 and tokens.json()["count"] > 0
    assert (generated.json()["model_name"], generated.json()["text_output"]) == ("small", "Hello you")
    assert '"model_name":"small"' in events.text
    assert (ready.status_code, metadata.json()["name"]) == (200, "small")


async def test_another_model_serves_what_the_first_one_cannot() -> None:
    long = {"messages": [{"role": "user", "content": "word " * 300}]}
    cards = chat_card("short", context_length=64), chat_card("long"), chat_card("busy"), chat_card("spare")
    rules = {
        "by-length": rule("short", fallbacks=(Fallback(model="long", on=(Condition.PROMPT_TOO_LONG,)),)),
        "by-load": rule("busy", fallbacks=(Fallback(model="spare", on=(Condition.OVERLOADED,)),)),
        "by-absence": rule("absent", fallbacks=(Fallback(model="spare", on=(Condition.NO_INSTANCES,)),)),
        "not-for-load": rule("busy", fallbacks=(Fallback(model="spare", on=(Condition.NO_INSTANCES,)),)),
    }
    say = Speaker()
    speakers = {1: say, 2: say, 3: overloaded, 4: say}
    async with open_http_edge(*cards, respond=lambda stream: by_model(stream, speakers), rules=rules) as edge:
        for stream in (False, True):
            for name, body, model in (
                ("by-length", long, "long"),
                ("by-length", HELLO, "short"),
                ("by-load", HELLO, "spare"),
                ("by-absence", HELLO, "spare"),
            ):
                response = await edge.post("/v1/chat/completions", {"model": name, "stream": stream, **body})
                assert response.status_code == 200, response.text
                assert f'"model":"{model}"' in response.text
        refused = await edge.post("/v1/chat/completions", {"model": "not-for-load", **HELLO})
        assert (refused.status_code, "enough to do" in refused.text) == (503, True)
        sent = edge.registry.get_sample_value
        name = "dynamo_frontend_name_requests_total"
        assert sent(name, {"name": "by-load", "model": "spare", "reason": "overloaded"}) == 2
        assert sent(name, {"name": "by-length", "model": "long", "reason": "prompt_too_long"}) == 2
        assert sent(name, {"name": "by-absence", "model": "spare", "reason": "no_instances"}) == 2
        assert sent(name, {"name": "by-absence", "model": "absent", "reason": "target"}) is None


async def test_a_target_that_does_not_exist_is_unavailable_and_an_unknown_name_is_not_found() -> None:
    async with open_http_edge(respond=Speaker(), rules={"n": rule("absent")}) as edge:
        unavailable = await edge.post("/v1/chat/completions", {"model": "n", **HELLO})
        unknown = await edge.post("/v1/chat/completions", {"model": "absent", **HELLO})
    assert (unavailable.status_code, unknown.status_code) == (503, 404)
    assert "no instance is serving model 'absent' now" in unavailable.text


async def test_there_is_no_fallback_once_a_part_of_the_response_went_out() -> None:
    say = Speaker(("Hel",))

    def fails_late(stream: FakeStream) -> None:
        send_delta(stream, "Hel")
        asyncio.get_running_loop().call_later(0, stream.fail, Overloaded("too much"))

    rules = {"n": rule("first", fallbacks=(Fallback(model="second"),))}
    cards = chat_card("first"), chat_card("second")
    async with open_http_edge(*cards, respond=lambda s: by_model(s, {1: fails_late, 2: say}), rules=rules) as edge:
        response = await edge.post("/v1/chat/completions", {"model": "n", "stream": True, **HELLO})
    assert "too much" in response.text
    assert '"second"' not in response.text


async def test_names_are_listed_with_their_targets() -> None:
    rules = {"chat": rule("talker=3", "new"), "talker": rule("talker"), "nowhere": rule("absent")}
    async with open_http_edge(respond=Speaker(), rules=rules) as edge:
        listed = {model["id"]: model for model in (await edge.http.get("/v1/models")).json()["data"]}
        one = (await edge.http.get("/v1/models/chat")).json()
        readiness = await edge.http.get("/v1/models/chat/ready")
    assert sorted(listed) == ["chat", "talker"]
    assert listed["chat"] == one
    assert (one["root"], one["ready"]) == ("talker", True)
    assert one["targets"] == [{"model": "talker", "weight": 3.0}, {"model": "new", "weight": 1.0}]
    assert readiness.status_code == 200


async def test_a_key_does_not_see_targets_that_it_may_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_http_edge(respond=Speaker(), rules={"chat": rule("talker", "secret")}) as edge:
        monkeypatch.setattr(type(ANONYMOUS), "permits", lambda account, model: model != "secret")
        one = (await edge.http.get("/v1/models/chat")).json()
        listed = (await edge.http.get("/v1/models")).text
    assert one["targets"] == [{"model": "talker", "weight": 1.0}]
    assert "secret" not in listed


async def test_copies_go_to_the_shadow_and_never_to_the_caller() -> None:
    say = Speaker()
    rules = {"n": rule("talker", shadows=(Shadow(model="shadow"), Shadow(model="absent")))}
    speakers = {1: say, 2: Speaker(("other",))}
    cards = chat_card(), chat_card("shadow")
    async with open_http_edge(*cards, respond=lambda s: by_model(s, speakers), rules=rules) as edge:
        response = await edge.post("/v1/chat/completions", {"model": "n", **HELLO})

        def copies(model: str, outcome: str) -> float | None:
            labels = {"model": model, "outcome": outcome}
            return edge.registry.get_sample_value("dynamo_frontend_shadow_requests_total", labels)

        await until(lambda: copies("shadow", "success") == 1 and copies("absent", "error") == 1)
    assert response.json()["choices"][0]["message"]["content"] == "Hello you"


async def test_of_requests_that_are_refused_there_are_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> NoReturn:
        raise RateLimited("too many")

    rules = {"n": rule("talker", shadows=(Shadow(model="absent"),))}
    async with open_http_edge(respond=Speaker(), rules=rules) as edge:
        labels = {"model": "absent", "outcome": "error"}
        with monkeypatch.context() as patched:
            patched.setattr(type(ANONYMOUS), "admit", refuse)
            refused = await edge.post("/v1/chat/completions", {"model": "n", **HELLO})
        await edge.post("/v1/chat/completions", {"model": "n", **HELLO})
        await until(lambda: bool(edge.registry.get_sample_value("dynamo_frontend_shadow_requests_total", labels)))
        assert edge.registry.get_sample_value("dynamo_frontend_shadow_requests_total", labels) == 1
    assert refused.status_code == 429


async def test_copies_of_texts_count_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows_module, "MAX_BYTES", 1000)
    rules = {"n": rule("talker", shadows=(Shadow(model="shadow"),))}
    content = [{"type": "text", "text": text * 600} for text in "xy"]
    async with open_http_edge(chat_card(), chat_card("shadow"), respond=Speaker(), rules=rules) as edge:
        for path, text in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}),
            ("/v1/completions", {"prompt": "x" * 1200}),
        ):
            assert (await edge.post(path, {"model": "n", **text})).status_code == 200
        labels = {"model": "shadow", "outcome": "dropped"}
        assert edge.registry.get_sample_value("dynamo_frontend_shadow_requests_total", labels) == 2


async def test_more_copies_than_may_be_made_are_dropped() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        shadows, held = edge.plane.shadows, asyncio.Event()

        async def send(model: str, call: Call) -> None:
            await held.wait()

        call = Call(request_id="r", account=ANONYMOUS)
        for _ in range(MAX_COPIES + 2):
            shadows.copy("shadow", 1, call, send)
        shadows.copy("shadow", 1 << 40, call, send)

        def dropped() -> float | None:
            labels = {"model": "shadow", "outcome": "dropped"}
            return edge.registry.get_sample_value("dynamo_frontend_shadow_requests_total", labels)

        assert dropped() == 3
        held.set()


async def test_a_copy_goes_where_the_shadow_s_router_chooses_by_the_operator_s_settings() -> None:
    calls: list[Call] = []

    async def send(model: str, call: Call) -> None:
        calls.append(call)

    wishes = {"instance": InstanceId(5), "prefill_instance": InstanceId(7), "overrides": {"ttft_goal": 0.0}}
    async with open_http_edge(respond=Speaker()) as edge:
        edge.plane.shadows.copy("shadow", 1, Call(request_id="r", account=ANONYMOUS, priority=9, **wishes), send)  # type: ignore[arg-type]
        await until(lambda: bool(calls))
    (call,) = calls
    assert (call.instance, call.prefill_instance, call.overrides) == (None, None, {})
    assert call.priority < 0
    assert call.is_copy


# The table in etcd


class FakeEtcd:
    """One key, with revisions."""

    def __init__(self) -> None:
        self.kv: KeyValue | None = None
        self.revision = 1
        self.changes: asyncio.Queue[Reset | Events] = asyncio.Queue()
        self.before_replace: list[Callable[[], None]] = []

    async def range(self, key: str) -> Listing:
        return Listing(() if self.kv is None else (self.kv,), self.revision)

    async def replace(self, key: str, value: bytes, *, mod_revision: int) -> bool:
        if self.before_replace:
            self.before_replace.pop()()
        if (0 if self.kv is None else self.kv.mod_revision) != mod_revision:
            return False
        self.put(value, key)
        return True

    def put(self, value: bytes, key: str = "/dynamo/v1/%names/ns") -> None:
        self.revision += 1
        self.kv = KeyValue(key, value, self.revision)
        self.changes.put_nowait(Events((Put(self.kv),), self.revision))

    async def watch(self, prefix: str) -> AsyncGenerator[Reset | Events, None]:
        yield Reset(() if self.kv is None else (self.kv,), self.revision)
        while True:
            yield await self.changes.get()


def setting(name: str, value: Rule) -> Callable[[dict[str, Rule]], None]:
    return lambda rules: rules.update({name: value})


def encoded(**rules: Rule) -> bytes:
    return msgspec.json.encode(Rules(rules))


async def test_a_change_is_made_to_the_table_as_it_is_then() -> None:
    etcd: Any = FakeEtcd()
    table = NameTable(etcd, "ns")
    etcd.before_replace.append(lambda: etcd.put(encoded(b=rule("a"))))
    with pytest.raises(InvalidRequest, match="loop"):
        await table.change(setting("a", rule("b")))
    await table.change(setting("c", rule("b")))
    assert sorted(table.rules) == ["b", "c"]


async def test_a_writer_who_always_comes_first_is_not_overwritten() -> None:
    etcd: Any = FakeEtcd()
    numbers = iter(range(100))
    etcd.before_replace = [lambda: etcd.put(encoded(**{f"n{next(numbers)}": rule("m")}))] * 50
    with pytest.raises(Unavailable, match="at the same time"):
        await NameTable(etcd, "ns").change(setting("a", rule("b")))


async def test_the_table_follows_etcd_keeps_what_is_valid_and_comes_back_after_a_loss() -> None:
    etcd = FakeEtcd()
    fake: Any = etcd
    table = NameTable(fake, "ns")
    follower = asyncio.create_task(table.follow())
    try:
        await table.ready.wait()
        assert table.rules == {}
        etcd.put(encoded(a=rule("b")))
        await until(lambda: "a" in table.rules)
        etcd.put(encoded(a=rule("a2"), a2=rule("a")))
        for unreadable in (b"not json", b"[]", b"null", b'{"rules": 3}', b'{"rules": {"\xff": {}}}', b'{"rules": ' * 10_000):
            etcd.put(unreadable)
        etcd.put(encoded(x=rule("y")), key="/dynamo/v1/%names/ns2")
        await until(etcd.changes.empty)
        assert table.rules == {"a": rule("b")}
        etcd.kv, etcd.revision = None, 1
        etcd.changes.put_nowait(Reset((), 1, history_lost=True))
        await until(lambda: etcd.kv is not None)
        assert etcd.kv is not None and etcd.kv.value == encoded(a=rule("b"))
        await until(etcd.changes.empty)
        etcd.kv = None
        etcd.changes.put_nowait(Events((Deleted("/dynamo/v1/%names/ns", etcd.revision + 1),), etcd.revision + 1))
        await until(lambda: table.rules == {})
    finally:
        follower.cancel()


async def test_a_lost_table_is_put_back_though_etcd_fails_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LONGEST_PAUSE_S", 0.0)
    etcd = FakeEtcd()
    fake: Any = etcd
    table = NameTable(fake, "ns")
    etcd.put(encoded(a=rule("b")))

    def fail() -> None:
        raise Unavailable("etcd is away")

    follower = asyncio.create_task(table.follow())
    try:
        await until(lambda: "a" in table.rules)
        etcd.kv, etcd.revision = None, 1
        etcd.before_replace.append(fail)
        etcd.changes.put_nowait(Reset((), 1, history_lost=True))
        await until(lambda: etcd.kv is not None)
        assert etcd.kv is not None and etcd.kv.value == encoded(a=rule("b"))
        assert table.rules == {"a": rule("b")}
    finally:
        follower.cancel()


# The command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["set", "a", "b=x"], "'b=x' is not of the form MODEL=NUMBER"),
        (["set", "a", "b", "--fallback", "c:never"], "names a condition that does not exist"),
        (["set", "a", "b", "--fallback", "a"], "itself as a fallback"),
        (["--url", "ftp://x", "list"], "must begin with http"),
        (["--url", "http://127.0.0.1:9", "list"], "cannot be reached"),
        (["--api-key-file", "/nowhere", "list"], "/nowhere: No such file"),
        (["list", "--api-key-file", "/nowhere"], "/nowhere: No such file"),
        (["set", "a", "b", "--url", "ftp://x"], "must begin with http"),
        (["--url", "ftp://x", "remove", "a", "--api-key-file", "/nowhere"], "must begin with http"),
        ([], "required"),
    ],
)
def test_a_command_that_cannot_be_carried_out_ends_with_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


class Admin(BaseHTTPRequestHandler):
    """An admin API that takes each rule, and serves one model."""

    def do_PUT(self) -> None:
        self._send(b"{}")

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "llama"}, {"id": "chat"}]}' if self.path == "/v1/models" else b"{}")

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""


def test_a_rule_that_names_what_does_not_exist_is_set_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        main(["set", "chat", "llama=9", "lama=1", "--shadow", "next", "--url", url])
        server.shutdown()
    shown = capsys.readouterr()
    assert shown.out == "chat llama=9 lama=1 --shadow next=1\n"
    assert [line.split("'")[1] for line in shown.err.splitlines()] == ["lama", "next"]
