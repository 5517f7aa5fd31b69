"""What can go wrong between ranks, by name."""


class PipelineError(RuntimeError):
    """Ranks of one pipeline disagree, or a rank can not go on; the message names ranks, actions and what is awaited."""


class TransportError(PipelineError):
    """A message was not sent or did not arrive; the message names the link, the action and the time waited."""


class Deadlock(PipelineError):
    """No rank of an in-process run can go on; the message says for each rank what it waits for."""
