"""The command above a run, as it is shown to go on with."""

from harness.resilience.process.launcher import Launcher, _as_typed


def test_the_command_that_goes_on() -> None:
    assert _as_typed(["/usr/bin/python3", "train.py"]) == ["/usr/bin/python3", "train.py"]
    assert Launcher.find().links == ()
