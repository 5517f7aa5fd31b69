"""`penstock convert`: the model of a run, or of a Hugging Face folder, as a new Hugging Face folder."""

import re
import sys
from pathlib import Path

from penstock.cli.options import Parser, add_json
from penstock.cli.output import print_json, show_log, waiting

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parser() -> Parser:
    parser = Parser(
        "penstock convert",
        "Write the model of a run, or of a Hugging Face folder, as a new Hugging Face folder that transformers loads.",
        examples=(
            "penstock convert runs/tiny tiny-hf",
            "penstock convert Llama-3.2-1B smaller --dtype bf16 --max-shard-size 500MB",
            "penstock convert Llama-3.2-1B small --quantize int8",
        ),
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the folder of a run, or of a Hugging Face model")
    parser.add_argument("destination", type=Path, metavar="DESTINATION", help="a folder that does not exist yet")
    parser.add_argument("--dtype", help="fp32, bf16 or fp16 (default: as stored)")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of one file, such as 500MB (default 5GB)"
    )
    parser.add_argument("--quantize", choices=["int8"], help="weights of products as 8-bit numbers")
    parser.add_argument(
        "--merge-adapters",
        action="store_true",
        help="add a run's LoRA adapters to the weights, instead of writing them into the folder adapter inside",
    )
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    max_shard_bytes = parse_size(options.max_shard_size)
    if not options.source.is_dir():
        raise ValueError(f"there is no folder {options.source}; give that of a run, or one of Hugging Face's")
    from penstock.engine.folders.export import ExportOptions, to_hugging_face
    from penstock.engine.folders.model_folder import open_folder

    show_log()
    adapters_apart = open_folder(options.source).has_adapters and not options.merge_adapters
    export = ExportOptions(options.dtype, max_shard_bytes, options.merge_adapters, options.quantize is not None)
    with waiting(f"writing {options.destination}", sys.stderr, speaks=not options.json):
        step = to_hugging_face(options.source, options.destination, export)
    num_bytes = sum(path.stat().st_size for path in options.destination.rglob("*.safetensors"))
    if options.json:
        result = {"source": str(options.source), "destination": str(options.destination)}
        print_json({**result, "bytes": num_bytes, **({} if step is None else {"step": step})})
        return 0
    of_step = "" if step is None else f", those of step {step}"
    print(f"wrote {num_bytes / 1e6:,.1f} MB of weights into {options.destination}{of_step}")
    if adapters_apart:
        print(f"they are the base model's; its adapters are in {options.destination / 'adapter'}, as peft loads them")
    return 0


def parse_size(text: str) -> int:
    """Parse a size such as 500MB or 2GiB into bytes.

    Raises: ValueError for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None or float(match.group(1)) * unit < 1:
        raise ValueError(f"--max-shard-size {text!r} is not a size; give a number with B, KB, MB, GB, KiB, MiB or GiB")
    return int(float(match.group(1)) * unit)
