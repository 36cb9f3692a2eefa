"""One-row decoding with a KV cache: the inner loop of synthesis.

`make_decoder` picks `LlamaDecoder`, which runs the few kernels of a Llama or Qwen3 step directly
(two to three times as fast on a CPU as the modelling code around them), or `GenericDecoder` for
any other causal LM. A test holds both to the teacher-forced states.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from stage1_llm.codebooks import Codebooks
from stage1_llm.model import head, mixed_layers, num_layers
from stage1_llm.network import TextToSemantic
from stage1_llm.prompt import Prompt
from stage1_llm.stream import IGNORE_INDEX

FAST_MODEL_TYPES = ("llama", "qwen3")


class Decoded(NamedTuple):
    """What the model says at one position."""

    state: Tensor  # [D] of the layer asked for, or of several, lowest first: [num_mixed * D]
    logits: Tensor  # [V]
    last: Tensor  # [D] after the final norm: what the codebook heads read


class Decoder(Protocol):
    """A model that reads one prompt, then token after token."""

    def prefill(self, prefix: Prompt) -> Decoded:
        """Read a prompt's prefix; what stands at its last position."""

    def step(self, token_id: int, position: float, codes: Sequence[int] = ()) -> Decoded:
        """Read one more token, with its codes of the other codebooks."""


def make_decoder(
    network: TextToSemantic, *, layer: int, capacity: int, num_mixed: int = 1
) -> Decoder:
    """The fastest decoder that fits the model.

    Args:
        network: in evaluation mode.
        layer: index into the model's hidden states, whose state is returned.
        capacity: tokens that will be read at most after the prefix.
        num_mixed: layers whose states are returned, `layer` and those below it.
    """
    return (
        LlamaDecoder(network, layer=layer, capacity=capacity, num_mixed=num_mixed)
        if is_fast_model(network.llm)
        else GenericDecoder(network, layer=layer, num_mixed=num_mixed)
    )


