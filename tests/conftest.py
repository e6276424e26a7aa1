"""What holds for every test: hypothesis measures no time, as the machine may be busy with other ranks.

It draws other examples in every run, so that few of them a run are enough; `--hypothesis-profile thorough` draws many.
"""

from hypothesis import settings

settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.register_profile("harness", deadline=None, max_examples=40)
settings.load_profile("harness")
