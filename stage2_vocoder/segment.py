"""Which tokens a crop covers and which must be decoded for it: pure arithmetic in token units.

Decoding a crop with the vocoder's receptive field on either side and cutting the margin off gives
the very samples that decoding the whole utterance gives.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tts_stack.contract import AudioSpec


@dataclass(frozen=True)
class Segment:
    """A crop of one utterance and the window decoded for it, in tokens."""

    crop_start: int
    crop_stop: int
    window_start: int
    window_stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the crop: fewer than asked for when the utterance is shorter."""
        return self.crop_stop - self.crop_start

    @property
    def offset(self) -> int:
        """Tokens of the window that stand before the crop."""
        return self.crop_start - self.window_start


def crop_tokens(seconds: float, audio: AudioSpec) -> int:
    """Whole tokens nearest to a duration, at least one."""
    return max(1, round(seconds * audio.token_rate))


def random_segment(num_tokens: int, crop: int, margin: int, generator: torch.Generator) -> Segment:
    """A crop at a random place, every place equally likely.

    Args:
        num_tokens: S of the utterance.
        crop: tokens wanted; an utterance of at most this many is taken whole.
        margin: tokens decoded on either side, fewer where the utterance ends.
        generator: source of the place.
    """
    num_places = max(0, num_tokens - crop) + 1
    start = int(torch.randint(num_places, (1,), generator=generator))
    return with_margin(start, min(start + crop, num_tokens), margin, num_tokens)


def with_margin(start: int, stop: int, margin: int, num_tokens: int) -> Segment:
    """The segment of a crop start .. stop - 1 with its margin cut to the utterance."""
    return Segment(start, stop, max(0, start - margin), min(num_tokens, stop + margin))


def slice_audio(audio: Tensor, starts: Tensor, num_samples: int, counts: Tensor) -> Tensor:
    """Cut each row's crop: [B, T] -> [B, num_samples].

    Args:
        audio: decoded windows.
        starts: [B], sample at which a row's crop begins.
        num_samples: width of the result.
        counts: [B], samples of a row's crop; the rest of the row is silence.
    """
    place = torch.arange(num_samples, device=audio.device)
    is_crop = place < counts.to(audio.device)[:, None]  # [B, num_samples]
    index = (starts.to(audio.device)[:, None] + place).clamp(max=audio.shape[1] - 1)
    return audio.gather(1, index) * is_crop
