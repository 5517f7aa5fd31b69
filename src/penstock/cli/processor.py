"""The name of this machine's processor, which every figure is reported with."""

import platform
from pathlib import Path

_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
"""Instructions that decide how fast products of each kind are."""


def processor_name() -> str:
    """Its model, family and number, and those of its instructions that products use, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    model = found.get("model name", platform.machine())
    number = f", family {found['cpu family']} model {found['model']}" if "cpu family" in found else ""
    has = [feature for feature in _FEATURES if feature in found.get("flags", "").split()]
    return f"{model}{number}" + (f" ({', '.join(has)})" if has else "")
