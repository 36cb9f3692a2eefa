"""Audio -> semantic tokens: what every speech tokenizer offers, and the built-in one."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tts_stack.contract import AudioSpec, CodecIdentity
from tts_stack.errors import DataError
from tts_stack.mel import LogMel
from tts_stack.semantic.model import MelCodec


class SpeechTokenizer(Protocol):
    """A frozen model that turns speech into tokens of a fixed rate."""

    @property
    def identity(self) -> CodecIdentity:
        """Which tokenizer this is."""

    @property
    def audio_spec(self) -> AudioSpec:
        """Rates of audio and tokens."""

    def encode(self, audio: Tensor | Sequence[Tensor | NDArray[np.float32]]) -> list[Tensor]:
        """Clips -> tokens [S] of each; S = audio_spec.num_tokens(T) for every T."""

    def log_mel(self, audio: Tensor | Sequence[Tensor | NDArray[np.float32]]) -> list[Tensor]:
        """Clips -> the log-mel [K, F] that `decode_mel` tries to give back."""

    def decode_mel(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Tokens [S] of each clip -> log-mel [K, S * frames_per_token]."""

    def sketch_audio(self, log_mel: Tensor) -> NDArray[np.float32]:
        """Log-mel [K, F] -> rough audio [T], good enough to follow what is said."""


class MelCodecTokenizer:
    """The built-in tokenizer: `MelCodec` with fixed weights. Made by `load_codec`.

    Args:
        codec: the trained autoencoder.
        log_mel: the spectrogram it was trained on.
        identity: its name and weight hash.
        audio_spec: its rates.
    """

    def __init__(
        self, codec: MelCodec, log_mel: LogMel, identity: CodecIdentity, audio_spec: AudioSpec
    ) -> None:
        self._codec = codec.eval()
        self._mel = log_mel.to(codec.mel_mean.device)
        self._identity = identity
        self._audio_spec = audio_spec

    @property
    def identity(self) -> CodecIdentity:
        return self._identity

    @property
    def audio_spec(self) -> AudioSpec:
        return self._audio_spec

    @torch.inference_mode()
    def encode(self, audio: Tensor | Sequence[Tensor | NDArray[np.float32]]) -> list[Tensor]:
        """Tokens [S] of each clip, int64 on the CPU; a clip's tokens do not depend on the others.

        Args:
            audio: [B, T], or clips [T] of different lengths.

        Returns:
            S = audio_spec.num_tokens(T) tokens a clip.

        Raises:
            DataError: a clip has no samples, or is not one-dimensional.
        """
        padded, num_tokens = self._pad(audio)
        tokens = self._codec.encode(self._mel(padded), num_tokens.to(padded.device)).cpu()
        return [row[:length] for row, length in zip(tokens, num_tokens.tolist(), strict=True)]

    @torch.inference_mode()
    def log_mel(self, audio: Tensor | Sequence[Tensor | NDArray[np.float32]]) -> list[Tensor]:
        """Log-mel [K, F] of each clip, F = S * frames_per_token.

        Raises:
            DataError: a clip has no samples, or is not one-dimensional.
        """
        padded, num_tokens = self._pad(audio)
        return self._cut_frames(self._mel(padded), num_tokens.tolist())

    @torch.inference_mode()
    def decode_mel(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Log-mel [K, S * frames_per_token] of each clip's tokens [S].

        Raises:
            DataError: a token is not in the codebook.
        """
        size = self._identity.codebook_size
        for clip, row in enumerate(tokens):
            if len(row) and not 0 <= int(row.min()) <= int(row.max()) < size:
                raise DataError(
                    f"clip {clip}: holds tokens {int(row.min())} to {int(row.max())}, expected "
                    f"0 to {size - 1}; codec {self._identity.describe()} did not write them"
                )
        device = self._codec.mel_mean.device
        num_tokens = torch.tensor([len(row) for row in tokens], device=device)
        padded = pad_sequence(list(tokens), batch_first=True).to(device)
        return self._cut_frames(self._codec.decode(padded, num_tokens), num_tokens.tolist())

    @torch.inference_mode()
    def sketch_audio(self, log_mel: Tensor) -> NDArray[np.float32]:
        """Rough audio [T] of a log-mel [K, F]."""
        audio: NDArray[np.float32] = self._mel.sketch_audio(log_mel).cpu().numpy()
        return audio

    def _pad(self, audio: Tensor | Sequence[Tensor | NDArray[np.float32]]) -> tuple[Tensor, Tensor]:
        """Clips -> [B, T] with T a whole number of tokens, and the tokens of each clip [B]."""
        clips = [torch.as_tensor(clip, dtype=torch.float32) for clip in audio]
        for index, clip in enumerate(clips):
            if clip.dim() != 1 or not len(clip):
                raise DataError(
                    f"clip {index}: has shape {list(clip.shape)}, expected [T] with at least one "
                    "sample; give mono audio that is not empty"
                )
        num_tokens = torch.tensor([self._audio_spec.num_tokens(len(clip)) for clip in clips])
        num_samples = int(num_tokens.max()) * self._audio_spec.samples_per_token
        padded = torch.zeros(len(clips), num_samples)
        for row, clip in zip(padded, clips, strict=True):
            row[: len(clip)] = clip
        return padded.to(self._codec.mel_mean.device), num_tokens

    def _cut_frames(self, mel: Tensor, num_tokens: Sequence[int]) -> list[Tensor]:
        frames_per_token = self._audio_spec.frames_per_token
        rows = zip(mel.cpu(), num_tokens, strict=True)
        return [row[:, : length * frames_per_token] for row, length in rows]
