"""Train one model over many devices from one YAML file, in MindSpore's dynamic-graph mode.

`prepare` and `Job` are here without importing MindSpore; `parallel_trainer.trainer.Trainer` runs a job.
"""

from parallel_trainer.errors import UserError
from parallel_trainer.job import Job, prepare

__all__ = ["Job", "UserError", "prepare"]
