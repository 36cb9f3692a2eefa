"""The vocoder: hidden states [B, W, S] -> audio [B, S * samples_per_token].

W is the LLM's hidden size D, or num_mixed_layers * D.

ConvNeXt blocks at token rate, an upsampling to frames, then the Vocos backbone and inverse-STFT
head (arXiv:2306.00814). Padding inside a batch never changes an item's audio: what lies past an
item's end is zeroed before every convolution, as the convolution's own padding would be.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from vocos.heads import ISTFTHead
from vocos.models import VocosBackbone
from vocos.modules import ConvNeXtBlock

from stage2_vocoder.config import VocoderConfig
from tts_stack.contract import AudioSpec
from tts_stack.errors import ConfigError, DataError

MAX_MAGNITUDE = 1e2  # as in vocos.heads.ISTFTHead
MIN_ENVELOPE = 1e-11  # of the summed squared windows, as in vocos.spectral_ops.ISTFT


class Vocoder(nn.Module):
    """Hidden states of the LLM to a waveform: S tokens give S * samples_per_token samples.

    Args:
        hidden_size: D of one layer of the LLM.
        audio: rates.
        dim: channels of every layer.
        intermediate_dim: inner width of a ConvNeXt block.
        num_token_blocks: ConvNeXt blocks at token rate.
        num_layers: ConvNeXt blocks at frame rate.
        input_kernel_size: of the first convolution, in tokens.
        n_fft: of the inverse STFT.
        num_mixed_layers: layers of the LLM that come side by side and are mixed.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        audio: AudioSpec,
        dim: int,
        intermediate_dim: int,
        num_token_blocks: int,
        num_layers: int,
        input_kernel_size: int,
        n_fft: int,
        num_mixed_layers: int = 1,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_mixed_layers = hidden_size, num_mixed_layers
        self.audio = audio
        self.norm = nn.LayerNorm(hidden_size)
        self.mix = LayerMix(num_mixed_layers) if num_mixed_layers > 1 else None
        self.embed = nn.Conv1d(hidden_size, dim, input_kernel_size, padding=input_kernel_size // 2)
        self.token_blocks = nn.ModuleList(
            ConvNeXtBlock(dim, intermediate_dim, layer_scale_init_value=1 / num_token_blocks)
            for _ in range(num_token_blocks)
        )
        # Kernel = stride: a frame reads one token, so no token leaks over an item's end.
        factor = audio.frames_per_token
        self.upsample = nn.ConvTranspose1d(dim, dim, factor, stride=factor)
        self.backbone = VocosBackbone(dim, dim, intermediate_dim, num_layers)
        self.head = MaskedISTFTHead(dim, n_fft, audio.hop_length, padding="same")

    def forward(self, hidden_states: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Decode a batch.

        Args:
            hidden_states: [B, W, S], right-padded.
            lengths: [B] tokens of each item; None means that none is padded.

        Returns:
            Audio [B, S * samples_per_token], float32, zero past each item's end.

        Raises:
            DataError: the states have another width than the vocoder was built for.
        """
        num_tokens = hidden_states.shape[-1]
        if lengths is None or bool((lengths == num_tokens).all()):
            return self._decode(hidden_states, None)
        mask = torch.arange(num_tokens, device=lengths.device) < lengths[:, None]  # [B, S]
        return self._decode(hidden_states, mask)

    def input_features(self, hidden_states: Tensor) -> Tensor:
        """Normalise and mix, each token for itself: [B, W, S] -> [B, D, S].

        Raises:
            DataError: the states have another width than the vocoder was built for.
        """
        found, wanted = hidden_states.shape[1], self.hidden_size * self.num_mixed_layers
        if found != wanted:
            raise DataError(
                f"vocoder: hidden states {found} wide, expected {wanted} ({self.num_mixed_layers} "
                f"x {self.hidden_size}); decode the states of the LLM it was trained on"
            )
        x = hidden_states.transpose(1, 2)  # [B, S, W]
        if self.mix is None:
            return self.norm(x).transpose(1, 2)
        layers = x.unflatten(-1, (self.num_mixed_layers, self.hidden_size))  # [B, S, k, D]
        return self.mix(self.norm(layers)).transpose(1, 2)

    def _decode(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        x = self.input_features(hidden_states)
        x = _masked(self.embed(_masked(x, mask)), mask)  # [B, D, S] -> [B, C, S]
        for block in self.token_blocks:
            x = _masked(block(x), mask)
        frame_mask = None
        if mask is not None:
            frame_mask = mask.repeat_interleave(self.audio.frames_per_token, dim=1)  # [B, F]
        x = _masked(self.upsample(x), frame_mask)  # [B, C, S] -> [B, C, F]
        features = run_backbone(self.backbone, x, frame_mask)  # [B, F, C]
        with torch.autocast(features.device.type, enabled=False):  # no complex bf16 exists
            audio: Tensor = self.head(features.float(), frame_mask)
        return audio

    def receptive_field_tokens(self) -> int:
        """Tokens on either side of a token that can change its samples."""
        tokens = _reach(self.embed) + sum(_reach(block.dwconv) for block in self.token_blocks)
        frames = _reach(self.backbone.embed)
        frames += sum(_reach(block.dwconv) for block in self.backbone.convnext)
        frames += self.head.reach_frames()
        return tokens + math.ceil(frames / self.audio.frames_per_token)


class LayerMix(nn.Module):
    """Learned mix of normalised layers: scale * sum_j softmax(weights)_j * layer_j.

    ELMo's mix (arXiv:1802.05365, equation 1, with the layer normalisation its section 3.2
    suggests: the layers of an LLM differ in size by far more than a softmax could even out).
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))  # all layers alike at first
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, layers: Tensor) -> Tensor:
        """[..., k, D] -> [..., D]."""
        return self.scale * torch.einsum("k,...kd->...d", self.weights.softmax(0), layers)


