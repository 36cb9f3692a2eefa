"""`read_corpus`: recognise the layout of a user's corpus and read it."""

from pathlib import Path

from tts_stack.data.corpora.jsonl import read_jsonl
from tts_stack.data.corpora.ljspeech import METADATA_FILE, read_ljspeech
from tts_stack.data.corpora.pairs import has_audio, read_pairs
from tts_stack.data.corpora.source import SourceCorpus
from tts_stack.errors import DataError
from tts_stack.shards import CORPUS_FILE

_LAYOUTS = (
    f"an LJSpeech folder ({METADATA_FILE} of id|text lines and wavs/), a JSONL manifest "
    '({"audio": …, "text": …} a line), or a folder of x.wav with x.txt or x.lab'
)


def read_corpus(path: Path) -> SourceCorpus:
    """Read a corpus in any understood layout.

    Args:
        path: a folder, a `.jsonl` manifest, or a `metadata.csv`.

    Raises:
        DataError: the path is missing or empty, or its layout is not understood.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; expected {_LAYOUTS}")
    if path.is_file():
        return _read_file(path)
    if (path / CORPUS_FILE).is_file():
        raise DataError(f"{path}: is a prepared corpus already; expected recordings as the source")
    if (path / METADATA_FILE).is_file():
        return read_ljspeech(path)
    manifests = sorted(path.glob("*.jsonl"))
    if len(manifests) == 1:
        return read_jsonl(manifests[0])
    if manifests:
        names = ", ".join(file.name for file in manifests)
        raise DataError(f"{path}: found {len(manifests)} manifests ({names}); name one of them")
    if has_audio(path):
        return read_pairs(path)
    state = "holds no audio files" if any(path.iterdir()) else "is empty"
    raise DataError(f"{path}: {state}; expected {_LAYOUTS}")


def _read_file(path: Path) -> SourceCorpus:
    if path.name == METADATA_FILE:
        return read_ljspeech(path.parent)
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    raise DataError(f"{path}: not a corpus; expected {_LAYOUTS}")
