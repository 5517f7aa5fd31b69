"""Running a proved program: stages, lanes, tapes, the executor, the transport and the trace."""

from penstock.runtime.decode.decoders import DecodeForm, Decoders, FixedDecoder
from penstock.runtime.decode.loop import DecodeLoop, Generation, StageDecoder
from penstock.runtime.decode.relay import Ring, host_channels
from penstock.runtime.errors import CallbackError, Deadlock, PipelineError, StepError, TransportError
from penstock.runtime.executor import Executor, Feed, run_together
from penstock.runtime.message import Boundary, Header, Message
from penstock.runtime.recovery import Recovery, Watchdog
from penstock.runtime.stage import GraphSegment, Pairs, Stage, Tape, UnitCall
from penstock.runtime.trace import Awaited, Recorder
from penstock.runtime.transport import (
    DistributedTransport,
    InProcessHub,
    InProcessTransport,
    Line,
    Transport,
)

__all__ = [
    "Awaited",
    "Boundary",
    "CallbackError",
    "Deadlock",
    "DecodeForm",
    "DecodeLoop",
    "Decoders",
    "DistributedTransport",
    "Executor",
    "Feed",
    "FixedDecoder",
    "Generation",
    "GraphSegment",
    "Header",
    "InProcessHub",
    "InProcessTransport",
    "Line",
    "Message",
    "Pairs",
    "PipelineError",
    "Recorder",
    "Recovery",
    "Ring",
    "Stage",
    "StageDecoder",
    "StepError",
    "Tape",
    "Transport",
    "TransportError",
    "UnitCall",
    "Watchdog",
    "host_channels",
    "run_together",
]
