"""`deepspeed scripts/train.py ...`: the training script of the harness, from a checkout."""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python still imports ends it without a traceback

from harness.train import main  # noqa: E402

sys.exit(main())
