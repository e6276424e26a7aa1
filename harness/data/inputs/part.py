"""What the Trainer asks of the data part: the functions of `harness.training.parts.data.DataPart`."""

from harness.data.inputs.data_files import data_files as data_files
from harness.data.inputs.datasets import later_dataset as later_dataset
from harness.data.inputs.datasets import own_tokenizer as own_tokenizer
from harness.data.inputs.datasets import user_datasets as user_datasets
from harness.data.inputs.sample_prompts import sample_prompts as sample_prompts
from harness.data.inputs.stop_at_answers import stop_at_answers as stop_at_answers
from harness.data.preview import composition as composition
from harness.data.preview import sample_lines as sample_lines
