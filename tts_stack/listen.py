"""What a training LLM says, for TensorBoard: its tokens, and their sound when a codec is at hand.

The codec's own mel decoder and Griffin-Lim stand in for the vocoder, which can only be trained on
the states of a finished LLM.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage1_llm.generate import Generation, SamplingSettings, generate
from stage1_llm.network import TextToSemantic
from stage1_llm.store import SampleStore
from stage1_llm.train import Listen
from tts_stack.contract import VoiceContract
from tts_stack.runtime import step_generator
from tts_stack.semantic.checkpoint import load_codec
from tts_stack.semantic.tokenizer import SpeechTokenizer
from tts_stack.training import MediaLog
from tts_stack.voice import CODEC_CONFIG, CODEC_DIR

SHOWN_TOKENS = 200  # of a stream, as text
_SEED = 0


def make_listener(corpus: Path, num_samples: int) -> Listen | None:
    """A listener that speaks the first validation texts after each validation.

    Args:
        corpus: a tokenised corpus; its `codec/`, when there, makes the tokens audible.
        num_samples: texts to speak; 0 for no listener.
    """
    if not num_samples:
        return None
    folder = corpus / CODEC_DIR
    codec = load_codec(folder) if (folder / CODEC_CONFIG).exists() else None

    def listen(
        network: TextToSemantic,
        contract: VoiceContract,
        samples: SampleStore,
        step: int,
        media: MediaLog,
    ) -> None:
        for index in range(min(num_samples, len(samples))):
            sample = samples[index]
            spoken = _speak(network, contract, sample.text_ids, sample.tag_ids)
            name = f"validation/{sample.id}"
            media.add_text(name, _describe(spoken, len(sample.semantic_tokens)))
            if codec is not None and contract.codec == codec.identity:
                _add_sound(media, name, codec, spoken.semantic_tokens)

    return listen


@torch.no_grad()
def _speak(
    network: TextToSemantic,
    contract: VoiceContract,
    text_ids: tuple[int, ...],
    tag_ids: tuple[int, ...],
) -> Generation:
    was_training = network.training
    network.eval()
    settings = SamplingSettings(contract.sampling.temperature, contract.sampling.top_p)
    generator = step_generator(_SEED, 0)
    spoken = generate(network, contract, text_ids, settings, generator, tag_ids)
    network.train(was_training)
    return spoken


def _describe(spoken: Generation, num_true: int) -> str:
    tokens = spoken.semantic_tokens.reshape(len(spoken.semantic_tokens), -1)[:, 0].tolist()
    shown = " ".join(map(str, tokens[:SHOWN_TOKENS])) + (" …" if len(tokens) > SHOWN_TOKENS else "")
    return f"{len(tokens)} tokens ({num_true} in the recording), {spoken.finish_reason}: {shown}"


def _add_sound(media: MediaLog, name: str, codec: SpeechTokenizer, tokens: Tensor) -> None:
    log_mel = codec.decode_mel([tokens.reshape(len(tokens), -1)[:, 0]])[0]  # [K, F]
    media.add_image(name, picture(log_mel))
    media.add_audio(name, codec.sketch_audio(log_mel), codec.audio_spec.sample_rate)


def picture(log_mel: Tensor) -> NDArray[np.uint8]:
    """Log-mel [K, F] -> grey picture [K, F, 3], low bins at the bottom, 8 nat of range."""
    level = ((log_mel - log_mel.max()) / 8 + 1).clamp(0, 1).flip(0)
    grey = (255 * level).to(torch.uint8).unsqueeze(-1).expand(-1, -1, 3)
    found: NDArray[np.uint8] = grey.contiguous().cpu().numpy()
    return found
