"""Text in, speech out: the only module that knows both stages.

text -> sentences -> model text -> semantic tokens and hidden states (one LLM pass) -> audio.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage1_llm.checkpoint import LoadedLLM, load_llm
from stage1_llm.generate import Generation, SamplingSettings, generate
from stage1_llm.hidden_states import teacher_forced_states
from stage2_vocoder.checkpoint import load_vocoder
from stage2_vocoder.model import Vocoder
from tts_stack.audio import write_audio
from tts_stack.contract import VoiceContract
from tts_stack.errors import CheckpointError, ConfigError, DataError
from tts_stack.records import TokenizedUtterance
from tts_stack.runtime import choose_device, step_generator
from tts_stack.semantic.checkpoint import load_codec
from tts_stack.semantic.tokenizer import SpeechTokenizer
from tts_stack.text.frontend import TextFrontend, build_frontend
from tts_stack.text.sentences import split_sentences
from tts_stack.voice import VoiceFiles

MAX_SENTENCE_CHARS = 200
PAUSE_S = 0.15  # silence between sentences, beside the margins the recordings have
SPEEDS = (0.5, 2.0)
FINAL_MARKS = tuple(".?!。？！")


@dataclass(frozen=True)
class SynthesisSettings:
    """How to speak; None takes the voice's own value."""

    seed: int = 0
    temperature: float | None = None
    top_p: float | None = None
    speed: float = 1.0  # 1.2 speaks 20 % faster
    retries: int = 2  # more attempts for a sentence that does not end by itself
    speaker: str | None = None  # of a voice trained with speaker tags; None: its first
    language: str | None = None  # of a voice trained with language tags; None: its first

    def __post_init__(self) -> None:
        if not SPEEDS[0] <= self.speed <= SPEEDS[1]:
            raise ConfigError(f"speed is {self.speed}, expected {SPEEDS[0]} to {SPEEDS[1]}")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise ConfigError(f"temperature is {self.temperature}, expected 0 to 2")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}, expected 0 or more")


@dataclass(frozen=True)
class SpokenSentence:
    """What happened to one sentence."""

    text: str
    model_text: str
    num_tokens: int
    finish_reason: str  # end, length or repetition
    attempts: int
    num_dropped_symbols: int  # characters of model_text this voice has never seen


