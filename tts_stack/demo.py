"""The demonstration corpus, prepared and tokenised on first use, so that training needs no data."""

import logging
from pathlib import Path

from tts_stack.config import load_config
from tts_stack.data.config import PrepareConfig
from tts_stack.data.prepare import prepare
from tts_stack.semantic.tokenize import tokenize
from tts_stack.shards import CORPUS_FILE, read_info
from tts_stack.voice import CODEC_DIR, default_voice_dir, demo_corpus_dir

logger = logging.getLogger(__name__)
DEMO_RUN = Path("runs/demo")


def ensure_demo_corpus() -> Path:
    """Prepare and tokenise the recordings that ship in the package, once.

    Returns:
        The corpus folder, `runs/demo/corpus`.
    """
    corpus = DEMO_RUN / "corpus"
    if not (corpus / CORPUS_FILE).exists():
        logger.info("preparing the demonstration corpus in %s", corpus)
        source = demo_corpus_dir()
        prepare(load_config(PrepareConfig, "prepare", [f"source={source}", f"corpus={corpus}"]))
    if read_info(corpus).codec is None:
        logger.info("tokenising it with the shipped codec")
        tokenize(corpus, default_voice_dir() / CODEC_DIR)
    return corpus
