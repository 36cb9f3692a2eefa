"""Text ids -> semantic tokens and the hidden states behind them, token by token with a KV cache."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stage1_llm.decoder import Decoded, make_decoder
from stage1_llm.network import TextToSemantic
from stage1_llm.prompt import next_position, prompt_prefix
from tts_stack.contract import MIN_RUN, LengthSpec, VoiceContract
from tts_stack.errors import ConfigError

FINISHED, TOO_LONG, STUCK = "end", "length", "repetition"
LONGEST_CYCLE = 8  # tokens; a repeated pattern of at most this many counts as being stuck
LOWER_SLACK, UPPER_SLACK = 0.8, 1.3  # on the shortest and longest speech seen for a text's length
SPARE_TOKENS = 10  # on top of the upper bound: short texts vary most
UNKNOWN_LENGTH_TOKENS = 1000  # upper bound of a voice without a LengthSpec


@dataclass(frozen=True)
class SamplingSettings:
    """How to choose among the LLM's predictions."""

    temperature: float = 0.7  # 0 takes the most probable token
    top_p: float = 0.9  # the fewest tokens that hold this share of the probability
    repetition_window: int = 0  # 0 off; else: a token seen too often in the last so many ...
    repetition_share: float = 0.3  # ... (more than this share) is drawn again without top_p
    stuck_tokens: int = 30  # 0 off; so many tokens in one short cycle end the utterance
    min_tokens: int | None = None  # None: from the voice's LengthSpec
    max_tokens: int | None = None  # None: from the voice's LengthSpec

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}, expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}, expected above 0 and at most 1")
        if self.max_tokens is not None and self.max_tokens < max(1, self.min_tokens or 0):
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, expected at least 1 and min_tokens "
                f"({self.min_tokens or 0})"
            )


@dataclass(frozen=True)
class Generation:
    """One utterance as the LLM spoke it, its runs expanded."""

    semantic_tokens: Tensor  # [S] or [S, K] int64
    hidden_states: Tensor  # [S, W], layers and position as the contract says
    finish_reason: str  # FINISHED, TOO_LONG or STUCK


class GeneratedToken(NamedTuple):
    """One step of generation."""

    semantic_token: int
    hidden_state: Tensor  # [W]
    codes: tuple[int, ...] = ()  # of the other codebooks of the codec
    run_length: int = 1  # tokens it stands for


class TokenBounds(NamedTuple):
    """Fewest and most semantic tokens an utterance may have."""

    low: int
    high: int


class TokenStream:
    """Semantic tokens as they are generated; `finish_reason` is set when iteration ends.

    Args:
        network: in evaluation mode.
        contract: of the voice the network belongs to.
        text_ids: of the voice's TextEncoder.
        settings: sampling.
        generator: on the CPU; the same seed gives the same tokens.
        tag_ids: speaker and language.
    """

    def __init__(
        self,
        network: TextToSemantic,
        contract: VoiceContract,
        text_ids: Sequence[int],
        settings: SamplingSettings,
        generator: torch.Generator,
        tag_ids: Sequence[int] = (),
    ) -> None:
        self.finish_reason = ""
        self._prefix = prompt_prefix(text_ids, contract.tokens, contract.prompt, tag_ids)
        self._bounds = token_bounds(len(text_ids), contract.length, settings)
        # Every token may have a duration token before it.
        capacity = self._bounds.high * (2 if contract.tokens.num_durations else 1)
        self._decoder = make_decoder(
            network,
            layer=contract.prompt.hidden_layer,
            capacity=capacity,
            num_mixed=contract.prompt.num_mixed_layers,
        )
        self._network, self._contract = network, contract
        self._settings, self._generator = settings, generator

    @torch.inference_mode()
    def __iter__(self) -> Iterator[GeneratedToken]:
        tokens = self._contract.tokens
        is_read_state = self._contract.prompt.state_position == "reads"
        past: list[int] = []
        decoded = self._decoder.prefill(self._prefix)
        position = next_position(self._prefix)
        num_spoken, run_length = 0, 1
        while num_spoken < self._bounds.high:
            may_end = num_spoken >= self._bounds.low and run_length == 1
            token_id = self._choose(decoded.logits, past, may_end=may_end, is_run=run_length > 1)
            if token_id == tokens.audio_end:
                self.finish_reason = FINISHED
                return
            if tokens.duration_offset <= token_id < tokens.duration_stop:
                run_length = token_id - tokens.duration_offset + MIN_RUN
                decoded = self._decoder.step(token_id, position)
                position += 1
                continue
            codes = self._choose_codes(decoded, token_id)
            before = decoded.state
            decoded = self._decoder.step(token_id, position, codes)
            position += 1
            past.append(token_id - tokens.semantic_offset)
            if self._contract.prompt.durations == "codebook":
                run_length = codes.pop() + 1
            run_length = min(run_length, self._bounds.high - num_spoken)
            state = decoded.state if is_read_state else before
            yield GeneratedToken(past[-1], state, tuple(codes), run_length)
            num_spoken += run_length
            run_length = 1
            if is_stuck(past, self._settings.stuck_tokens):
                self.finish_reason = STUCK
                return
        self.finish_reason = TOO_LONG

    def _choose(self, logits: Tensor, past: Sequence[int], *, may_end: bool, is_run: bool) -> int:
        """Id of a semantic token, a duration token (never two in a row), or the end."""
        tokens = self._contract.tokens
        scores = logits[tokens.semantic_offset : tokens.semantic_stop]
        if tokens.num_durations and not is_run:
            durations = logits[tokens.duration_offset : tokens.duration_stop]
            scores = torch.cat([scores, durations])
        end_score = logits[tokens.audio_end].float() if may_end else -math.inf
        choice = choose_token(scores.float(), end_score, past, self._settings, self._generator)
        if choice == len(scores):
            return tokens.audio_end
        if choice < tokens.codebook_size:
            return tokens.semantic_offset + choice
        return tokens.duration_offset + choice - tokens.codebook_size

    def _choose_codes(self, decoded: Decoded, token_id: int) -> list[int]:
        if self._network.codebooks is None:
            return []
        embedding = self._network.llm.get_input_embeddings().weight[token_id]

        def pick(logits: Tensor) -> int:
            return choose_token(logits.float(), -math.inf, (), self._settings, self._generator)

        return self._network.codebooks.choose(decoded.last, embedding, pick)


