"""Streaming decode: hidden states in pieces -> the samples that decoding them at once gives.

Every layer keeps the few inputs that its next outputs need, and the inverse STFT the samples that
later windows add to. So nothing is computed twice, whatever the size of the pieces, and what is
held back is the receptive field of the layers, at most.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from vocos.modules import ConvNeXtBlock

from stage2_vocoder.model import MaskedISTFTHead, Vocoder


class StreamDecoder:
    """Decodes one utterance after the other, each in pieces.

    decoder = StreamDecoder(vocoder)
    for states in pieces:  # [S, W]
        play(decoder.push(states))
    play(decoder.flush())

    The samples of all pieces together are those of `vocoder(all states)`.

    Args:
        vocoder: in evaluation mode; its weights are read at every call.
    """

    def __init__(self, vocoder: Vocoder) -> None:
        self._vocoder = vocoder
        self.latency_tokens = vocoder.receptive_field_tokens()  # at most so many are held back
        self._start()

    def push(self, states: Tensor) -> Tensor:
        """Take more states [S, W]; returns the samples [T] that they make final, maybe none.

        Raises:
            DataError: the states have another width than the vocoder was built for.
        """
        return self._decode(states, is_last=False)

    def flush(self) -> Tensor:
        """End the utterance: its last samples [T]. The next push begins another one."""
        width = self._vocoder.hidden_size * self._vocoder.num_mixed_layers
        audio = self._decode(self._weight.new_zeros(0, width), is_last=True)
        self._start()
        return audio

    @property
    def _weight(self) -> Tensor:
        return self._vocoder.embed.weight

    def _start(self) -> None:
        """Forget everything: each layer as at the start of an utterance."""
        vocoder = self._vocoder
        backbone = vocoder.backbone
        self._embed = _Convolution(vocoder.embed)
        self._token_blocks = [_Block(_convnext(block)) for block in vocoder.token_blocks]
        self._backbone_embed = _Convolution(backbone.embed)
        self._blocks = [_Block(_convnext(block)) for block in backbone.convnext]
        self._overlap_add = _OverlapAdd(vocoder.head)

    @torch.no_grad()
    def _decode(self, states: Tensor, *, is_last: bool) -> Tensor:
        vocoder = self._vocoder
        x = vocoder.input_features(states.to(self._weight).T[None])  # [S, W] -> [1, D, S]
        x = self._embed(x, is_last=is_last)
        for block in self._token_blocks:
            x = block(x, is_last=is_last)
        if x.shape[-1]:
            x = vocoder.upsample(x)  # [1, C, S] -> [1, C, F]
        x = self._backbone_embed(x, is_last=is_last)
        x = vocoder.backbone.norm(x.transpose(1, 2)).transpose(1, 2)
        for block in self._blocks:
            x = block(x, is_last=is_last)
        features = vocoder.backbone.final_layer_norm(x.transpose(1, 2))
        return self._overlap_add(features, is_last=is_last)


class _Convolution:
    """A convolution that pads with zeros, fed in pieces."""

    def __init__(self, convolution: nn.Conv1d) -> None:
        self._convolution = convolution
        self._reach = convolution.dilation[0] * (convolution.kernel_size[0] - 1) // 2
        self._kept = self._zeros()  # the padding before an utterance

    def __call__(self, x: Tensor, *, is_last: bool) -> Tensor:
        """[1, C, n] -> the outputs [1, C', m] that are final."""
        x = torch.cat([self._kept, x, *([self._zeros()] if is_last else [])], dim=-1)
        count = x.shape[-1] - 2 * self._reach  # outputs whose inputs are all there
        self._kept = x[..., max(0, count) :]
        layer = self._convolution
        if count <= 0:
            return x.new_zeros(1, layer.out_channels, 0)
        return functional.conv1d(
            x, layer.weight, layer.bias, dilation=layer.dilation, groups=layer.groups
        )

    def _zeros(self) -> Tensor:
        return self._convolution.weight.new_zeros(1, self._convolution.in_channels, self._reach)


class _Block:
    """A ConvNeXt block of vocos, fed in pieces: the same layers around its convolution."""

    def __init__(self, block: ConvNeXtBlock) -> None:
        self._block = block
        self._mix = _Convolution(block.dwconv)
        self._waiting = block.dwconv.weight.new_zeros(1, block.dwconv.in_channels, 0)

    def __call__(self, x: Tensor, *, is_last: bool) -> Tensor:
        """[1, C, n] -> the outputs [1, C, m] that are final."""
        block = self._block
        waiting = torch.cat([self._waiting, x], dim=-1)
        y = self._mix(x, is_last=is_last)
        residual, self._waiting = waiting.tensor_split([y.shape[-1]], dim=-1)
        y = block.pwconv2(block.act(block.pwconv1(block.norm(y.transpose(1, 2)))))
        if block.gamma is not None:
            y = block.gamma * y
        return residual + y.transpose(1, 2)


class _OverlapAdd:
    """The inverse-STFT head, fed in pieces: a sample is final when no later window reaches it."""

    def __init__(self, head: MaskedISTFTHead) -> None:
        self._head = head
        self._window = cast(Tensor, head.istft.window)
        self._overlap = head.n_fft - head.hop_length
        self._to_drop = head.padding  # samples before an utterance
        self._sums = self._window.new_zeros(2, self._overlap)  # audio and envelope still growing

    def __call__(self, features: Tensor, *, is_last: bool) -> Tensor:
        """[1, F, C] -> final samples [T]."""
        sums = functional.pad(self._sums, (0, features.shape[1] * self._head.hop_length))
        if features.shape[1]:
            sums = sums + self._summed(features)
        after = self._overlap - self._head.padding  # samples after an utterance
        num_final = sums.shape[1] - (after if is_last else self._overlap)
        start = min(self._to_drop, num_final)
        self._to_drop -= start
        self._sums = sums[:, num_final:]
        audio, envelope = sums[:, start:num_final]
        return audio / envelope

    def _summed(self, features: Tensor) -> Tensor:
        """Windowed frames and squared windows, overlapped and added: [2, samples]."""
        head = self._head
        frames = torch.fft.irfft(head.spectrum(features)[0], head.n_fft, dim=0)  # [n_fft, F]
        windows = self._window[:, None].expand_as(frames)
        both = torch.stack([frames * windows, windows.square()])  # [2, n_fft, F]
        return functional.fold(
            both,
            output_size=(1, (features.shape[1] - 1) * head.hop_length + head.n_fft),
            kernel_size=(1, head.n_fft),
            stride=(1, head.hop_length),
        )[:, 0, 0]


def _convnext(module: nn.Module) -> ConvNeXtBlock:
    return cast(ConvNeXtBlock, module)
