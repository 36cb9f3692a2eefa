"""Log-mel spectrograms with an exact frame count: the codec's input and stage 2's target."""

import torch
import torchaudio
from torch import Tensor, nn

LOG_FLOOR = 1e-5  # magnitude below which the logarithm is clipped
_GRIFFIN_LIM_STEPS = 24


class LogMel(nn.Module):
    """Natural-log mel magnitudes, one frame per hop: [B, T] -> [B, n_mels, T / hop_length].

    Frames are centred on their hop ("same" padding, as in Vocos, arXiv:2306.00814), so
    F = T / hop_length exactly.
    """

    def __init__(self, *, sample_rate: int, n_fft: int, hop_length: int, n_mels: int) -> None:
        super().__init__()
        self.hop_length = hop_length
        self._padding = n_fft - hop_length
        self.transform = torchaudio.transforms.MelSpectrogram(
            sample_rate=sample_rate,
            n_fft=n_fft,
            hop_length=hop_length,
            n_mels=n_mels,
            center=False,
            power=1.0,
        )
        # Tables, not weights: keep them out of every checkpoint.
        for module in self.transform.modules():
            module._non_persistent_buffers_set.update(module._buffers)

    def forward(self, audio: Tensor) -> Tensor:
        """[B, T] -> [B, n_mels, F]; T must be a multiple of the hop."""
        if audio.shape[-1] % self.hop_length:
            raise ValueError(f"{audio.shape[-1]} samples are not a multiple of {self.hop_length}")
        left = self._padding // 2
        padded = torch.nn.functional.pad(audio.float(), (left, self._padding - left))
        mel: Tensor = self.transform(padded)
        return mel.clamp(min=LOG_FLOOR).log()

    def sketch_audio(self, log_mel: Tensor) -> Tensor:
        """[n_mels, F] -> rough audio [T], to hear what a mel says: phases by Griffin-Lim."""
        filters = self.transform.mel_scale.fb.to(log_mel)  # [K, n_mels]
        magnitude = (torch.linalg.pinv(filters.T) @ log_mel.exp()).clamp(min=0)  # [K, F]
        spectrogram = self.transform.spectrogram
        audio: Tensor = torchaudio.functional.griffinlim(
            magnitude,
            window=spectrogram.window.to(log_mel),
            n_fft=spectrogram.n_fft,
            hop_length=self.hop_length,
            win_length=spectrogram.win_length,
            power=1.0,
            n_iter=_GRIFFIN_LIM_STEPS,
            momentum=0.99,
            length=None,
            rand_init=False,
        )
        return audio
