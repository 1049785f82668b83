"""What two ranks do with checkpoints that were imported: logits, a step of training, a checkpoint, logits again.

    mpiexec -n 2 python ranks.py FOLDER

For each folder in FOLDER, its run.yaml starts from what was imported. Each rank that has logits leaves
them there in logits-RANK.npz, with the rows of FOLDER/ids.npy that they are of; the checkpoint is in saved/.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
from device_mesh import abort_on_error, connect
from mindspore import Tensor
from parallel_config import load
from parallel_config.schema import Checkpoint as Section
from parallel_trainer.batch import MicroBatch
from parallel_trainer.checkpoint.resume import restore, snapshot
from parallel_trainer.checkpoint.save import Saver
from parallel_trainer.job import prepare
from parallel_trainer.trainer import Trainer


def logits(trainer, ids):
    """Those of this rank's rows, None where another stage has them; and which rows these are."""
    plan, pp = trainer.job.plan, trainer.groups["pp"]
    share = len(ids) // plan.data_parallel
    first = trainer.mesh.shard_index(trainer.groups["world"].rank) * share
    rows = ids[first : first + share]
    batch = MicroBatch(rows, np.tile(np.arange(rows.shape[1], dtype=np.int32), (len(rows), 1)))
    x = Tensor(rows)
    if pp.rank:
        hidden = np.empty((rows.size // plan.tp, trainer.job.model.hidden_size), trainer.job.dtype)
        x = Tensor.from_numpy(pp.recv(hidden, pp.rank - 1))
    [chunk] = trainer.pipeline.chunks
    out, _ = chunk.forward(x, batch)
    chunk.end_step()
    if pp.rank < pp.size - 1:
        pp.send(out.asnumpy(), pp.rank + 1)
        return None, None
    return out.asnumpy(), np.arange(first, first + share)


def run(folder, ids, communicator):
    config = load(folder / "run.yaml")
    trainer = Trainer(prepare(config, communicator.size, dtype="float32"), communicator)
    restore(trainer, Path(config.checkpoint.load_path), optimizer=False)
    imported, rows = logits(trainer, ids)
    trainer.train_step()
    trained, _ = logits(trainer, ids)
    section = Section(save_path=str(folder / "saved"))
    with Saver(section, communicator, partial(snapshot, trainer, optimizer=True), step=0) as saver:
        saver.finish(trainer.step)
    if imported is not None:
        np.savez(folder / f"logits-{communicator.rank}.npz", rows=rows, imported=imported, trained=trained)


def main(folder):
    communicator = connect()
    warnings.simplefilter("ignore")
    with abort_on_error(communicator):
        ids = np.load(folder / "ids.npy")
        for case in sorted(path for path in folder.iterdir() if path.is_dir()):
            run(case, ids, communicator)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
