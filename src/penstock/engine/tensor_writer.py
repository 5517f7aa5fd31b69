"""Writing tensors through torch's distributed checkpoint, which takes half a second to import: only who saves does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], file_of: dict[str, int]) -> list[str]:
    """Write `tensors`, each into the file of that number, and give the names of the files, which are on the disk then.

    Each process follows a plan of its own, so torch has nothing to send between them (it would pickle).
    """
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    return sorted({result.storage_data.relative_path for result in results})