def is_fast_model(model: PreTrainedModel) -> bool:
    """True for a plain Llama or Qwen3: default rotary positions, no biases, no window."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FAST_MODEL_TYPES
        and rope.get("rope_type") == "default"
        and config.hidden_act == "silu"
        and getattr(config, "sliding_window", None) is None
        and not any(name.endswith("bias") for name, _ in model.named_parameters())
    )


class GenericDecoder:
    """Any causal LM, through its own forward."""

    def __init__(self, network: TextToSemantic, *, layer: int, num_mixed: int = 1) -> None:
        model = network.llm
        self._network = network
        self._decoder, self._head, self._device = model.get_decoder(), head(model), model.device
        self._layers = mixed_layers(model, layer, num_mixed)
        self._needs_all = self._layers != range(num_layers(model), num_layers(model) + 1)
        self.cache = DynamicCache(config=model.config)
        self._length = 0

    def prefill(self, prefix: Prompt) -> Decoded:
        """See Decoder."""
        num_codebooks = len(_embeddings(self._network.codebooks))
        codes = torch.full((1, len(prefix), num_codebooks), IGNORE_INDEX)
        position_ids = torch.from_numpy(prefix.position_ids)[None]
        return self._forward(torch.from_numpy(prefix.token_ids)[None], codes, position_ids)

    def step(self, token_id: int, position: float, codes: Sequence[int] = ()) -> Decoded:
        """See Decoder."""
        num_codebooks = len(_embeddings(self._network.codebooks))
        read = list(codes) or [IGNORE_INDEX] * num_codebooks
        input_ids = torch.tensor([[token_id]])
        code_ids = torch.tensor([[read]], dtype=torch.int64)
        return self._forward(input_ids, code_ids, torch.tensor([[position]]))

    def _forward(self, input_ids: Tensor, codes: Tensor, position_ids: Tensor) -> Decoded:
        self._length += input_ids.shape[1]
        # The mask keeps restarted positions from being read as packed documents.
        mask = torch.ones(1, self._length, dtype=torch.bool, device=self._device)
        output = self._decoder(
            None,
            mask,
            position_ids.to(self._device),
            self.cache,  # by place: transformers 5 has had two names for it
            inputs_embeds=self._network.embed(input_ids.to(self._device), codes.to(self._device)),
            use_cache=True,
            output_hidden_states=self._needs_all,
        )
        last = output.last_hidden_state[0, -1]  # [D]
        state = last
        if self._needs_all:
            states = [output.hidden_states[layer][0, -1] for layer in self._layers]
            state = torch.cat(states)
        return Decoded(cast(Tensor, state), self._head(last), last)


class LlamaDecoder:
    """Llama or Qwen3: the prefix through its own forward, then steps of bare kernels."""

    def __init__(
        self, network: TextToSemantic, *, layer: int, capacity: int, num_mixed: int = 1
    ) -> None:
        model = network.llm
        self._network, self._capacity = network, capacity
        self._layer, self._num_mixed = layer, num_mixed
        self._layers = mixed_layers(model, layer, num_mixed)
        self._code_embeddings = _embeddings(network.codebooks)
        decoder = model.get_decoder()
        self._embedding = model.get_input_embeddings().weight
        self._norm, self._head = decoder.norm, model.get_output_embeddings().weight
        self._inv_freq = decoder.rotary_emb.inv_freq.float()  # [head_dim / 2]
        self._blocks = [_Block(module) for module in decoder.layers]
        self._length = 0

    def prefill(self, prefix: Prompt) -> Decoded:
        """See Decoder."""
        reader = GenericDecoder(self._network, layer=self._layer, num_mixed=self._num_mixed)
        decoded = reader.prefill(prefix)
        self._length = len(prefix)
        for block, layer in zip(self._blocks, reader.cache.layers, strict=True):
            block.fill(layer.keys, layer.values, self._capacity)
        return decoded

    def step(self, token_id: int, position: float, codes: Sequence[int] = ()) -> Decoded:
        """See Decoder."""
        angles = position * self._inv_freq
        cos, sin = angles.cos().to(self._embedding.dtype), angles.sin().to(self._embedding.dtype)
        x = self._embedding[token_id]  # [D]
        if codes:
            pairs = zip(self._code_embeddings, codes, strict=True)
            x = x + torch.stack([weight[code] for weight, code in pairs]).sum(0)
        states = [x]
        for block in self._blocks:
            x = block(x, cos, sin, self._length)
            states.append(x)
        self._length += 1
        last = states[-1] = _rms_norm(x, self._norm)
        wanted = [states[layer] for layer in self._layers]
        state = torch.cat(wanted) if len(wanted) > 1 else wanted[0]
        return Decoded(state, functional.linear(last, self._head), last)


class _Block:
    """One transformer block and its cache."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self._norms = module.input_layernorm, module.post_attention_layernorm
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self._qkv = torch.cat([projection.weight for projection in projections])
        self._sizes = [projection.out_features for projection in projections]
        self._query_norm = getattr(attention, "q_norm", None)  # Qwen3 has them, Llama not
        self._key_norm = getattr(attention, "k_norm", None)
        self._out, self._down = attention.o_proj.weight, mlp.down_proj.weight
        self._gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self._head_dim = attention.head_dim
        self._is_grouped = attention.num_key_value_groups > 1

    def fill(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        """Copy the prefix [1, H, L, head_dim] and leave room for `capacity` tokens."""
        self._keys = functional.pad(keys, (0, 0, 0, capacity))
        self._values = functional.pad(values, (0, 0, 0, capacity))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, length: int) -> Tensor:
        x = x + self._attend(_rms_norm(x, self._norms[0]), cos, sin, length)
        gate, up = functional.linear(_rms_norm(x, self._norms[1]), self._gate_up).chunk(2)
        return x + functional.linear(functional.silu(gate) * up, self._down)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, length: int) -> Tensor:
        query, key, value = (
            part.view(-1, self._head_dim)  # [H, head_dim]
            for part in functional.linear(x, self._qkv).split(self._sizes)
        )
        if self._query_norm is not None:
            query, key = _rms_norm(query, self._query_norm), _rms_norm(key, self._key_norm)
        self._keys[0, :, length] = _rotate(key, cos, sin)
        self._values[0, :, length] = value
        attended = functional.scaled_dot_product_attention(
            _rotate(query, cos, sin)[None, :, None],  # [1, H, 1, head_dim]
            self._keys[:, :, : length + 1],
            self._values[:, :, : length + 1],
            enable_gqa=self._is_grouped,
        )
        return functional.linear(attended.flatten(), self._out)


def _embeddings(codebooks: Codebooks | None) -> list[Tensor]:
    """Embedding matrix of each other codebook."""
    if codebooks is None:
        return []
    return [cast(Tensor, embedding.weight) for embedding in codebooks.embeddings]


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [H, head_dim] in the halves layout of Llama."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
