"""The vocoder: hidden states [B, D, S] -> audio [B, S * samples_per_token].

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
from tts_stack.errors import ConfigError

MAX_MAGNITUDE = 1e2  # as in vocos.heads.ISTFTHead


class Vocoder(nn.Module):
    """Hidden states of the LLM to a waveform: S tokens give S * samples_per_token samples."""

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
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.audio = audio
        self.norm = nn.LayerNorm(hidden_size)
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
            hidden_states: [B, D, S], right-padded.
            lengths: [B] tokens of each item; None means that none is padded.

        Returns:
            Audio [B, S * samples_per_token], float32, zero past each item's end.
        """
        num_tokens = hidden_states.shape[-1]
        if lengths is None or bool((lengths == num_tokens).all()):
            return self._decode(hidden_states, None)
        mask = torch.arange(num_tokens, device=lengths.device) < lengths[:, None]  # [B, S]
        return self._decode(hidden_states, mask)

    def _decode(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm(hidden_states.transpose(1, 2)).transpose(1, 2)
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


class MaskedISTFTHead(ISTFTHead):
    """Vocos' inverse-STFT head for batches with padding: padded frames add nothing."""

    def __init__(self, dim: int, n_fft: int, hop_length: int, padding: str = "same") -> None:
        super().__init__(dim, n_fft, hop_length, padding)
        self.n_fft, self.hop_length = n_fft, hop_length
        self.istft._non_persistent_buffers_set.add("window")  # a table, not a weight

    def forward(self, x: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """Features [B, F, C] -> audio [B, F * hop_length]."""
        log_magnitude, phase = self.out(x).transpose(1, 2).chunk(2, dim=1)  # each [B, K, F]
        magnitude = log_magnitude.exp().clamp(max=MAX_MAGNITUDE)
        if frame_mask is None:
            audio: Tensor = self.istft(torch.polar(magnitude, phase))
            return audio
        magnitude = magnitude * frame_mask[:, None]
        return self.istft(torch.polar(magnitude, phase)) * self._envelope_ratio(frame_mask)

    def reach_frames(self) -> int:
        """Frames on either side of a frame whose windows overlap its samples."""
        padding = (self.n_fft - self.hop_length) // 2
        return (self.hop_length - 1 + padding) // self.hop_length

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
        padding = (self.n_fft - self.hop_length) // 2
        squared = self.istft.window.square()[None, :, None] * frame_mask[:, None]  # [B, n_fft, F]
        summed = nn.functional.fold(
            squared,
            output_size=(1, (num_frames - 1) * self.hop_length + self.n_fft),
            kernel_size=(1, self.n_fft),
            stride=(1, self.hop_length),
        )
        return summed[:, 0, 0, padding:-padding]


def run_backbone(backbone: VocosBackbone, x: Tensor, mask: Tensor | None) -> Tensor:
    """The backbone's own layers with a mask after each: [B, C, F] -> [B, F, C]."""
    x = backbone.norm(backbone.embed(x).transpose(1, 2)).transpose(1, 2)
    x = _masked(x, mask)
    for block in backbone.convnext:
        x = _masked(block(x), mask)
    features: Tensor = backbone.final_layer_norm(x.transpose(1, 2))
    return features


def build_vocoder(config: VocoderConfig, *, hidden_size: int, audio: AudioSpec) -> Vocoder:
    """Build a vocoder for the states of one LLM and the rates of one corpus.

    Raises:
        ConfigError: n_fft does not suit the hop.
    """
    overlap = config.n_fft - audio.hop_length
    if overlap < 2 or overlap % 2:
        raise ConfigError(
            f"vocoder.n_fft is {config.n_fft}, expected more than hop_length {audio.hop_length} "
            f"by an even number; try {4 * audio.hop_length}"
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
    )


def count_parameters(module: nn.Module) -> int:
    """Trainable parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero what lies past an item's end; a no-op without padding."""
    return x if mask is None else x * mask[:, None]


def _reach(convolution: Any) -> int:
    """Steps on either side that a convolution reads."""
    return int(convolution.dilation[0]) * (int(convolution.kernel_size[0]) - 1) // 2
