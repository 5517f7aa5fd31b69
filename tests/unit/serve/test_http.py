"""The HTTP side of a server without a model: slow and idle clients, and templates without end, stop nobody."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.data.guard import ChatTemplate, Guard
from penstock.engine.generation.requests import RequestQueue
from penstock.model import Limits
from penstock.serve import app, server
from penstock.serve.app import ServerParts
from penstock.serve.asked import ServedModel
from penstock.serve.mailboxes import Mailboxes
from penstock.serve.metrics import ServerMetrics
from penstock.serve.server import http_thread, listening_socket
from penstock.settings import ServeConfig

LOOP = "{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}"
TALK = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]}).encode()
HALF = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server; gives its port."""
    running = ExitStack()

    def start(**settings: Any) -> int:
        template = ChatTemplate(LOOP, SimpleNamespace(special_tokens_map={}), Guard(most_s=1))
        model = ServedModel("m", ServeConfig(**settings), 0, None, template, Limits(300, 64), 2, (), {})
        boxes = Mailboxes(lambda publish: RequestQueue(1, 1, None, publish))
        parts = ServerParts(model, boxes, ServerMetrics(lambda: boxes.queue.counts), None)
        listener = listening_socket("127.0.0.1", 0)
        running.enter_context(http_thread(parts, listener))
        return listener.getsockname()[1]

    with running:
        yield start


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
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


def test_who_does_not_finish_the_headers_is_dropped(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEADERS_S", 0.2)
    port = serve()
    for sent in (b"", HALF):
        with connect(port, sent) as connection:
            assert connection.recv(1) == b""


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


def test_a_template_without_end_is_refused_while_others_are_answered(serve: Serve) -> None:
    port, answers = serve(), []
    chats = [
        threading.Thread(target=lambda: answers.append(ask(port, "POST", "/v1/chat/completions", TALK)))
        for _ in range(2)
    ]
    for chat in chats:
        chat.start()
    num_healthy = 0
    while any(chat.is_alive() for chat in chats):
        assert ask(port, "GET", "/health")[0] == 200
        num_healthy += not answers
        time.sleep(0.05)
    for chat in chats:
        chat.join()
    assert num_healthy > 1
    assert [status for status, _ in answers] == [400, 400]
    for _, content in answers:
        assert content["error"]["message"].endswith("refuses the messages (it computes for more than 1 s)")