@dataclass(frozen=True)
class Speech:
    """Audio with the report of how it was made."""

    audio: NDArray[np.float32]  # [T], mono
    sample_rate: int  # Hz
    sentences: tuple[SpokenSentence, ...]
    skipped: tuple[str, ...] = ()  # pieces of text with nothing to speak in them

    @property
    def seconds(self) -> float:
        """Duration."""
        return len(self.audio) / self.sample_rate

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each thing a listener may notice."""
        lines = [f"nothing to speak in {text!r}: left out" for text in self.skipped]
        for sentence in self.sentences:
            place = f"sentence {sentence.text[:40]!r}"
            if sentence.finish_reason != "end":
                reason = {"length": "reached its length bound", "repetition": "got stuck repeating"}
                lines.append(
                    f"{place} {reason[sentence.finish_reason]} after {sentence.attempts} attempts "
                    "and was cut there; try another --seed"
                )
            if sentence.num_dropped_symbols:
                lines.append(
                    f"{place}: left out {sentence.num_dropped_symbols} symbols this voice never saw"
                )
        return tuple(lines)

    def save(self, path: str | Path) -> None:
        """Write wav, flac, ogg or mp3, by extension.

        Raises:
            DataError: unknown extension, or the path cannot be written.
        """
        write_audio(Path(path), self.audio, self.sample_rate)


class Voice:
    """A loaded voice, ready to speak."""

    def __init__(
        self,
        files: VoiceFiles,
        llm: LoadedLLM,
        vocoder: Vocoder,
        frontend: TextFrontend,
        device: torch.device,
    ) -> None:
        self.files, self.device = files, device
        self._llm, self._vocoder, self._frontend = llm, vocoder, frontend
        self._codec: SpeechTokenizer | None = None

    @classmethod
    def load(cls, path: str | Path | None = None, *, device: str = "auto") -> Self:
        """Load a voice folder; without a path, the voice that ships in the package.

        Raises:
            CheckpointError: a file is missing or belongs to another voice.
            ConfigError: the device cannot be used.
        """
        chosen = choose_device(device)
        files = VoiceFiles.open(None if path is None else Path(path))
        llm = load_llm(files.llm, contract=files.contract, device=chosen)
        vocoder = load_vocoder(files.vocoder, chosen)
        frontend = build_frontend(files.contract.text)
        return cls(files, llm, vocoder, frontend, chosen)

    @property
    def contract(self) -> VoiceContract:
        """What the stages of this voice agree on."""
        return self.files.contract

    @property
    def sample_rate(self) -> int:
        """Rate of the audio, Hz."""
        return self.contract.audio.sample_rate

    def synthesize(
        self,
        text: str,
        settings: SynthesisSettings | None = None,
        *,
        on_sentence: Callable[[int, int], None] = lambda done, total: None,
    ) -> Speech:
        """Speak text of any length.

        Args:
            text: plain text; what looks like a control token is text.
            settings: seed, sampling, speed; None takes the defaults.
            on_sentence: called with (sentences done, sentences in all).

        Returns:
            Audio at the voice's rate, with a report per sentence.

        Raises:
            DataError: there is nothing to speak in the text.
        """
        settings = settings or SynthesisSettings()
        pieces, skipped = self._front_end(text)
        pause = np.zeros(round(PAUSE_S * self.sample_rate), dtype=np.float32)
        audio: list[NDArray[np.float32]] = []
        spoken = []
        for index, (sentence, model_text) in enumerate(pieces):
            report, sound = self._speak(sentence, model_text, settings, index)
            audio += [pause, sound] if audio else [sound]
            spoken.append(report)
            on_sentence(index + 1, len(pieces))
        return Speech(np.concatenate(audio), self.sample_rate, tuple(spoken), tuple(skipped))

    @torch.inference_mode()
    def copy_synthesis(self, audio: NDArray[np.float32], text: str) -> NDArray[np.float32]:
        """Recording -> true tokens -> teacher-forced states -> audio: what the decoder can do.

        Args:
            audio: [T] mono at the voice's rate.
            text: its transcript.

        Returns:
            Audio of num_tokens * samples_per_token samples.

        Raises:
            CheckpointError: the voice folder carries no codec.
        """
        tokens = self._load_codec().encode([torch.from_numpy(audio)])[0]
        utterance = TokenizedUtterance(
            "copy", self._frontend(text), tokens.cpu().numpy().astype(np.int64)
        )
        network, contract, encode = self._llm
        states = teacher_forced_states(network, contract, encode, [utterance])[0]
        return self._decode(states)

    def _front_end(self, text: str) -> tuple[list[tuple[str, str]], list[str]]:
        pieces, skipped = [], []
        for sentence in split_sentences(text, max_chars=MAX_SENTENCE_CHARS):
            try:
                model_text = self._frontend(sentence)
                pieces.append((sentence, close_sentence(model_text, self.contract.tokens.symbols)))
            except DataError:
                skipped.append(sentence)
        if not pieces:
            raise DataError(f"text {text[:40]!r}: nothing to speak in it; give at least one word")
        return pieces, skipped

    @torch.inference_mode()
    def _speak(
        self, sentence: str, model_text: str, settings: SynthesisSettings, index: int
    ) -> tuple[SpokenSentence, NDArray[np.float32]]:
        sampling = self.contract.sampling
        encoded = self._llm.encode(model_text)
        tag_ids = self._tag_ids(settings)
        chosen = SamplingSettings(
            temperature=sampling.temperature
            if settings.temperature is None
            else settings.temperature,
            top_p=sampling.top_p if settings.top_p is None else settings.top_p,
        )
        attempts = 0
        generation: Generation | None = None
        while generation is None or (
            generation.finish_reason != "end" and attempts <= settings.retries
        ):
            generator = step_generator(settings.seed, index, attempts)
            generation = generate(
                self._llm.network, self.contract, encoded.ids, chosen, generator, tag_ids
            )
            attempts += 1
        report = SpokenSentence(
            sentence,
            model_text,
            len(generation.semantic_tokens),
            generation.finish_reason,
            attempts,
            encoded.num_dropped,
        )
        return report, self._decode(_change_speed(generation.hidden_states, settings.speed))

    def _tag_ids(self, settings: SynthesisSettings) -> tuple[int, ...]:
        """Ids of the chosen speaker and language."""
        tokens = self.contract.tokens
        speaker = _choose_tag("speaker", settings.speaker, tokens.speakers)
        language = _choose_tag("language", settings.language, tokens.languages)
        return tokens.tag_ids(speaker, language)

    def _decode(self, states: Tensor) -> NDArray[np.float32]:
        features = states.to(self.device, torch.float32).T.unsqueeze(0)  # [S, D] -> [1, D, S]
        audio: Tensor = self._vocoder(features)[0]
        samples: NDArray[np.float32] = audio.float().clamp(-1, 1).cpu().numpy()
        return samples

    def _load_codec(self) -> SpeechTokenizer:
        if self._codec is None:
            if self.files.codec is None:
                raise CheckpointError(
                    f"{self.files.path}: no codec/ in this voice, so it cannot copy recordings"
                )
            self._codec = load_codec(self.files.codec)
        return self._codec


def _choose_tag(kind: str, wanted: str | None, known: Sequence[str]) -> str:
    if wanted is None:
        return known[0] if known else ""
    if wanted not in known:
        raise ConfigError(
            f"{kind} is {wanted!r}, expected one of {', '.join(known)}"
            if known
            else f"{kind} is {wanted!r}, but this voice was trained without {kind} tags"
        )
    return wanted


def close_sentence(model_text: str, symbols: Sequence[str]) -> str:
    """End a text with a full stop when it has no final mark and the voice knows one.

    Without symbols the voice reads with a base model's tokenizer, which knows every mark. A voice
    trained on punctuated transcripts takes the mark for the end; without it, it may go on
    and repeat the last words.
    """
    if (symbols and "." not in symbols) or model_text[-1:] in FINAL_MARKS:
        return model_text
    return model_text.rstrip(" ,;:") + "."


def _change_speed(states: Tensor, speed: float) -> Tensor:
    """Resample states in time by linear interpolation: [S, D] -> [round(S / speed), D]."""
    if speed == 1.0:
        return states
    length = max(1, round(len(states) / speed))
    stretched = torch.nn.functional.interpolate(
        states.float().T.unsqueeze(0), size=length, mode="linear", align_corners=True
    )
    return stretched[0].T
