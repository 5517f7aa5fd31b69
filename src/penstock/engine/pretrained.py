"""A model that is already there: a Hugging Face folder opened, checked, and given to an engine as units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from penstock.model import ModelConfig, ModelGroups, UnitSpec, decoder_units
from penstock.model.huggingface import config_from_json, config_to_json, names_of, read_config_json
from penstock.model.placed import Names, placed_units
from penstock.model.weight_files import MissingFile, WeightFiles
from penstock.parallel.exchange import together

T = TypeVar("T")


@dataclass(frozen=True)
class HuggingFaceForm:
    """How a model is written for transformers: its names there, its config.json, and the folder it came from.

    `describe` makes the config.json, and raises ValueError where no family of transformers is the model. `folder` is
    where tokenizer files are copied from; None where the model was made here.
    """

    names: Names
    describe: Callable[[], Mapping[str, Any]]
    folder: Path | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> HuggingFaceForm:
        """The form of a decoder that was made here."""
        return cls(names_of(config), lambda: config_to_json(config))


@dataclass(frozen=True)
class Pretrained:
    """A model in a folder, checked: its units take their values from there.

    `units` makes them for the groups that share them; nothing is read before a unit is initialised.
    """

    units: Callable[[ModelGroups], Sequence[UnitSpec]]
    hidden_size: int
    form: HuggingFaceForm
    config: ModelConfig | None = None


def open_pretrained(path: Path | str, native: bool = True) -> Pretrained:
    """Open a Hugging Face folder; every process that will hold a part of the model calls this at the same point.

    Configuration, names, shapes and the files' sizes are held against each other; no value is read.

    Raises:
        MissingFile: a FileNotFoundError with the path of what is missing; on every process if on one.
        ValueError: an architecture or a setting that can not be run so, damaged files, missing tensors, wrong shapes,
            or pickles; on every process if on one.
    """
    return _on_every_process(lambda: _open(Path(path), native))


def _open(folder: Path, native: bool) -> Pretrained:
    if not folder.is_dir():
        raise MissingFile(f"there is no folder {folder} to read a model from")
    content = read_config_json(folder)
    if not native:
        return _open_foreign(folder, content)
    config = config_from_json(content)
    names, files = names_of(config), WeightFiles.open(folder)

    def units(groups: ModelGroups) -> Sequence[UnitSpec]:
        return placed_units(decoder_units(config, groups=groups), names, files)

    units(ModelGroups())
    return Pretrained(units, config.hidden_size, HuggingFaceForm(names, lambda: content, folder), config)


def _open_foreign(folder: Path, content: Mapping[str, Any]) -> Pretrained:
    # Only now, since it loads transformers.
    from penstock.model.foreign import ForeignModel

    files = WeightFiles.open(folder)
    model = ForeignModel.open(files)
    placed = placed_units(model.units(), model.names, files)

    def units(groups: ModelGroups) -> Sequence[UnitSpec]:
        for axis, size in {"tp": groups.tp_size, "cp": groups.cp_size, "ep": groups.ep_size}.items():
            if size > 1:
                raise ValueError(f"transformers' own layers can not be shared over {axis} = {size}; native layers can")
        return placed

    return Pretrained(units, model.hidden_size, HuggingFaceForm(model.names, lambda: content, folder))


def _on_every_process(act: Callable[[], T]) -> T:
    """Act together with all processes, before an engine has its groups; the group made here is let go again."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return act()
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    try:
        return together(act, group, MissingFile)
    finally:
        dist.destroy_process_group(group)
