"""A server whose stages are on two hosts: it answers as one process does, and says so when one is lost."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hosts import Host, Rendezvous, three_hosts, why_no_hosts
from tests.e2e.serving import serving, write_model
from tests.e2e.training import Started

pytestmark = pytest.mark.subject(
    "src/penstock/cli/**/*.py",
    "src/penstock/engine/**/*.py",
    "src/penstock/parallel/*.py",
    "src/penstock/runtime/**/*.py",
    "src/penstock/serve/*.py",
)

PORT = 8123
PROMPT = {"model": "model", "prompt": [5, 3, 8], "max_tokens": 24, "temperature": 0.9, "seed": 4}
ASK = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"content-type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=60) as response:
        print(json.dumps([response.status, response.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


def ask(host: Host, server: Host, path: str, content: Any = None) -> tuple[int, str]:
    """Status and body, from a client on a host; status 0 where nobody answers."""
    body = "" if content is None else json.dumps(content)
    done = host.run(sys.executable, "-c", ASK, f"http://{server.address}:{PORT}{path}", body, limit_s=120)
    status, text = json.loads(done.stdout)
    return status, text


def text_of(body: str) -> str:
    return json.loads(body)["choices"][0]["text"]


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
@pytest.mark.shows(137)
@pytest.mark.parametrize("is_cut", [False, True], ids=["killed", "cut off"])
def test_stages_on_two_hosts_answer_as_one_process_until_a_host_is_lost(tmp_path: Path, is_cut: bool) -> None:
    model = write_model(tmp_path)
    with serving(model, "--name", "model") as alone:
        status, expected = alone.post("/v1/completions", PROMPT)
        assert status == 200
    with three_hosts() as (first, second, third), third.store() as endpoint:
        meet = Rendezvous(endpoint, nodes="2", num_processes=1)
        words = [str(model), "--pp", "2", "--name", "model", "--timeout", "8"]
        words += ["--address", first.address, "--port", str(PORT)]
        with first.start(meet, *words, command="serve") as here, second.start(meet, *words, command="serve") as there:
            wait_for_server(first, here)
            # Only the first host listens, and another reaches it.
            assert ask(second, second, "/health")[0] == 0
            status, body = ask(second, first, "/v1/completions", PROMPT)
            assert (status, text_of(body)) == (200, expected["choices"][0]["text"])
            if is_cut:
                second.cut_off()
            else:
                there.stop()
            lost = time.monotonic()
            status, body = ask(first, first, "/v1/completions", PROMPT | {"max_tokens": 50})
            # A cut line is silent, so it is noticed later; after the end nobody answers.
            assert status in ((503,) if is_cut else (503, 0)), body
            assert status == 0 or "the server has failed" in body
            ended = here.end_of_agent()
            assert time.monotonic() - lost < 60
    assert ended.exit_code != 0
    (told,) = [line for line in ended.err.splitlines() if line.startswith("penstock: process 0")]
    assert "rank 1" in told, told


def wait_for_server(host: Host, started: Started) -> None:
    deadline = time.monotonic() + 120
    while ask(host, host, "/health")[0] != 200:
        assert started.process.poll() is None, started.stop()
        assert time.monotonic() < deadline, "the server did not start in time"
        time.sleep(0.2)
