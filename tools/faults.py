"""Disturbs small training runs at random, and compares each with one that nothing disturbed, bit for bit.

    make faults ARGS="--minutes 30 --seed 1"

Processes are killed, stopped and interrupted at any moment, from their start on; disks fill up, the network between
two hosts is cut, files of checkpoints are damaged. After each, the same command goes on. When a run has come to its
end, the numbers of all its steps and every bit that its last checkpoint holds must be those of the undisturbed run.
Prints a table, and exits 1 when anything was lost, with the run's folder kept. Needs root and iproute2 for the hosts,
and goes without them.
"""

import argparse
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.hosts import JOIN_TIMEOUT_S, Host, Rendezvous, three_hosts, why_no_hosts
from tests.e2e.training import Ended, Started, exact_metrics, last_step, write_run

STEPS = 150
# Between one fault and the next.
MOST_STEPS, MOST_START_S = 20, 5.0
END_LIMIT_S = 60.0
LAYOUTS = {
    "pp 2": ("--parallel.pp", "2"),
    "pp 2, zb-v": ("--parallel.pp", "2", "--schedule.name", "zb-v"),
    "dp 2, zero": ("--parallel.pp", "1", "--parallel.dp", "2"),
    "tp 2": ("--parallel.pp", "1", "--parallel.tp", "2"),
    "dp 2 x pp 2": ("--parallel.pp", "2", "--parallel.dp", "2"),
}
HOSTS = "pp 2 over two hosts"


class Lost(Exception):
    """A run that did not keep its word; the text says how."""


@dataclass
class Run:
    """A run that is started again and again."""

    file: Path
    output: Path
    words: tuple[str, ...]
    #: the two hosts it runs on, and that of the store at which they meet; empty for a local run
    hosts: tuple[Host, ...] = ()
    #: the commands under way, one a host
    commands: list[Started] = field(default_factory=list)

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        words = [str(self.file), *self.words, "--parallel.timeout_s", "15"]
        with contextlib.ExitStack() as stack:
            if self.hosts:
                meet = Rendezvous(stack.enter_context(self.hosts[2].store()), nodes="2", num_processes=1)
                self.commands = [host.start(meet, *words) for host in self.hosts[:2]]
                for command in self.commands:
                    # torchrun leaves a folder of temporary files behind: it goes with the campaign's.
                    command.environ["TMPDIR"] = str(self.file.parent)
                    stack.enter_context(command)
            else:
                self.commands = [stack.enter_context(Started(words))]
            yield

    def ended(self) -> list[Ended]:
        """Wait until all commands have ended, and see that they explained themselves."""
        # An agent that never hears of the other one gives up by itself.
        limit_s = JOIN_TIMEOUT_S * bool(self.hosts) + END_LIMIT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        try:
            found = [c.end_of_agent(limit_s) if self.hosts else c.end(limit_s) for c in self.commands]
        except (subprocess.TimeoutExpired, AssertionError):
            raise Lost(f"did not end within {limit_s:.0f} s") from None
        for ended in found:
            # torchrun ends in a traceback of its own.
            if self.hosts:
                continue
            if "Traceback" in ended.err:
                raise Lost(f"ended in a traceback:\n{ended.err}")
            if ended.exit_code == 0 and last_step(self.output) < STEPS:
                raise Lost(f"ended after step {last_step(self.output)} with the exit code of a run that is done")
        return found

    def wait(self, chance: random.Random) -> bool:
        """Wait for a random moment, of the start or of the steps that follow; False if the run ends before."""
        begun, at_s = time.monotonic(), chance.uniform(0.0, MOST_START_S)
        at_step = last_step(self.output) + chance.randint(1, MOST_STEPS)
        early = chance.random() < 0.3
        while all(command.process.poll() is None for command in self.commands):
            if (early and time.monotonic() > begun + at_s) or (not early and last_step(self.output) >= at_step):
                return True
            time.sleep(0.002)
        return False

    def one(self, chance: random.Random) -> Started:
        return chance.choice(self.commands)

    def checkpoints(self) -> list[Path]:
        return sorted((self.output / "checkpoints").glob("step-*"))


# ---- faults of a run under way


def kill_a_rank(run: Run, chance: random.Random) -> None:
    if workers := run.one(chance).workers():
        _signal(chance.choice(workers), signal.SIGKILL)
    else:
        kill_everything(run, chance)


def kill_the_command(run: Run, chance: random.Random) -> None:
    run.one(chance).signal(signal.SIGKILL)
    for command in run.commands:
        while command.workers():
            time.sleep(0.01)
        command.kill()


def kill_everything(run: Run, chance: random.Random) -> None:
    for command in run.commands:
        command.kill()


def ask_to_end(run: Run, chance: random.Random) -> None:
    number = chance.choice([signal.SIGTERM, signal.SIGINT])
    for command in run.commands:
        command.signal(number)


def insist_on_an_end_while_a_rank_is_stopped(run: Run, chance: random.Random) -> None:
    if workers := run.one(chance).workers():
        _signal(chance.choice(workers), signal.SIGSTOP)
    for _ in range(2):
        ask_to_end(run, chance)
        time.sleep(chance.uniform(0.05, 0.5))


def fill_the_disk(run: Run, chance: random.Random) -> None:
    """No file of a rank may grow beyond a random size from now on."""
    limit = chance.choice([0, 100, 1000, 10_000])
    for pid in run.one(chance).workers():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))


def cut_the_network(run: Run, chance: random.Random) -> None:
    host = chance.choice(run.hosts[:2])
    host.cut_off()
    try:
        run.ended()
    finally:
        host.connect()


