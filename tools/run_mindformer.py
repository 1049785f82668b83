"""What the reference's start-up line calls: msrun ... tools/run_mindformer.py --config FILE --mode 1."""

import sys

from parallel_trainer.run_mindformer import main

sys.exit(main())
