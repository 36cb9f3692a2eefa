"""`TrainerConfig`: how long, how often and on what hardware a training runs."""

from dataclasses import dataclass

from omegaconf import MISSING

from tts_stack.errors import ConfigError
from tts_stack.ranges import check_choice, check_number

PRECISIONS = ("32-true", "bf16-mixed")
STRATEGIES = ("auto", "ddp", "fsdp")
MAX_SEED = 2**32  # what every library takes


@dataclass
class TrainerConfig:
    """Steps, intervals and hardware; values live in configs/trainer/*.yaml."""

    max_steps: int = MISSING
    validate_every: int = MISSING  # steps
    checkpoint_every: int = MISSING  # steps
    log_every: int = 10  # steps
    seed: int = 0
    device: str = "auto"
    precision: str = "32-true"  # or bf16-mixed: bfloat16 products, float32 weights and updates
    num_threads: int = 0  # 0 leaves torch's choice
    max_nonfinite_steps: int = 20  # in a row, before training stops
    devices: int = 1  # processes on each machine, one device each
    num_nodes: int = 1  # machines
    strategy: str = "auto"  # ddp: a copy of the weights on each device; fsdp: a share of them
    accumulate: int = 1  # micro-batches that one process adds up in a step
    compile: bool = False  # torch.compile, for the tasks that support it
    gradient_checkpointing: bool = False  # less memory, a third more arithmetic
    wandb_project: str | None = None  # also log to Weights & Biases

    def __post_init__(self) -> None:
        counts = ("max_steps", "validate_every", "checkpoint_every", "log_every")
        for name in (*counts, "devices", "num_nodes", "accumulate", "max_nonfinite_steps"):
            check_number(f"trainer.{name}", getattr(self, name), at_least=1)
        check_number("trainer.num_threads", self.num_threads, at_least=0)
        check_number("trainer.seed", self.seed, at_least=0, below=MAX_SEED)
        check_choice("trainer.precision", self.precision, PRECISIONS)
        check_choice("trainer.strategy", self.strategy, STRATEGIES)

    @property
    def num_processes(self) -> int:
        return self.devices * self.num_nodes

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that make up one step, over all processes."""
        return self.num_processes * self.accumulate

    def require_one_process(self, command: str) -> None:
        """Refuse what a task cannot do yet.

        Raises:
            ConfigError: more than one process or micro-batch is asked for.
        """
        if self.num_micro_batches > 1:
            raise ConfigError(
                f"trainer.devices x num_nodes x accumulate is {self.num_micro_batches}, "
                f"{command} takes 1; set all three to 1"
            )
