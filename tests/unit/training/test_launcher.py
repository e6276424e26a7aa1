"""The command above a run, as it is shown to go on with."""

from harness.resilience.process.launcher import Launcher, _as_typed, with_resume


def test_the_command_that_goes_on() -> None:
    words = ["deepspeed", "train.py", "--resume_from_checkpoint", "old", "--seed", "1"]
    assert with_resume(words) == ["deepspeed", "train.py", "--seed", "1", "--resume_from_checkpoint", "auto"]
    assert with_resume(with_resume(words)) == with_resume(words)
    assert _as_typed(["/usr/bin/python3", "train.py"]) == ["/usr/bin/python3", "train.py"]
    assert Launcher.find().links == ()
