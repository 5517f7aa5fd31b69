"""The settings of models that only score and generate, and of the server: where it listens, and what it takes."""

from dataclasses import dataclass

from penstock.settings.declare import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    Bounds,
    NamedValue,
    Settings,
    setting,
)


class Quantize(NamedValue):
    """The whole numbers that weights of products are kept as.

    NONE: as they are. INT8: weights of 8 bits, for activations that are rounded to 8 bits row by row. INT8_WEIGHTS and
    INT4: weights of 8 or 4 bits alone, for activations in bf16. AUTO: INT8 where that is faster than NONE.
    """

    NONE = "none"
    AUTO = "auto"
    INT8 = "int8"
    INT8_WEIGHTS = "int8-weights"
    INT4 = "int4"


@dataclass(frozen=True)
class InferenceConfig(Settings, section="inference"):
    """Settings of models that only score and generate.

    >>> InferenceConfig("int8").quantize is Quantize.INT8
    True
    """

    quantize: Quantize = setting(
        Quantize.NONE,
        "Keep weights as whole numbers of 8 or 4 bits (dense models); int8 rounds activations as well; auto "
        "is int8 where that is faster.",
    )


@dataclass(frozen=True)
class ServeConfig(Settings, section="serve"):
    """The address of a server, and the limits of what it takes; more than these is refused, never cut.

    >>> ServeConfig(port=0).address
    '127.0.0.1'
    """

    address: str = setting("127.0.0.1", "Where to listen; 0.0.0.0 stands for all networks.")
    port: int = setting(8000, "The port; 0 takes any free one.", Bounds(least=0, below=1 << 16))
    name: str | None = setting(None, "The model's name for clients; left out, that of its folder.")
    api_key_file: str | None = setting(None, "File with the key that clients must give.")
    chat_template: str | None = setting(None, "File with the chat template; left out, the model's own.")
    max_length: int | None = setting(
        None, "Tokens of a prompt with its answer, at most; left out, the model's own limit, up to 4096.", AT_LEAST_1
    )
    max_waiting: int = setting(128, "Answers that may wait beside those computed; more are refused (429).", AT_LEAST_0)
    max_choices: int = setting(16, "Answers of one request, at most.", AT_LEAST_1)
    max_body_bytes: int = setting(1 << 20, "Bytes of a request, at most.", AT_LEAST_1)
    max_connections: int = setting(1024, "Connections at the same time, at most; others are refused (503).", AT_LEAST_1)
    log_requests: bool = setting(True, "Write a line for each request on standard error.")
    drain_s: float = setting(60.0, "Seconds that running answers may take once the server is told to end.", ABOVE_0)
