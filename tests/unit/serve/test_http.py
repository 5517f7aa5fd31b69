"""The HTTP side of a server without a model: idle connections, slow bodies and long prompts stop nobody."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
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


def answered(port: int) -> socket.socket:
    """A connection that has had an answer and is kept."""
    connection = connect(port, HEALTH)
    got = b""
    while not got.endswith(b"}"):
        got += connection.recv(1 << 16)
    assert got.startswith(b"HTTP/1.1 200 ")
    return connection


class Slow:
    """A tokenizer that takes a second for a long text."""

    longest = 1 << 20

    def encode(self, texts: list[str], special_tokens: bool) -> list[torch.Tensor]:
        time.sleep(1.0 if len(texts[0]) > 1000 else 0.0)
        return [torch.zeros(0, dtype=torch.long)]


@pytest.mark.shows(166)
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


@pytest.mark.shows(166)
def test_a_connection_is_kept_for_a_while_after_a_reply_and_then_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_IDLE_S", 2)
    with answered(serve()) as connection:
        time.sleep(0.5)
        # Two at once, of which the second waits for the answer to the first.
        connection.sendall(HEALTH * 2)
        got = b""
        while piece := connection.recv(1 << 16):
            got += piece
        assert got.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.shows(166)
def test_more_connections_than_there_may_be_are_refused(serve: Serve) -> None:
    port = serve(max_connections=2)
    with answered(port), answered(port), connect(port, HEALTH) as third:
        assert third.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    wait_for(lambda: connect(port, HEALTH).recv(1 << 16).startswith(b"HTTP/1.1 200 "))


def test_who_does_not_finish_the_body_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODY_S", 0.2)
    with connect(serve(), HALF + b'content-length: 100\r\n\r\n{"model"') as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


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
