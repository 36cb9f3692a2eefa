"""Types and checks of stage 1's settings; the values live in configs/train_llm.yaml and groups."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from stage1_llm.lora_config import LoraSettings
from tts_stack.contract import (
    DURATIONS,
    MIN_RUN,
    POSITION_SCHEMES,
    PROMPT_FORMATS,
    STATE_POSITIONS,
)
from tts_stack.errors import ConfigError
from tts_stack.ranges import check_choice, check_number
from tts_stack.training import ScheduleConfig, TrainerConfig

ARCHITECTURES = ("llama", "qwen3")
OPTIMIZERS = ("muon_adamw", "adamw")
SAVE_DTYPES = ("float32", "float16", "bfloat16")
BATCHING_KINDS = ("dynamic", "packing")
WEIGHT_SCHEDULES = ("constant", "linear", "hold")
_LLM_COUNTS = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "intermediate_size",
    "max_positions",
)


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
    head_dim: int | None = None  # None: hidden_size / num_heads
    # Folder or hub name of a Hugging Face causal LM; all fields above but dropout are then unused.
    base_model: str | None = None

    def __post_init__(self) -> None:
        check_number("llm.dropout", self.dropout, at_least=0, below=1)
        if self.base_model is not None:
            return
        if self.architecture == "base_model":
            raise ConfigError("llm.base_model must be given: llm=FOLDER or llm=HUB/NAME")
        check_choice("llm.architecture", self.architecture, ARCHITECTURES)
        for name in _LLM_COUNTS:
            check_number(f"llm.{name}", getattr(self, name), at_least=1)
        check_number("llm.rope_theta", self.rope_theta, above=0)
        if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
            raise ConfigError(
                f"llm.head_dim is {self.head_dim}, expected an even number of at least 2: rotary "
                "positions turn pairs of values"
            )
        if MISSING in (self.hidden_size, self.num_heads, self.num_kv_heads):
            return
        if self.head_dim is None and self.hidden_size % (2 * self.num_heads):
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
    num_mixed_layers: int = 1  # hidden_layer and those below it, which stage 2 learns to mix
    state_position: str = MISSING  # reads or predicts
    format: str = MISSING  # tagged, or chat: the base model's own chat template
    durations: str = MISSING  # none, tokens or codebook: collapse runs of one token, keep lengths
    max_run: int = MISSING  # tokens of the longest run, where runs are collapsed
    speaker_tags: bool = MISSING  # one token for each speaker of the corpus, before the text
    language_tags: bool = MISSING  # one token for each language of the corpus

    def __post_init__(self) -> None:
        check_choice("prompt.format", self.format, PROMPT_FORMATS)
        check_choice("prompt.durations", self.durations, DURATIONS)
        check_number("prompt.max_run", self.max_run, at_least=MIN_RUN)
        check_number("prompt.num_mixed_layers", self.num_mixed_layers, at_least=1)
        check_choice("prompt.position_scheme", self.position_scheme, POSITION_SCHEMES)
        check_choice("prompt.state_position", self.state_position, STATE_POSITIONS)


@dataclass
class CurriculumConfig:
    """Short samples first: the longest sample allowed grows while the token budget stays."""

    start_length: int = MISSING  # tokens of the longest sample at step 0
    steps: int = MISSING  # until every sample takes part; 0: no curriculum

    def __post_init__(self) -> None:
        check_number("batching.curriculum.start_length", self.start_length, at_least=1)
        check_number("batching.curriculum.steps", self.steps, at_least=0)


@dataclass
class BatchingConfig:
    """How samples make up a batch."""

    kind: str = MISSING  # dynamic: rows of similar length; packing: one row, one after the other
    max_tokens: int = MISSING  # of a batch, padding included
    max_length: int = MISSING  # tokens of one prompt; longer samples are left out and reported
    cache_tokens: int = MISSING  # of samples kept in memory; the others are read when needed
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)

    def __post_init__(self) -> None:
        check_choice("batching.kind", self.kind, BATCHING_KINDS)
        check_number("batching.max_tokens", self.max_tokens, at_least=1)
        check_number("batching.max_length", self.max_length, at_least=1)
        check_number("batching.cache_tokens", self.cache_tokens, at_least=0)
        if MISSING not in (self.max_tokens, self.max_length) and self.max_length > self.max_tokens:
            raise ConfigError(
                f"batching.max_length is {self.max_length}, expected at most batching.max_tokens "
                f"({self.max_tokens}): one prompt must fit in a batch"
            )


@dataclass
class WeightConfig:
    """Weight of one group of labels over the steps."""

    value: float = MISSING  # at step 0
    kind: str = "constant"  # linear: from value to final; hold: value, then final at once
    steps: int = 0  # of the line, or of the hold
    final: float = 0.0  # afterwards; unused by constant

    def check(self, place: str) -> None:
        """Refuse what is out of range.

        Args:
            place: the weight, as the user writes it.

        Raises:
            ConfigError: something is.
        """
        check_choice(f"{place}.kind", self.kind, WEIGHT_SCHEDULES)
        for name in ("value", "steps", "final"):
            check_number(f"{place}.{name}", getattr(self, name), at_least=0)

    def at(self, step: int) -> float:
        """The weight of a step."""
        if self.kind == "constant":
            return self.value
        if step >= self.steps:
            return self.final
        share = step / self.steps if self.kind == "linear" else 0.0
        return self.value + share * (self.final - self.value)


@dataclass
class LossConfig:
    """Weight of a label by its group."""

    text_weight: WeightConfig = field(default_factory=WeightConfig)
    audio_weight: WeightConfig = field(default_factory=WeightConfig)
    end_weight: WeightConfig = field(default_factory=WeightConfig)  # of [STOP]
    codebook_weight: float = MISSING  # of the mean loss of the codebooks beside the token stream

    def __post_init__(self) -> None:
        for group in ("text_weight", "audio_weight", "end_weight"):
            getattr(self, group).check(f"loss.{group}")
        check_number("loss.codebook_weight", self.codebook_weight, at_least=0)

    def weights(self, step: int) -> tuple[float, float, float]:
        """Of text, audio and end."""
        return self.text_weight.at(step), self.audio_weight.at(step), self.end_weight.at(step)


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
    ema_decay: float = MISSING  # of the averaged weights that are validated and kept; 0: none

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2", "ema_decay"):
            check_number(f"optimizer.{name}", getattr(self, name), at_least=0, below=1)
        for name in ("lr", "matrix_lr", "weight_decay"):
            check_number(f"optimizer.{name}", getattr(self, name), at_least=0)
        check_number("optimizer.max_grad_norm", self.max_grad_norm, above=0)
        check_choice("optimizer.kind", self.kind, OPTIMIZERS)


@dataclass
class SamplingConfig:
    """Decoding settings written into the voice; see contract.SamplingSpec."""

    temperature: float = MISSING
    top_p: float = MISSING

    def __post_init__(self) -> None:
        check_number("sampling.temperature", self.temperature, at_least=0)
        check_number("sampling.top_p", self.top_p, above=0, at_most=1)


@dataclass
class LLMTrainConfig:
    """Everything `tts-stack train-llm` reads; values live in configs/train_llm.yaml."""

    corpus: str = MISSING  # folder of a tokenised corpus
    run: str = MISSING  # folder of this voice; stage 1 writes <run>/llm
    name: str = ""  # of the voice; empty takes the run folder's name
    llm: LLMConfig = field(default_factory=LLMConfig)
    lora: LoraSettings | None = None  # None trains every weight
    prompt: PromptConfig = field(default_factory=PromptConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    token_noise: float = MISSING  # share of input audio tokens replaced at random in training
    max_validation_samples: int | None = None  # the first so many; None: the whole split
    num_listened: int = MISSING  # validation texts spoken at every validation, for TensorBoard
    save_dtype: str = MISSING  # of the finished model's file, one of SAVE_DTYPES

    def __post_init__(self) -> None:
        check_choice("save_dtype", self.save_dtype, SAVE_DTYPES)
        check_number("token_noise", self.token_noise, at_least=0, below=1)
        check_number("max_validation_samples", self.max_validation_samples, at_least=1)
        check_number("num_listened", self.num_listened, at_least=0)
