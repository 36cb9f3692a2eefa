"""The built-in codec: log-mel -> 25 Hz trunk -> FSQ codes -> log-mel.

All its layers work at the token rate: four frames enter as one vector and leave as one. Positions
past the end of a clip are zeroed after every layer that could fill them, so a clip has the same
codes alone and in a padded batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tts_stack.mel import LogMel
from tts_stack.semantic.config import CodecConfig
from tts_stack.semantic.fsq import FSQ


class CodecOutput(NamedTuple):
    """What one pass through the autoencoder gives."""

    mel_hat: Tensor  # [B, K, F] natural-log mel
    features: Tensor  # [B, S, D] decoder trunk, computed from the codes alone
    indices: Tensor  # [B, S] int64; meaningless past a clip's end


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution over time, then two pointwise layers (arXiv:2201.03545)."""

    def __init__(
        self, *, hidden_size: int, ffn_size: int, kernel_size: int, initial_scale: float
    ) -> None:
        super().__init__()
        self.mix = nn.Conv1d(
            hidden_size, hidden_size, kernel_size, padding=kernel_size // 2, groups=hidden_size
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.expand = nn.Linear(hidden_size, ffn_size)
        self.contract = nn.Linear(ffn_size, hidden_size)
        self.scale = nn.Parameter(torch.full((hidden_size,), initial_scale))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Mix x [B, S, D], which must be zero where mask [B, S, 1] is 0; so is the result."""
        y = self.mix(x.transpose(1, 2)).transpose(1, 2)
        y = self.contract(functional.gelu(self.expand(self.norm(y))))
        return (x + self.scale * y) * mask


class Trunk(nn.Module):
    """Residual blocks at the token rate and a last norm; [B, S, D] -> [B, S, D]."""

    def __init__(
        self, num_blocks: int, *, hidden_size: int, ffn_size: int, kernel_size: int
    ) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(hidden_size)
        self.blocks = nn.ModuleList(
            ConvNeXtBlock(
                hidden_size=hidden_size,
                ffn_size=ffn_size,
                kernel_size=kernel_size,
                initial_scale=1 / num_blocks,
            )
            for _ in range(num_blocks)
        )
        self.norm_out = nn.LayerNorm(hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Read x [B, S, D]; what it holds where mask [B, S, 1] is 0 reaches no other position."""
        x = self.norm_in(x) * mask
        for block in self.blocks:
            x = block(x, mask)
        return self.norm_out(x)


class MelCodec(nn.Module):
    """Convolutional autoencoder over log-mel with a finite-scalar-quantised bottleneck.

    Args:
        n_mels: bins of the log-mel.
        frames_per_token: frames that one token stands for.
        levels: FSQ levels.
        hidden_size: width of both trunks.
        ffn_size: width inside a block.
        kernel_size: tokens that one block sees.
        num_encoder_blocks: blocks before the codes.
        num_decoder_blocks: blocks after the codes.
    """

    def __init__(
        self,
        *,
        n_mels: int,
        frames_per_token: int,
        levels: list[int],
        hidden_size: int,
        ffn_size: int,
        kernel_size: int,
        num_encoder_blocks: int,
        num_decoder_blocks: int,
    ) -> None:
        super().__init__()
        self.frames_per_token = frames_per_token
        self.mel_mean: Tensor
        self.mel_std: Tensor
        self.register_buffer("mel_mean", torch.zeros(n_mels))
        self.register_buffer("mel_std", torch.ones(n_mels))
        # Twice as wide as its stride: a token also sees half of each neighbour's frames.
        self.patch = nn.Conv1d(n_mels, hidden_size, 2 * frames_per_token, stride=frames_per_token)
        widths = {"hidden_size": hidden_size, "ffn_size": ffn_size, "kernel_size": kernel_size}
        self.encoder = Trunk(num_encoder_blocks, **widths)
        self.to_code = nn.Linear(hidden_size, len(levels))
        self.fsq = FSQ(levels)
        self.from_code = nn.Linear(len(levels), hidden_size)
        self.decoder = Trunk(num_decoder_blocks, **widths)
        self.to_mel = nn.Linear(hidden_size, frames_per_token * n_mels)

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Fix the mean and standard deviation [K] that scale the log-mel at both ends."""
        self.mel_mean.copy_(mean)
        self.mel_std.copy_(std)

    def forward(self, mel: Tensor, num_tokens: Tensor) -> CodecOutput:
        """Log-mel [B, K, F] of clips with num_tokens [B] tokens -> its reconstruction."""
        mask = token_mask(num_tokens, mel.shape[-1] // self.frames_per_token)[..., None]
        values = self.fsq(self._encode(mel, mask))  # [B, S, D] -> [B, S, len(levels)]
        mel_hat, features = self._decode(values, mask)
        return CodecOutput(mel_hat, features, self.fsq.indices(values))

    def encode(self, mel: Tensor, num_tokens: Tensor) -> Tensor:
        """Log-mel [B, K, F] -> codes [B, S], int64; meaningless past a clip's end."""
        mask = token_mask(num_tokens, mel.shape[-1] // self.frames_per_token)[..., None]
        return self.fsq.indices(self.fsq(self._encode(mel, mask)))

    def decode(self, indices: Tensor, num_tokens: Tensor) -> Tensor:
        """Codes [B, S] -> log-mel [B, K, F]."""
        mask = token_mask(num_tokens, indices.shape[-1])[..., None]
        return self._decode(self.fsq.values(indices), mask)[0]

    def _encode(self, mel: Tensor, mask: Tensor) -> Tensor:
        frame_mask = mask.repeat_interleave(self.frames_per_token, dim=1).transpose(1, 2)
        scaled = (mel - self.mel_mean[:, None]) / self.mel_std[:, None] * frame_mask
        left = self.frames_per_token // 2
        padded = functional.pad(scaled, (left, self.frames_per_token - left))
        x = self.patch(padded).transpose(1, 2)  # [B, K, F] -> [B, S, D]
        return self.to_code(self.encoder(x, mask))

    def _decode(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        features = self.decoder(self.from_code(values), mask)
        frames = self.to_mel(features).float()  # [B, S, frames_per_token * K]
        mel = frames.view(*frames.shape[:1], -1, self.mel_mean.shape[0]).transpose(1, 2)
        return mel * self.mel_std[:, None] + self.mel_mean[:, None], features


def token_mask(num_tokens: Tensor, length: int) -> Tensor:
    """[B] -> [B, length] float32: 1 on a clip's own positions, 0 past its end."""
    position = torch.arange(length, device=num_tokens.device)
    return (position < num_tokens[:, None]).float()


def build_codec(config: CodecConfig) -> MelCodec:
    """The autoencoder that a config describes, with random weights."""
    return MelCodec(
        n_mels=config.n_mels,
        frames_per_token=config.frames_per_token,
        levels=config.levels,
        hidden_size=config.hidden_size,
        ffn_size=config.ffn_size,
        kernel_size=config.kernel_size,
        num_encoder_blocks=config.num_encoder_blocks,
        num_decoder_blocks=config.num_decoder_blocks,
    )


def build_log_mel(config: CodecConfig) -> LogMel:
    """The spectrogram that the autoencoder reads and writes."""
    return LogMel(
        sample_rate=config.sample_rate,
        n_fft=config.n_fft,
        hop_length=config.hop_length,
        n_mels=config.n_mels,
    )
