"""Callbacks of [`DFlashTrainer`]."""

from typing import Any

from transformers import TrainerCallback

from dflash_hf.trainer.ema import WeightAverage


class EpochSetter(TrainerCallback):
    """Tells the rows which epoch begins, because Accelerate's dataloader does so only in one process without skips.

    With several processes, or after a resume inside an epoch, `DataLoaderShard.set_epoch` (Accelerate 1.15) finds the
    inner sampler and leaves the dataset out: anchors would stay those of epoch 0.
    """

    def __init__(self, rows: Any):
        self.rows = rows

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        # After a resume `state.epoch` lies inside the epoch; a sum of steps may end a rounding error below a whole.
        self.rows.set_epoch(int(state.epoch + 1e-6))


class AverageUpdater(TrainerCallback):
    """Moves the average of the weights after every optimizer step."""

    def __init__(self, average: WeightAverage):
        self.average = average

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        self.average.update(model)
