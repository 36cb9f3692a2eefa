"""Settings of the built-in speech tokenizer, its training and its use; values live in configs/."""

import math
from dataclasses import dataclass, field

from omegaconf import MISSING

from tts_stack.contract import AudioSpec
from tts_stack.errors import ConfigError
from tts_stack.rates import check_token_rate
from tts_stack.training import ScheduleConfig, TrainerConfig


@dataclass
class CodecConfig:
    """Shape of the convolutional autoencoder; values live in configs/codec/*.yaml."""

    id: str = MISSING  # name that goes into the voice contract
    sample_rate: int = MISSING  # Hz
    n_fft: int = MISSING  # samples per analysis window
    hop_length: int = MISSING  # samples per mel frame
    n_mels: int = MISSING
    frames_per_token: int = MISSING
    levels: list[int] = MISSING  # values each code dimension can take; the product is the codebook
    hidden_size: int = MISSING
    ffn_size: int = MISSING
    kernel_size: int = MISSING  # tokens that one block sees; odd
    num_encoder_blocks: int = MISSING
    num_decoder_blocks: int = MISSING
    token_rate: float | None = None  # Hz; follows from the rates above, and is checked when given

    def __post_init__(self) -> None:
        if MISSING in vars(self).values():
            return
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"codec.{name} is {value}, expected at least 1")
        if not self.levels or min(self.levels) < 3:
            raise ConfigError(f"codec.levels is {self.levels}, expected numbers of at least 3")
        if self.kernel_size % 2 == 0:
            raise ConfigError(f"codec.kernel_size is {self.kernel_size}, expected an odd number")
        if self.n_fft < self.hop_length:
            raise ConfigError(
                f"codec.n_fft is {self.n_fft}, expected at least codec.hop_length "
                f"({self.hop_length}), or samples between windows are never seen"
            )
        if self.token_rate is not None:
            check_token_rate(
                self.token_rate,
                sample_rate=self.sample_rate,
                hop_length=self.hop_length,
                frames_per_token=self.frames_per_token,
                place="codec",
            )

    @property
    def audio_spec(self) -> AudioSpec:
        return AudioSpec(self.sample_rate, self.hop_length, self.frames_per_token)

    @property
    def codebook_size(self) -> int:
        return math.prod(self.levels)


@dataclass
class CodecOptimizerConfig:
    """AdamW and gradient clipping."""

    lr: float = MISSING
    weight_decay: float = MISSING
    max_grad_norm: float = MISSING


@dataclass
class CodecTrainConfig:
    """`tts-stack train-codec`; values live in configs/train_codec.yaml and its groups."""

    corpus: str = MISSING  # folder written by prepare
    run: str = MISSING  # output folder of this voice; the codec goes to <run>/codec
    codec: CodecConfig = field(default_factory=CodecConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: CodecOptimizerConfig = field(default_factory=CodecOptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch_seconds: float = MISSING  # seconds of speech in a batch, padding included
    ctc_weight: float = MISSING  # of the loss that predicts the transcript from the codes
    ctc_steps_per_token: int = MISSING  # transcript positions per token: room for fast speech
    num_validation_clips: int = MISSING  # at most; the first ones of the validation split
    max_cache_gb: float = 4.0  # memory for mel spectrograms; clips beyond it are read again

    def __post_init__(self) -> None:
        for name in ("batch_seconds", "ctc_steps_per_token", "num_validation_clips"):
            value = getattr(self, name)
            if value != MISSING and value <= 0:
                raise ConfigError(f"{name} is {value}, expected more than 0")
        if self.ctc_weight != MISSING and self.ctc_weight < 0:
            raise ConfigError(f"ctc_weight is {self.ctc_weight}, expected 0 or more")


@dataclass
class TokenizeConfig:
    """`tts-stack tokenize`; values live in configs/tokenize.yaml."""

    corpus: str = MISSING  # folder written by prepare
    tokenizer: str = MISSING  # codec folder; empty lets the command choose
