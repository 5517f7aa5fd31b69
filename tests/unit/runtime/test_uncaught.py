"""What an exception that nobody catches prints: the caller's lines, and one line for all other ranks."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from penstock import Engine, PackedBatch
from penstock.runtime import uncaught
from penstock.runtime.recovery import Alarm, Failure

NUM_RANKS = 64
# What a terminal shows at once.
SCREEN = 40


def raised_by(call: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def own(rank: int) -> None:
    raise KeyError(f"number {rank}")


OWN = own.__code__.co_firstlineno + 1


def alike(rank: int) -> None:
    torch.matmul(torch.zeros(2), torch.zeros(3))


def because_of_17(rank: int) -> None:
    if rank == 17:
        own(rank)
    alarm = Alarm()
    alarm.failure = Failure(17, "", 3, "in 17F0", "KeyError", "'number 17'")
    alarm.check()


@pytest.mark.shows(190)
@pytest.mark.parametrize("mistake", [own, alike, because_of_17])
def test_sixty_four_ranks_tell_a_mistake_on_one_screen(
    mistake: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncaught, "PATIENCE_S", 60.0)
    monkeypatch.setattr(uncaught, "_POLL_S", 0.2)
    store, texts = HashStore(), [""] * NUM_RANKS

    def end(rank: int) -> None:
        error = raised_by(lambda: mistake(rank))
        texts[rank] = uncaught.tell_together(store, rank, NUM_RANKS, error)

    ranks = [threading.Thread(target=end, args=(rank,)) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    [(teller, told)] = [(rank, text) for rank, text in enumerate(texts) if text]
    assert told.count("Traceback (most recent call last)") == 1
    assert len(told.splitlines()) <= SCREEN
    last = told.splitlines()[-1]
    if mistake is because_of_17:
        assert (teller, last) == (17, "penstock: ranks 0-16, 18-63 ended because of it")
    elif mistake is alike:
        assert last.startswith("penstock: ranks ") and last.endswith(" failed in the same way")
    else:
        assert last.endswith(" failed too, each in another way")
        assert "KeyError" in told.splitlines()[-2]


@pytest.mark.shows(190)
@pytest.mark.parametrize(("mistake", "num_late"), [(own, 4), (alike, 0)])
def test_mistakes_that_come_too_late_to_be_told_by_another_fit_there_too(
    mistake: Callable[[int], object], num_late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncaught, "PATIENCE_S", 1.0)
    store = HashStore()
    errors = [raised_by(lambda rank=rank: mistake(rank)) for rank in range(NUM_RANKS)]
    told = [uncaught.tell_together(store, rank, NUM_RANKS, error) for rank, error in enumerate(errors)]
    assert told[0].startswith("Traceback ")
    assert told[1 : 1 + num_late] == [
        f"penstock: rank {rank} failed too: KeyError: 'number {rank}' (test_uncaught.py, line {OWN})\n"
        for rank in range(1, 1 + num_late)
    ]
    assert not any(told[1 + num_late :])


def shown(error: BaseException) -> str:
    return "".join(uncaught.shortened(error))


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.zeros(3, 3)


@pytest.mark.shows(190)
def test_the_exception_itself_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine.from_layers([nn.Embedding(8, 4), Fails(), nn.Linear(4, 8)], 4, device="cpu")
    batch = PackedBatch.from_documents([torch.arange(3)])
    error = raised_by(lambda: engine.train_batch(batch))
    before = len(uncaught._traces(error))
    uncaught.tell(error)
    text = capsys.readouterr().err
    assert f"{uncaught._PACKAGE}" not in text and "return x @ torch.zeros(3, 3)" in text
    assert len(uncaught._traces(error)) == before > 10


def test_a_library_that_the_engine_calls_is_shown_where_nothing_comes_after_it() -> None:
    engine = Engine.from_layers([nn.Embedding(8, 4), nn.LayerNorm(3), nn.Linear(4, 8)], 4, device="cpu")
    text = shown(raised_by(lambda: engine.train_batch(PackedBatch.from_documents([torch.arange(3)]))))
    assert "normalization.py" in text and f"{uncaught._PACKAGE}" not in text


def test_the_line_of_a_mistake_of_the_packages_own_is_shown() -> None:
    text = shown(raised_by(lambda: uncaught._ranks(None)))  # type: ignore[arg-type]
    assert text.count(uncaught._PACKAGE) == 1 and "within Penstock" not in text.splitlines()[-2]


def test_a_deep_recursion_and_chained_errors_are_short() -> None:
    def even(number: int) -> None:
        odd(number - 1)

    def odd(number: int) -> None:
        even(number - 1)

    def chained() -> None:
        try:
            even(10**6)
        except RecursionError as error:
            raise ValueError("too deep") from error

    text = shown(raised_by(chained))
    assert len(text.splitlines()) <= SCREEN
    assert text.index("RecursionError") < text.index("because of which") < text.index("ValueError: too deep")


def test_a_hook_of_the_users_own_stands() -> None:
    program = "import sys; own = sys.excepthook = lambda *_: None; import penstock; assert sys.excepthook is own"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
