"""Types and checks of stage 1's settings; the values live in configs/train_llm.yaml and groups."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from tts_stack.contract import POSITION_SCHEMES, STATE_POSITIONS
from tts_stack.errors import ConfigError
from tts_stack.training import ScheduleConfig, TrainerConfig

ARCHITECTURES = ("llama", "qwen3")
OPTIMIZERS = ("muon_adamw", "adamw")
SAVE_DTYPES = ("float32", "float16", "bfloat16")


@dataclass
class LLMConfig:
    """Shape of a language model built from scratch, or the folder of one to start from."""

    architecture: str = MISSING  # one of ARCHITECTURES
    hidden_size: int = MISSING
    num_layers: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING  # fewer than num_heads: grouped-query attention
    intermediate_size: int = MISSING
    tie_embeddings: bool = MISSING  # one matrix for input and output embeddings
    rope_theta: float = MISSING
    max_positions: int = MISSING  # longest prompt the model is declared for
    dropout: float = MISSING  # on the input embeddings
    base_model: str | None = None  # Hugging Face causal LM folder; the fields above are then unused

    def __post_init__(self) -> None:
        _one_of("llm.architecture", self.architecture, ARCHITECTURES)
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "max_positions"):
            _at_least(f"llm.{name}", getattr(self, name), 1)
        if MISSING in (self.hidden_size, self.num_heads, self.num_kv_heads):
            return
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"llm.hidden_size is {self.hidden_size}, expected a multiple of twice "
                f"llm.num_heads ({self.num_heads}): rotary positions turn pairs of values"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"llm.num_kv_heads is {self.num_kv_heads}, expected a divisor of "
                f"llm.num_heads ({self.num_heads})"
            )


@dataclass
class PromptConfig:
    """Form of the prompt and which states stage 2 will read; see contract.PromptSpec."""

    position_scheme: str = MISSING  # plain or aligned
    hidden_layer: int = MISSING  # index into the model's hidden states, -1 after the final norm
    state_position: str = MISSING  # reads or predicts

    def __post_init__(self) -> None:
        _one_of("prompt.position_scheme", self.position_scheme, POSITION_SCHEMES)
        _one_of("prompt.state_position", self.state_position, STATE_POSITIONS)


@dataclass
class BatchingConfig:
    """Token-budget batches of similar length."""

    max_tokens: int = MISSING  # rows x longest row, padding included
    max_length: int = MISSING  # tokens of one prompt; longer samples are left out and reported

    def __post_init__(self) -> None:
        _at_least("batching.max_tokens", self.max_tokens, 1)
        _at_least("batching.max_length", self.max_length, 1)
        if MISSING not in (self.max_tokens, self.max_length) and self.max_length > self.max_tokens:
            raise ConfigError(
                f"batching.max_length is {self.max_length}, expected at most batching.max_tokens "
                f"({self.max_tokens}): one prompt must fit in a batch"
            )


@dataclass
class LossConfig:
    """Weight of a label by its group."""

    text_weight: float = MISSING
    audio_weight: float = MISSING
    end_weight: float = MISSING  # of <|audio_end|>

    def __post_init__(self) -> None:
        for name in ("text_weight", "audio_weight", "end_weight"):
            _at_least(f"loss.{name}", getattr(self, name), 0)


@dataclass
class OptimizerConfig:
    """Muon on hidden matrices and AdamW on the rest, or AdamW alone."""

    kind: str = MISSING  # one of OPTIMIZERS
    matrix_lr: float = MISSING  # of Muon; unused by adamw
    lr: float = MISSING  # of AdamW
    weight_decay: float = MISSING  # on hidden matrices only, never on embeddings and norms
    beta1: float = MISSING
    beta2: float = MISSING
    max_grad_norm: float = MISSING

    def __post_init__(self) -> None:
        _one_of("optimizer.kind", self.kind, OPTIMIZERS)


@dataclass
class SamplingConfig:
    """Decoding settings written into the voice; see contract.SamplingSpec."""

    temperature: float = MISSING
    top_p: float = MISSING


@dataclass
class LLMTrainConfig:
    """Everything `tts-stack train-llm` reads; values live in configs/train_llm.yaml."""

    corpus: str = MISSING  # folder of a tokenised corpus
    run: str = MISSING  # folder of this voice; stage 1 writes <run>/llm
    name: str = ""  # of the voice; empty takes the run folder's name
    llm: LLMConfig = field(default_factory=LLMConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    token_noise: float = MISSING  # share of input audio tokens replaced at random in training
    max_validation_samples: int = MISSING  # the first so many of the validation split
    save_dtype: str = MISSING  # of the finished model's file, one of SAVE_DTYPES

    def __post_init__(self) -> None:
        _one_of("save_dtype", self.save_dtype, SAVE_DTYPES)
        if self.token_noise != MISSING and not 0 <= self.token_noise < 1:
            raise ConfigError(f"token_noise is {self.token_noise}, expected 0 or more, below 1")
        _at_least("max_validation_samples", self.max_validation_samples, 1)


def _at_least(name: str, value: float | str, minimum: float) -> None:
    if value != MISSING and float(value) < minimum:
        raise ConfigError(f"{name} is {value}, expected at least {minimum}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in (*choices, MISSING):
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
