"""A server of a small model in processes of its own, for tests."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.scripts import free_port
from tests.e2e.training import Started
from tests.hostile_tokenizers import PANICS
from tests.hugging_face import make_model, make_tokenizer

KEY = "a-key-for-tests"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'evil' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}<|im_start|>assistant {{ opening }}"
)
MAX_LENGTH = 256


def write_model(folder: Path) -> Path:
    """A Hugging Face model of a few thousand weights, with a tokenizer and a chat template."""
    folder = folder / "tiny"
    model: Any = make_model("llama", vocab_size=300, max_position_embeddings=MAX_LENGTH)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def let_tokenizer_panic(model: Path) -> Path:
    """Give a model's tokenizer a pattern that panics on `MANY`, and finds nothing in other texts."""
    content, hostile = json.loads((model / "tokenizer.json").read_text()), PANICS["a pattern that backtracks"]
    own = [hostile["pre_tokenizer"], content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": own}
    (model / "tokenizer.json").write_text(json.dumps(content))
    return model


@dataclass(frozen=True)
class Served:
    """A server that answers; started: its command."""

    started: Started
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        return self._answer(urllib.request.Request(self.url + path))

    def post(self, path: str, content: Any, key: str | None = None, limit_s: float = 60.0) -> tuple[int, Any]:
        """Status and JSON."""
        headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        status, text = self._answer(urllib.request.Request(self.url + path, body, headers), limit_s)
        return status, json.loads(text)

    def figure(self, name: str) -> float:
        """One of the server's metrics."""
        lines = self.get("/metrics")[1].splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"penstock_{name} ")))

    def wait_for(self, name: str, value: float, limit_s: float = 60.0) -> None:
        """Wait until a metric has a value."""
        deadline = time.monotonic() + limit_s
        while self.figure(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.figure(name)}"
            time.sleep(0.01)

    @staticmethod
    def _answer(request: urllib.request.Request, limit_s: float = 60.0) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextmanager
def serving(model: Path, *words: str, key: str | None = None) -> Iterator[Served]:
    """A server of the model, from its first answer to the end of the block."""
    port = free_port()
    environ = {} if key is None else {"PENSTOCK_API_KEY": key}
    with Started([str(model), "--port", str(port), *words], environ, command="serve") as started:
        served, deadline = Served(started, port), time.monotonic() + 120
        while True:
            try:
                assert served.get("/health")[0] == 200
                break
            except OSError:
                assert started.process.poll() is None, started.end(10)
                assert time.monotonic() < deadline, "the server did not start in time"
                time.sleep(0.05)
        yield served


def resident_bytes(pid: int) -> int:
    """The memory of a process that is in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