class MaskedISTFTHead(ISTFTHead):
    """Vocos' inverse-STFT head for batches with padding: padded frames add nothing."""

    def __init__(self, dim: int, n_fft: int, hop_length: int, padding: str = "same") -> None:
        super().__init__(dim, n_fft, hop_length, padding)
        self.n_fft, self.hop_length = n_fft, hop_length
        self.istft._non_persistent_buffers_set.add("window")  # a table, not a weight

    def forward(self, x: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """Features [B, F, C] -> audio [B, F * hop_length]."""
        spectrum = self.spectrum(x)
        num_samples = x.shape[1] * self.hop_length  # one more where the overlap is odd: cut
        if frame_mask is None:
            audio: Tensor = self.istft(spectrum)[:, :num_samples]
            return audio
        audio = self.istft(spectrum * frame_mask[:, None])[:, :num_samples]
        return audio * self._envelope_ratio(frame_mask)

    def spectrum(self, x: Tensor) -> Tensor:
        """Features [B, F, C] -> complex spectrum [B, K, F]."""
        log_magnitude, phase = self.out(x).transpose(1, 2).chunk(2, dim=1)  # each [B, K, F]
        return torch.polar(log_magnitude.exp().clamp(max=MAX_MAGNITUDE), phase)

    def reach_frames(self) -> int:
        """Frames on either side of a frame whose windows overlap its samples."""
        return (self.n_fft - 1 - self.padding) // self.hop_length

    @property
    def padding(self) -> int:
        """Samples before an utterance that its first window covers."""
        return (self.n_fft - self.hop_length) // 2

    def _envelope_ratio(self, frame_mask: Tensor) -> Tensor:
        """Full window envelope over that of each item's own frames: [B, F] -> [B, T].

        The head divides the overlap-add by the envelope of all frames, padded ones included.
        """
        full = self._envelope(torch.ones_like(frame_mask[:1]))
        own = self._envelope(frame_mask)
        is_audio = frame_mask.repeat_interleave(self.hop_length, dim=1)
        return torch.where(is_audio, full / own.clamp(min=torch.finfo(own.dtype).tiny), 0.0)

    def _envelope(self, frame_mask: Tensor) -> Tensor:
        """Sum of squared windows of the frames in the mask: [B, F] -> [B, T]."""
        num_frames = frame_mask.shape[1]
        squared = self.istft.window.square()[None, :, None] * frame_mask[:, None]  # [B, n_fft, F]
        summed = nn.functional.fold(
            squared,
            output_size=(1, (num_frames - 1) * self.hop_length + self.n_fft),
            kernel_size=(1, self.n_fft),
            stride=(1, self.hop_length),
        )
        return summed[:, 0, 0, self.padding :][:, : num_frames * self.hop_length]


def run_backbone(backbone: VocosBackbone, x: Tensor, mask: Tensor | None) -> Tensor:
    """The backbone's own layers with a mask after each: [B, C, F] -> [B, F, C]."""
    x = backbone.norm(backbone.embed(x).transpose(1, 2)).transpose(1, 2)
    x = _masked(x, mask)
    for block in backbone.convnext:
        x = _masked(block(x), mask)
    features: Tensor = backbone.final_layer_norm(x.transpose(1, 2))
    return features


def build_vocoder(
    config: VocoderConfig,
    *,
    hidden_size: int,
    audio: AudioSpec,
    num_mixed_layers: int = 1,
) -> Vocoder:
    """Build a vocoder for the states of one LLM and the rates of one corpus.

    Args:
        config: sizes.
        hidden_size: D of one layer of the LLM.
        audio: rates.
        num_mixed_layers: layers of the LLM that come side by side and are mixed.

    Raises:
        ConfigError: n_fft does not suit the hop.
    """
    if config.n_fft % 2 or _least_envelope(config.n_fft, audio.hop_length) <= MIN_ENVELOPE:
        raise ConfigError(
            f"vocoder.n_fft is {config.n_fft}, expected more than hop_length {audio.hop_length}, "
            f"and even; try {4 * audio.hop_length}"
        )
    return Vocoder(
        hidden_size=hidden_size,
        audio=audio,
        dim=config.dim,
        intermediate_dim=config.intermediate_dim,
        num_token_blocks=config.num_token_blocks,
        num_layers=config.num_layers,
        input_kernel_size=config.input_kernel_size,
        n_fft=config.n_fft,
        num_mixed_layers=num_mixed_layers,
    )


def count_parameters(module: nn.Module) -> int:
    """Trainable parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _least_envelope(n_fft: int, hop_length: int) -> float:
    """Squared Hann window at an utterance's first sample, where the fewest windows overlap."""
    place = (n_fft - hop_length) // 2
    return math.sin(math.pi * place / n_fft) ** 4 if place > 0 else 0.0


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero what lies past an item's end; a no-op without padding."""
    return x if mask is None else x * mask[:, None]


def _reach(convolution: Any) -> int:
    """Steps on either side that a convolution reads."""
    return int(convolution.dilation[0]) * (int(convolution.kernel_size[0]) - 1) // 2
