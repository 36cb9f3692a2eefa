"""What of a network is trained and saved in checkpoints: all of it, or adapters and new rows."""

from collections.abc import Mapping

from torch import Tensor

from stage1_llm.lora import adapter_weights, has_adapter, load_adapter_weights
from stage1_llm.model import load_saved_weights, saved_weights
from stage1_llm.network import TextToSemantic
from tts_stack.errors import CheckpointError

CODEBOOKS_PREFIX = "codebooks."


def network_weights(network: TextToSemantic) -> dict[str, Tensor]:
    """Trained weights by name; those of codebook heads start with "codebooks."."""
    llm = network.llm
    found = adapter_weights(llm) if has_adapter(llm) else saved_weights(llm)
    if network.codebooks is None:
        return found
    return found | {
        CODEBOOKS_PREFIX + name: value for name, value in network.codebooks.state_dict().items()
    }


def load_network_weights(network: TextToSemantic, weights: Mapping[str, Tensor]) -> None:
    """Inverse of `network_weights`.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape.
    """
    llm_weights = {name: w for name, w in weights.items() if not name.startswith(CODEBOOKS_PREFIX)}
    load = load_adapter_weights if has_adapter(network.llm) else load_saved_weights
    load(network.llm, llm_weights)
    own = {
        name.removeprefix(CODEBOOKS_PREFIX): value
        for name, value in weights.items()
        if name.startswith(CODEBOOKS_PREFIX)
    }
    if network.codebooks is not None:
        try:
            network.codebooks.load_state_dict(own)
        except RuntimeError as error:
            raise CheckpointError(
                f"weights do not fit the codebook heads: {str(error).splitlines()[-1].strip()}"
            ) from error
