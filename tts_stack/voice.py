"""A voice on disk: which files it holds, and whether they belong together.

my_voice/
  voice.json            the contract
  README.md             the card
  llm/                  config.json, model.safetensors (Hugging Face format)
  vocoder/              config.json, model.safetensors
  codec/                codec.json, model.safetensors (optional: copy-synthesis, more training)
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tts_stack.contract import CONTRACT_FILE, VoiceContract, file_sha256, llm_sha256
from tts_stack.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
LLM_DIR, VOCODER_DIR, CODEC_DIR = "llm", "vocoder", "codec"
CODEC_CONFIG = "codec.json"
RUN_VOICE_DIR = "voice"  # inside a run folder, written by train-vocoder


@dataclass(frozen=True)
class VoiceFiles:
    """A voice folder whose files were found and match the contract."""

    path: Path
    contract: VoiceContract

    @property
    def llm(self) -> Path:
        """Folder of the LLM."""
        return self.path / LLM_DIR

    @property
    def vocoder(self) -> Path:
        """Folder of the vocoder."""
        return self.path / VOCODER_DIR

    @property
    def codec(self) -> Path | None:
        """Folder of the codec, when the voice carries one."""
        folder = self.path / CODEC_DIR
        return folder if (folder / CODEC_CONFIG).exists() else None

    @classmethod
    def open(cls, path: Path | None = None) -> Self:
        """Check a voice folder; None is the voice that ships in the package.

        A run folder is accepted too: its `voice/` is meant.

        Raises:
            CheckpointError: no such folder, a file is missing, or a file belongs to another voice.
        """
        path = default_voice_dir() if path is None else path
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such voice folder; make one with tts-stack export")
        if not (path / CONTRACT_FILE).exists() and (path / RUN_VOICE_DIR / CONTRACT_FILE).exists():
            path = path / RUN_VOICE_DIR
        contract = VoiceContract.load(path / CONTRACT_FILE)
        _require(path / LLM_DIR / WEIGHTS_FILE, contract.llm_sha256, contract.name, _llm_sha256)
        _require(path / VOCODER_DIR / WEIGHTS_FILE, contract.vocoder_sha256, contract.name)
        for folder in (LLM_DIR, VOCODER_DIR):
            if not (path / folder / "config.json").exists():
                raise CheckpointError(
                    f"{path / folder}/config.json: missing; export the voice again"
                )
        return cls(path, contract)


def default_voice_dir() -> Path:
    """The voice inside the package."""
    return assets_dir() / "voices" / "joe"


def demo_corpus_dir() -> Path:
    """The demonstration recordings inside the package (LJSpeech layout)."""
    return assets_dir() / "demo_corpus"


def assets_dir() -> Path:
    """Data files that ship in the package."""
    return Path(__file__).resolve().parent / "assets"


def _require(
    path: Path,
    expected_sha256: str,
    voice_name: str,
    hash_of: Callable[[Path], str] = file_sha256,
) -> None:
    if not path.exists():
        raise CheckpointError(f"{path}: missing; export the voice again or copy the whole folder")
    found = hash_of(path)
    if found != expected_sha256:
        raise CheckpointError(
            f"{path}: SHA-256 {found[:12]}, but {CONTRACT_FILE} of voice {voice_name!r} names "
            f"{expected_sha256[:12] or '(none)'}; the file belongs to another voice: export again"
        )


def _llm_sha256(path: Path) -> str:
    return llm_sha256(path.parent)