# ---- faults of its files, between two starts


def flip_a_bit_in(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut_a_file_of(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def remove_a_file_of(path: Path, chance: random.Random) -> None:
    path.unlink()


ACTS: tuple[Callable[[Run, random.Random], None], ...] = (
    kill_a_rank,
    kill_the_command,
    kill_everything,
    ask_to_end,
    insist_on_an_end_while_a_rank_is_stopped,
    fill_the_disk,
)
DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (flip_a_bit_in, cut_a_file_of, remove_a_file_of)


def disturb(run: Run, chance: random.Random) -> str | None:
    """One fault, and the end of what it met; returns its name, None if the run had come to its end."""
    if len(run.checkpoints()) > 1 and chance.random() < 0.3:
        damage = chance.choice(DAMAGES)
        damage(chance.choice([path for path in run.checkpoints()[-1].iterdir() if path.stat().st_size]), chance)
        return f"{_named(damage)} the newest checkpoint"
    with run.started():
        if not run.wait(chance):
            run.ended()
            return None
        act = chance.choice([*ACTS, cut_the_network] if run.hosts else ACTS)
        step = last_step(run.output)
        try:
            act(run, chance)
            # Where the disk is full at a moment without writing, the run may go on to its end.
            run.ended()
        except Lost as lost:
            raise Lost(f"after {_named(act)} at step {step}: {lost}") from None
    return _named(act)


def differences(run: Run, expected: Path, whole: bool) -> str | None:
    """What is not as in the undisturbed run; `whole`: nothing may be missing either."""
    told, wanted = exact_metrics(run.output), exact_metrics(expected)
    for key, number in told.items():
        if wanted.get(key) != number:
            return f"step {key[0]}: {key[1]} is {number}, not {wanted.get(key)}"
    if not whole:
        return None
    if missing := wanted.keys() - told.keys():
        return f"{len(missing)} numbers are missing, the first {min(missing)}"
    name = run.checkpoints()[-1].name
    kept, wanted = (contents(folder / "checkpoints" / name) for folder in (run.output, expected))
    return next((f"{name}: {key} differs" for key in kept | wanted if kept.get(key) != wanted.get(key)), None)


def contents(checkpoint: Path) -> dict[str, bytes]:
    """All that a run goes on from, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}


def campaign(run: Run, expected: Path, chance: random.Random, go_on: Callable[[], bool]) -> Iterator[str]:
    """Disturb a run until it has come to its end or the time is up, and go through to its end; yields the faults."""
    while go_on():
        fault = disturb(run, chance)
        if (found := differences(run, expected, whole=False)) is not None:
            raise Lost(f"after {fault}: {found}")
        if fault is None:
            break
        yield fault
    with run.started():
        run.ended()
    if (found := differences(run, expected, whole=True)) is not None:
        raise Lost(f"at the end: {found}")


def undisturbed(folder: Path, words: Sequence[str]) -> Path:
    with Started([str(write_run(folder, "undisturbed", STEPS)), *words]) as started:
        ended = started.end()
    assert ended.exit_code == 0, ended.err
    return folder / "undisturbed"


def main() -> int:
    parser = argparse.ArgumentParser(description="Disturb small runs at random; compare each with an undisturbed one.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="of faults, moments and layouts")
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, HOSTS], default=[*LAYOUTS, HOSTS], metavar="LAYOUT")
    parser.add_argument("--faults", type=int, default=10**9, help="end after this many")
    options = parser.parse_args()
    chance, counts, num_runs = random.Random(options.seed), Counter[tuple[str, str]](), 0
    deadline, begun = time.monotonic() + 60 * options.minutes, time.monotonic()
    folder, expected = Path(tempfile.mkdtemp(prefix="penstock-faults-")), dict[str, Path]()
    layouts = [layout for layout in options.layouts if layout != HOSTS or not why_no_hosts()]

    def go_on() -> bool:
        return time.monotonic() < deadline and counts.total() < options.faults

    while go_on():
        layout = chance.choice(layouts)
        words = LAYOUTS.get(layout, LAYOUTS["pp 2"])
        base = folder / layout.replace(" ", "-")
        if layout not in expected:
            base.mkdir()
            expected[layout] = undisturbed(base, words)
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(three_hosts()) if layout == HOSTS else ()
            name, num_runs = f"run-{num_runs}", num_runs + 1
            run = Run(write_run(base, name, STEPS), base / name, words, hosts)
            try:
                for fault in campaign(run, expected[layout], chance, go_on):
                    counts[layout, fault] += 1
                    minutes = (time.monotonic() - begun) / 60
                    print(f"{minutes:5.1f} min  {layout:<20} step {last_step(run.output):>3}  {fault}", flush=True)
            except Lost as lost:
                print(f"{layout}, seed {options.seed}: {lost}\nits folder is {run.output}", file=sys.stderr)
                return 1
            shutil.rmtree(run.output)
    shutil.rmtree(folder)
    print(table(counts, layouts))
    print(f"{counts.total()} faults in {num_runs} runs of {STEPS} steps, none with a number or a bit lost")
    return 0


def table(counts: Counter[tuple[str, str]], layouts: Sequence[str]) -> str:
    faults = sorted({fault for _, fault in counts})
    rows = [[fault, *(str(counts[layout, fault] or "") for layout in layouts)] for fault in faults]
    lines = [["fault", *layouts], ["---"] * (1 + len(layouts)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _named(act: Callable[..., object]) -> str:
    return act.__name__.replace("_", " ")


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
