"""The processes above a run that nobody has launched: none."""

from harness.resilience.process.launcher import Launcher


def test_a_process_of_its_own_has_no_launcher() -> None:
    assert Launcher.find().links == ()
