"""The voice contract (`voice.json`): what every stage of one voice must agree on.

Preparation and tokenisation fix the first half, stage 1 the token ids, export the hashes. Every
later step checks it, so that a wrong pairing is an error that names both sides, never noise.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tts_stack.errors import CheckpointError, ConfigError

CONTRACT_FILE = "voice.json"
LLM_WEIGHTS_FILE = "model.safetensors"
CODEBOOKS_FILE = "codebooks.safetensors"  # only where there is more than one codebook
FORMAT_VERSION = 1
TEXT_KINDS = ("phonemes", "normalized", "raw")
STATE_POSITIONS = ("reads", "predicts")
POSITION_SCHEMES = ("plain", "aligned")
PROMPT_FORMATS = ("tagged", "chat")
DURATIONS = ("none", "tokens", "codebook")
MIN_RUN = 2  # the shortest run that has a duration token; a run of one goes without


@dataclass(frozen=True)
class AudioSpec:
    """Rates of a voice; T = S * frames_per_token * hop_length ties them together."""

    sample_rate: int  # Hz
    hop_length: int  # samples per frame
    frames_per_token: int

    def __post_init__(self) -> None:
        for name in ("sample_rate", "hop_length", "frames_per_token"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"audio: {name} is {getattr(self, name)}, expected at least 1")

    @property
    def samples_per_token(self) -> int:
        return self.hop_length * self.frames_per_token

    @property
    def token_rate(self) -> float:
        """Semantic tokens per second."""
        return self.sample_rate / self.samples_per_token

    def num_tokens(self, num_samples: int) -> int:
        """Tokens that cover `num_samples`: the last one is padded with silence."""
        return -(-num_samples // self.samples_per_token)


@dataclass(frozen=True)
class TextSpec:
    """How raw text becomes what the LLM reads."""

    kind: str  # one of TEXT_KINDS
    language: str  # BCP 47 in lower case: "en-us"
    engine: str = "gruut"  # grapheme-to-phoneme engine when kind is "phonemes": gruut or espeak

    def __post_init__(self) -> None:
        if self.kind not in TEXT_KINDS:
            raise ConfigError(
                f"text.kind is {self.kind!r}, expected one of {', '.join(TEXT_KINDS)}"
            )


@dataclass(frozen=True)
class CodecIdentity:
    """Which speech tokenizer wrote the tokens."""

    id: str  # "fsq-mel-25hz"
    weights_sha256: str
    codebook_size: int
    num_codebooks: int = 1

    def describe(self) -> str:
        """Short form for messages."""
        return f"{self.id} ({self.weights_sha256[:12]}, {self.codebook_size} codes)"


@dataclass(frozen=True)
class TokenMap:
    """One id space for text, special and semantic tokens.

    Text comes either from `symbols` (character i has id `text_offset + i`) or, when `symbols` is
    empty, from the base model's own tokenizer stored beside the LLM (ids 0 .. num_text - 1).
    """

    vocab_size: int  # rows of the embedding, padding rows included
    pad: int
    text_start: int  # [TEXT], or the task token <|text_to_semantic|>
    audio_start: int  # [START], or <|sound_start|>
    audio_end: int  # [STOP], or <|sound_end|>
    semantic_offset: int  # semantic token i has id semantic_offset + i
    codebook_size: int
    text_offset: int = 0
    symbols: tuple[str, ...] = ()
    num_text: int = 0  # text ids of a base model's tokenizer; 0 when `symbols` is used
    mask: int = -1  # stands for a masked semantic token, never a label; -1: there is none
    duration_offset: int = 0  # a run of n tokens has the id duration_offset + n - MIN_RUN
    num_durations: int = 0  # 0: no duration tokens
    tag_offset: int = 0  # speakers, then languages
    speakers: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()

    @property
    def semantic_stop(self) -> int:
        """One past the last semantic id."""
        return self.semantic_offset + self.codebook_size

    @property
    def duration_stop(self) -> int:
        """One past the last duration id."""
        return self.duration_offset + self.num_durations

    def tag_ids(self, speaker: str, language: str) -> tuple[int, ...]:
        """Ids of the tags of one utterance; a tag the voice never saw is left out."""
        places = []
        if speaker in self.speakers:
            places.append(self.speakers.index(speaker))
        if language in self.languages:
            places.append(len(self.speakers) + self.languages.index(language))
        return tuple(self.tag_offset + place for place in places)


@dataclass(frozen=True)
class PromptSpec:
    """Form of the LLM's input and which of its states stage 2 reads.

    *before_text, tags, text, *after_text, audio_start, audio, audio_end
    """

    position_scheme: str = "plain"  # "aligned": audio restarts at 0, text is spaced by text_stride
    text_stride: float = 1.0  # mean audio tokens per text token, used by "aligned"
    hidden_layer: int = -1  # index into the model's hidden_states; -1 is after the final norm
    state_position: str = "reads"  # the state of token i stands where i is read, or is predicted
    format: str = "tagged"  # one of PROMPT_FORMATS
    # The chat template rendered once: a template may hold today's date, a voice must not.
    before_text: tuple[int, ...] = ()  # empty: (text_start,)
    after_text: tuple[int, ...] = ()
    durations: str = "none"  # runs of one token are collapsed, their lengths kept: see DURATIONS
    max_run: int = 1  # longest run; a longer one is split
    num_mixed_layers: int = 1  # hidden_layer and those below it that stage 2 mixes

    def __post_init__(self) -> None:
        if self.num_mixed_layers < 1:
            raise ConfigError(
                f"prompt.num_mixed_layers is {self.num_mixed_layers}, expected at least 1"
            )
        if self.position_scheme not in POSITION_SCHEMES:
            raise ConfigError(
                f"prompt.position_scheme is {self.position_scheme!r}, "
                f"expected one of {', '.join(POSITION_SCHEMES)}"
            )
        if self.state_position not in STATE_POSITIONS:
            raise ConfigError(
                f"prompt.state_position is {self.state_position!r}, "
                f"expected one of {', '.join(STATE_POSITIONS)}"
            )
        if self.format not in PROMPT_FORMATS:
            raise ConfigError(
                f"prompt.format is {self.format!r}, expected one of {', '.join(PROMPT_FORMATS)}"
            )
        if self.durations not in DURATIONS:
            raise ConfigError(
                f"prompt.durations is {self.durations!r}, expected one of {', '.join(DURATIONS)}"
            )


@dataclass(frozen=True)
class LengthSpec:
    """Tokens of a text by its length, over the training set: bounds for synthesis.

    The fit is tokens = fixed_tokens + tokens_per_symbol * symbols.
    """

    tokens_per_symbol: float = 0.0  # slope; 0 means unknown
    low: float = 0.0  # 0.1 % quantile of (tokens - fixed_tokens) / symbols
    high: float = 0.0  # 99.9 % quantile of the same
    fixed_tokens: float = 0.0  # intercept: pauses at both ends


@dataclass(frozen=True)
class SamplingSpec:
    """Decoding settings that suit this voice; the command line overrides them."""

    temperature: float = 0.7
    top_p: float = 0.9


@dataclass(frozen=True)
class VoiceContract:
    """Everything the stages of one voice must agree on; saved as `voice.json`."""

    name: str
    audio: AudioSpec
    text: TextSpec
    codec: CodecIdentity
    tokens: TokenMap
    prompt: PromptSpec = field(default_factory=PromptSpec)
    length: LengthSpec = field(default_factory=LengthSpec)
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    llm_sha256: str = ""  # of the LLM's weights (see llm_sha256), set when the LLM is final
    vocoder_sha256: str = ""  # of vocoder/model.safetensors, set by export
    format_version: int = FORMAT_VERSION

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Sizes of the codebooks beside the token stream: the codec's other ones, run lengths."""
        extra = (self.codec.codebook_size,) * (self.codec.num_codebooks - 1)
        return (*extra, self.prompt.max_run) if self.prompt.durations == "codebook" else extra

    def save(self, path: Path) -> None:
        """Write as JSON; the file appears whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(
            json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n",
            encoding="utf-8",
        )
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a contract.

        Raises:
            CheckpointError: the file is missing, is not JSON, has another version, or lacks or
                has a field too many.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path}: no such file; a voice folder holds voice.json"
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
        version = values.get("format_version") if isinstance(values, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version is {version}, this release reads {FORMAT_VERSION}"
            )
        try:
            return cls(
                audio=AudioSpec(**values.pop("audio")),
                text=TextSpec(**values.pop("text")),
                codec=CodecIdentity(**values.pop("codec")),
                tokens=TokenMap(**_tuples(values.pop("tokens"))),
                prompt=PromptSpec(**_tuples(values.pop("prompt"))),
                length=LengthSpec(**values.pop("length")),
                sampling=SamplingSpec(**values.pop("sampling")),
                **values,
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{path}: not a voice contract ({error})") from error


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where the records hold tuples."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }


def llm_sha256(folder: Path) -> str:
    """Hash of an LLM folder's weights: the model, and its codebook heads when it has any.

    Raises:
        CheckpointError: the model's file cannot be read.
    """
    found = file_sha256(folder / LLM_WEIGHTS_FILE)
    codebooks = folder / CODEBOOKS_FILE
    if not codebooks.exists():
        return found
    return hashlib.sha256(f"{found}{file_sha256(codebooks)}".encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in blocks.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
