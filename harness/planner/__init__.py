"""What a run will need and do, before it is started: memory of each stage, seconds of each step, the best layout.

Plain numbers in, plain numbers out: no torch, no process. In the order in which they build on each other:

- `shape.py`: the sizes of a decoder; `model_config.py` reads them from its config.json
- `hardware/`: the devices, one JSON each, and `Hardware`, which reads them; `calibrate.py` measures this CPU
- `workload.py`: what is trained, and how it is laid out
- `compute.py`: seconds of a matrix product; `layer_time.py`: of a layer, the embedding and the head
- `traffic.py`: seconds of collectives and messages over the links
- `memory.py`: what each stage holds
- `stages.py`: which layers a stage holds
- `step.py`: seconds of a step, from the four above
- `estimate.py`: one config, as a row; `task.py`: what is asked of a plan; `search.py`: all layouts, ranked;
  `sensitivity.py`: what more would bring
- `preset.py`: the DeepSpeed JSON of a row; `table.py`: rows in the terminal; `page/`: the planner in a browser;
  `commands.py`: the verbs
"""
