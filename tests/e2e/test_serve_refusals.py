"""Malformed and hostile requests: each is refused with one sentence, and the server answers on as before."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import KEY, MAX_LENGTH, Served, let_tokenizer_panic, serving, write_model
from tests.hostile_tokenizers import MANY

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "tiny", "prompt": "the cat", "max_tokens": 4, "seed": 1}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
MAX_BODY_BYTES = 100_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_model(tmp_path_factory.mktemp("hostile"))
    with serving(model, "--max-body-bytes", str(MAX_BODY_BYTES), "--max-choices", "4", key=KEY) as served:
        yield served


@pytest.fixture(scope="module")
def good(served: Served) -> str:
    """The answer that a good request has, before and after anything else."""
    return answer(served)


def answer(served: Served) -> str:
    status, content = served.post(COMPLETIONS, GOOD, KEY)
    assert status == 200, content
    return content["choices"][0]["text"]


def raw(served: Served, sent: bytes) -> bytes:
    """All that comes back for these bytes."""
    got = b""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    # The server may refuse and leave before all has been sent.
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        while piece := connection.recv(1 << 16):
            got += piece
    return got


def head(length: object, path: str = COMPLETIONS, key: str = KEY) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: a", "connection: close", f"authorization: Bearer {key}"]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode("latin-1")


def but(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def said(content: Any, **changes: Any) -> dict[str, Any]:
    return {**TALK, "messages": [{"role": "user", "content": content, **changes}]}


# (path, content, status, words of the message)
BAD: list[tuple[str, Any, int, str]] = [
    # no requests at all
    (COMPLETIONS, b"", 400, "not JSON"),
    (COMPLETIONS, b"[" * 90_000, 400, "nested too deeply"),
    (COMPLETIONS, b'{"seed": ' + b"9" * 6000 + b"}", 400, "not JSON"),
    (COMPLETIONS, b'{"model": "tiny", "prompt": "a", "prompt": "b"}', 400, "the key 'prompt' twice"),
    (CHAT, b'{"model": "tiny", "messages": [{"role": "user", "role": "system"}]}', 400, "the key 'role' twice"),
    (COMPLETIONS, [], 400, "a JSON object is expected"),
    (COMPLETIONS, {}, 400, "model is missing"),
    (COMPLETIONS, b'{"model": "tiny", "prompt": "' + b"a" * MAX_BODY_BYTES + b'"}', 413, "longer than"),
    # fields
    (COMPLETIONS, but(model="\ud800"), 404, "there is no model"),
    (COMPLETIONS, but(max_tokenz=3), 400, "did you mean 'max_tokens'?"),
    (COMPLETIONS, but(**{"\udfff" * 100: 3}), 400, "there is no field"),
    (COMPLETIONS, but(stream=True, stream_options={"include_usage": 1}), 400, "stream_options.include_usage = 1"),
    # lengths and numbers of answers
    (COMPLETIONS, but(max_tokens=0), 400, "from 1 on is possible, and 0 with echo"),
    (COMPLETIONS, but(max_tokens=1 << 70), 400, f"from 0 to {MAX_LENGTH}"),
    (COMPLETIONS, but(max_tokens=MAX_LENGTH), 400, f"it would pass the model's max_length={MAX_LENGTH}"),
    (COMPLETIONS, but(prompt="a b" * 5000), 400, f"it would pass the model's max_length={MAX_LENGTH}"),
    (COMPLETIONS, but(n=5), 400, "from 1 to 4"),
    # prompts
    (COMPLETIONS, {"model": "tiny"}, 400, "prompt is missing"),
    (COMPLETIONS, but(prompt=[]), 400, "token ids"),
    (COMPLETIONS, but(prompt=[[1], "a", 3]), 400, "a string is expected"),
    (COMPLETIONS, but(prompt=[1, 300]), 400, "the model knows 0 to 299"),
    (COMPLETIONS, but(prompt=[1 << 80]), 400, "the model knows"),
    (COMPLETIONS, but(prompt="a\ud800b"), 400, "UTF-8"),
    # sampling
    (COMPLETIONS, b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "from 0 to 2"),
    (COMPLETIONS, but(temperature=1e-30), 400, "0.01 to 2"),
    (COMPLETIONS, but(seed=1 << 64), 400, "from -9223372036854775808 to 18446744073709551615"),
    (COMPLETIONS, but(logit_bias={"5": 1e308}), 400, "-100 to 100"),
    (COMPLETIONS, but(logit_bias={"9" * 5000: 1}), 400, "token ids"),
    (COMPLETIONS, but(logit_bias={str(token): 1 for token in range(1025)}), 400, "up to 1024"),
    (COMPLETIONS, but(stop=["a" * 257]), 400, "1 to 256 characters"),
    # conversations
    (CHAT, {**TALK, "messages": ["hello"]}, 400, "role and content"),
    (CHAT, {**TALK, "messages": [{"content": "a"}]}, 400, "messages[0].role"),
    (CHAT, said([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), 400, "type text"),
    (CHAT, said("a\udc80"), 400, "UTF-8"),
    (CHAT, said("a", role="evil"), 400, "no such role"),
    (CHAT, said("a", tool_calls=[{}]), 400, "does not have it"),
    (CHAT, {**TALK, "tools": [{"type": "function"}]}, 400, "does not have it"),
    (CHAT, {**TALK, "top_logprobs": 2}, 400, "logprobs is not true"),
    # places
    ("/v1/complete", GOOD, 404, "there is no"),
    ("/v1/models", GOOD, 405, "Method Not Allowed"),
    ("/v1/completions/../../etc/passwd", GOOD, 404, "there is no"),
]


@pytest.mark.shows(136)
@pytest.mark.parametrize(("path", "content", "status", "words"), BAD)
def test_a_bad_request_is_refused_in_one_sentence(
    served: Served, good: str, path: str, content: Any, status: int, words: str
) -> None:
    got, refused = served.post(path, content, KEY)
    assert (got, set(refused["error"])) == (status, {"message", "type", "param", "code"}), refused
    message = refused["error"]["message"]
    assert words in message
    assert len(message) < 1500 and "\n" not in message and "Traceback" not in message
    assert answer(served) == good


@pytest.mark.shows(136)
@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("", 401),
        ("Bearer", 401),
        (f"Bearer {KEY}x", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Basic {KEY}", 401),
        ("Bearer \xe9\xff", 401),
        (f"Bearer {'k' * 30_000}", 401),
        (f"bearer  {KEY} ", 200),
    ],
)
def test_only_who_has_the_key_is_answered(served: Served, good: str, given: str, status: int) -> None:
    body = json.dumps(GOOD).encode()
    for path, method in ((COMPLETIONS, "POST"), ("/v1/models", "GET")):
        lines = [f"{method} {path} HTTP/1.1", "host: a", "connection: close", f"content-length: {len(body)}"]
        got = raw(served, "\r\n".join([*lines, f"authorization: {given}", "", ""]).encode("latin-1") + body)
        assert got.startswith(f"HTTP/1.1 {status} ".encode()), got
        assert KEY.encode() not in got
    assert served.get("/health")[0] == 200
    assert answer(served) == good


@pytest.mark.shows(136)
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"hello\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 200_000 + b"\r\n\r\n", 400),
        (head(-1) + b"{}", 400),
        (head("1e9") + b"{}", 400),
        (head(2).replace(b"host: a", b"host: a\r\nContent-Encoding: gzip") + b"{}", 415),
        (head(2).replace(b"host: a", b"host: a\r\ncontent-encoding: identity\r\ncontent-encoding: br") + b"{}", 415),
        (head(2).replace(b"host: a", b"host: a\r\ncontent-encoding: identity") + b"[]", 400),
        (head(10**15) + b"{}", 413),
        (head(MAX_BODY_BYTES + 1) + b"{}", 413),
        (head(2).replace(b"content-length: 2", b"content-length: 2\r\ncontent-length: 9") + b"{}", 400),
        (head(2).replace(b"content-length: 2", b"transfer-encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n", 400),
        (
            head(2).replace(b"content-length: 2", b"transfer-encoding: chunked")
            + b"".join(b"4000\r\n" + b" " * 0x4000 + b"\r\n" for _ in range(8))
            + b"0\r\n\r\n",
            413,
        ),
    ],
)
def test_what_is_no_request_is_refused(served: Served, good: str, sent: bytes, status: int) -> None:
    got = raw(served, sent)
    assert got.startswith(f"HTTP/1.1 {status} ".encode()), got[:200]
    assert b"Traceback" not in got
    assert answer(served) == good


@pytest.mark.shows(136)
def test_who_leaves_in_the_middle_costs_nothing_and_idle_connections_stop_nobody(served: Served, good: str) -> None:
    body = json.dumps({**GOOD, "max_tokens": 250, "stream": True, "ignore_eos": True}).encode()
    before = served.figure("cancelled_answers_total")
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
            connection.sendall(head(len(body)) + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(head(1000) + b'{"model": ')
    idle = [socket.create_connection(("127.0.0.1", served.port), timeout=30) for _ in range(50)]
    for connection in idle:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
    assert answer(served) == good
    for connection in idle:
        connection.close()
    served.wait_for("answers_running", 0)
    assert served.figure("cancelled_answers_total") > before


@pytest.mark.shows(167)
def test_a_tokenizer_that_fails_on_a_prompt_refuses_it_and_the_server_lives_on(tmp_path: Path) -> None:
    with serving(let_tokenizer_panic(write_model(tmp_path))) as served:
        status, before = served.post(COMPLETIONS, GOOD)
        assert status == 200
        for path, asked in ((COMPLETIONS, but(prompt=MANY)), (CHAT, said(MANY))):
            status, refused = served.post(path, asked)
            assert (status, set(refused["error"])) == (400, {"message", "type", "param", "code"}), refused
            assert "the tokenizer" in refused["error"]["message"] and "\n" not in refused["error"]["message"]
            status, after = served.post(COMPLETIONS, GOOD)
            assert (status, after["choices"]) == (200, before["choices"])


def test_a_key_in_a_file_is_as_good_and_more_answers_than_fit_are_refused_for_good(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    words = ["--api-key-file", str(tmp_path / "key"), "--name", "other/name", "--rows", "1", "--max-waiting", "1"]
    with serving(write_model(tmp_path), *words) as served:
        assert served.post(COMPLETIONS, but(model="other/name"))[0] == 401
        assert served.post(COMPLETIONS, but(model="other/name"), KEY)[0] == 200
        # A client would ask again and again where it was told to wait (429).
        status, refused = served.post(COMPLETIONS, but(model="other/name", n=3), KEY)
        assert status == 400 and "from 1 to 2" in refused["error"]["message"]
