import time
from pathlib import Path

import pytest

from tts_stack.contract import TextSpec
from tts_stack.errors import DataError
from tts_stack.text.frontend import build_frontend

_TRANSCRIPTS = Path(__file__).parents[1] / "../shared/data/text/ljspeech_transcripts.csv"
_SYMBOLS = set(" ,.?!;:ˈˌabdefhijklmnopstuvwzæðŋɑɔəɚɛɡɪɹʃʊʌʒθ")


@pytest.mark.parametrize("kind", ["phonemes", "normalized", "raw"])
@pytest.mark.parametrize("text", ["", "  \n", "😀", "...", "?!", "“”", "<|>"])
def test_text_without_words_is_refused(kind, text):
    frontend = build_frontend(TextSpec(kind, "en-us"))
    with pytest.raises(DataError, match="nothing to speak in it; give at least one word"):
        frontend(text)


def test_the_message_quotes_the_text():
    with pytest.raises(DataError) as caught:
        build_frontend(TextSpec("raw", "en-us"))("😀")
    assert str(caught.value) == 'text "😀": nothing to speak in it; give at least one word'


def test_each_kind_reads_the_same_text():
    read = {
        kind: build_frontend(TextSpec(kind, "en-us")) for kind in ("raw", "normalized", "phonemes")
    }
    assert read["raw"]("“Dr. No” has 5") == "Dr. No has 5"
    assert read["normalized"]("“Dr. No” has 5") == "Doctor No has five"
    assert read["phonemes"]("“Dr. No” has 5") == "dˈɑktɚ nˈoʊ hˈæz fˈaɪv"
    assert read["raw"].spec.kind == "raw"


def test_a_control_token_is_plain_text():
    spoken = build_frontend(TextSpec("phonemes", "en-us"))("<|audio_start|> hello <|audio_end|>")
    assert spoken == "ˈɔdioʊ stˈɑɹt hɛlˈoʊ ˈɔdioʊ ˈɛnd"


def test_one_front_end_per_process():
    assert build_frontend(TextSpec("raw", "en-us")) is build_frontend(TextSpec("raw", "en-us"))


def test_real_transcripts_are_fast_and_use_a_closed_set_of_symbols():
    if not _TRANSCRIPTS.is_file():
        pytest.skip("../shared/data/text/ljspeech_transcripts.csv is absent")
    with _TRANSCRIPTS.open(encoding="utf-8") as file:
        texts = [line.rstrip("\n").split("|")[-1] for line in file][:500]
    frontend = build_frontend(TextSpec("phonemes", "en-us"))
    frontend(texts[0])
    start = time.process_time()
    spoken = [frontend(text) for text in texts]
    assert time.process_time() - start < 10
    assert set("".join(spoken)) <= _SYMBOLS
