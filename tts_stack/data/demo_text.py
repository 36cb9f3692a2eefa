"""Sentences for a text-to-speech teacher: long lines cut into phrases of many lengths.

First step of `tts-stack demo-corpus`: text file -> sentences -> (demo_corpus.py) recordings.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tts_stack.errors import DataError

_BREAK = re.compile(
    r"(?<=[,;:?!.])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\bNo\.)(?<!\bMessrs\.)\s+"
)
_SPOKEN = re.compile(r"[A-Za-z' ,.;:?!-]+")
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty "
    "ninety hundred thousand million"
).split()
_MIN_WORDS_FOR_REUSE = 3  # a word must occur this often in the text to be spoken alone


def read_lines(path: Path, *, skip: int = 0) -> list[str]:
    """Read one utterance a line; in `id|text` and `id|raw|normalised` files take the last column.

    Raises:
        DataError: the file is missing, is not UTF-8, or has no line left after `skip`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    texts = [line.rsplit("|", 1)[-1].strip() for line in lines[skip:]]
    texts = [text for text in texts if text]
    if not texts:
        raise DataError(f"{path}: no text in it after the first {skip} lines; give a longer file")
    return texts


def cut_phrases(line: str, rng: random.Random) -> list[str]:
    """Cut a line at punctuation into phrases whose word counts are drawn from 3 to 25.

    A segment without inner punctuation is never cut, so nothing is lost and words keep their order.
    """
    phrases: list[list[str]] = [[]]
    target = _draw_length(rng)
    for segment in _BREAK.split(line):
        if sum(len(part.split()) for part in phrases[-1]) >= target:
            phrases.append([])
            target = _draw_length(rng)
        phrases[-1].append(segment)
    return [" ".join(parts) for parts in phrases if any(parts)]


def demo_sentences(
    lines: Sequence[str], *, seed: int, short_fraction: float, cut: bool = True
) -> list[str]:
    """Turn lines into a shuffled list of sentences, a share of them one or two words long.

    Lines with digits or symbols are left out: the teacher's reading of them need not be ours.

    Args:
        lines: the source text, one passage a line.
        seed: fixes cuts, short sentences and order.
        short_fraction: share of the result that is one to three words taken from the text.
        cut: False keeps every line whole.

    Returns:
        Distinct sentences, each ending in `.`, `?` or `!`.
    """
    rng = random.Random(seed)
    cleaned = [_clean(line) for line in lines]
    spoken = [line for line in cleaned if _SPOKEN.fullmatch(line)]
    phrases = [phrase for line in spoken for phrase in (cut_phrases(line, rng) if cut else [line])]
    num_short = int(len(phrases) * short_fraction / max(1e-9, 1 - short_fraction))
    short = _short_sentences(spoken, num_short, rng)
    sentences = list(dict.fromkeys(_finish(phrase, rng) for phrase in [*phrases, *short]))
    rng.shuffle(sentences)
    return [sentence for sentence in sentences if any(letter.isalpha() for letter in sentence)]


def _draw_length(rng: random.Random) -> int:
    return rng.randint(3, 14) if rng.random() < 0.7 else rng.randint(15, 25)


def _clean(line: str) -> str:
    line = line.replace("’", "'").replace("--", ", ")
    line = re.sub(r"[\"“”()\[\]]", "", line)
    return re.sub(r"\s+", " ", line).strip()


def _short_sentences(lines: Iterable[str], count: int, rng: random.Random) -> list[str]:
    words = Counter(
        word for line in lines for word in re.findall(r"[a-z']+", line) if "'" not in word
    )
    vocabulary = sorted(word for word, n in words.items() if n >= _MIN_WORDS_FOR_REUSE)
    if not vocabulary:
        return []
    short = []
    for _ in range(count):
        source = _NUMBER_WORDS if rng.random() < 0.15 else vocabulary
        short.append(" ".join(rng.choice(source) for _ in range(rng.choice((1, 1, 2, 2, 3)))))
    return short


def _finish(phrase: str, rng: random.Random) -> str:
    body = phrase.strip(" ,;:-")
    if body[-1:] not in (".", "?", "!"):
        body += rng.choices((".", "?", "!"), weights=(90, 6, 4))[0]
    return body[:1].upper() + body[1:]
