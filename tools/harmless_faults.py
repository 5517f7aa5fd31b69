"""Faults that change nothing a user sees, each with the reason; `tools/mutants.py` leaves them out and counts them."""

from nearest_tests import PACKAGE
from small_faults import Fault

#: file of the package -> how the changed line reads with the fault -> why no test can notice it
HARMLESS: dict[str, dict[str, str]] = {
    "engine/checkpoint/checkpointer.py": {
        "_MAX_FILES = (63)": "into how many files a rank's part is divided at most",
        "reason = (error.strerror or (str())).lower()": "the system's errors have a strerror",
        "self.refused[path] = reasons[(-1)]": "the reason of any rank is one",
    },
    "engine/folders/export.py": {
        """((staging / CONFIG_FILE).write_text(json.dumps(content, indent=2) + '\\n'))""": "JSON is written in ASCII",
    },
    "engine/generation/prompts.py": {
        "if max(tokens, default=(-1)) >= limits.vocab_size:": "a vocabulary has a token",
    },
    "engine/generation/requests.py": {
        "_next_prompt: int = field(default=(1), init=False)": "numbers of prompts only tell them apart",
    },
    "engine/optimizer/optimizer.py": {
        "self._counted = [as_real(view) for name, view in (sorted(gradients)) if name in counted]": (
            "no two have one name"
        ),
    },
    "engine/rehearsal/counted.py": {
        "return (len())": "only tests ask a transport for it, and none a rehearsal's",
    },
    "engine/rehearsal/step.py": {
        'source, target = (args[(-1)], kwargs.get("device")) if func is _TO_COPY else (args[1], args[0].device)': (
            "a tensor is all that is given to the operation without a name"
        ),
    },
    "engine/weight_transfer.py": {
        "self._move(pieces, (source.get(name)), target.get(name, ()))": "is read only where the rank has a part",
        "pass # self._transfers.clear()": "those of a closed engine are not asked for again",
    },
    "model/cpu/fixed_tiles.py": {
        "mask = None if sees is None else sees[0].expand(-1, (1), q_RHLK.shape[2], -1)": "all heads see alike",
    },
    "model/layers/dense.py": {
        "turned_THK.addcmul_((swapped_THK.to()), sin_T1K)": "a CPU promotes the factor itself",
    },
    "model/cpu/quantized.py": {
        "_PART = (19)": "how many elements are rounded at a time",
        "return y_TO.to(x.dtype).reshape(*x.shape[:-1], y_TO.shape[(1)])": "the last of two dimensions",
    },
    "model/sampling.py": {
        "return torch.empty_like(left_out_SV).scatter_((1), order_SV, left_out_SV)": "the last of two dimensions",
    },
    "model/transformers/units.py": {
        "full = (1) == longest": "whether rows are copied where all of them are taken",
        "full = (int(ends_B1.min())) == longest": "whether rows are copied where all of them are taken",
    },
    "model/cpu/host_memory.py": {
        "_KEEP_BYTES = 1 << (29)": "how much freed memory is kept",
        "trim((1))": "how many bytes are kept at the end",
        "_KEEP_BYTES = 1 << (31)": "how much freed memory is kept",
    },
    "runtime/stage.py": {
        "peak: int = (-1)": "is set before each run",
    },
    "schedule/partition.py": {
        "least = max(start + (1) * num_after, bisect_left(until, until[end] - spare))": (
            "leaves out earlier what leaves later ranks too few units anyway"
        ),
    },
    "schedule/builders/squeeze.py": {
        "numbers = {(Op.F, second): (2), (Op.I, second): 2, (Op.I, first): 3, (Op.F, first): 0}": (
            "only the first pass and the last are told from the others"
        ),
    },
    "schedule/search/weave.py": {
        "while not backward and (live + 1 + share * len(waiting) >= max_tapes):": "the limit has a tolerance added",
    },
}


def is_harmless(fault: Fault) -> bool:
    known = HARMLESS.get(fault.path.relative_to(PACKAGE).as_posix(), {})
    return bool(known) and fault.reads in known
