"""Settings of `tts-stack prepare`; values live in configs/prepare.yaml."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from tts_stack.contract import TextSpec
from tts_stack.errors import ConfigError


@dataclass
class TextConfig:
    """What the LLM reads: phonemes, normalised text or the raw text."""

    kind: str = MISSING  # phonemes, normalized or raw
    language: str = MISSING  # BCP 47 in lower case: "en-us"
    engine: str = MISSING  # grapheme-to-phoneme engine: gruut or espeak

    def spec(self) -> TextSpec:
        """The same as a frozen record.

        Raises:
            ConfigError: `kind` is unknown.
        """
        return TextSpec(self.kind, self.language, self.engine)


@dataclass
class PrepareConfig:
    """From a folder of recordings with transcripts to checked Parquet shards."""

    source: str = MISSING  # LJSpeech folder, JSONL manifest, or folder of x.wav + x.txt
    corpus: str = MISSING  # output folder
    sample_rate: int = MISSING  # Hz
    text: TextConfig = field(default_factory=TextConfig)
    trim_silence: bool = MISSING  # cut silence at both ends
    trim_threshold_db: float = MISSING  # silence is this far below the loudest 20 ms
    trim_keep_before_s: float = MISSING
    trim_keep_after_s: float = MISSING
    loudness_db: float | None = MISSING  # RMS of speech, dBFS; null leaves levels alone
    min_seconds: float = MISSING  # after trimming
    max_seconds: float = MISSING
    min_characters_per_second: float = MISSING  # of model_text; catches wrong transcripts
    max_characters_per_second: float = MISSING
    validation_fraction: float = MISSING
    max_validation: int = MISSING  # utterances
    shard_size: int = MISSING  # source lines a shard covers
    seed: int = MISSING  # of the train/validation split
    num_workers: int = MISSING  # processes; 0 takes every core

    def __post_init__(self) -> None:
        for name in ("sample_rate", "max_validation", "shard_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("num_workers", "trim_keep_before_s", "trim_keep_after_s", "min_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if self.trim_threshold_db <= 0:
            raise ConfigError(
                f"trim_threshold_db is {self.trim_threshold_db}, expected a positive number of dB"
            )
        if self.loudness_db is not None and self.loudness_db > 0:
            raise ConfigError(f"loudness_db is {self.loudness_db}, expected at most 0 or null")
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(
                f"validation_fraction is {self.validation_fraction}, expected between 0 and 1"
            )
        self._check_order("seconds")
        self._check_order("characters_per_second")
        self.text.spec()

    def _check_order(self, name: str) -> None:
        low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
        if not low < high:
            raise ConfigError(f"min_{name} is {low}, expected less than max_{name} ({high})")
