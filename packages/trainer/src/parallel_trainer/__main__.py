"""`python -m parallel_trainer` is the `parallel-train` command."""

import sys

from parallel_trainer.cli import main

sys.exit(main())
