"""The end of a process whose engine was never closed: no thread of ours may be inside torch by then."""

import subprocess
import sys
import time

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

WATCHING = """
import sys, time
from datetime import timedelta

from torch.distributed import TCPStore
from penstock.runtime.recovery import _Watch

class Recovery:
    pass

class Gone:
    def set(self, key, value):
        raise RuntimeError("the store has gone with its process")

class Lasting:
    def __del__(self):
        time.sleep(1.5)  # the interpreter is ending

recovery, lasting = Recovery(), Lasting()
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=60))
watch = _Watch(recovery, store, 0)
watch.start()
time.sleep(0.3)
print("ending", flush=True)
watch.end(Gone())
"""


SENDING = """
import sys, time
from datetime import timedelta

import torch
from penstock.runtime.transport import _ThreadedSends
from penstock.schedule import Channel, Direction
from torch.distributed import TCPStore

class Waiting:
    def wait(self):
        try:
            TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=60)).wait(["never"])
        except RuntimeError:
            pass

class Lasting:
    def __del__(self):
        time.sleep(1.5)  # the interpreter is ending

lasting = Lasting()
sends = _ThreadedSends(Channel(0, 1, Direction.FORWARD), 60.0)
message = torch.zeros(1 << 20)
sends.add(([message], [Waiting()]))
time.sleep(0.3)
print("ending", flush=True)
"""


@pytest.mark.shows(152)
@pytest.mark.parametrize("script", [WATCHING, SENDING], ids=["recovery", "sends"])
def test_a_process_ends_well_though_its_store_goes_at_the_same_time(script: str) -> None:
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-c", script, str(held.port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ending\n", process.stderr.read()
        time.sleep(0.4)
        del held
        # A thread that comes back from torch while the interpreter ends would abort the process.
        assert process.wait(60) == 0, process.stderr.read()
