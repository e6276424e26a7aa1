from harness.arguments.configure import RunConfig as RunConfig
from harness.arguments.themes.lora import LoraArguments as LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments as PreferenceArguments
from harness.checking import check as check
from harness.composition import Trainer as Trainer
from harness.config.text.diagnostic import ConfigError as ConfigError
from harness.config.text.diagnostic import Diagnostic as Diagnostic
from harness.config.text.diagnostic import Severity as Severity
from harness.config.text.document import load as load
from harness.data.tokenizer import ByteTokenizer as ByteTokenizer
from harness.errors import UserError as UserError
from harness.errors import UserErrors as UserErrors
from harness.extras.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
from harness.installed import TrainingArguments as TrainingArguments
from harness.installed import read_run_config as read_run_config
from harness.parallel.tensor.layers import ColumnParallelLinear as ColumnParallelLinear
from harness.parallel.tensor.layers import RowParallelLinear as RowParallelLinear
from harness.parallel.tensor.layers import VocabParallelEmbedding as VocabParallelEmbedding
from harness.preferences.objective import Preferences as Preferences
from harness.training.callbacks import StepRecord as StepRecord
from harness.training.callbacks import TrainerCallback as TrainerCallback
from harness.training.callbacks import TrainerControl as TrainerControl
from harness.training.callbacks import TrainerState as TrainerState

__version__: str
