"""Tokens per second of a server over `penstock generate`, and the wait for its first tokens in decode steps.

Server and generation are commands of their own on the same model, and take turns; clients share the machine with them.
"""

import argparse
import asyncio
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import main, new_parser, progress, spread
from benchmarks.generate import Generation, llama
from penstock.cli.options import Parser

_HOST = "127.0.0.1"
WHOLE, STREAMED, GENERATE = "server, whole answers", "server, streamed answers", "generate"


_NUM_DECODING, _NUM_FIRST_TOKENS = 8, 20


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compare both kinds of serving with generation, and measure first tokens."""
    generation = replace(
        Generation.of(),
        num_layers=given.layers,
        hidden_size=given.hidden_size,
        num_prompts=given.clients,
        prompt_tokens=given.prompt_tokens,
        new_tokens=given.new_tokens,
    )
    progress(generation.described)
    # Of server and generation alike.
    layout = ["--pp", str(given.ranks), "--rows", str(-(-given.clients // given.ranks))]
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name) / "model"
        _write_model(folder, generation)
        rates: dict[str, list[float]] = {GENERATE: [], WHOLE: [], STREAMED: []}
        with _server(folder, layout) as port:
            for _ in range(given.rounds):
                rates[GENERATE].append(_generate(folder, generation, layout))
                rates[WHOLE].append(asyncio.run(_all_answers(port, generation, stream=False)))
                rates[STREAMED].append(asyncio.run(_all_answers(port, generation, stream=True)))
            steps = asyncio.run(_first_tokens(port, generation))
    median = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "tokens_per_s": {name: spread(found) for name, found in rates.items()},
        "over_generate": {name: median[name] / median[GENERATE] for name in (WHOLE, STREAMED)},
        **steps,
    }


def _write_model(folder: Path, generation: Generation) -> None:
    """Random weights in Hugging Face's form, and a tokenizer whose words are numbers: every token has text to send."""
    import torch
    from tokenizers import Tokenizer, decoders, models

    torch.manual_seed(0)
    llama(replace(generation, new_tokens=4 * generation.new_tokens)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"Ġ{number}": number for number in range(generation.vocab_size)}, "Ġ0"))
    words.decoder = decoders.ByteLevel()
    words.save(str(folder / "tokenizer.json"))


def _generate(folder: Path, generation: Generation, layout: list[str]) -> float:
    """Tokens per second of `penstock generate`, from its first batch to its last."""
    prompts = folder.with_name("prompts.jsonl")
    lines = [json.dumps({"tokens": tokens}) for tokens in generation.prompts(generation.num_prompts)]
    prompts.write_text("\n".join(lines) + "\n")
    answers = folder.with_name("answers.jsonl")
    words = ["generate", str(folder), "--file", str(prompts), "--output", str(answers), "--json", "--temperature", "0"]
    words += ["--ignore-end", "--max-new-tokens", str(generation.new_tokens), *layout]
    ended = subprocess.run([sys.executable, "-m", "penstock", *words], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"penstock generate failed: {ended.stderr}")
    answers.unlink()
    return json.loads(ended.stdout)["tokens_per_s"]


@contextmanager
def _server(folder: Path, layout: list[str]) -> Iterator[int]:
    """A server of the model; yields its port, and ends it."""
    words = ["serve", str(folder), "--port", "0", "--max-waiting", "256", *layout]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise RuntimeError(f"penstock serve ended with exit code {process.wait()}")
        yield int(said.partition("/v1")[0].rpartition(":")[2])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


# ---- clients


async def _all_answers(port: int, generation: Generation, stream: bool) -> float:
    """Tokens per second of as many clients as there are prompts, from the first request to the last answer."""
    body = {"max_tokens": generation.new_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    prompts = generation.prompts(generation.num_prompts)
    start_s = time.perf_counter()
    counts = await asyncio.gather(*(_count_tokens(port, {**body, "prompt": prompt}) for prompt in prompts))
    wall_s = time.perf_counter() - start_s
    if counts != [generation.new_tokens] * len(prompts):
        raise RuntimeError(f"the server gave answers of {min(counts)} to {max(counts)} tokens")
    return sum(counts) / wall_s


async def _count_tokens(port: int, body: dict[str, Any]) -> int:
    """The new tokens of one answer; parts are received as they come, and only the one that counts is read."""
    if body["stream"]:
        body = {**body, "stream_options": {"include_usage": True}}
    async with _reply_lines(port, {"model": "model", **body}) as lines:
        found = [line async for line in lines if b'"usage"' in line]
    return _content(found[-1])["usage"]["completion_tokens"]


async def reply_parts(port: int, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of one completion: all of it, or part by part if it is streamed. The client goes if it is closed.

    Raises:
        RuntimeError: it was refused.
    """
    async with _reply_lines(port, body) as lines:
        async for line in lines:
            # Sizes of pieces and blank lines stand between.
            if line.startswith((b"data: {", b"{")):
                yield _content(line)


@asynccontextmanager
async def _reply_lines(port: int, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
    """The lines of the reply to one completion after the first, as they come."""
    reader, writer = await asyncio.open_connection(_HOST, port)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server said {status!r} and {await reader.read()!r}")
        yield _lines(reader)
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    left = b""
    while piece := await reader.read(1 << 16):
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            yield line
    yield left


def _content(line: bytes) -> dict[str, Any]:
    return json.loads(line.removeprefix(b"data: "))


async def _first_tokens(port: int, generation: Generation) -> dict[str, Any]:
    """The time to the first token of a short prompt, in the steps that others decode at the same time."""
    prompts = generation.prompts(_NUM_DECODING + _NUM_FIRST_TOKENS)
    # With log-probabilities each token comes at once, not only each whole character.
    common = {"model": "model", "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 0}
    times_s: list[list[float]] = [[] for _ in range(_NUM_DECODING)]

    async def decode(place: int) -> None:
        """Decode on and on, noting when each token comes."""
        while True:
            times_s[place].append(float("nan"))  # between two answers lies no step
            length = generation.config.max_length * 2
            body = {**common, "prompt": prompts[place], "max_tokens": length}
            async for _ in reply_parts(port, body):
                times_s[place].append(time.perf_counter())

    others = [asyncio.create_task(decode(place)) for place in range(_NUM_DECODING)]
    waits_s = []
    for prompt in prompts[_NUM_DECODING:]:
        await asyncio.sleep(0.3)
        start_s = time.perf_counter()
        async for _ in reply_parts(port, {**common, "prompt": prompt[:8], "max_tokens": 1}):
            waits_s.append(time.perf_counter() - start_s)
            break
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    steps_s = [b - a for own in times_s for a, b in itertools.pairwise(own) if b > a]
    step_s = statistics.median(steps_s)
    return {
        "decode_step_ms": step_s * 1e3,
        "first_token_ms": spread([wait_s * 1e3 for wait_s in waits_s]),
        "first_token_in_steps": spread([wait_s / step_s for wait_s in waits_s]),
    }


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("serve", __doc__, "--clients 16 --new-tokens 32")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--hidden-size", type=int, default=512, help="width of the model")
    parser.add_argument("--clients", type=int, default=64, help="clients at the same time")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the pipeline")
    parser.add_argument("--rounds", type=int, default=3, help="of each side, in turn")
    return parser


if __name__ == "__main__":
    sys.exit(main("serve"))
