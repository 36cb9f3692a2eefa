"""Configuration of stage 2; values live in configs/train_vocoder.yaml and the groups it names."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from tts_stack.errors import ConfigError
from tts_stack.training import ScheduleConfig, TrainerConfig

PHASES = ("reconstruction", "adversarial")
ADVERSARIAL_KINDS = ("hinge", "least_squares")
DECODE_MODES = ("crop", "full")
STATES_KINDS = ("cached", "on_the_fly")
SPECTROGRAM_KINDS = ("whole", "banded")


@dataclass
class VocoderConfig:
    """Sizes of the generator; rates and the hidden size come from the corpus and the LLM."""

    dim: int = MISSING  # channels of every layer
    intermediate_dim: int = MISSING  # inner width of a ConvNeXt block
    num_token_blocks: int = MISSING  # ConvNeXt blocks at token rate
    num_layers: int = MISSING  # ConvNeXt blocks at frame rate
    input_kernel_size: int = MISSING  # of the first convolution, in tokens
    n_fft: int = MISSING  # of the inverse STFT; its hop is the corpus's hop_length

    def __post_init__(self) -> None:
        _at_least_one(self, "vocoder", "dim", "intermediate_dim", "num_layers", "n_fft")
        if self.input_kernel_size != MISSING and self.input_kernel_size % 2 == 0:
            raise ConfigError(
                f"vocoder.input_kernel_size is {self.input_kernel_size}, expected an odd number"
            )


@dataclass
class DiscriminatorConfig:
    """Which discriminators judge the audio, and how wide they are."""

    periods: list[int] = MISSING  # samples; one period discriminator each, [] for none
    period_multiplier: float = MISSING  # 1.0 is HiFi-GAN's width
    num_scales: int = MISSING  # scale discriminators, each at half the rate of the one before
    first_scale: int = MISSING  # times the rate is halved before the first scale discriminator
    scale_multiplier: float = MISSING  # 1.0 is HiFi-GAN's width
    spectrogram_sizes: list[int] = MISSING  # n_fft of each spectrogram discriminator
    spectrogram_channels: int = MISSING
    spectrogram_kind: str = "whole"  # or "banded": Vocos' own, five bands with a stack each

    def __post_init__(self) -> None:
        _one_of("discriminator.spectrogram_kind", self.spectrogram_kind, SPECTROGRAM_KINDS)
        if MISSING in (self.periods, self.num_scales, self.spectrogram_sizes):
            return
        if not (len(self.periods) + self.num_scales + len(self.spectrogram_sizes)):
            raise ConfigError(
                "discriminator: periods, num_scales and spectrogram_sizes name no discriminator; "
                "choose discriminator=full or discriminator=small"
            )


@dataclass
class MelScaleConfig:
    """One log-mel resolution."""

    n_fft: int = MISSING
    hop_length: int = MISSING  # samples; must divide samples_per_token
    n_mels: int = MISSING


@dataclass
class LossConfig:
    """Weights and resolutions of the losses; a weight of 0 skips the loss."""

    mel: MelScaleConfig = field(default_factory=MelScaleConfig)  # also the validation figure
    mel_weight: float = MISSING
    multi_mel: list[MelScaleConfig] = field(default_factory=list)
    multi_mel_weight: float = MISSING
    stft_sizes: list[int] = MISSING  # n_fft of each resolution of the STFT loss
    stft_hops: list[int] = MISSING  # samples
    stft_windows: list[int] = MISSING  # samples
    stft_weight: float = MISSING
    adversarial_kind: str = MISSING  # one of ADVERSARIAL_KINDS
    adversarial_weight: float = MISSING
    feature_weight: float = MISSING

    def __post_init__(self) -> None:
        _one_of("losses.adversarial_kind", self.adversarial_kind, ADVERSARIAL_KINDS)
        if MISSING in (self.stft_sizes, self.stft_hops, self.stft_windows):
            return
        if not len(self.stft_sizes) == len(self.stft_hops) == len(self.stft_windows):
            raise ConfigError(
                f"losses: {len(self.stft_sizes)} stft_sizes, {len(self.stft_hops)} stft_hops and "
                f"{len(self.stft_windows)} stft_windows, expected as many of each"
            )


@dataclass
class OptimizerConfig:
    """AdamW of one network."""

    learning_rate: float = MISSING
    betas: list[float] = MISSING
    weight_decay: float = MISSING
    max_grad_norm: float = MISSING


@dataclass
class DataConfig:
    """How batches are read, and what is looked at in a validation."""

    cache_mb: int = MISSING  # decoded audio kept in memory, 16 bits a sample
    num_validation: int = MISSING  # utterances, the first of the validation split
    validation_seconds: float = MISSING  # longer validation utterances are left out
    quality_every: int = MISSING  # validations between PESQ, STOI and F0 figures; 0: never
    num_shown: int = MISSING  # validation utterances heard and seen in TensorBoard
    states: str = "cached"  # on disk, or "on_the_fly": the LLM computes them
    states_dtype: str = "float16"  # of states, on disk and in memory; or bfloat16
    # Noise on the states in training, relative to the spread of each of their dimensions: against
    # the gap between states of true tokens and states of sampled ones.
    state_noise: float = 0.0

    def __post_init__(self) -> None:
        _one_of("data.states", self.states, STATES_KINDS)
        for name in ("quality_every", "num_shown", "state_noise"):
            value = getattr(self, name)
            if value != MISSING and value < 0:
                raise ConfigError(f"data.{name} is {value}, expected at least 0")


@dataclass
class ReconstructionConfig:
    """First phase: spectral losses alone."""

    max_steps: int | None = None  # None takes trainer.max_steps
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch_seconds: float = MISSING  # of audio a batch, padding included
    crop_seconds: float | None = None  # None trains on whole utterances
    margin_tokens: int | None = None  # context around a crop; None takes the receptive field

    def __post_init__(self) -> None:
        _check_crop("reconstruction", self.crop_seconds, self.margin_tokens)


@dataclass
class AdversarialConfig:
    """Second phase: starts from the first, adds discriminators on crops."""

    max_steps: int | None = None  # None takes trainer.max_steps
    generator: OptimizerConfig = field(default_factory=OptimizerConfig)
    discriminator: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch_size: int = MISSING  # crops
    crop_seconds: float = MISSING
    # "crop": the crop and its margin. "full": the whole utterance, of which the discriminators
    # judge the crop and the spectral losses all.
    decode: str = MISSING
    margin_tokens: int | None = None  # context around a crop; None takes the receptive field
    warmup_steps: int = MISSING  # in which the discriminators learn alone
    ema_decay: float = MISSING  # of the generator's average, which is validated and exported

    def __post_init__(self) -> None:
        _check_crop("adversarial", self.crop_seconds, self.margin_tokens)
        _one_of("adversarial.decode", self.decode, DECODE_MODES)
        if self.ema_decay != MISSING and not 0 <= self.ema_decay < 1:
            raise ConfigError(f"adversarial.ema_decay is {self.ema_decay}, expected 0 to below 1")


@dataclass
class VocoderTrainConfig:
    """Root of configs/train_vocoder.yaml."""

    corpus: str = MISSING  # folder of a tokenised corpus
    run: str = MISSING  # output folder of this voice
    vocoder: VocoderConfig = field(default_factory=VocoderConfig)
    discriminator: DiscriminatorConfig = field(default_factory=DiscriminatorConfig)
    losses: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reconstruction: ReconstructionConfig = field(default_factory=ReconstructionConfig)
    adversarial: AdversarialConfig = field(default_factory=AdversarialConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in (*choices, MISSING):
        raise ConfigError(f"{name} is {value!r}, expected {' or '.join(choices)}")


def _at_least_one(config: Any, place: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value != MISSING and value < 1:
            raise ConfigError(f"{place}.{name} is {value}, expected at least 1")


def _check_crop(place: str, crop_seconds: float | None, margin_tokens: int | None) -> None:
    if crop_seconds not in (None, MISSING) and float(crop_seconds or 0) <= 0:
        raise ConfigError(f"{place}.crop_seconds is {crop_seconds}, expected more than 0")
    if margin_tokens is not None and margin_tokens < 0:
        raise ConfigError(f"{place}.margin_tokens is {margin_tokens}, expected at least 0")
