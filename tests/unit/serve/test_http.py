"""The HTTP side of a server without a model: slow and idle clients, and templates without end, stop nobody."""

import asyncio
import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.data.chat_template import ChatTemplate
from penstock.data.tokenizer import load_tokenizer
from penstock.engine.generation.requests import RequestQueue
from penstock.model import Limits
from penstock.serve import app, server
from penstock.serve.app import ServerParts
from penstock.serve.asked import ServedModel
from penstock.serve.mailboxes import Mailboxes
from penstock.serve.metrics import ServerMetrics
from penstock.serve.server import http_thread, listening_socket
from penstock.settings import ServeConfig
from tests.hostile_tokenizers import MANY, PANICS, write

TALK = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
HALF = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server; gives its port."""
    running = ExitStack()

    def start(tokenizer: Any = None, **settings: Any) -> int:
        template = ChatTemplate("{{ raise_exception('no') }}")
        model = ServedModel("m", ServeConfig(**settings), 0, tokenizer, template, Limits(300, 64), 2, (), {})
        waiting = settings.get("max_waiting", 1)
        boxes = Mailboxes(lambda publish: RequestQueue(1, waiting, None, publish))
        parts = ServerParts(model, boxes, ServerMetrics(lambda: boxes.queue.counts), None)
        listener = listening_socket("127.0.0.1", 0)
        running.enter_context(http_thread(parts, listener))
        return listener.getsockname()[1]

    with running:
        yield start


def ask(port: int, method: str, path: str, body: bytes | None = None, source: str = "127.0.0.1") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120, source_address=(source, 0))
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def connect(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    connection.sendall(sent)
    return connection


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_who_does_not_finish_the_headers_is_dropped(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEADERS_S", 0.2)
    port = serve()
    for sent in (b"", HALF):
        with connect(port, sent) as connection:
            assert connection.recv(1) == b""


def answered(port: int) -> socket.socket:
    """A connection that has had an answer and is kept."""
    connection = connect(port, HEALTH)
    got = b""
    while not got.endswith(b"}"):
        got += connection.recv(1 << 16)
    assert got.startswith(b"HTTP/1.1 200 ")
    return connection


def is_ended(connection: socket.socket, sends: bytes, within_s: float = 20.0) -> bool:
    """True once the server has ended a connection on which a byte is sent now and then."""
    deadline = time.monotonic() + within_s
    connection.settimeout(0.05)
    while time.monotonic() < deadline:
        try:
            connection.sendall(sends[:1])
            sends = sends[1:]
            if connection.recv(1 << 16) == b"":
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize(
    "sent",
    [
        b"G",
        HALF + b"x: " + b"y" * 1000,
        # A body of which nobody wants to know more.
        b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n" + b"y" * 400,
    ],
    ids=["a byte after an answer", "slow headers", "a slow body after its answer"],
)
def test_each_request_of_a_connection_is_timed(serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(server, "_HEADERS_S", 0.3)
    port = serve()
    with answered(port) as connection:
        assert is_ended(connection, sent)


def test_half_open_connections_are_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client that sends no more, and of one that asks and asks and never reads."""
    monkeypatch.setattr(server, "_TAKING_S", 0.3)
    port = serve()
    with answered(port) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", port))
        connection.settimeout(20)
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(HEALTH.replace(b"health", b"metrics") * 100)


def test_a_stream_that_nobody_reads_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        ended.set()

    monkeypatch.setattr(server, "_TAKING_S", 0.3)
    monkeypatch.setattr(server, "application", lambda parts: endless)
    with connect(serve(), HEALTH):
        assert ended.wait(60)


