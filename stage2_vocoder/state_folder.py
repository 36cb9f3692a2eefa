"""A folder of hidden states as a whole: whose they are, how large it is, and its end."""

from pathlib import Path

from stage2_vocoder.states import STATES_FILE, StateIdentity, read_info, shard_identity
from tts_stack.errors import CheckpointError


def found_identity(folder: Path) -> StateIdentity | None:
    """Whose states a folder holds, finished or not; None when it holds none that can be read."""
    try:
        return read_info(folder).identity
    except CheckpointError:
        pass
    for path in sorted(folder.glob("*.safetensors")):
        try:
            return shard_identity(path)
        except CheckpointError:
            continue
    return None


def clear_store(folder: Path) -> None:
    """Delete the files of a store, and nothing else."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.partial"), folder / STATES_FILE):
        path.unlink(missing_ok=True)


def store_bytes(folder: Path) -> int:
    """Size of a store on disk."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
