"""What a device did, and when, is read from marks on its stream, whatever times the host launched it at."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import Engine, PackedBatch
from penstock.cli.main import main
from penstock.data import MicroBatchSpec
from penstock.draw.layers import RecordedStep, write_recorded_step
from penstock.engine.generation.answers import GenerateResult
from penstock.engine.pipeline import Surroundings
from penstock.parallel.collectives import Handle
from penstock.runtime import Awaited, Recorder, device_trace
from penstock.runtime.device_trace import DeviceRecorder
from penstock.schedule import Action, Direction, Op
from penstock.schedule.recording import CollectiveKind, PeerWait, Recording


@dataclass(eq=False)
class FakeEvent:
    """An event that a device passes at a known time, in ms."""

    device: FakeDevice
    time: float

    def synchronize(self) -> None:
        self.device.waited_for.append(self.time)

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        return end_event.time - self.time


@dataclass(eq=False)
class FakeDevice:
    """A device whose events come at times that a test gives, or else 1 ms after another."""

    times: list[float] = field(default_factory=list)
    #: the events so far, and the times of those that the host has waited for
    num_events: int = 0
    waited_for: list[float] = field(default_factory=list)

    def event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self, self.times.pop(0) if self.times else float(self.num_events))


MS = 1_000_000


@pytest.mark.shows(214)
def test_times_of_actions_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    # The host launches all within 9 ms, from 100 ms of its clock on; the device begins at 500 ms of its own.
    host_ms = iter(range(100, 200))
    monkeypatch.setattr(device_trace, "time", SimpleNamespace(perf_counter_ns=lambda: next(host_ms) * MS))
    device = FakeDevice([500.0, 501.0, 520.0, 535.0, 535.0, 550.0, 551.0, 560.0])
    recorder = DeviceRecorder(0, event=device.event)
    recorder.begin_step(1)
    forward = recorder.begin(Action(Op.F, 0, 0))
    recorder.awaits(forward, Awaited(Direction.FORWARD, 0, 0, 3))
    recorder.started(forward)
    recorder.end(forward)
    recorder.end(recorder.begin(Action(Op.SEND_F, 0, 0)))
    backward = recorder.begin(Action(Op.B, 0, 0))
    recorder.started(backward)
    recorder.end(backward)
    step = recorder.begin(Action(Op.STEP))
    assert recorder.doing == "in STEP"
    recorder.end(step)
    # From 500 to 551 it computed for 15 ms twice.
    assert recorder.idle_share(time_s=1000.0) == pytest.approx(1 - 30 / 51)
    assert device.waited_for == [551.0]
    # Its 0 is the host's 100 ms: there the host is never later, and at the first mark both are at one point.
    found = [(str(r.action), r.begin_ns // MS, r.start_ns // MS, r.end_ns // MS) for r in recorder.records()]
    assert found == [
        ("0F0", 101, 120, 135),
        ("0SEND_F0", 135, 135, 135),
        ("0B0", 135, 135, 150),
        ("STEP", 151, 151, 160),
    ]
    assert recorder.records()[0].waits == (PeerWait(3, 101 * MS),)
    recorder.begin_step(2)
    assert recorder.records() == []


@pytest.mark.shows(214)
def test_decoding_is_not_timed() -> None:
    device = FakeDevice()
    recorder = DeviceRecorder(0, event=device.event)
    with torch.inference_mode():
        recorder.begin_step(0)
        forward = recorder.begin(Action(Op.F, 0, 0))
        recorder.awaits(forward, Awaited(Direction.FORWARD, 0, 0, 3))
        recorder.started(forward)
        recorder.end(forward)
    assert device.num_events == 0 and recorder.records() == []
    assert GenerateResult((), 1.0, (), (3,), 3).idle_share is None
    assert GenerateResult((), 1.0, (0.5, 0.25), (3, 3), 3).idle_share == 0.625


@pytest.mark.shows(214)
def test_a_steps_idle_share_and_timeline_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(
        Surroundings, "recorder", lambda self, grid, place: DeviceRecorder(0, place, event=device.event)
    )
    engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    batch = PackedBatch.from_documents([torch.arange(5), torch.arange(3)])
    result = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=2))
    # One mark at the beginning, two for each of four actions, and the optimizer's step's beginning: 10 ms in all, of
    # which four actions took 1 ms each. Nobody waited for that step's end.
    assert result.idle_share == pytest.approx(5 / 9)
    assert device.waited_for == [10.0] and device.num_events == 11
    recording = engine.pipeline.recording()
    assert recording is not None
    computed = [(str(e.action), e.end - e.start) for e in recording.timeline.events[0]]
    times = {"0F0": 1.0, "0B0": 1.0, "0F1": 1.0, "0B1": 1.0, "0REDUCE_GRAD": 0.0, "STEP": 1.0}
    assert computed == [(name, pytest.approx(time)) for name, time in times.items()]
    engine.close()


@pytest.mark.shows(214)
@pytest.mark.parametrize("device, recorder", [("cuda", DeviceRecorder), ("cpu", Recorder)])
def test_a_pipeline_on_a_device_records_so(device: str, recorder: type[Recorder]) -> None:
    grid: Any = SimpleNamespace(device=torch.device(device), pp_rank=0)
    assert type(Surroundings().recorder(grid, None)) is recorder


class Done(Handle[object]):
    def wait(self) -> None: ...


@pytest.mark.shows(214)
def test_hidden_time_of_collectives_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = DeviceRecorder(0, event=FakeDevice().event)
    recorder.begin_step(1)
    forward = recorder.begin(Action(Op.F, 0, 0))
    recorder.started(forward)
    recorder.follow(CollectiveKind.ALL_TO_ALL, 4096, Done()).wait()
    recorder.end(forward)
    rows = [record.row() for record in recorder.records()], recorder.collective_rows()
    recording = Recording.gathered([rows[0]], [rows[1]], title="step", step=1, stages_per_rank=1)
    (sums,) = recording.collective_totals()[0].values()
    assert (sums.number, sums.num_bytes, sums.is_timed) == (1, 4096, False)
    write_recorded_step(tmp_path / "step.json", RecordedStep(recording))
    assert main(["trace", str(tmp_path / "step.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line.split() for line in lines if "all-to-all" in line]
    assert line == ["0", "all-to-all", "1", "0.00", "-", "-", "-"]
    assert main(["trace", str(tmp_path / "step.json"), "--json"]) == 0
    (totals,) = json.loads(capsys.readouterr().out)["collectives"]
    unknown = {"exposed": None, "hidden": None, "hidden_share": None}
    assert totals == {"all-to-all": {"number": 1, "num_bytes": 4096, **unknown}}
