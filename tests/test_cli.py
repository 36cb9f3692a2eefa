import pytest

from tts_stack import cli


def test_ctrl_c_before_a_command_begins_is_one_line(monkeypatch, capsys):
    """Click turns it into a code and prints nothing."""
    monkeypatch.setattr(cli, "app", lambda **settings: cli.INTERRUPTED)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted"