def test_a_client_that_comes_back_in_time_keeps_its_connection(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEADERS_S", 0.6)
    with answered(serve()) as connection:
        for _ in range(3):
            time.sleep(0.4)
            # Two at once, of which the second waits for the answer to the first.
            connection.sendall(HEALTH * 2)
            got = b""
            while got.count(b"HTTP/1.1 200 ") < 2:
                got += connection.recv(1 << 16)


def test_a_body_may_take_longer_than_headers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEADERS_S", 0.3)
    with connect(serve(), HALF + b"content-length: 2\r\n\r\n{") as connection:
        time.sleep(0.6)
        connection.sendall(b"}")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


def test_a_host_that_has_gone_without_a_word_is_asked_after(serve: Serve) -> None:
    with listening_socket("127.0.0.1", 0) as listener, connect(listener.getsockname()[1], b""):
        taken, _ = listener.accept()
        with taken:
            assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30


def test_one_address_leaves_places_to_others(serve: Serve) -> None:
    port = serve(max_connections=5, max_connections_per_address=3)
    held = [connect(port, HALF) for _ in range(3)]
    wait_for(lambda: ask(port, "GET", "/health")[0] == 503)
    status, content = ask(port, "GET", "/health")
    assert content["error"]["message"] == (
        "there are more than 3 connections from 127.0.0.1; close some, or try again later"
    )
    assert status == 503 and content["error"]["code"] == "too_many"
    assert ask(port, "GET", "/health", source="127.0.0.2")[0] == 200
    for connection in held:
        connection.close()
    wait_for(lambda: ask(port, "GET", "/health")[0] == 200)


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(serve: Serve) -> None:
    port = serve()
    for path in (b"/health", b"/v1/models"):
        two = b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        with connect(port, b"GET " + path + b" HTTP/1.1\r\nhost: a\r\n" + two + HEALTH) as connection:
            got = b""
            while piece := connection.recv(1 << 16):
                got += piece
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head.lower()
        assert json.loads(body)["error"]["message"] == "a request has Content-Length or Transfer-Encoding, not both"


@pytest.mark.parametrize(
    "lengths",
    [b"Content-Length: 2\r\ncontent-length: 2", b"content-length: 2, 2", b"a: b\r\ncontent-length: 2\r\n , 2\r\nc: d"],
)
def test_one_length_said_twice_is_refused_though_both_are_equal(serve: Serve, lengths: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
    with connect(serve(), head + lengths + b"\r\n\r\n{}" + HEALTH) as connection:
        got = b""
        while piece := connection.recv(1 << 16):
            got += piece
    assert got.startswith(b"HTTP/1.1 400 ") and got.count(b"HTTP/1.1 ") == 1, got
    assert b"a request has one Content-Length" in got


def test_one_length_is_no_matter_of_the_body_or_of_other_headers(serve: Serve) -> None:
    body = b'{"model":\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-content-length: 3, 4\r\ncontent-length: %d\r\n\r\n"
    with connect(serve(), head % len(body) + body) as connection:
        got = b""
        # The body may come after its head.
        while b"the body is not JSON" not in got:
            got += (more := connection.recv(1 << 16))
            assert more, got


class Slow:
    """A tokenizer that takes a second for a long text."""

    longest = 1 << 20

    def encode(self, texts: list[str], special_tokens: bool) -> list[torch.Tensor]:
        time.sleep(1.0 if len(texts[0]) > 1000 else 0.0)
        return [torch.zeros(0, dtype=torch.long)]


def test_short_texts_do_not_wait_for_long_ones_and_all_that_wait_are_counted(serve: Serve) -> None:
    port, answers = serve(Slow(), max_waiting=3), list[tuple[int, Any]]()
    long = json.dumps({"model": "m", "prompt": "a" * 100_000}).encode()
    asking = [
        threading.Thread(target=lambda: answers.append(ask(port, "POST", "/v1/completions", long))) for _ in range(5)
    ]
    for thread in asking[:3]:
        thread.start()
    time.sleep(0.3)
    begin = time.monotonic()
    status, content = ask(port, "POST", "/v1/completions", b'{"model": "m", "prompt": "a"}')
    assert (status, content["error"]["param"]) == (400, "prompt") and time.monotonic() - begin < 0.7
    for thread in asking[3:]:
        thread.start()
    for thread in asking:
        thread.join()
    assert sorted(status for status, _ in answers) == [400, 400, 400, 400, 429]
    assert [content["error"]["code"] for status, content in answers if status == 429] == ["queue_full"]


def test_a_text_that_no_tokens_of_the_models_length_could_hold_is_not_read(serve: Serve) -> None:
    prompt = json.dumps({"model": "m", "prompt": "a" * 20_000}).encode()
    status, content = ask(serve(load_tokenizer(None)), "POST", "/v1/completions", prompt)
    said = "prompt has 20000 bytes; at most 64 bytes fit in 64 tokens, the length of the model"
    assert (status, content["error"]["message"]) == (400, said)


def test_more_connections_than_files_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: allowed.append(limits))
    allowed: list[Any] = []
    with pytest.raises(ValueError, match=r"--max-connections 1024 needs 1280 open files, but .* allows 1000"):
        server.allow_connections(1024)
    server.allow_connections(744)
    assert allowed == [(1000, 1000)]
    monkeypatch.undo()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.1", 80), "10.0.0.1"),
        (("2001:db8:0:1:2:3:4:5", 80, 0, 0), "2001:db8:0:1::/64"),
        (("fe80::1%eth0", 80, 0, 2), "fe80::/64"),
        (("::ffff:10.0.0.1", 80, 0, 0), "10.0.0.1"),
        ("", "elsewhere"),
        (None, "elsewhere"),
    ],
)
def test_a_client_has_one_address(peer: Any, address: str) -> None:
    transport: Any = SimpleNamespace(get_extra_info=lambda name: peer)
    assert server._address_of(transport) == address


def test_who_does_not_finish_the_body_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODY_S", 0.2)
    with connect(serve(), HALF + b'content-length: 100\r\n\r\n{"model"') as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_more_connections_than_there_may_be_are_refused_in_the_form_of_all_errors(serve: Serve) -> None:
    port = serve(max_connections=2)
    assert ask(port, "GET", "/health")[0] == 200
    idle = [connect(port, HALF) for _ in range(2)]
    status, content = ask(port, "GET", "/health")
    assert status == 503
    assert content["error"]["message"] == "there are more than 2 connections; try again later"
    for connection in idle:
        connection.close()


@pytest.mark.shows(167)
def test_a_prompt_on_which_the_template_or_the_tokenizer_fails_is_refused_alone(serve: Serve, tmp_path: Path) -> None:
    port = serve(load_tokenizer(str(write(tmp_path, PANICS["a pattern that backtracks"]))))
    status, content = ask(port, "POST", "/v1/chat/completions", TALK)
    assert (status, content["error"]["message"]) == (400, "the model's chat template refuses the messages (no)")
    status, content = ask(port, "POST", "/v1/completions", json.dumps({"model": "m", "prompt": MANY}).encode())
    assert (status, content["error"]["param"], content["error"]["type"]) == (400, "prompt", "invalid_request_error")
    assert content["error"]["message"].startswith("prompt cannot be read: the tokenizer ")
    # A text that it can read is told its length, as ever.
    long = json.dumps({"model": "m", "prompt": "b" * 80}).encode()
    assert "80 tokens" in ask(port, "POST", "/v1/completions", long)[1]["error"]["message"]