def generate(
    network: TextToSemantic,
    contract: VoiceContract,
    text_ids: Sequence[int],
    settings: SamplingSettings,
    generator: torch.Generator,
    tag_ids: Sequence[int] = (),
) -> Generation:
    """Speak one text; see TokenStream for the arguments.

    Raises:
        DataError: the text has no symbol.
    """
    stream = TokenStream(network, contract, text_ids, settings, generator, tag_ids)
    steps = list(stream)
    rows = [(step.semantic_token, *step.codes) for step in steps]
    tokens = torch.tensor(rows, dtype=torch.int64)  # [N, K]
    repeats = torch.tensor([step.run_length for step in steps])
    tokens = tokens.repeat_interleave(repeats, dim=0)
    states = torch.stack([step.hidden_state for step in steps])
    return Generation(
        tokens[:, 0] if tokens.shape[1] == 1 else tokens,
        states.repeat_interleave(repeats.to(states.device), dim=0),
        stream.finish_reason,
    )


def token_bounds(num_symbols: int, length: LengthSpec, settings: SamplingSettings) -> TokenBounds:
    """Fewest and most tokens for a text of `num_symbols`, at least one; settings come first."""
    low, high = 1, UNKNOWN_LENGTH_TOKENS
    if length.tokens_per_symbol:
        shortest = length.fixed_tokens + length.low * num_symbols
        longest = length.fixed_tokens + length.high * num_symbols
        low = max(1, math.floor(LOWER_SLACK * shortest))
        high = max(low, math.ceil(UPPER_SLACK * longest)) + SPARE_TOKENS
    low = max(1, settings.min_tokens) if settings.min_tokens is not None else low
    high = settings.max_tokens if settings.max_tokens is not None else high
    return TokenBounds(min(low, high), high)


def choose_token(
    scores: Tensor,
    end_score: Tensor | float,
    past: Sequence[int],
    settings: SamplingSettings,
    generator: torch.Generator,
) -> int:
    """Index of a score, or their number for the end of audio.

    Args:
        scores: [n] logits of the semantic tokens, then of duration tokens where they are allowed.
        end_score: logit of <|audio_end|>, -inf where it is forbidden.
        past: semantic tokens so far.
        settings: sampling.
        generator: source of randomness.
    """
    all_scores = torch.cat([scores, scores.new_full((1,), float(end_score))]).cpu()
    if not settings.temperature:
        return int(all_scores.argmax())
    probabilities = torch.softmax(all_scores / settings.temperature, dim=-1)
    choice = _draw(keep_top_p(probabilities, settings.top_p), generator)
    # Repetition-aware sampling (VALL-E 2, arXiv:2406.05370, section 3.2).
    window = past[-settings.repetition_window :] if settings.repetition_window else []
    if window and window.count(choice) > settings.repetition_share * len(window):
        choice = _draw(probabilities, generator)
    return choice


def keep_top_p(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the fewest entries that together hold `top_p`; not normalised."""
    if top_p >= 1:
        return probabilities
    ordered, index = probabilities.sort(descending=True)
    is_kept = ordered.cumsum(0) - ordered < top_p  # the first is always kept
    return torch.zeros_like(probabilities).scatter(0, index, ordered * is_kept)


def is_stuck(past: Sequence[int], num_tokens: int) -> bool:
    """True when the last `num_tokens` tokens repeat one cycle of at most LONGEST_CYCLE."""
    if not num_tokens or len(past) < num_tokens + LONGEST_CYCLE:
        return False
    tail = past[-num_tokens:]
    return any(
        tail == past[-num_tokens - period : -period] for period in range(1, LONGEST_CYCLE + 1)
    )


def _draw(probabilities: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(probabilities, 1, generator=generator))
