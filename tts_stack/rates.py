"""The law that ties samples, frames and tokens, and the nearest rates that keep it.

sample_rate = token_rate * frames_per_token * hop_length, the last two whole numbers: a token is a
whole number of frames, a frame a whole number of samples.
"""

from typing import NamedTuple

from tts_stack.errors import ConfigError

ROUNDING = 2e-3  # relative: 33.3 stands for 100 / 3


class Split(NamedTuple):
    """Samples of a token as frames of so many samples."""

    hop_length: int
    frames_per_token: int

    @property
    def samples(self) -> int:
        """Samples of a token."""
        return self.hop_length * self.frames_per_token

    def rate(self, sample_rate: int) -> float:
        """Tokens per second."""
        return sample_rate / self.samples


def check_token_rate(
    token_rate: float, *, sample_rate: int, hop_length: int, frames_per_token: int, place: str
) -> None:
    """Compare a wanted token rate with what the whole numbers give.

    Args:
        token_rate: tokens per second; may be rounded to three digits.
        sample_rate: Hz.
        hop_length: samples per frame.
        frames_per_token: frames per token.
        place: start of the setting names, "codec".

    Raises:
        ConfigError: they differ; the message names the nearest rates that work.
    """
    found = Split(hop_length, frames_per_token)
    if token_rate <= 0:
        raise ConfigError(f"{place}.token_rate is {token_rate:g}, expected more than 0")
    if _is_near(found.rate(sample_rate), token_rate):
        return
    raise ConfigError(
        f"{place}.token_rate is {token_rate:g} Hz, but {sample_rate} Hz / (hop_length {hop_length} "
        f"x frames_per_token {frames_per_token}) is {_shown(found.rate(sample_rate))} Hz; "
        + _advice(token_rate, sample_rate, hop_length)
    )


def nearest_with_hop(token_rate: float, sample_rate: int, hop_length: int) -> list[Split]:
    """The splits with this hop whose rates stand on either side of the wanted one; one if exact."""
    frames = sample_rate / hop_length / token_rate
    exact = max(1, round(frames))
    if _is_near(Split(hop_length, exact).rate(sample_rate), token_rate):
        return [Split(hop_length, exact)]
    below = max(1, int(frames))  # fewer frames, a higher rate
    return [Split(hop_length, below + 1), Split(hop_length, below)]


def nearest_with_any_hop(token_rate: float, sample_rate: int, hop_length: int) -> Split:
    """The split of the nearest whole number of samples, its hop as near as can be to this one."""
    samples = max(1, round(sample_rate / token_rate))
    splits = [
        Split(samples // frames, frames)
        for frames in range(1, samples + 1)
        if samples % frames == 0
    ]
    return min(splits, key=lambda split: abs(split.hop_length - hop_length))


def _advice(token_rate: float, sample_rate: int, hop_length: int) -> str:
    near = nearest_with_hop(token_rate, sample_rate, hop_length)
    if len(near) == 1:
        return f"set frames_per_token to {near[0].frames_per_token}"
    low, high = (
        f"{_shown(split.rate(sample_rate))} Hz ({prefix}{split.hop_length} x "
        f"{split.frames_per_token})"
        for split, prefix in zip(near, ("hop ", ""), strict=True)
    )
    other = nearest_with_any_hop(token_rate, sample_rate, hop_length)
    return (
        f"nearest: {low}, {high}; or hop_length {other.hop_length} x {other.frames_per_token} = "
        f"{_shown(other.rate(sample_rate))} Hz"
    )


def _is_near(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= ROUNDING * wanted


def _shown(rate: float) -> str:
    """25, 33.3, 15.625: three digits at least, all where they are few."""
    return f"{rate:g}" if rate == round(rate, 3) else f"{rate:.1f}"
