"""What tests share: real ranks, a simulated device, and models and data made for tests.

A test with ranks is three things: a worker, which is a function at the top of a module and returns what it has seen;
`run_ranks(n, worker, ...)`, which calls it on n processes and returns their results in rank order; and asserts on them.

    def losses(jobs: list[Job], folder: str) -> list[Curve]: ...

    def test_layouts_are_alike(tmp_path):
        jobs = [Job(model, "pp2z1"), Job(model, "dp2z3")]  # layouts: pipeline stages, ranks of each axis, ZeRO stage
        first, second = run_ranks(2, losses, jobs, str(tmp_path))

`run_ranks` asks the fork server for a launcher, which imports the worker's module and forks the ranks. The server has
imported torch, transformers, DeepSpeed and the harness, so a launch of two ranks takes a second, not ten. It is
started by the first test that needs it, and again by a test with other environment variables: tests should not change
any. What a worker imports or changes is gone with its ranks.

The same workers run on the CPU, on the simulated device (tests of `tests/simulated_device/`, or `--device simulated`)
and on GPUs (`--device cuda`). The simulated device is a torch backend with a process group. It computes on the CPU,
reports what a GPU or NCCL would not forgive, counts how often the host waits for it, and keeps a clock.

| module | what it is for |
| --- | --- |
| `ranks` | run a function, or a script, on n real ranks: gloo on the CPU, a simulated device, or NCCL on GPUs |
| `forkserver` | the process that `ranks` forks its launchers from, so that the suite imports torch once |
| `workers` | what workers are made of: one case after the other, and the text of a refusal |
| `training` | a whole training run as a worker of `ranks`, and the same numbers computed in one process |
| `points`, `graphs` | runs of one linear layer on points; the graphs that torch.compile makes in a run |
| `comparing`, `rollback` | workers of `ranks` that compare the weights of layouts, and that go back to a checkpoint |
| `shared_sequences` | jobs whose ranks share each sequence, held to those whose ranks do not |
| `simulated_device` | a torch device that fails as a GPU would, counts waits for the device, and has a clock |
| `models`, `experts`, `expert_families`, `plan_models`, `preferences` | tiny models of each kind, completions |
| `cut_layers` | a layer that is cut over tensor-parallel ranks, held to the whole one |
| `random_compositions` | layouts with features drawn at random, and the smallest one that fails |
| `layers` | a model cut into pipeline layers in one process |
| `threads` | threads as ranks, for tensor-parallel layers alone |
| `browser`, `report_runs` | a browser that opens a page, and the files of a run to show |
| `formats` | what every format of data files keeps, for its own tests to derive from |
| `core` | finds the tests of the core, and copies the package without its parts (`scripts/test_core`) |
"""
