"""`penstock serve MODEL`: answers over HTTP, by OpenAI's interface."""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.models.session import IMPORTS, RING_OPTIONS, ModelCommand
from penstock.cli.options import PROCESSES, Parser, add_options, options_of, parallel_options, values_of
from penstock.cli.processes.launch import WorkerCommand
from penstock.cli.processes.machine import check_rows, options_here
from penstock.io.files import read_text
from penstock.settings import RingConfig, ServeConfig

if TYPE_CHECKING:
    from socket import socket

    from penstock.engine.engine import Engine
    from penstock.engine.folders.model_folder import ModelFolder
    from penstock.schedule import RingShape
    from penstock.serve.app import ServerParts

API_KEY = "PENSTOCK_API_KEY"
"""The environment variable with the key that clients must give."""

_SERVE = options_of(ServeConfig(), {"drain_s": "drain"})
_USUAL_LENGTH = 4096
# oneDNN and PyTorch's layer above it each keep code for every number of rows that a product has had, up to 1,024 of
# them, a quarter of a megabyte apiece: most of it for prompts' lengths that do not come again.
_KEEP_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
# A launcher passes on a signal that its workers may have been sent as well.
_SAME_SIGNAL_S = 1.0
_METAVARS = {
    "drain": "SECONDS",
    "address": "ADDRESS",
    "port": "PORT",
    "name": "NAME",
    "api_key_file": "FILE",
    "chat_template": "FILE",
}


