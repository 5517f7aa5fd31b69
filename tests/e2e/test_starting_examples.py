"""An example that needs several processes says how to start it, where it is started as any other script."""

import os
from pathlib import Path

import pytest

from tests.fork_server import Forked, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHED = sorted(path.stem for path in EXAMPLES.glob("*.py") if "torchrun --nproc-per-node" in path.read_text())
# It takes as many processes as it finds.
ALONE = {"bring_your_script", "from_a_training_loop"}


def started(name: str, *arguments: str) -> tuple[int | None, str, str]:
    """The exit code of a script that no launcher has started, and what it wrote."""
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    script = Forked(run_script, str(EXAMPLES / f"{name}.py"), arguments, environ=environ | {"COLUMNS": "200"})
    texts = script.communicate(60)
    return script.returncode, *texts


@pytest.mark.parametrize("name", sorted({*LAUNCHED} - ALONE))
def test_an_example_says_how_to_start_it(name: str) -> None:
    code, out, err = started(name)
    assert (code, out) == (2, "")
    assert f"examples/{name}.py" in err and "torchrun --nproc-per-node" in err
    assert "start its processes by torchrun" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["async_grpo", "dpo", "grpo", "reinforce", "reward_model"])
def test_an_example_explains_itself_and_refuses_what_it_does_not_know(name: str) -> None:
    code, out, _ = started(name, "--help")
    assert code == 0 and f"examples/{name}.py" in out
    code, _, err = started(name, "--unknown")
    assert code == 2 and err.splitlines()[-1] == f"{name}.py: error: unrecognized arguments: --unknown"


def test_all_of_them_are_tried() -> None:
    assert len(LAUNCHED) == 10
