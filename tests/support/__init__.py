"""What tests share: real ranks, a simulated device, and models and data made for tests.

| module | what it is for |
| --- | --- |
| `ranks` | run a function, or a script, on n real ranks: gloo on the CPU, a simulated device, or NCCL on GPUs |
| `forkserver` | the process that `ranks` forks its launchers from, so that the suite imports torch once |
| `training` | a whole training run as a worker of `ranks`, and the same numbers computed in one process |
| `comparing`, `rollback` | workers of `ranks` that compare the weights of layouts, and that go back to a checkpoint |
| `simulated_device` | a torch device that fails as a GPU would, counts waits for the device, and has a clock |
| `models`, `experts`, `plan_models`, `preferences` | tiny models of each kind, and pairs of completions |
| `random_compositions` | layouts with features drawn at random, and the smallest one that fails |
| `threads` | threads as ranks, for tensor-parallel layers alone |
| `browser`, `report_runs` | a browser that opens a page, and the files of a run to show |
| `core` | finds the tests of the core, and copies the package without its parts (`scripts/test_core`) |
"""
