"""Settings of LoRA; values live in configs/lora/*.yaml and are chosen with +lora=NAME."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from tts_stack.errors import ConfigError
from tts_stack.ranges import check_number

ALL_LINEAR = "all-linear"


@dataclass
class LoraSettings:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on a frozen base model."""

    r: int = MISSING  # rank
    alpha: int = MISSING  # an adapter counts alpha / r, or alpha / sqrt(r) with use_rslora
    dropout: float = MISSING  # on what an adapter of a linear projection reads
    # Names of linear projections (q_proj, down_proj, ...); "all-linear" is all but the head.
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    embeddings: bool = MISSING  # on the embeddings too; a tied head shares their adapter
    use_rslora: bool = False  # arXiv:2312.03732: keeps large ranks from learning slowly

    def __post_init__(self) -> None:
        check_number("lora.r", self.r, at_least=1)
        check_number("lora.alpha", self.alpha, at_least=1)
        check_number("lora.dropout", self.dropout, at_least=0, below=1)
        if not self.target_modules:
            raise ConfigError(
                f"lora.target_modules is empty, expected names of projections, or [{ALL_LINEAR}]"
            )
