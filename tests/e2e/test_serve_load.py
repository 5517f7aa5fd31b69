"""Many clients at once, with answers of random lengths, of whom many leave: a few seconds here, two minutes by make."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from benchmarks.serve import reply_parts

from tests.e2e.serving import Served, let_tokenizer_panic, resident_bytes, serving, write_model
from tests.hostile_tokenizers import MANY

pytestmark = pytest.mark.subject("src/penstock/**/*.py", "benchmarks/serve.py")

NUM_CLIENTS, NUM_KINDS, LONGEST = 64, 24, 40
SECONDS = float(os.environ.get("SERVE_LOAD_SECONDS", "4"))
# In the first seconds libraries still meet numbers of rows that they have not seen, and keep code for them.
MOST_GROWTH_BYTES = (16 if SECONDS > 60 else 80) << 20


def body_of(kind: int, length: int, stream: bool) -> dict[str, Any]:
    """A request whose answer is one of few, up to its length."""
    draw = random.Random(kind)
    prompt = [draw.randrange(5, 300) for _ in range(draw.randint(1, 30))]
    asked = {"prompt": prompt, "seed": kind, "temperature": draw.choice([0, 0.8]), "max_tokens": length}
    return {"model": "tiny", "logprobs": 0, "ignore_eos": True, "stream": stream, **asked}


@dataclass
class Seen:
    """The outcomes of all clients."""

    #: kind -> the tokens of its longest answer
    expected: dict[int, list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    #: process -> memory, early and at the end
    memory: list[dict[int, int]] = field(default_factory=list)


async def answer(port: int, body: dict[str, Any], leave_after: float | None) -> list[str] | None:
    """The tokens of one answer; None for a client that left before its end.

    leave_after: parts of a streamed answer, or seconds of a whole one, after which the client leaves.
    """
    tokens: list[str] = []
    parts: Any = reply_parts(port, body)
    async with contextlib.aclosing(parts), asyncio.timeout(120 if body["stream"] else leave_after or 120):
        finish_reason = None
        async for part in parts:
            (choice,) = part["choices"]
            tokens += choice["logprobs"]["tokens"]
            finish_reason = finish_reason or choice["finish_reason"]
            if body["stream"] and leave_after is not None and len(tokens) >= leave_after:
                return None
    assert finish_reason == "length"
    return tokens


async def client(port: int, seen: Seen, draw: random.Random, deadline: float) -> None:
    """Ask again and again, and hold each answer against what it is alone."""
    num_asked = 0
    while time.monotonic() < deadline or num_asked < 3:
        num_asked += 1
        kind, length, stream = draw.randrange(NUM_KINDS), draw.randint(1, LONGEST), draw.random() < 0.7
        leave_after = None
        if draw.random() < 0.3:
            leave_after = draw.randint(0, length) if stream else draw.uniform(0.001, 0.2)
        try:
            tokens = await answer(port, body_of(kind, length, stream), leave_after)
        except TimeoutError:
            assert not stream and leave_after is not None, "no answer came"
            tokens = None
        if tokens is None:
            seen.counts["left"] += 1
        else:
            assert tokens == seen.expected[kind][:length], f"kind {kind} of {length} tokens, stream={stream}"
            seen.counts["answered"] += 1


# What other clients do to their connections, and how the server answers.
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
UNREADABLE = json.dumps({"model": "tiny", "prompt": MANY}).encode()
MISCHIEF: dict[str, tuple[bytes, bytes]] = {
    "a prompt that the tokenizer cannot read": (
        HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(UNREADABLE) + UNREADABLE, b"HTTP/1.1 400"
    ),
    "half closed": (HEAD, b""),
}  # fmt: skip


async def do_mischief(port: int, seen: Seen, draw: random.Random, deadline: float) -> None:
    """Misuse one connection after another, each until the server ends it."""
    num_done = 0
    while time.monotonic() < deadline or num_done < 3:
        kind, num_done = draw.choice(list(MISCHIEF)), num_done + 1
        sent, expected = MISCHIEF[kind]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        with contextlib.closing(writer):
            writer.write(sent)
            if kind == "half closed":
                writer.write_eof()
            async with asyncio.timeout(60):
                got = await reader.read()
        assert got.startswith(expected) and bool(got) == bool(expected), (kind, got)
        seen.counts[kind] += 1


async def load(served: Served, seen: Seen, pids: list[int]) -> None:
    for kind in range(NUM_KINDS):
        found = await answer(served.port, body_of(kind, LONGEST, stream=False), None)
        assert found is not None and len(found) == LONGEST
        seen.expected[kind] = found

    async def remember() -> None:
        # Half of the time is enough for what is allocated once.
        await asyncio.sleep(SECONDS / 2)
        seen.memory.append({pid: resident_bytes(pid) for pid in pids})

    deadline = time.monotonic() + SECONDS
    clients = [client(served.port, seen, random.Random(number), deadline) for number in range(NUM_CLIENTS)]
    mischief = [do_mischief(served.port, seen, random.Random(-number), deadline) for number in range(1, 9)]
    await asyncio.gather(remember(), *clients, *mischief)
    seen.memory.append({pid: resident_bytes(pid) for pid in pids})


@pytest.mark.shows(135)
def test_no_answer_is_lost_or_mixed_up_memory_is_flat_and_nothing_is_left(tmp_path: Path) -> None:
    seen = Seen()
    with serving(
        let_tokenizer_panic(write_model(tmp_path)), "--pp", "2", "--rows", "8", "--max-waiting", "128"
    ) as served:
        pids = [served.started.process.pid, *served.started.workers()]
        assert len(pids) == 3
        asyncio.run(load(served, seen, pids))
        served.wait_for("answers_running", 0)
        served.wait_for("answers_waiting", 0)
        grown = {pid: after - seen.memory[0][pid] for pid, after in seen.memory[1].items()}
        print(f"{SECONDS:g} s: {dict(seen.counts)}, grown by {[size >> 10 for size in grown.values()]} KiB")
        assert seen.counts["answered"] > NUM_CLIENTS and seen.counts["left"] > NUM_CLIENTS / 4
        assert all(seen.counts[kind] for kind in MISCHIEF)
        assert served.figure("cancelled_answers_total") > 0
        assert max(grown.values()) < MOST_GROWTH_BYTES, grown
        served.started.signal(signal.SIGTERM)
        ended = served.started.end(60)
    assert ended.exit_code == 0, ended.err
    assert "Traceback" not in ended.err
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    with pytest.raises(OSError):
        served.get("/health")
