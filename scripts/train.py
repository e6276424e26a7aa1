"""`deepspeed scripts/train.py ...`: the training script of the harness, from a checkout."""

import sys

from harness.train import main

sys.exit(main())
