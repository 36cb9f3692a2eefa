"""tts-stack: recordings into a voice, and text into speech with it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tts_stack.synthesize import Voice

__all__ = ["Voice"]


def __getattr__(name: str) -> Any:
    """Load `Voice` when it is asked for: `import tts_stack` alone stays light."""
    if name == "Voice":
        from tts_stack.synthesize import Voice

        return Voice
    raise AttributeError(f"module 'tts_stack' has no attribute {name!r}")
