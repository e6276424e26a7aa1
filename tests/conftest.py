"""What holds for every test: hypothesis measures no time, as the machine may be busy with other ranks."""

from hypothesis import settings

settings.register_profile("harness", deadline=None)
settings.load_profile("harness")
