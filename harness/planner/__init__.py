"""Predict a run before it starts: the memory of each stage, the seconds of each step, and the best layout.

Plain numbers in, plain numbers out: no torch, no process. Each module builds on those before it:

- `shape.py`: the sizes of a decoder; `model_config.py` reads them from its config.json, or counts them on the model
- `hardware/`: the devices, one JSON each, and `Hardware`, which reads them; `calibrate.py` measures this CPU
- `workload.py`: model and precision, the training program, the layout, and which layers each stage holds
- `traffic.py`: seconds of collectives and messages over the links
- `layer_time.py`: seconds of a matrix product, a layer, the embedding and the head, and of the host that issues them
- `memory.py`: bytes of each stage between two steps, and at the peak of a step
- `step.py`: seconds of a step, from the three above
- `estimate.py`: the prediction of one config; `search.py`: all layouts of a task, ranked, and what more devices bring
- `preset.py`: the DeepSpeed JSON of a layout; `page/`: the planner in a browser; `cli/`: the verbs, their tables
"""
