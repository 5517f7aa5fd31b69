"""The benchmark of scale, at a size that takes no time; its limits are for the machine it is run on to keep."""

from argparse import Namespace

import pytest

from benchmarks import scale
from penstock import schedule


def test_each_size_is_timed_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    sizes = {"interleaved": (scale.Size(2, 2, 4),), "1f1b": (scale.Size(2, 1, 8),)}
    monkeypatch.setattr(scale, "SIZES", sizes)
    monkeypatch.setattr(scale, "sizes_of_all", lambda: {"v-min": (scale.Size(3, 2, 4),)})
    found = scale.measure(Namespace())
    assert [row["schedule"] for row in found["sizes"]] == list(sizes)
    for row in found["sizes"]:
        built = schedule.build(row["schedule"], ranks=2, microbatches=row["microbatches"])
        assert row["num_actions"] == schedule.verify(schedule.lower(built)).num_actions
        parts = [row[part] for part in ("build_s", "lower_s", "verify_s", "simulate_s")]
        assert all(part > 0 for part in parts) and sum(parts) == pytest.approx(row["total_s"])
        assert 2**20 < row["peak_memory_bytes"] <= found["largest"]["peak_memory_bytes"]
    (many,) = found["many ranks"]
    assert (many["schedule"], many["ranks"]) == ("v-min", 3) and 0 < many["build_s"] < many["total_s"]


def test_every_schedule_that_trains_is_built_for_a_thousand_ranks():
    sizes = scale.sizes_of_all()
    assert set(sizes) == {name for name in schedule.names() if name != "inference"}
    assert all(own[-1].ranks == 1024 for own in sizes.values())
    for name, (least, *_) in sizes.items():
        schedule.build(name, ranks=least.ranks, microbatches=least.microbatches, stages_per_rank=least.stages_per_rank)


def test_a_process_that_fails_is_named():
    with pytest.raises(RuntimeError, match=r"(?s)1f1b at Size\(ranks=0.*ranks must be a whole number of at least 1"):
        scale._in_own_process("1f1b", scale.Size(0, 1, 1))