def parser() -> Parser:
    parser = Parser(
        "penstock serve",
        f"""Serve the model in a folder, that of a run or of a Hugging Face model, by OpenAI's interface: completions
and chat completions, whole or streamed. Requests join and leave the running computation at any token; an answer is the
one that penstock generate gives for the same prompt, settings and seed, whatever else is computed. SIGTERM or Ctrl-C
drains: running answers are finished, new requests refused (503), and the exit code is 0; a second one ends them.
It listens on this machine alone unless --address says otherwise. Where the environment variable {API_KEY} or
--api-key-file gives a key, /v1 answers only who has it. There is no encryption: put a proxy in front of a network.""",
        examples=(
            ("penstock serve runs/demo", "http://127.0.0.1:8000/v1 for the clients of OpenAI"),
            ("penstock serve model/ --pp 2 --rows 32", "two stages, 32 answers in each of their slots"),
            "PENSTOCK_API_KEY=... penstock serve model/ --address 0.0.0.0 --port 80",
            'curl localhost:8000/v1/completions -d \'{"model": "demo", "prompt": "def "}\'',
        ),
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder of a run, or of a Hugging Face model")
    takes = parser.add_argument_group("what it takes")
    add_options(takes, _SERVE, _METAVARS)
    takes.add_argument("--host", dest="address", default=argparse.SUPPRESS, metavar="ADDRESS", help="as --address")
    Serve.add_options(
        parser.add_argument_group("how it runs (where no layout is given, as fits this machine)"), RING_OPTIONS
    )
    return parser


class Serve(ModelCommand):
    """One call of the command."""

    parser = staticmethod(parser)
    layout = parallel_options(("pp", *PROCESSES))
    chosen = ("pp", "threads")
    workers = WorkerCommand("penstock.cli.models.serve", "serves again", ("penstock.serve.server", *IMPORTS))

    #: what the server takes, and what goes round the ring
    config: ServeConfig
    ring: RingConfig

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        # Missing, they are named before anything starts.
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401

        self.config = ServeConfig(**values_of(self.given, _SERVE))
        self.ring = RingConfig(**values_of(self.given, RING_OPTIONS))

    @property
    def shape(self) -> "RingShape":
        """The rows that go round the ring, as for prompts without end."""
        from penstock.engine.generation.options import GenerateOptions

        ring = self.ring
        options = GenerateOptions(ring.num_slots, ring.rows_per_slot, ring.max_rows_per_slot, ring.prefill_tokens)
        return options.shape(1 << 30, self.parallel.pp)

    def length(self, model: "ModelFolder") -> int:
        """The tokens of a row of the KV cache."""
        return self.config.max_length or min(_USUAL_LENGTH, model.max_generated_length())

    def look(self) -> "ModelFolder":
        """Open the model. Raises: ValueError for what no number of processes could serve."""
        model, longest, shape = self.open_to_cut(), self.config.max_length, self.shape
        if longest is not None and longest > (most := model.max_generated_length()):
            raise ValueError(f"--max-length {longest} is more than the {most} tokens that {model.folder} generates")
        check_rows(shape.num_slots, shape.num_rows, self.length(model), model, self.parallel.device)
        return model

    def fit(self) -> list[str]:
        """The options of the layout that fits this machine. Raises: ValueError for a model that cannot be served."""
        model = self.look()
        return options_here(model, self.shape.num_rows, 1, self.parallel.device)

    def work(self) -> None:
        from penstock.engine.generation.options import GenerateOptions
        from penstock.serve.server import listening_socket

        is_first, config = self.group.rank == 0, self.config
        model = self.meeting.together("model", self.look)
        if is_first:
            logging.getLogger("penstock.serve").setLevel("INFO" if config.log_requests else "WARNING")
        shape, length = self.shape, self.length(model)
        self.meeting.refuse_differing("form", {"rows": shape.num_rows, "slots": shape.num_slots, "length": length})

        def prepare() -> "tuple[ServerParts, socket] | None":
            return (self._parts(model, shape), listening_socket(config.address, config.port)) if is_first else None

        prepared = self.meeting.together("address", prepare)
        os.environ.update(_KEEP_PRODUCTS | os.environ)
        # Answers are on their way from the first token to the last: half of the longest, on average.
        with self.open(model, (shape.rows_per_slot, length / 2)) as (engine, _):
            ending = threading.Event() if prepared is not None else None
            for number in (signal.SIGTERM, signal.SIGINT):
                # The other ranks end with the ring, which the first one closes.
                signal.signal(number, lambda *_: None if ending is None else ending.set())
            if prepared is None or ending is None:
                engine.generator.serve(None, shape, length, GenerateOptions())
            else:
                self._answer(engine, prepared, ending)

    def _answer(self, engine: "Engine", prepared: "tuple[ServerParts, socket]", ending: threading.Event) -> None:
        """Generate on the first rank until the server has been told to end."""
        from penstock.engine.generation.options import GenerateOptions
        from penstock.serve.server import http_thread

        parts, listener = prepared
        shape, length = self.shape, parts.model.limits.max_length
        with http_thread(parts, listener):
            threading.Thread(target=_drain, args=(parts, ending), name="penstock ending", daemon=True).start()
            host, port = listener.getsockname()[:2]
            place = f"[{host}]" if ":" in host else host
            print(
                f"serving {parts.model.name} at http://{place}:{port}/v1: {shape.num_rows} answers at a time, "
                f"each of up to {length} tokens with its prompt",
                flush=True,
            )
            try:
                engine.generator.serve(parts.mailboxes.queue, shape, length, GenerateOptions())
            except BaseException as error:
                parts.mailboxes.fail(f"the server has failed: {error}")
                raise

    def _parts(self, model: "ModelFolder", shape: "RingShape") -> "ServerParts":
        """The server's part on the rank of the first stage. Raises: ValueError for an unusable key or template."""
        from penstock.data.chat_template import ChatTemplate
        from penstock.engine.generation.requests import RequestQueue
        from penstock.model import Limits
        from penstock.serve.app import ServerParts
        from penstock.serve.asked import ServedModel
        from penstock.serve.mailboxes import Mailboxes
        from penstock.serve.metrics import ServerMetrics

        config, file = self.config, self.config.chat_template
        served = ServedModel(
            name=config.name or model.folder.resolve().name,
            config=config,
            created=int(time.time()),
            tokenizer=model.tokenizer,
            template=ChatTemplate.load(model.tokenizer_folder, None if file is None else Path(file)),
            limits=Limits(model.vocab_size, self.length(model)),
            max_unfinished=shape.num_rows + config.max_waiting,
            end_tokens=model.end_tokens,
            sampling=model.sampling,
        )
        if served.template is not None:
            import transformers.utils.chat_template_utils  # noqa: F401, so that it is there for the first request
        rows, waiting = shape.num_rows, config.max_waiting
        mailboxes = Mailboxes(lambda publish: RequestQueue(rows, waiting, model.tokenizer, publish))
        return ServerParts(served, mailboxes, ServerMetrics(lambda: mailboxes.queue.counts), self._key())

    def _key(self) -> str | None:
        """The key that clients must give; None for none. Raises: ValueError for an unusable one."""
        file = self.config.api_key_file
        key, where = (os.environ.get(API_KEY), f"the environment variable {API_KEY}")
        if file is not None:
            key, where = read_text(file), file
        key = key and key.strip()
        if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
            raise ValueError(f"{where} holds no usable key; give printable ASCII characters without blanks")
        return key


main = Serve.main


def _drain(parts: "ServerParts", ending: threading.Event) -> None:
    """Once a signal has come, let running answers finish; end them after a while, or at a second signal."""
    ending.wait()
    parts.mailboxes.close("the server is ending; no new requests are taken")
    print("penstock: ending once the running answers are finished", file=sys.stderr)
    time.sleep(_SAME_SIGNAL_S)
    ending.clear()
    ending.wait(parts.model.config.drain_s)
    if num_left := sum(parts.mailboxes.queue.counts):
        print(f"penstock: {num_left} answers were cut off; --drain gives them more time", file=sys.stderr)
    parts.mailboxes.fail("the server has ended before the answer was finished")
