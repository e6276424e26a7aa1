"""Let a trained model continue a prompt, as `ds-harness generate` does: python scripts/generate.py runs/demo."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
