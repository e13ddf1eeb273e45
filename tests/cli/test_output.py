import pytest

from modelserver.cli.output import print_table


def test_a_row_is_one_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("model", "reason"), [("a", "two problems\nfirst\nsecond"), ("longer", "")])
    assert capsys.readouterr().out == "MODEL   REASON\na       two problems first second\nlonger\n"
