"""Words of the command line that no option takes: what is said of them, by every command's parser."""

import pytest

from penstock.cli.main import main
from penstock.cli.options import Parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("schedule simulate 1f1b --forward abc", "argument --forward: 'abc' is no list of numbers, such as 1,0.5,1.5"),
        ("schedule simulate 1f1b --forward 1,x", "argument --forward: '1,x' is no list of numbers, such as 1,0.5,1.5"),
        ("schedule simulate 1f1b --ranks 4x", "argument --ranks: invalid int value: '4x'"),
        ("schedule show interleaved --group-size 1.5", "schedule.group_size = 1.5: expected int"),
        ("schedule show auto --ranks 2 --placement 0,1,x", "schedule.placement = '0,1,x': expected"),
        ("generate runs/none hi --temperature x", "sampling.temperature = 'x': expected float"),
        ("generate runs/none hi --logit-bias x", "'x' is no bias; give a token id and a number"),
    ],
)
def test_a_word_of_another_type_is_refused_in_words(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--bogus", "takes --help says what it takes"),
        ("--microbatchs", "did you mean '--microbatches'?"),
        ("--outptu=x", "did you mean '--output'?"),
    ],
)
def test_an_unknown_option_brings_a_suggestion_only_where_one_is_near(given: str, hint: str) -> None:
    parser = Parser("takes", "")
    for name in ("--output", "--ranks", "--microbatches"):
        parser.add_argument(name)
    with pytest.raises(ValueError) as refused:
        parser.parse_args([given])
    assert str(refused.value) == f"no option of takes is called {given.partition('=')[0]!r}; {hint}"
