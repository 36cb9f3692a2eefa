"""The training loop that codec, LLM and vocoder share; import its names from here."""

from tts_stack.training.checkpoint import LAST_CHECKPOINT
from tts_stack.training.config import PRECISIONS, STRATEGIES, TrainerConfig
from tts_stack.training.ema import EMA
from tts_stack.training.fabric import make_fabric
from tts_stack.training.log import format_figures, read_metrics
from tts_stack.training.loop import TrainSummary, train
from tts_stack.training.optimization import MicroLoss, backward, clip_and_step, update
from tts_stack.training.parallel import (
    Share,
    from_main,
    sum_over_processes,
    total_weight,
    wait_for_all,
)
from tts_stack.training.run import OnValidation
from tts_stack.training.schedules import SCHEDULES, ScheduleConfig, set_learning_rate
from tts_stack.training.sharding import load_optimizer, sharded_like, whole_state
from tts_stack.training.task import BatchT, TrainingTask
from tts_stack.training.weights import BEST_WEIGHTS, FINAL_WEIGHTS, load_weights, save_weights
from tts_stack.training.writers import MediaLog

__all__ = [
    "BEST_WEIGHTS",
    "EMA",
    "FINAL_WEIGHTS",
    "LAST_CHECKPOINT",
    "PRECISIONS",
    "SCHEDULES",
    "STRATEGIES",
    "BatchT",
    "MediaLog",
    "MicroLoss",
    "OnValidation",
    "ScheduleConfig",
    "Share",
    "TrainSummary",
    "TrainerConfig",
    "TrainingTask",
    "backward",
    "clip_and_step",
    "format_figures",
    "from_main",
    "load_optimizer",
    "load_weights",
    "make_fabric",
    "read_metrics",
    "save_weights",
    "set_learning_rate",
    "sum_over_processes",
    "sharded_like",
    "total_weight",
    "train",
    "update",
    "wait_for_all",
    "whole_state",
]
