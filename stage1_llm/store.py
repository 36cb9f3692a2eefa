"""Samples of a corpus that may be larger than memory: Parquet rows -> samples, when asked for.

One pass at opening finds which rows can be trained on and how long they are; the samples met first
stay in a cache of bounded size. Others are read and encoded again when a batch needs them.
"""

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from stage1_llm.dataset import Sample
from tts_stack.errors import DataError
from tts_stack.records import TokenizedUtterance
from tts_stack.shards import Corpus

logger = logging.getLogger(__name__)
SHOWN_IDS = 5  # of left-out samples in a log line

Encode = Callable[[TokenizedUtterance], Sample]


class SampleStore(Sequence[Sample]):
    """The samples of a split that stage 1 can train on, by number.

    It travels to other processes without its cache, if its `encode` does.

    Args:
        rows: of the split.
        encode: makes a sample of a row, the same one every time.
        kept: row number of each sample.
        lengths: tokens of each sample's prompt.
        num_text: text ids of each sample.
        num_audio: semantic tokens of each sample.
        cache: of samples by row number.
    """

    def __init__(
        self,
        rows: Sequence[TokenizedUtterance],
        encode: Encode,
        *,
        kept: NDArray[np.int64],
        lengths: NDArray[np.int32],
        num_text: NDArray[np.int32],
        num_audio: NDArray[np.int32],
        cache: "SampleCache",
    ) -> None:
        self.lengths, self.num_text, self.num_audio = lengths, num_text, num_audio
        self._rows, self._encode, self._kept, self._cache = rows, encode, kept, cache

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> "SampleStore": ...
    def __getitem__(self, index: int | slice) -> "Sample | SampleStore":
        """One sample; or a part of the store that shares its cache."""
        if isinstance(index, slice):
            return self._part(index)
        row = int(self._kept[index])
        sample = self._cache.get(row)
        if sample is None:
            sample = self._encode(self._rows[row])
            self._cache.put(row, sample)
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": SampleCache(self._cache.max_tokens)}

    def _part(self, part: slice) -> "SampleStore":
        return SampleStore(
            self._rows,
            self._encode,
            kept=self._kept[part],
            lengths=self.lengths[part],
            num_text=self.num_text[part],
            num_audio=self.num_audio[part],
            cache=self._cache,
        )


class SampleCache:
    """Samples by row number, up to a number of tokens; the least recently used go out first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._samples: OrderedDict[int, Sample] = OrderedDict()

    def __len__(self) -> int:
        return len(self._samples)

    def get(self, row: int) -> Sample | None:
        """The sample, which now counts as used; or None."""
        if row in self._samples:
            self._samples.move_to_end(row)
        return self._samples.get(row)

    def put(self, row: int, sample: Sample) -> None:
        """Keep a sample that is not there yet, unless it alone is over the limit."""
        if _num_ids(sample) > self.max_tokens:
            return
        while not self.has_room(sample):
            _, old = self._samples.popitem(last=False)
            self.num_tokens -= _num_ids(old)
        self._samples[row] = sample
        self.num_tokens += _num_ids(sample)

    def has_room(self, sample: Sample) -> bool:
        """Whether nothing has to go out for it."""
        return self.num_tokens + _num_ids(sample) <= self.max_tokens


@dataclass
class _LeftOut:
    """Samples left out for one reason: how many, and the first few ids."""

    reason: str
    count: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, id: str) -> None:
        self.count += 1
        if len(self.ids) < SHOWN_IDS:
            self.ids.append(id)

    def report(self, split: str) -> None:
        if self.count:
            shown = ", ".join(self.ids) + (", …" if self.count > len(self.ids) else "")
            logger.warning("%s: %d samples %s left out: %s", split, self.count, self.reason, shown)


def open_store(
    corpus: Corpus, split: str, encode: Encode, *, max_length: int, cache_tokens: int
) -> SampleStore:
    """Read a split once, and keep what is needed to read any of its samples again.

    Samples without text or audio, or over `max_length`, are left out and named in the log.

    Args:
        corpus: tokenised.
        split: "train" or "validation".
        encode: makes a sample of a row, of length 0 where text or audio is missing.
        max_length: tokens of the longest prompt.
        cache_tokens: text ids and semantic tokens that stay in memory.

    Raises:
        DataError: the corpus holds no tokens of its codec, or no sample is left.
    """
    empty, too_long = (
        _LeftOut("without text or audio"),
        _LeftOut(f"longer than {max_length} tokens"),
    )
    cache = SampleCache(cache_tokens)
    kept, lengths, num_text, num_audio = array("q"), array("i"), array("i"), array("i")
    num_dropped, num_rows = 0, 0
    for row, utterance in enumerate(corpus.iter_tokenized(split)):
        sample = encode(utterance)
        num_rows, num_dropped = row + 1, num_dropped + sample.num_dropped
        if not sample.length:
            empty.add(sample.id)
        elif sample.length > max_length:
            too_long.add(sample.id)
        else:
            kept.append(row)
            lengths.append(sample.length)
            num_text.append(len(sample.text_ids))
            num_audio.append(len(sample.semantic_tokens))
            if cache.has_room(sample):
                cache.put(row, sample)
    empty.report(split)
    too_long.report(split)
    if num_dropped:
        logger.warning("%s: %d symbols unknown to the voice were dropped", split, num_dropped)
    if not num_rows:
        raise DataError(
            f"{corpus.path}: the {split} split is empty, expected at least one utterance; re-run "
            "tts-stack prepare with more recordings"
        )
    if not kept:
        raise DataError(
            f"{corpus.path}: {split}: none of {num_rows} utterances is left for stage 1 "
            f"({too_long.count} longer than batching.max_length={max_length}, {empty.count} empty)"
        )
    _log_size(split, len(kept), len(cache), cache_tokens)
    return SampleStore(
        corpus.token_rows(split),
        encode,
        kept=np.array(kept, np.int64),
        lengths=np.array(lengths, np.int32),
        num_text=np.array(num_text, np.int32),
        num_audio=np.array(num_audio, np.int32),
        cache=cache,
    )


def _log_size(split: str, num_samples: int, num_cached: int, cache_tokens: int) -> None:
    if num_cached < num_samples:
        logger.info(
            "%s: %d of %d samples fit in batching.cache_tokens=%d; the others are read from disk",
            split,
            num_cached,
            num_samples,
            cache_tokens,
        )


def _num_ids(sample: Sample) -> int:
    return len(sample.text_ids) + int(sample.semantic_tokens.size)
